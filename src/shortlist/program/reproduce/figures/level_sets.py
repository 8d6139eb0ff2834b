"""Level sets of ten losses for three classes: the paper's first figure (K = 2) and its twin of the appendix (K = 1)."""

from itertools import chain
from pathlib import Path

from matplotlib.figure import Figure

from shortlist.program.reproduce import Scale
from shortlist.program.reproduce.figures.effort import Effort
from shortlist.program.reproduce.figures.landscapes import LANDSCAPES
from shortlist.program.reproduce.figures.numbers import Columns
from shortlist.program.reproduce.figures.panels import (
    NOTHING,
    draw_map,
    loss_scale,
    mesh_of,
    score_columns,
    two_rows_of_five,
)
from shortlist.program.reproduce.figures.style import QUIET, headline, publish
from shortlist.program.reproduce.figures.triangle import rescaled, triangle_of

_EFFORTS: dict[Scale, Effort] = {
    "smoke": Effort(steps=12, repetitions=4),
    "short": Effort(steps=60, repetitions=20),
    "paper": Effort(steps=120, repetitions=100),
}


def draw_k2(folder: Path, scale: Scale) -> list[Path]:
    """With two suggestions for three classes: only the lowest score is an error."""
    return _draw(2, folder, scale)


def draw_k1(folder: Path, scale: Scale) -> list[Path]:
    """With one suggestion: the usual classification."""
    return _draw(1, folder, scale)


def _draw(k: int, folder: Path, scale: Scale) -> list[Path]:
    return publish(folder, f"level-sets-k{k}", numbers(k, _EFFORTS[scale]), lambda columns: _paint(k, columns))


def numbers(k: int, effort: Effort) -> Columns:
    """The points, and each loss there, rescaled to [0, 1]."""
    triangle = triangle_of(effort.steps)
    maps = {each.column: rescaled(each.losses(triangle, k, effort.repetitions)) for each in LANDSCAPES}
    return score_columns(triangle) | maps


def _paint(k: int, columns: Columns) -> Figure:
    figure, rows = two_rows_of_five(title_height=1.95, space_between=1.0)
    mesh = mesh_of(columns)
    for axes, each in zip(chain(*rows), LANDSCAPES, strict=True):
        draw_map(axes, mesh, columns[each.column])
        axes.set_title(each.name.replace("K", str(k)), fontweight="bold", pad=28 if each.setting else 10)
        axes.text(0.5, 1.02, each.setting, transform=axes.transAxes, ha="center", color=QUIET)
    loss_scale(figure)
    headline(
        figure,
        f"Ten losses of three scores, K = {k}",
        "Each point of a triangle is a vector of scores that sum to 2. At the orange corner all of it goes to the true"
        f" label.\nEach loss is rescaled to [0, 1]; white: below {NOTHING}.",
    )
    return figure
