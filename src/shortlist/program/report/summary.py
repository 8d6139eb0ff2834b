"""Mean and standard deviation over seeds, and how numbers are written."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Mean and spread over runs that differ only in the seed."""

    mean: float
    deviation: float
    """Sample standard deviation; zero for a single value."""
    count: int


def summarise(values: Sequence[float | None]) -> Summary | None:
    """Summarise the values that are defined; None if there are none.

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


ABSENT = "\N{EN DASH}"
PLUS_MINUS = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"


def percent(share: float) -> str:
    """A share between 0 and 1 in percent, without the sign."""
    return f"{100 * share:.1f}"


def percent_spread(summary: Summary) -> str:
    """The mean, with the standard deviation if there are several values.

    Example:
        >>> percent_spread(Summary(0.5, 0.012, 3)).replace(PLUS_MINUS, " ± "), percent_spread(Summary(0.5, 0.0, 1))
        ('50.0 ± 1.2', '50.0')
    """
    return percent(summary.mean) + (f"{PLUS_MINUS}{percent(summary.deviation)}" if summary.count > 1 else "")


def seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
