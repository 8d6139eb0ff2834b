"""The plots of docs/performance.md."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from shortlist.program.bench import Suite, heads, losses
from shortlist.program.bench.measurements import CLOCKS, Clock, Selection, class_count, milliseconds, size_text
from shortlist.program.documents import LOOK, save_figure

_DRAWS = (5, 10)
"""(K, B) of the plot of the loss: the paper's usual setting."""

_LINE_HEIGHT = 0.055
"""Of a label, as a share of the panel."""

_OURS, _PEER, _GREY, _DARK = "#0b62c4", "#d0621b", "#8a96a1", "#4c5a66"
_STYLE = LOOK | {
    "font.size": 12,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
}


@dataclass(frozen=True)
class _Curve:
    label: str
    colour: str
    selection: Selection
    width: float = 2.0
    dashes: str | tuple[int, tuple[int, int]] = "solid"
    everywhere: Selection | None = None
    """Measurements whose extremes the band around the curve shows."""


def loss_plot(selection: Selection) -> Figure | None:
    """Time against size, a panel a clock; None if the usual setting was not measured."""
    k, n_samples = _DRAWS
    single = selection.only(dtype="float32")
    ours = single.only(losses.OURS, K=k, B=n_samples)
    if not ours.measurements:
        return None
    usual = ours.only(spread=losses.USUAL_SPREAD, epsilon=losses.USUAL_EPSILON)
    curves = [
        _Curve("pytopk", _PEER, single.only(losses.PYTOPK, K=k, B=n_samples)),
        _Curve("cross-entropy", _GREY, single.only(losses.CROSS_ENTROPY)),
        _Curve("compiled", _DARK, single.only(losses.COMPILED_CROSS_ENTROPY), dashes=(0, (4, 2))),
        _Curve("shortlist", _OURS, usual, width=3.2, everywhere=ours),
    ]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6.6 * len(ours.clocks), 5.0), layout="constrained")
        panels = figure.subplots(1, len(ours.clocks), sharey=True, squeeze=False)[0]
        for axes, clock in zip(panels, ours.clocks, strict=True):
            _draw_loss_panel(axes, clock, curves)
        for axes, clock in zip(panels, ours.clocks, strict=True):  # after drawing: the panels share one scale
            _label_ends(axes, clock, curves)
        panels[0].set_ylabel("milliseconds, forward and backward")
        figure.suptitle(
            f"Noised loss, K = {k}, B = {n_samples}, beside cross-entropy, plain and compiled\n"
            "Band: score spreads from 0.1 to 3, epsilon from 0.01 to 1",
            x=0.01,
            ha="left",
            fontsize=12,
        )
    return figure


def _draw_loss_panel(axes: Axes, clock: Clock, curves: Sequence[_Curve]) -> None:
    for curve in curves:
        at = _by_size(curve.selection, clock)
        axes.plot(
            list(at), [min(times) for times in at.values()], linestyle=curve.dashes,
            color=curve.colour, linewidth=curve.width, marker="o", markersize=5,
        )  # fmt: skip
        if curve.everywhere is not None:
            band = _by_size(curve.everywhere, clock)
            low, high = [min(times) for times in band.values()], [max(times) for times in band.values()]
            axes.fill_between(list(band), low, high, color=curve.colour, alpha=0.16, linewidth=0)
    axes.set(xscale="log", yscale="log", title=CLOCKS[clock])
    sizes = sorted({(row.N * row.L, row.L, row.N) for curve in curves for row in curve.selection.measurements})
    axes.set_xticks(
        [scores for scores, _, _ in sizes], [f"{class_count(num_classes)}\n{n}" for _, num_classes, n in sizes]
    )
    axes.set_xlabel("classes L (above) and batch size N (below), placed by their product")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(axis="y")
    axes.tick_params(length=0)


def _by_size(selection: Selection, clock: Clock) -> dict[int, list[float]]:
    """Times by number of scores, the fewest first."""
    at: dict[int, list[float]] = {}
    for row in sorted(selection.measurements, key=lambda row: row.N * row.L):
        if (time := row.time(clock)) is not None:
            at.setdefault(row.N * row.L, []).append(time)
    return at


def _label_ends(axes: Axes, clock: Clock, curves: Sequence[_Curve]) -> None:
    """Write the names beside the last points, pushed apart where curves end close together."""
    ends = []
    for curve in curves:
        at = _by_size(curve.selection, clock)
        if at:
            x = max(at)
            ends.append((math.log(min(at[x])), x, curve))
    ends.sort(key=lambda end: end[0])
    low, high = (math.log(limit) for limit in axes.get_ylim())
    heights = pushed_apart([height for height, _, _ in ends], _LINE_HEIGHT * (high - low))
    for (_, x, curve), height in zip(ends, heights, strict=True):
        axes.annotate(
            curve.label, (x, math.exp(height)), (10, 0), textcoords="offset points", annotation_clip=False,
            color=curve.colour, va="center", fontweight="bold" if curve.colour == _OURS else "normal",
        )  # fmt: skip


def pushed_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights, moved as little as needed to be a gap apart. Those too close settle around their mean."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _span(groups[-2], gap)[1] + gap > _span(groups[-1], gap)[0]:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_span(group, gap)[0] + place * gap for group in groups for place in range(len(group))]


def _span(group: Sequence[float], gap: float) -> tuple[float, float]:
    middle, half = sum(group) / len(group), gap * (len(group) - 1) / 2
    return middle - half, middle + half


def head_plot(selection: Selection) -> Figure | None:
    """Time of each layer with its loss, a panel a size; None if ours was not measured."""
    if not selection.only(heads.OURS, heads.OURS_SPARSE).measurements:
        return None
    clock = selection.main_clock
    entries = [entry for entry in heads.ENTRIES if selection.only(entry).measurements][::-1]
    sizes = selection.sizes
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(3.0 + 3.6 * len(sizes), 0.9 + 0.52 * len(entries)), layout="constrained")
        panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        for axes, (n, num_classes) in zip(panels, sizes, strict=True):
            _draw_head_panel(axes, selection.only(N=n, L=num_classes), clock, entries)
            axes.set_title(size_text(n, num_classes))
        panels[0].set_yticks(range(len(entries)), entries)
        for entry, name in zip(entries, panels[0].get_yticklabels(), strict=True):
            name.set_color(_colour(entry))
        figure.supxlabel(
            f"milliseconds, {CLOCKS[clock]} (figures: and peak extra memory); dotted: the goal,"
            f" {heads.GOAL:g} of the fastest peer's time",
            fontsize=12,
        )
    return figure


def _draw_head_panel(axes: Axes, selection: Selection, clock: Clock, entries: Sequence[str]) -> None:
    # Dots, not bars: on a logarithmic axis the length of a bar means nothing.
    for place, entry in enumerate(entries):
        for row in selection.only(entry).measurements:
            time = row.time(clock)
            time, on_wall = (row.wall_ms, " (wall)") if time is None else (time, "")
            if time is None:
                continue
            colour = _colour(entry)
            memory = "" if row.peak_mib is None else f", {row.peak_mib:,.0f} MiB"
            axes.plot([time], [place], "o", color=colour, markersize=9, markerfacecolor="white" if on_wall else colour)
            axes.annotate(
                f"{milliseconds(time)} ms{on_wall}{memory}", (1.03, place), xycoords=("axes fraction", "data"),
                va="center", fontsize=11, color=colour, annotation_clip=False,
            )  # fmt: skip
    axes.set(xscale="log", ylim=(-0.6, len(entries) - 0.4))
    fastest = selection.only(*heads.PEERS).best(clock)
    if fastest is not None:
        axes.axvline(heads.GOAL * fastest, color=_OURS, linestyle=":", linewidth=1.6, zorder=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)


def _colour(entry: str) -> str:
    return _OURS if entry in (heads.OURS, heads.OURS_SPARSE) else _DARK


PLOTS: dict[Suite, tuple[str, Callable[[Selection], Figure | None]]] = {
    "loss": ("Time of the noised loss and of its peers against the size of the batch", loss_plot),
    "head": ("Time of a linear layer with its loss, ours beside the peers", head_plot),
}
"""By suite: a description for readers who cannot see the plot, and the function that draws it."""


def save(figure: Figure, path: Path) -> None:
    with mpl.rc_context(_STYLE):
        save_figure(figure, path)
