"""How numbers are written."""

from shortlist.program.report.summary import Summary

ABSENT = "\N{EN DASH}"
PLUS_MINUS = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"


def percent(share: float) -> str:
    """A share between 0 and 1, without its sign."""
    return f"{100 * share:.1f}"


def percent_spread(summary: Summary) -> str:
    """Mean, and standard deviation where there are several values.

    Example:
        >>> percent_spread(Summary(0.5, 0.012, 3)).replace(PLUS_MINUS, " ± "), percent_spread(Summary(0.5, 0.0, 1))
        ('50.0 ± 1.2', '50.0')
    """
    return percent(summary.mean) + (f"{PLUS_MINUS}{percent(summary.deviation)}" if summary.count > 1 else "")


def seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
