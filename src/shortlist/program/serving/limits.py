"""How much a client may ask for, and what is said when it is too much."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shortlist.errors import ShortlistError

_CLIENTS_REMEMBERED = 10_000


class RefusedError(ShortlistError):
    """A request that is not answered, with its HTTP status and a sentence for people."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


@dataclass(frozen=True)
class Limits:
    """Of one request, one client, and all of them together."""

    bytes_of_request: int = 20 * 2**20
    pixels_of_photo: int = 50_000_000
    photos: int = 8
    """In one request."""
    requests_per_second: float = 10.0
    """Of one client, on average; 0 for no limit. Twice as many may come at once."""
    bytes_at_once: int = 256 * 2**20
    """Of all requests that are being read or answered."""
    photos_waiting: int = 256
    """Decoded, and waiting for the network."""
    seconds_to_send: float = 60.0
    """Until a request must have arrived in full."""


class RateLimit:
    """A token bucket for each client: one second refills ``rate`` tokens, a request takes one.

    Args:
        rate: Requests a second; 0 for no limit.
        clock: Seconds from any beginning.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str) -> None:
        """Count a request, or refuse it."""
        if self._rate <= 0:
            return
        now, most = self._clock(), max(1.0, 2 * self._rate)
        tokens, then = self._buckets.pop(client, (most, now))
        tokens = min(most, tokens + (now - then) * self._rate)
        enough = tokens >= 1
        self._buckets[client] = (tokens - enough, now)
        while len(self._buckets) > _CLIENTS_REMEMBERED:  # the one that has been quiet for longest
            self._buckets.popitem(last=False)
        if not enough:
            wait = max(1, round((1 - tokens) / self._rate))
            raise RefusedError(
                429, f"Too many requests: at most {self._rate:g} a second. Try again in {wait} s.", retry_after=wait
            )


class MemoryBudget:
    """Bytes that all requests together may hold."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0

    @contextmanager
    def reserve(self, amount: int) -> Iterator[None]:
        """Hold so many bytes for a block, or refuse. One request is always let in."""
        if self._held and self._held + amount > self._most:
            raise RefusedError(503, "The server is busy with other photos. Try again in a moment.", retry_after=1)
        self._held += amount
        try:
            yield
        finally:
            self._held -= amount


def readable_bytes(amount: int) -> str:
    """
    Example:
        >>> readable_bytes(20 * 2**20), readable_bytes(300_000)
        ('20 MB', '0.29 MB')
    """
    return f"{amount / 2**20:.2g} MB" if amount < 10 * 2**20 else f"{amount / 2**20:.0f} MB"
