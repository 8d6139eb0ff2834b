"""The paper's figures that come from training, drawn from the results of their experiments."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from shortlist.program.reproduce.figures.style import ACCENT, QUIET, SERIES, finish, headline, save
from shortlist.program.reproduce.registry import COLUMN_NAMES, EXPERIMENTS
from shortlist.program.reproduce.results import Result
from shortlist.program.reproduce.tables import latest_setups


def draw(name: str, results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw an experiment that the paper shows as a figure; for a table, or without results, draw nothing.

    Args:
        name: Of the experiment.
        results: The longest runs are drawn.
        folder: Where the files go; they have the experiment's name.
    """
    paint = PAINTERS.get(name)
    if paint is None or not results:
        return []
    longest = max(result.epochs for result in results)
    drawn = latest_setups([result for result in results if result.epochs == longest])
    return save(folder, name, lambda: paint(drawn))


def _means(results: Sequence[Result], column: str) -> dict[str, float]:
    """The mean over the seeds, by row."""
    values: dict[str, list[float]] = {}
    for result in results:
        if result.column == column:
            values.setdefault(result.row, []).append(result.value)
    return {row: statistics.fmean(numbers) for row, numbers in values.items()}


def _paint_sparsity(results: Sequence[Result]) -> Figure:
    figure = Figure(figsize=(11, 6.2))
    axes = figure.add_axes((0.08, 0.14, 0.66, 0.68))
    noised = {float(row): mean for row, mean in _means(results, "noised").items()}
    positive = sorted(epsilon for epsilon in noised if epsilon > 0)
    axes.plot(positive, [noised[epsilon] for epsilon in positive], "-o", color=SERIES[1], linewidth=3, markersize=8)
    places = {epsilon: epsilon for epsilon in positive}
    if 0 in noised and positive:
        # A logarithmic axis has no zero: its point is left of the others, and not on their line.
        places[0.0] = positive[0] / 10
        axes.plot([places[0.0]], [noised[0.0]], "o", color=SERIES[1], markersize=8)
    for epsilon, place in places.items():
        value = noised[epsilon]
        axes.annotate(f"{value:.1f}", (place, value), (0, 9), textcoords="offset points", ha="center", color=SERIES[1])
    axes.set_xscale("log")
    axes.set_xticks([*places.values()], [f"{epsilon:g}" for epsilon in places])
    axes.minorticks_off()
    ends = {"noised, B = 3": (noised[positive[-1]], SERIES[1])} if positive else {}
    for turn, (column, colour) in enumerate((("cross_entropy", QUIET), ("smooth", ACCENT))):
        for mean in _means(results, column).values():
            # If the two are equal, the dashes of one fill the gaps of the other.
            axes.axhline(mean, color=colour, linewidth=2, linestyle=(4 * turn, (4, 4)))
            ends[COLUMN_NAMES[column]] = (mean, colour)
    axes.set(xlabel="ε", ylim=(0, 106))
    finish(axes, ends)
    headline(
        figure,
        "How many scores a gradient moves",
        "Non-zero coordinates of the gradient, of 100. CIFAR-100, first epoch, K = 5.",
    )
    return figure


def _paint_times(results: Sequence[Result]) -> Figure:
    figure = Figure(figsize=(11, 6.2))
    axes = figure.add_axes((0.08, 0.14, 0.66, 0.68))
    colours = dict(zip(("noised_b3", "noised_b10", "noised_b50"), SERIES, strict=True))
    colours |= {"cross_entropy": QUIET, "smooth": ACCENT}
    ends = {}
    slowest = 0.0
    for column in EXPERIMENTS["epoch-time"].columns:
        times = {int(row): mean for row, mean in _means(results, column).items()}
        if times:
            ks = sorted(times)
            axes.plot(ks, [times[k] for k in ks], "-o", color=colours[column], linewidth=3, markersize=7)
            ends[COLUMN_NAMES[column]] = (times[ks[-1]], colours[column])
            slowest = max(slowest, *times.values())
    axes.set(xlabel="K", ylim=(0, 1.15 * slowest))
    axes.set_xticks(sorted({int(result.row) for result in results}))
    finish(axes, ends)
    headline(
        figure,
        "What the loss adds to an epoch",
        "Seconds an epoch, CIFAR-100, DenseNet 40-40: the median of all epochs but the first.",
    )
    return figure


PAINTERS: dict[str, Callable[[Sequence[Result]], Figure]] = {
    "gradient-sparsity": _paint_sparsity,
    "epoch-time": _paint_times,
}
"""By the name of the experiment."""
