"""From the runs of each set-up to a chart with its legend and its numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shortlist.program.report.charts import Bar, Guide, Line, Point, legend, line_chart
from shortlist.program.report.formats import ABSENT, percent_spread
from shortlist.program.report.gather import Run, Setup
from shortlist.program.report.markup import Html, element
from shortlist.program.report.scales import Axis
from shortlist.program.report.summary import Summary, summarise
from shortlist.program.report.tables import folded, plain_table


@dataclass(frozen=True)
class Curve:
    """What a set-up's finished runs say, taken together, at each of several places."""

    setup: Setup
    values: dict[float, Summary]
    ringed: float | None = None
    """A place to draw attention to."""


def curves_of(setups: Sequence[Setup], read: Callable[[Run], Mapping[float, float | None]]) -> list[Curve]:
    """A curve for each set-up that has any value."""
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
    """All values, and one standard deviation to either side of each."""
    summaries = [summary for curve in curves for summary in curve.values.values()]
    return [summary.mean + sign * summary.deviation for summary in summaries for sign in (-1, 1)]


def ring_best_epochs(curves: Sequence[Curve]) -> list[Curve]:
    """Point out the epoch whose weights were kept, where a curve is that of one run."""
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
) -> Html:
    """A chart, and the same in numbers for those who would rather read.

    Args:
        title: What it shows.
        x: Its horizontal axis.
        y: Its vertical axis.
        curves: What is drawn.
        places: Where the curves have values, and what to call these places.
        text: How a value is written.
        bars: Drawn behind the curves.
        guides: Drawn across them.
    """
    lines = [_line(curve, places, text) for curve in curves]
    rows = [
        (name, [text(curve.values[place]) if place in curve.values else ABSENT for curve in curves])
        for place, name in places.items()
    ]
    return element(
        "figure",
        element("figcaption", title),
        line_chart(_description(title, x, lines), x, y, lines, bars=bars, guides=guides),
        folded("Numbers", plain_table(title, [x.title, *(curve.setup.label for curve in curves)], rows)),
    )


def side_by_side(figures: Sequence[Html | None], setups: Sequence[Setup]) -> Html | None:
    """The figures that could be drawn, under one legend; None if there is none."""
    drawn = [each for each in figures if each is not None]
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
