"""Axes: where a chart begins and ends, and what is written along it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shortlist.program.report.accuracy import SizeBin

_MOST_STEPS = 6


@dataclass(frozen=True)
class Axis:
    title: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    """Positions and what is written there."""

    def along(self, value: float) -> float:
        """0 at the lower end, 1 at the upper."""
        return (value - self.low) / (self.high - self.low)


def percent_axis(title: str, values: Iterable[float]) -> Axis:
    """Around shares between 0 and 1, written in percent; it need not begin at zero."""
    return _round_axis(title, [100 * value for value in values], lowest=0.0, highest=100.0, unit=0.01)


def number_axis(title: str, values: Iterable[float]) -> Axis:
    """From zero (or below) to a round number above all values."""
    return _round_axis(title, [0.0, *values])


def count_axis(title: str, low: int, high: int) -> Axis:
    """Whole numbers, the first and every few written out."""
    step = math.ceil(_round_step(low, high, most_steps=10))
    ticks = [low, *(tick for tick in range(step, high + 1, step) if tick - low > step / 2)]
    padding = 0.5 if low == high else 0.0
    return Axis(title, low - padding, high + padding, tuple((tick, f"{tick:,}") for tick in ticks))


def size_axis(title: str, bins: Sequence[SizeBin]) -> Axis:
    """Logarithmic, in octaves, with the smallest size of each bin where the bin begins."""
    low, high = bins[0].octave, bins[-1].octave + bins[-1].octaves
    # No image at all has no logarithm: its bin is marked in the middle.
    without = [(low + bins[0].octaves / 2, "0")] if bins[0].sizes[0] == 0 else []
    first = next((each.octave for each in bins if each.sizes[0]), high)
    return Axis(title, low, high, (*without, *((at, short(2**at)) for at in range(first, high + 1, bins[0].octaves))))


def short(number: int) -> str:
    """Few enough characters for the foot of a chart.

    Example:
        >>> [short(number) for number in (512, 8192, 2**20)]
        ['512', '8k', '1M']
    """
    for size, letter in ((10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.0f}{letter}"
    return str(number)


def _round_axis(
    title: str, values: Sequence[float], lowest: float = -math.inf, highest: float = math.inf, unit: float = 1.0
) -> Axis:
    step = _round_step(min(values), max(values), _MOST_STEPS)
    first, last = math.floor(min(values) / step), math.ceil(max(values) / step)
    if first == last:
        first, last = first - 1, last + 1
    digits = max(0, -math.floor(math.log10(step)))
    steps = [at for at in range(first, last + 1) if lowest <= at * step <= highest]
    return Axis(
        title,
        steps[0] * step * unit,
        steps[-1] * step * unit,
        tuple((at * step * unit, f"{at * step:.{digits}f}") for at in steps),
    )


def _round_step(low: float, high: float, most_steps: int) -> float:
    """1, 2 or 5 times a power of ten, such that few steps lead from low to high."""
    least = (high - low or abs(high) or 1.0) / most_steps
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
