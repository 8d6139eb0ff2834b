"""Signals that ask a training to stop. All ranks obey after the same step."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lightning_fabric
import torch
from torch import distributed as dist

# Between agreements, in which all ranks wait for each other. torchrun asks ranks to stop, and kills them after 30 s.
_MOST_STEPS, _MOST_SECONDS = 50, 2.0


class StopRequests:
    """SIGINT and SIGTERM end training after the current step; a second signal ends it at once.

    A third kills the process: while Python unwinds, another exception would only print tracebacks.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.asked = False
        self._clock = clock
        self._steps, self._agree_after, self._agreed_at = 0, 1, clock()

    def ask(self, number: int, frame: object) -> None:
        if self.asked:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        self.asked = True

    def requested(self, fabric: lightning_fabric.Fabric, *, last: bool) -> bool:
        """True if training must stop after this step. Ranks agree on it every few steps, and at the last."""
        if fabric.world_size == 1:
            return self.asked
        self._steps += 1
        if self._steps < self._agree_after and not last:
            return False
        step_seconds = (self._clock() - self._agreed_at) / self._steps
        agreed = torch.tensor([float(self.asked), step_seconds], device=fabric.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        asked, slowest = agreed.tolist()
        self._agree_after = max(1, min(_MOST_STEPS, int(_MOST_SECONDS / slowest)))
        self._steps, self._agreed_at = 0, self._clock()
        return bool(asked)


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Catch the signals during the block."""
    stop = StopRequests()
    # Only the main thread may handle signals.
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, stop.ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
