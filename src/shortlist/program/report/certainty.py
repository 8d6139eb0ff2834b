"""The part of the page about calibrated runs: what their probabilities and their sets are worth."""

import math
from collections.abc import Sequence

from shortlist.program.predicting.calibration import METHODS, Of
from shortlist.program.predicting.certainty import COVERAGES, MeasuredSets
from shortlist.program.predicting.reliability import BINS
from shortlist.program.report.charts import Axis, Bar, Line, Point, legend, line_chart, percent_axis
from shortlist.program.report.curves import curves_of, figure, short, side_by_side
from shortlist.program.report.gather import Comparison, Run, Setup
from shortlist.program.report.markup import Html, element, folded, plain_table
from shortlist.program.report.run_tables import SIZES
from shortlist.program.report.summary import ABSENT, PLUS_MINUS, Summary, percent_spread, summarise

FEWEST_IN_BIN = 10
"""Images that a point of a reliability diagram rests on at least."""
_GROUPS = {"all": "all images", **{name: f"{name} ({size} training images)" for name, size in SIZES.items()}}
_COVERED = {
    "macro_coverage": "classes",
    "few_coverage": "few",
    "medium_coverage": "medium",
    "many_coverage": "many",
    "micro_coverage": "photos",
}


def reliability_diagrams(comparison: Comparison) -> Html | None:
    """Accuracy against confidence, of all images and by class size, with the errors; None if no run is calibrated."""
    setups = _calibrated(comparison)
    drawn = side_by_side([_diagram(setups, group) for group in _GROUPS], setups)
    if drawn is None:
        return None
    rows = [(setup.label, [_error_text(setup, group) for group in _GROUPS]) for setup in setups]
    return element("div", plain_table("Calibration error, %", ["calibration error, %", *_GROUPS.values()], rows), drawn)


def coverage_against_size(comparison: Comparison) -> Html | None:
    """How many classes the sets cover, and what as many plain suggestions would; None if no run is calibrated."""
    setups = _calibrated(comparison)
    if not setups:
        return None
    # The same colours for sets and plain suggestions would hide which is which.
    leading = [setup for setup in setups if setup in comparison.leading]
    plain_styles = {setup.label: len(comparison.setups) + place for place, setup in enumerate(leading)}
    names = [(f"{setup.label}: sets", setup.style) for setup in leading]
    names += [(f"{setup.label}: first K", plain_styles[setup.label]) for setup in leading]
    figures = [_size_chart(leading, plain_styles, of) for of in METHODS]
    tables = [folded(f"Sets with a coverage of {of}", _sets_table(setups, of)) for of in METHODS]
    return element("div", legend(names), element("div", *figures, class_="figures"), *tables)


def _calibrated(comparison: Comparison) -> list[Setup]:
    return [setup for setup in comparison.finished if any(run.certainty for run in setup.finished)]


def _diagram(setups: Sequence[Setup], group: str) -> Html | None:
    def read(run: Run) -> dict[float, float | None]:
        bins = run.certainty.reliability[group] if run.certainty else ()
        return {(found.place + 0.5) / BINS: found.accuracy for found in bins if found.images >= FEWEST_IN_BIN}

    curves = curves_of(setups, read)
    if not curves:
        return None
    middles = [(place + 0.5) / BINS for place in range(BINS)]
    names = {at: f"{100 * (at - 0.5 / BINS):.0f} to {100 * (at + 0.5 / BINS):.0f} %" for at in middles}
    return figure(
        f"Reliability, {_GROUPS[group]}",
        percent_axis("probability of the best class, %", (0.0, 1.0)),
        percent_axis("how often it is right, %", (0.0, 1.0)),
        curves,
        names,
        bars=_image_bars(setups, group),
        diagonal=True,
    )


def _image_bars(setups: Sequence[Setup], group: str) -> list[Bar]:
    """How many images have such a probability, if there is a single run to show."""
    runs = [run for setup in setups for run in setup.finished if run.certainty]
    if len(runs) != 1 or runs[0].certainty is None:
        return []
    bins = runs[0].certainty.reliability[group]
    most = max(found.images for found in bins)
    return [
        Bar(found.place / BINS, (found.place + 1) / BINS, found.images / most, f"{found.images:,} images")
        for found in bins
    ]


def _error_text(setup: Setup, group: str) -> str:
    found = summarise([run.certainty.error[group] for run in setup.finished if run.certainty])
    return percent_spread(found) if found else ABSENT


def _size_chart(setups: Sequence[Setup], plain_styles: dict[str, int], of: Of) -> Html:
    name = {"classes": "macro_coverage", "photos": "micro_coverage"}[of]
    lines = []
    for setup in setups:
        for is_sets, style in ((True, setup.style), (False, plain_styles[setup.label])):
            found = [_mean(setup, of, coverage, is_sets) for coverage in COVERAGES]
            lines.append(Line(style, [_point(setup, values, name, is_sets) for values in found]))
    sizes, covered = ([getattr(point, axis) for line in lines for point in line.points] for axis in ("x", "y"))
    x, y = _size_axis(sizes), percent_axis(f"{of} covered, %", covered)
    title = f"Share of {of} covered, against mean size"
    return element("figure", element("figcaption", title), line_chart(_description(title, lines), x, y, lines))


def _point(setup: Setup, values: dict[str, Summary | None], name: str, is_sets: bool) -> Point:
    size, covered = values["mean_size"], values[name]
    assert size is not None
    assert covered is not None
    what = "sets" if is_sets else "first K"
    text = f"{setup.label}, {what} of {size.mean:.1f} on average: {percent_spread(covered)} %"
    return Point(math.log2(max(size.mean, 0.5)), covered.mean, text, covered.deviation)


def _mean(setup: Setup, of: Of, coverage: float, is_sets: bool) -> dict[str, Summary | None]:
    """The numbers of sets over the seeds, or of plain suggestions of their mean size."""
    found = _measured(setup, of, coverage)
    covered = [sets.metrics if is_sets else sets.top_k for sets in found]
    return {"mean_size": summarise([sets.metrics["mean_size"] for sets in found])} | {
        name: summarise([values.get(name) for values in covered]) for name in _COVERED
    }


def _measured(setup: Setup, of: Of, coverage: float) -> list[MeasuredSets]:
    return [
        sets
        for run in setup.finished
        if run.certainty
        for sets in run.certainty.sets
        if (sets.of, sets.coverage) == (of, coverage)
    ]


def _sets_table(setups: Sequence[Setup], of: Of) -> Html:
    """A row for each coverage of each set-up, and one for as many plain suggestions."""
    rows = []
    for setup in setups:
        for coverage in COVERAGES:
            for is_sets in (True, False):
                values = _mean(setup, of, coverage, is_sets)
                what = f"{setup.label}, {100 * coverage:g} %" if is_sets else "as many plain suggestions"
                cells = [_size_text(values["mean_size"]), *(_text(values[name]) for name in _COVERED)]
                rows.append((what, cells))
    columns = ["asked for", "mean size", *(f"{title}, %" for title in _COVERED.values())]
    return plain_table(f"Sets with a coverage of {of}", columns, rows)


def _text(found: Summary | None) -> str:
    return ABSENT if found is None else percent_spread(found)


def _size_text(found: Summary | None) -> str:
    if found is None:
        return ABSENT
    return f"{found.mean:.2f}" + (f"{PLUS_MINUS}{found.deviation:.2f}" if found.count > 1 else "")


def _size_axis(octaves: Sequence[float]) -> Axis:
    """A logarithmic axis of sizes, in octaves."""
    low, high = math.floor(min(octaves)), max(math.ceil(max(octaves)), math.floor(min(octaves)) + 1)
    ticks = tuple((at, short(2**at) if at >= 0 else f"{2.0**at:g}") for at in range(low, high + 1))
    return Axis("mean number of classes in a set (log scale)", low, high, ticks)


def _description(title: str, lines: Sequence[Line]) -> str:
    return f"Line chart: {title}. " + " ".join(f"{line.points[0].text}; {line.points[-1].text}." for line in lines)
