"""Mean and standard deviation over seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """What several runs that differ by chance alone have in common."""

    mean: float
    deviation: float
    """Sample standard deviation; zero for a single value."""
    count: int


def summarise(values: Sequence[float | None]) -> Summary | None:
    """Of the values that are defined; None if there is none.

    Example:
        >>> summarise([1.0, 3.0, None])
        Summary(mean=2.0, deviation=1.4142135623730951, count=2)
    """
    defined = [value for value in values if value is not None and not math.isnan(value)]
    if not defined:
        return None
    return Summary(
        statistics.fmean(defined), statistics.stdev(defined) if len(defined) > 1 else 0.0, count=len(defined)
    )
