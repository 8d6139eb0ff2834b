"""The figures of docs/rare-classes.md: accuracy against class size, and the gain over cross-entropy against K."""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from shortlist.program.reproduce.comparison_results import Found, Loss
from shortlist.program.reproduce.figures.style import ACCENT, QUIET, finish, headline, save

_KS = (1, 2, 3, 4, 5, 7, 10)
_LARGEST_BIN_RATIO = 2.0
_SHOWN = {
    "cross_entropy": ("Cross-entropy", QUIET, "-"),
    "balanced_softmax": ("Balanced softmax", "#0b62c4", "-"),
    "ldam": ("LDAM", "#5a9bdc", "-"),
    "mixture_k5": ("Mixture, K = 5", ACCENT, "-"),
    "imbalanced_k135": ("Noised imbalanced, K = 1, 3, 5", "#7a3e9d", "-"),
    "noised_k5": ("Noised, K = 5", "#2a8f5b", "--"),
}
"""What is drawn of each loss, if it was run: name, colour and line."""


def draw(name: str, found: Found, folder: Path) -> list[str]:
    """Draw the figures of a comparison that has cross-entropy; returns their names.

    Args:
        name: Of the comparison.
        found: Its results.
        folder: Where the files go.
    """
    baseline = found.loss("cross_entropy")
    shown = [loss for key in _SHOWN if (loss := found.loss(key)) is not None and loss.runs]
    if baseline is None or not baseline.runs or len(shown) < 2:
        return []
    names = [f"{name}-class-size", f"{name}-gain"]
    save(folder, names[0], lambda: _paint_sizes(found.class_counts, shown))
    save(folder, names[1], lambda: _paint_gain(baseline, [loss for loss in shown if loss is not baseline]))
    return names


def size_bins(sizes: Sequence[int]) -> list[list[int]]:
    """Classes grouped by size: bins whose largest class has less than twice the images of the smallest.

    Example:
        >>> size_bins([1, 2, 3, 4, 9, 100])
        [[0], [1, 2], [3], [4], [5]]
    """
    bins: dict[int, list[int]] = {}
    for index, size in enumerate(sizes):
        bins.setdefault(int(math.log(max(size, 1), _LARGEST_BIN_RATIO) + 1e-9), []).append(index)
    return [bins[key] for key in sorted(bins)]


def _paint_sizes(sizes: Sequence[int], losses: Sequence[Loss]) -> Figure:
    figure = Figure(figsize=(11, 6.4))
    axes = figure.add_axes((0.08, 0.14, 0.58, 0.66))
    ends = {}
    bins = [group for group in size_bins(sizes) if _accuracies(losses[0], group)]
    places = [statistics.fmean(sizes[index] for index in group) for group in bins]
    for loss in losses:
        label, colour, line = _SHOWN[loss.name]
        heights = [100 * statistics.fmean(_accuracies(loss, group)) for group in bins]
        axes.plot(places, heights, line, marker="o", color=colour, linewidth=2.5, markersize=6)
        ends[label] = (heights[0], colour)
    axes.set_xscale("log")
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500) if places[0] * 0.8 <= tick <= places[-1] * 1.3]
    axes.set_xticks(ticks, [f"{tick}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("training images of the class")
    finish(axes, ends)
    headline(
        figure,
        "Which classes gain",
        "Mean top-5 accuracy of classes of similar size, in percent, corrected for class sizes.\n"
        "Names stand in the order of the rarest classes.",
    )
    return figure


def _accuracies(loss: Loss, classes: Sequence[int]) -> list[float]:
    return [value for run in loss.runs for index in classes if (value := run.class_accuracy[index]) is not None]


def _paint_gain(baseline: Loss, losses: Sequence[Loss]) -> Figure:
    figure = Figure(figsize=(11, 6.4))
    axes = figure.add_axes((0.08, 0.14, 0.58, 0.66))
    ends = {}
    axes.axhline(0, color=QUIET, linewidth=1.5)
    for loss in losses:
        label, colour, line = _SHOWN[loss.name]
        points = list(_gains(baseline, loss))
        ks, middles = [k for k, _, _ in points], [middle for _, middle, _ in points]
        axes.plot(ks, middles, line, marker="o", color=colour, linewidth=2.5, markersize=6)
        halves = [half for _, _, half in points]
        if all(half is not None for half in halves):
            low, high = zip(
                *((middle - half, middle + half) for _, middle, half in points if half is not None), strict=True
            )
            axes.fill_between(ks, low, high, color=colour, alpha=0.12, linewidth=0)
        ends[label] = (middles[-1], colour)
    axes.set_xticks(_KS, [f"{k}" for k in _KS])
    axes.set_xlabel("K, the number of suggestions")
    finish(axes, ends)
    headline(
        figure,
        "What a loss adds to cross-entropy",
        "Macro top-K accuracy minus that of cross-entropy, in points, both corrected for class sizes.\n"
        "Bands: 95 % intervals over seeds, paired.",
    )
    return figure


def _gains(baseline: Loss, loss: Loss) -> Iterator[tuple[int, float, float]]:
    """K, the gain in points, and half the width of its interval, which one seed does not have."""
    for k in _KS:
        gain = loss.difference(baseline, f"macro_top{k}")
        if gain is not None:
            yield k, 100 * gain.mean, 100 * (gain.half or 0.0)
