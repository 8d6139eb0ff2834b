"""Signals that ask a training to stop: obeyed between two steps, by all ranks after the same one."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import lightning_fabric
import torch
from torch import distributed as dist

# Between agreements, each of which makes all ranks wait for each other. torchrun kills ranks half a minute after it has
# asked them to stop.
_MOST_STEPS, _MOST_SECONDS = 50, 2.0


class StopRequests:
    """SIGINT and SIGTERM end training after the step at hand; a second one ends it at once.

    A third kills the process: while Python unwinds, another exception would only print tracebacks.
    """

    def __init__(self) -> None:
        self.asked = False
        self._steps, self._agree_after, self._agreed_at = 0, 1, time.monotonic()

    def ask(self, number: int, frame: object) -> None:
        if self.asked:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        self.asked = True

    def requested(self, fabric: lightning_fabric.Fabric, *, last: bool) -> bool:
        """Whether to stop after this step: on several ranks, agreed among them now and then, and at the last."""
        if fabric.world_size == 1:
            return self.asked
        self._steps += 1
        if self._steps < self._agree_after and not last:
            return False
        step_seconds = (time.monotonic() - self._agreed_at) / self._steps
        agreed = torch.tensor([float(self.asked), step_seconds], device=fabric.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        asked, slowest = agreed.tolist()
        self._agree_after = max(1, min(_MOST_STEPS, int(_MOST_SECONDS / slowest)))
        self._steps, self._agreed_at = 0, time.monotonic()
        return bool(asked)


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
