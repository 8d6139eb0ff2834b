"""The figures of the page: accuracy against K, accuracy against class size, learning curves."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shortlist.ops.class_counts import FEW_BELOW, MANY_ABOVE
from shortlist.program.report.charts import (
    Axis,
    Bar,
    Guide,
    Line,
    Point,
    count_axis,
    legend,
    line_chart,
    number_axis,
    percent_axis,
)
from shortlist.program.report.gather import ClassAccuracy, Comparison, Predictions, Run, Setup
from shortlist.program.report.markup import Html, element, folded, plain_table
from shortlist.program.report.summary import ABSENT, PLUS_MINUS, Summary, percent_spread, summarise
from shortlist.program.runs.records import corrected_name
from shortlist.program.text import counted

_MOST_BINS = 10


def micro_by_k(predictions: Predictions) -> list[float]:
    """The share of images that are correct at K = 1, 2, ..., up to the number of suggestions.

    Example:
        >>> labels, suggestions, above = torch.tensor([2, 0]), torch.tensor([[2, 1], [1, 0]]), torch.tensor([0, 1])
        >>> micro_by_k(Predictions(labels, suggestions, above))
        [0.5, 1.0]
    """
    hits_NK, _ = _hits(predictions)
    return list(hits_NK.mean(0).tolist())


def macro_by_k(predictions: Predictions) -> list[float]:
    """The same share for each class, averaged over the classes that occur."""
    hits_NK, labels_N = _hits(predictions)
    _, which_N, images_C = torch.unique(labels_N, return_inverse=True, return_counts=True)
    hits_CK = hits_NK.new_zeros(len(images_C), hits_NK.shape[1]).index_add_(0, which_N, hits_NK)
    return list((hits_CK / images_C.unsqueeze(1)).mean(0).tolist())


def _hits(predictions: Predictions) -> tuple[Tensor, Tensor]:
    is_readable = predictions.labels >= 0
    labels_N = predictions.labels[is_readable]
    ks_K = torch.arange(1, predictions.suggestions.shape[1] + 1)
    return (predictions.above[is_readable].unsqueeze(1) < ks_K).double(), labels_N


@dataclass(frozen=True)
class SizeBin:
    """Classes with a similar number of training images."""

    octave: int
    """Its position on a logarithmic scale: sizes from ``2 ** octave``. A bin without images is one below the others."""
    octaves: int
    """Its width on this scale."""
    sizes: range
    classes: int

    @property
    def text(self) -> str:
        smallest, largest = self.sizes[0], self.sizes[-1]
        return f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"


def size_bins(train_images: Sequence[int]) -> list[SizeBin]:
    """Bins whose sizes double, or quadruple and so on if doubling would give too many bins.

    Example:
        >>> [(size_bin.text, size_bin.classes) for size_bin in size_bins([0, 1, 5, 6, 7, 9])]
        [('0', 1), ('1', 1), ('4 to 7', 3), ('8 to 15', 1)]
    """
    sizes = [size for size in train_images if size > 0]
    span = math.log2(max(sizes) / min(sizes)) if sizes else 0.0
    octaves = max(1, math.ceil(span / _MOST_BINS))
    counts = Counter(_octave(size, octaves) for size in sizes)
    bins = [
        SizeBin(octave, octaves, range(2**octave, 2 ** (octave + octaves)), classes)
        for octave, classes in sorted(counts.items())
    ]
    if len(sizes) < len(train_images):
        before = bins[0].octave - octaves if bins else 0
        bins.insert(0, SizeBin(before, octaves, range(1), len(train_images) - len(sizes)))
    return bins


def macro_in_bin(accuracy: ClassAccuracy, k: int, size_bin: SizeBin) -> float | None:
    """Mean accuracy at K of the classes in the bin that occur among the test images; None if there are none."""
    if k not in accuracy.by_k:  # the file is from another run
        return None
    sizes = accuracy.train_images
    inside = (sizes >= size_bin.sizes[0]) & (sizes <= size_bin.sizes[-1])
    mean = float(accuracy.by_k[k][inside].nanmean())
    return None if math.isnan(mean) else mean


def _octave(size: int, octaves: int) -> int:
    return (size.bit_length() - 1) // octaves * octaves


def size_axis(title: str, bins: Sequence[SizeBin]) -> Axis:
    """A logarithmic axis in octaves, labelled with the smallest size of each bin at its start."""
    low, high = bins[0].octave, bins[-1].octave + bins[-1].octaves
    # Zero has no logarithm: its bin is labelled in the middle.
    without = [(low + bins[0].octaves / 2, "0")] if bins[0].sizes[0] == 0 else []
    first = next((size_bin.octave for size_bin in bins if size_bin.sizes[0]), high)
    return Axis(title, low, high, (*without, *((at, short(2**at)) for at in range(first, high + 1, bins[0].octaves))))


def short(number: int) -> str:
    """A number in few characters, for an axis.

    Example:
        >>> [short(number) for number in (512, 8192, 2**20)]
        ['512', '8k', '1M']
    """
    for size, letter in ((10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.0f}{letter}"
    return str(number)


@dataclass(frozen=True)
class Curve:
    """The values of a set-up, averaged over its finished runs, by position on the x axis."""

    setup: Setup
    values: dict[float, Summary]
    ringed: float | None = None
    """A position to highlight."""


def curves_of(setups: Sequence[Setup], read: Callable[[Run], Mapping[float, float | None]]) -> list[Curve]:
    """A curve for each set-up that has a value."""
    curves = []
    for setup in setups:
        of_runs = [read(run) for run in setup.finished]
        places = sorted({place for values in of_runs for place in values})
        summaries = {place: summarise([values.get(place) for values in of_runs]) for place in places}
        defined = {place: summary for place, summary in summaries.items() if summary}
        if defined:
            curves.append(Curve(setup, defined))
    return curves


def extent(curves: Sequence[Curve]) -> list[float]:
    """One standard deviation below and above each value."""
    summaries = [summary for curve in curves for summary in curve.values.values()]
    return [summary.mean + sign * summary.deviation for summary in summaries for sign in (-1, 1)]


def ring_best_epochs(curves: Sequence[Curve]) -> list[Curve]:
    """Highlight the epoch whose weights were kept, on curves of a single run."""
    ringed = []
    for curve in curves:
        final = curve.setup.finished[0].final
        single = len(curve.setup.finished) == 1
        ringed.append(replace(curve, ringed=final["best_epoch"] + 1.0) if single and final else curve)
    return ringed


def figure(
    title: str,
    x: Axis,
    y: Axis,
    curves: Sequence[Curve],
    places: Mapping[float, str],
    text: Callable[[Summary], str] = percent_spread,
    *,
    bars: Sequence[Bar] = (),
    guides: Sequence[Guide] = (),
    diagonal: bool = False,
) -> Html:
    """A chart, and its numbers in a table.

    Args:
        title: What it shows.
        x: Its horizontal axis.
        y: Its vertical axis.
        curves: What is drawn.
        places: Positions of the values and their names.
        text: Formats a value.
        bars: Drawn behind the curves.
        guides: Drawn across them.
        diagonal: Draw a line from corner to corner.
    """
    lines = [_line(curve, places, text) for curve in curves]
    rows = [
        (name, [text(curve.values[place]) if place in curve.values else ABSENT for curve in curves])
        for place, name in places.items()
    ]
    return element(
        "figure",
        element("figcaption", title),
        line_chart(_description(title, x, lines), x, y, lines, bars=bars, guides=guides, diagonal=diagonal),
        folded("Numbers", plain_table(title, [x.title, *(curve.setup.label for curve in curves)], rows)),
    )


def side_by_side(figures: Sequence[Html | None], setups: Sequence[Setup]) -> Html | None:
    """The figures that could be drawn, below one legend; None if there are none."""
    drawn = [figure for figure in figures if figure is not None]
    names = legend([(setup.label, setup.style) for setup in setups])
    return element("div", names, element("div", *drawn, class_="figures")) if drawn else None


def _line(curve: Curve, places: Mapping[float, str], text: Callable[[Summary], str]) -> Line:
    points = [
        Point(place, summary.mean, f"{curve.setup.label}, {places[place]}: {text(summary)}", summary.deviation)
        for place, summary in curve.values.items()
    ]
    ringed = list(curve.values).index(curve.ringed) if curve.ringed in curve.values else None
    return Line(curve.setup.style, points, ringed)


def _description(title: str, x: Axis, lines: Sequence[Line]) -> str:
    ends = " ".join(f"{line.points[0].text}; {line.points[-1].text}." for line in lines)
    return f"Line chart: {title} against {x.title}. First and last points: {ends}"


def accuracy_against_k(comparison: Comparison) -> Html | None:
    """Micro and macro accuracy for every K. None if no run has predictions, as for the other two figures."""
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
    """Mean accuracy of classes with a similar number of training images, at the smallest K and at the main K."""
    bins = size_bins(comparison.train_images)
    if len(bins) < 2 or comparison.main_k is None:
        return None
    figures = [_size_figure(comparison, k, bins) for k in sorted({comparison.ks[0], comparison.main_k})]
    return side_by_side(figures, _setups_with(comparison, lambda run: run.class_accuracy))


def _size_figure(comparison: Comparison, k: int, bins: Sequence[SizeBin]) -> Html | None:
    def read(run: Run) -> dict[float, float | None]:
        accuracy = run.class_accuracy
        return {_middle(size_bin): macro_in_bin(accuracy, k, size_bin) for size_bin in bins} if accuracy else {}

    curves = curves_of(comparison.finished, read)
    if not curves:
        return None
    x = size_axis("training images of the class (log scale)", bins)
    return figure(
        f"Macro top-{k} accuracy",
        x,
        percent_axis(f"macro top-{k} accuracy, %", extent(curves)),
        curves,
        {_middle(size_bin): f"{size_bin.text} ({_classes(size_bin)})" for size_bin in bins},
        bars=_class_bars(bins),
        guides=_size_guides(x),
    )


def _middle(size_bin: SizeBin) -> float:
    return size_bin.octave + size_bin.octaves / 2


def _class_bars(bins: Sequence[SizeBin]) -> list[Bar]:
    most = max(size_bin.classes for size_bin in bins)
    return [
        Bar(
            size_bin.octave,
            size_bin.octave + size_bin.octaves,
            size_bin.classes / most,
            f"{_classes(size_bin)} with {size_bin.text} training images",
        )
        for size_bin in bins
    ]


def _classes(size_bin: SizeBin) -> str:
    return counted(size_bin.classes, "class", "classes")


def _size_guides(x: Axis) -> list[Guide]:
    """The boundaries between few, medium and many, the groups of the table."""
    guides = [Guide(math.log2(FEW_BELOW), "few", "medium"), Guide(math.log2(MANY_ABOVE + 1), "", "many")]
    return [guide for guide in guides if x.low < guide.x < x.high]


def learning_curves(comparison: Comparison) -> Html | None:
    """Training loss, and the metric that selects the best epoch, by epoch."""
    figures = [_loss_figure(comparison), _selection_figure(comparison)]
    return side_by_side(figures, _setups_with(comparison, lambda run: run.epochs))


def _loss_figure(comparison: Comparison) -> Html | None:
    # Different losses have different units: only their shapes can be compared.
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
        number_axis("loss, relative to the first epoch" if relative else "loss", extent(curves)),
        curves,
        {epoch: f"epoch {epoch}" for epoch in epochs},
        _plain,
    )


def _selection_figure(comparison: Comparison) -> Html | None:
    selected = {run.final["select"] for run in comparison.runs if run.final}
    # If runs selected by different metrics, show the main metric of the table.
    metric = selected.pop() if len(selected) == 1 else f"macro_top{comparison.main_k}"
    is_corrected = all(corrected_name(metric) in line for run in comparison.runs for line in run.epochs)
    name = corrected_name(metric) if is_corrected else f"val_{metric}"
    curves = curves_of(comparison.finished, lambda run: _by_epoch(run, name))
    if not curves:
        return None
    epochs = _epochs(comparison)
    average, _, k = metric.partition("_top")
    return figure(
        f"Validation {average} top-{k} accuracy" + (", corrected for class sizes" if is_corrected else ""),
        count_axis("epoch", epochs[0], epochs[-1]),
        percent_axis(f"{average} top-{k} accuracy, %", extent(curves)),
        ring_best_epochs(curves),
        {epoch: f"epoch {epoch}" for epoch in epochs},
    )


def _by_epoch(run: Run, name: str) -> dict[float, float | None]:
    """A metric by epoch, counted from 1."""
    return {line["epoch"] + 1: line.get(name) for line in run.epochs}


def _epochs(comparison: Comparison) -> list[int]:
    return sorted({line["epoch"] + 1 for run in comparison.runs for line in run.epochs})


def _plain(summary: Summary) -> str:
    return f"{summary.mean:.3g}" + (f"{PLUS_MINUS}{summary.deviation:.2g}" if summary.count > 1 else "")


def _setups_with(comparison: Comparison, needed: Callable[[Run], object]) -> list[Setup]:
    return [setup for setup in comparison.finished if any(needed(run) for run in setup.finished)]
