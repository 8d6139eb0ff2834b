"""Line charts as inline SVG, and their axes. They scale with the page, follow its colours and need no library."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shortlist.program.report.markup import Html, element, joined

COLOURS = 7
_DASHES = ("", "7 3", "2 3", "10 3 2 3")
_WIDTH, _HEIGHT = 440, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 428, 34, 234
_MARKER = 3.6
_MOST_MARKERS = 12
_BAR_HEIGHT = 44
_MOST_STEPS = 6


@dataclass(frozen=True)
class Axis:
    title: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    """Positions and their labels."""

    def along(self, value: float) -> float:
        """0 at the lower end, 1 at the upper."""
        return (value - self.low) / (self.high - self.low)


def percent_axis(title: str, values: Iterable[float]) -> Axis:
    """An axis around shares between 0 and 1, in percent; it need not start at zero."""
    return _round_axis(title, [100 * value for value in values], lowest=0.0, highest=100.0, unit=0.01)


def number_axis(title: str, values: Iterable[float]) -> Axis:
    """An axis from zero (or below) to a round number above all values."""
    return _round_axis(title, [0.0, *values])


def count_axis(title: str, low: int, high: int) -> Axis:
    """An axis of whole numbers; the first and then every few have a label."""
    step = math.ceil(_round_step(low, high, most_steps=10))
    ticks = [low, *(tick for tick in range(step, high + 1, step) if tick - low > step / 2)]
    padding = 0.5 if low == high else 0.0
    return Axis(title, low - padding, high + padding, tuple((tick, f"{tick:,}") for tick in ticks))


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
    """1, 2 or 5 times a power of ten, with at most ``most_steps`` steps from low to high."""
    size = max(abs(low), abs(high))
    span = high - low if high - low > 1e-9 * size else size  # no step is finer than the digits of its values
    least = (span if span > 1e-300 else 1.0) / most_steps
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    text: str
    """Shown on hover."""
    deviation: float = 0.0


@dataclass(frozen=True)
class Line:
    style: int
    points: list[Point]
    ringed: int | None = None
    """Index of a point to highlight."""


@dataclass(frozen=True)
class Bar:
    """A rectangle on the x axis, behind the lines."""

    start: float
    end: float
    height: float
    """As a share of the tallest bar."""
    text: str


@dataclass(frozen=True)
class Guide:
    """A vertical line with a label on each side."""

    x: float
    left: str
    right: str


def line_chart(
    description: str,
    x: Axis,
    y: Axis,
    lines: Sequence[Line],
    *,
    bars: Sequence[Bar] = (),
    guides: Sequence[Guide] = (),
    diagonal: bool = False,
) -> Html:
    """A chart whose lines differ in colour, dashes and markers. The description is for screen readers.

    The diagonal is drawn from corner to corner: where both axes are the same, it is where their values are equal.
    """
    return element(
        "svg",
        *(_bar(bar, x) for bar in bars),
        *(_y_tick(y, at, text) for at, text in y.ticks),
        *(_x_tick(x, at, text) for at, text in x.ticks),
        *(part for guide in guides for part in _guide(guide, x)),
        *([element("path", d=f"M{_LEFT} {_BOTTOM}L{_RIGHT} {_TOP}", class_="guide")] if diagonal else []),
        _text(y.title, 0, 13, "axis-title"),
        _text(x.title, _RIGHT, _HEIGHT - 8, "axis-title", "end"),
        *(_line(line, x, y) for line in lines),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=description,
        class_="chart",
    )


def legend(names: Sequence[tuple[str, int]]) -> Html:
    """The labels of the lines, each beside a sample of its line."""
    return element("ul", *(element("li", key(label, style)) for label, style in names), class_="legend")


def key(label: str, style: int) -> Html:
    """A label beside a sample of its line."""
    return element("span", _swatch(style), element("span", label), class_="key")


def _swatch(style: int) -> Html:
    stroke = element("path", d="M1 7H29", class_="line", stroke_dasharray=_dashes(style))
    return element(
        "svg",
        element("g", stroke, _marker(style, 15, 7), class_=_colour(style)),
        viewBox="0 0 30 14",
        class_="swatch",
        aria_hidden="true",
    )


def _across(x: Axis, value: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * x.along(value)


def _up(y: Axis, value: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * y.along(value)


def _y_tick(y: Axis, at: float, text: str) -> Html:
    height = _up(y, at)
    grid = element("path", d=f"M{_LEFT} {height:.1f}H{_RIGHT}", class_="grid")
    return joined([grid, _text(text, _LEFT - 8, height + 4, "tick", "end")])


def _x_tick(x: Axis, at: float, text: str) -> Html:
    return _text(text, _across(x, at), _BOTTOM + 19, "tick", "middle")


def _guide(guide: Guide, x: Axis) -> list[Html]:
    at = _across(x, guide.x)
    return [
        element("path", d=f"M{at:.1f} {_TOP}V{_BOTTOM}", class_="guide"),
        _text(guide.left, at - 6, _TOP - 4, "tick", "end"),
        _text(guide.right, at + 6, _TOP - 4, "tick"),
    ]


def _bar(bar: Bar, x: Axis) -> Html:
    left, right, height = _across(x, bar.start), _across(x, bar.end), _BAR_HEIGHT * bar.height
    return element(
        "rect",
        element("title", bar.text),
        x=f"{left + 1:.1f}",
        y=f"{_BOTTOM - height:.1f}",
        width=f"{right - left - 2:.1f}",
        height=f"{height:.1f}",
        class_="bar",
    )


def _line(line: Line, x: Axis, y: Axis) -> Html:
    places = [(_across(x, point.x), _up(y, point.y)) for point in line.points]
    marked = {round(i * (len(places) - 1) / (_MOST_MARKERS - 1)) for i in range(_MOST_MARKERS)}
    parts = [_band(line, x, y), element("path", d=_path(places), class_="line", stroke_dasharray=_dashes(line.style))]
    for position, (point, (left, top)) in enumerate(zip(line.points, places, strict=True)):
        ring = [element("circle", cx=f"{left:.1f}", cy=f"{top:.1f}", r=8, class_="ring")]
        parts += ring if position == line.ringed else []
        # Every point shows its value on hover; if there are many, only some have a visible marker.
        shape = _marker(line.style, left, top) if position in marked else ""
        target = element("circle", cx=f"{left:.1f}", cy=f"{top:.1f}", r=7, class_="target")
        parts.append(element("g", element("title", point.text), shape, target))
    return element("g", *parts, class_=_colour(line.style))


def _band(line: Line, x: Axis, y: Axis) -> str:
    """The area of one standard deviation on either side."""
    if not any(point.deviation for point in line.points):
        return ""
    upper = [(_across(x, point.x), _up(y, min(y.high, point.y + point.deviation))) for point in line.points]
    lower = [(_across(x, point.x), _up(y, max(y.low, point.y - point.deviation))) for point in line.points]
    return element("path", d=_path(upper + lower[::-1]) + "Z", class_="band")


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{left:.1f} {top:.1f}" for left, top in places)


def _marker(style: int, left: float, top: float) -> Html:
    return element("path", d=_MARKERS[style % len(_MARKERS)](left, top, _MARKER), class_="marker")


def _circle(left: float, top: float, size: float) -> str:
    return f"M{left - size:.1f} {top:.1f}a{size} {size} 0 1 0 {2 * size} 0a{size} {size} 0 1 0 {-2 * size} 0Z"


def _square(left: float, top: float, size: float) -> str:
    return f"M{left - size:.1f} {top - size:.1f}h{2 * size}v{2 * size}h{-2 * size}Z"


def _triangle(left: float, top: float, size: float) -> str:
    return f"M{left - 1.2 * size:.1f} {top + size:.1f}h{2.4 * size:.1f}L{left:.1f} {top - 1.2 * size:.1f}Z"


def _diamond(left: float, top: float, size: float) -> str:
    reach = 1.35 * size
    right, bottom = left + reach, top + reach
    return f"M{left - reach:.1f} {top:.1f}L{left:.1f} {top - reach:.1f}L{right:.1f} {top:.1f}L{left:.1f} {bottom:.1f}Z"


def _pointing_down(left: float, top: float, size: float) -> str:
    return f"M{left - 1.2 * size:.1f} {top - size:.1f}h{2.4 * size:.1f}L{left:.1f} {top + 1.2 * size:.1f}Z"


_MARKERS: tuple[Callable[[float, float, float], str], ...] = (_circle, _square, _triangle, _diamond, _pointing_down)


def _dashes(style: int) -> str | None:
    return _DASHES[style % len(_DASHES)] or None


def _colour(style: int) -> str:
    return f"series-{style % COLOURS}"


def _text(text: str, left: float, baseline: float, class_: str, anchor: str = "start") -> Html:
    return element("text", text, x=f"{left:.1f}", y=f"{baseline:.1f}", class_=class_, text_anchor=anchor)
