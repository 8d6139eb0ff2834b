"""The figures: accuracy against K, accuracy against class size, learning curves.

Each is None where the runs do not hold what it needs.
"""

import math
from collections.abc import Callable, Sequence

from shortlist.class_sizes import FEW_BELOW, MANY_ABOVE
from shortlist.program.report.accuracy import SizeBin, macro_by_k, macro_in_bin, micro_by_k, size_bins
from shortlist.program.report.charts import Bar, Guide
from shortlist.program.report.curves import curves_of, extent, figure, ring_best_epochs, side_by_side
from shortlist.program.report.formats import PLUS_MINUS
from shortlist.program.report.gather import Comparison, Predictions, Run, Setup
from shortlist.program.report.markup import Html
from shortlist.program.report.scales import Axis, count_axis, number_axis, percent_axis, size_axis
from shortlist.program.report.summary import Summary
from shortlist.program.wording import counted


def accuracy_against_k(comparison: Comparison) -> Html | None:
    """Share of test images whose label is among the first K suggestions, and its mean over classes."""
    figures = [
        _accuracy_figure(comparison, "Micro accuracy: mean over images", micro_by_k),
        _accuracy_figure(comparison, "Macro accuracy: mean over classes", macro_by_k),
    ]
    return side_by_side(figures, _setups_with(comparison, lambda run: run.predictions))


def _accuracy_figure(comparison: Comparison, title: str, by_k: Callable[[Predictions], Sequence[float]]) -> Html | None:
    def read(run: Run) -> dict[float, float]:
        return dict(enumerate(by_k(run.predictions), 1)) if run.predictions else {}

    curves = curves_of(comparison.finished, read)
    if not curves:
        return None
    most = max(len(curve.values) for curve in curves)
    return figure(
        title,
        count_axis("K, the number of suggestions", 1, most),
        percent_axis("top-K accuracy, %", extent(curves)),
        curves,
        {k: f"K = {k}" for k in range(1, most + 1)},
    )


def accuracy_against_size(comparison: Comparison) -> Html | None:
    """Mean accuracy of classes with about the same number of training images, at the smallest K and at the main one."""
    bins = size_bins(comparison.train_images)
    if len(bins) < 2 or comparison.main_k is None:
        return None
    figures = [_size_figure(comparison, k, bins) for k in sorted({comparison.ks[0], comparison.main_k})]
    return side_by_side(figures, _setups_with(comparison, lambda run: run.class_accuracy))


def _size_figure(comparison: Comparison, k: int, bins: Sequence[SizeBin]) -> Html | None:
    def read(run: Run) -> dict[float, float | None]:
        return {_middle(each): macro_in_bin(run.class_accuracy, k, each) for each in bins} if run.class_accuracy else {}

    curves = curves_of(comparison.finished, read)
    if not curves:
        return None
    x = size_axis("training images of a class, logarithmic", bins)
    return figure(
        f"Macro top-{k} accuracy",
        x,
        percent_axis(f"macro top-{k} accuracy, %", extent(curves)),
        curves,
        {_middle(each): f"{each.text} ({counted(each.classes, 'class', 'classes')})" for each in bins},
        bars=_class_bars(bins),
        guides=_size_guides(x),
    )


def _middle(size_bin: SizeBin) -> float:
    return size_bin.octave + size_bin.octaves / 2


def _class_bars(bins: Sequence[SizeBin]) -> list[Bar]:
    most = max(each.classes for each in bins)
    return [
        Bar(
            each.octave,
            each.octave + each.octaves,
            each.classes / most,
            f"{counted(each.classes, 'class', 'classes')} of {each.text} training images",
        )
        for each in bins
    ]


def _size_guides(x: Axis) -> list[Guide]:
    """Where few, medium and many, the groups of the table, meet."""
    guides = [Guide(math.log2(FEW_BELOW), "few", "medium"), Guide(math.log2(MANY_ABOVE + 1), "", "many")]
    return [guide for guide in guides if x.low < guide.x < x.high]


def learning_curves(comparison: Comparison) -> Html | None:
    """Training loss and the metric that picks the best epoch, by epoch."""
    figures = [_loss_figure(comparison), _selection_figure(comparison)]
    return side_by_side(figures, _setups_with(comparison, lambda run: run.epochs))


def _loss_figure(comparison: Comparison) -> Html | None:
    # Different losses have different units; only their course can be compared.
    relative = len({setup.config.loss for setup in comparison.finished}) > 1

    def read(run: Run) -> dict[float, float | None]:
        losses = _by_epoch(run, "train_loss")
        first = next(iter(losses.values()), None) if relative else 1.0
        return {epoch: loss / first for epoch, loss in losses.items() if loss is not None} if first else {}

    curves = curves_of(comparison.finished, read)
    if not curves:
        return None
    epochs = _epochs(comparison)
    return figure(
        "Training loss",
        count_axis("epoch", epochs[0], epochs[-1]),
        number_axis("loss, as a multiple of the first epoch's" if relative else "loss", extent(curves)),
        curves,
        {epoch: f"epoch {epoch}" for epoch in epochs},
        _plain,
    )


def _selection_figure(comparison: Comparison) -> Html | None:
    chosen = {run.final["select"] for run in comparison.runs if run.final}
    # Runs that chose by different metrics are still compared in one: the table's most important.
    metric = chosen.pop() if len(chosen) == 1 else f"macro_top{comparison.main_k}"
    curves = curves_of(comparison.finished, lambda run: _by_epoch(run, f"val_{metric}"))
    if not curves:
        return None
    epochs = _epochs(comparison)
    average, _, k = metric.partition("_top")
    return figure(
        f"Validation {average} top-{k} accuracy",
        count_axis("epoch", epochs[0], epochs[-1]),
        percent_axis(f"{average} top-{k} accuracy, %", extent(curves)),
        ring_best_epochs(curves),
        {epoch: f"epoch {epoch}" for epoch in epochs},
    )


def _by_epoch(run: Run, name: str) -> dict[float, float | None]:
    """Epochs counted from one, as people do."""
    return {line["epoch"] + 1: line.get(name) for line in run.epochs}


def _epochs(comparison: Comparison) -> list[int]:
    return sorted({line["epoch"] + 1 for run in comparison.runs for line in run.epochs})


def _plain(summary: Summary) -> str:
    return f"{summary.mean:.3g}" + (f"{PLUS_MINUS}{summary.deviation:.2g}" if summary.count > 1 else "")


def _setups_with(comparison: Comparison, needed: Callable[[Run], object]) -> list[Setup]:
    return [setup for setup in comparison.finished if any(needed(run) for run in setup.finished)]
