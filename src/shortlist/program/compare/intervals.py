"""Means and paired differences over seeds, with 95 % intervals of Student's t."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_CONFIDENCE = 0.95
_BISECTIONS = 80


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and how far the true mean may be from it."""

    mean: float
    half: float | None
    """Half the width of the 95 % interval; None for one value, which says nothing about the spread."""
    count: int

    @property
    def is_below_zero(self) -> bool:
        """True if the whole interval is."""
        return self.half is not None and self.mean + self.half < 0

    @property
    def contains_zero(self) -> bool:
        """True if the values cannot tell the mean from zero."""
        return self.half is None or abs(self.mean) <= self.half


def interval(values: Sequence[float]) -> Interval | None:
    """The mean with its 95 % interval; None if there are no values.

    Example:
        >>> found = interval([1.0, 2.0, 3.0])
        >>> found.mean, round(found.half, 3)
        (2.0, 2.484)
    """
    if not values:
        return None
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval(mean, None, 1)
    return Interval(mean, t_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count), count)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """The difference between two losses on the seeds that both have; None if there are none.

    Runs of one seed share the order of their batches and their initial weights, so their difference varies less than
    either value.

    Example:
        >>> paired_difference({0: 0.5, 1: 0.75, 2: 0.5}, {0: 0.25, 1: 0.5})
        Interval(mean=0.25, half=0.0, count=2)
    """
    return interval([value - theirs[seed] for seed, value in ours.items() if seed in theirs])


def t_quantile(freedom: int) -> float:
    """How many standard errors the 95 % interval reaches to each side, for this many degrees of freedom.

    The probability that |t| stays below a value is a finite sum for whole degrees of freedom (Abramowitz & Stegun,
    26.7.3 and 26.7.4). It rises with the angle atan(t / sqrt(freedom)), which is found by bisection.

    Example:
        >>> round(t_quantile(2), 4), round(t_quantile(1000), 4)
        (4.3027, 1.9623)
    """
    low, high = 0.0, math.pi / 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability_within(middle, freedom) < _CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _probability_within(angle: float, freedom: int) -> float:
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for power in range(1 + is_odd, freedom, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    return (angle + sine * total) * 2 / math.pi if is_odd else sine * total
