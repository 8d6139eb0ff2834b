"""Signals that ask a training to stop: obeyed between two steps, by all ranks after the same one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import lightning_fabric
import torch
from torch import distributed as dist

# Steps between agreements: each makes all ranks wait for each other.
_AGREE_EVERY = 50


class StopRequests:
    """SIGINT and SIGTERM end training after the step at hand; a second one ends it at once."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def requested(self, fabric: lightning_fabric.Fabric, step: int, *, last: bool) -> bool:
        """Whether to stop after this step: on several ranks, agreed among them now and then, and at the last."""
        if fabric.world_size == 1:
            return self.asked
        if step % _AGREE_EVERY and not last:
            return False
        asked = torch.tensor(self.asked, dtype=torch.int32, device=fabric.device)
        dist.all_reduce(asked)
        return bool(asked.item())


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Those of the block; elsewhere the signals do what they did before."""
    stop = StopRequests()
    # Signals are the main thread's alone.
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, stop.ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
