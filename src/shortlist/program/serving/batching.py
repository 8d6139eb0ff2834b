"""Photos of several requests at a time go through the network together."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from shortlist.program.serving.limits import RefusedError

AT_ONCE = 32
"""Photos in a batch."""
_SECONDS_TO_WAIT = 0.004


@dataclass(frozen=True)
class _Waiting:
    prepared: Tensor
    row: "Future[Tensor]"


class Batcher:
    """A thread that collects prepared photos for a few milliseconds and computes them in one batch.

    Args:
        compute: From prepared photos to a row for each.
        most_waiting: More than so many photos are refused.
        at_once: Photos in a batch.
        seconds: How long the first photo of a batch waits for others.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        most_waiting: int,
        at_once: int = AT_ONCE,
        seconds: float = _SECONDS_TO_WAIT,
    ) -> None:
        self._compute, self._at_once, self._seconds = compute, at_once, seconds
        self._queue: queue.Queue[_Waiting | None] = queue.Queue(most_waiting)
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    def submit(self, photos: Sequence[Tensor]) -> "list[Future[Tensor]]":
        """The rows of these photos, once they are computed; or a refusal if too many are waiting."""
        rows: list[Future[Tensor]] = []
        for prepared in photos:
            waiting = _Waiting(prepared, Future())
            try:
                self._queue.put_nowait(waiting)
            except queue.Full:
                for row in rows:
                    row.cancel()
                raise RefusedError(503, "Too many photos are waiting. Try again in a moment.", retry_after=1) from None
            rows.append(waiting.row)
        return rows

    def close(self) -> None:
        """End the thread, after what is waiting."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        is_open = True
        while is_open:
            first = self._queue.get()
            if first is None:
                return
            batch, end = [first], time.monotonic() + self._seconds
            while len(batch) < self._at_once:
                try:
                    following = self._queue.get(timeout=max(0.0, end - time.monotonic()))
                except queue.Empty:
                    break
                if following is None:
                    is_open = False
                    break
                batch.append(following)
            wanted = [waiting for waiting in batch if waiting.row.set_running_or_notify_cancel()]
            for piece in _powers_of_two(wanted):
                self._answer(piece)

    def _answer(self, batch: Sequence[_Waiting]) -> None:
        try:
            rows = self._compute([waiting.prepared for waiting in batch])
        except Exception as error:  # the thread must live on; each request reports it
            for waiting in batch:
                waiting.row.set_exception(error)
            return
        for waiting, row in zip(batch, rows, strict=True):
            waiting.row.set_result(row)


def _powers_of_two(batch: Sequence[_Waiting]) -> Iterator[Sequence[_Waiting]]:
    """The batch in pieces of 32, 16, 8, ... photos.

    The libraries below torch keep memory for every size of a batch that they have met. For an EfficientNet-Lite0 on
    64 x 64 pixels that was 440 MB with all sizes up to 32, and 50 MB with these six.
    """
    start = 0
    while start < len(batch):
        size = 1 << (len(batch) - start).bit_length() - 1
        yield batch[start : start + size]
        start += size
