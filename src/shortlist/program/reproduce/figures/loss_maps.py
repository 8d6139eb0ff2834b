"""Figures of losses over the triangle: level sets of ten losses, and the impact of B and epsilon on the noised loss.

Shape suffixes: as in ``triangle.py``.
"""

import math
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.tri import Triangulation
from torch import Tensor

from shortlist.program.documents import INK
from shortlist.program.reproduce import Scale
from shortlist.program.reproduce.figures.style import ACCENT, LOSS_COLOURS, QUIET, Columns, headline, publish
from shortlist.program.reproduce.figures.triangle import (
    BALANCED,
    CORNERS,
    LABEL,
    LANDSCAPES,
    Triangle,
    places,
    repeated,
    rescaled,
    triangle_of,
)

KS = (1, 2)
DRAWS = (1, 5, 10, 50, 100)
"""The values of B, at epsilon 1."""
EPSILONS = (0.01, 0.1, 1.0, 10.0, 100.0)
"""At 50 draws."""

_EPSILON = 1.0
_N_SAMPLES = 50
_SHOWN = 6
"""Repetitions whose level lines are drawn one by one."""
_LEVEL = 0.5
_ZERO = 0.01
"""Below this share of its range a loss counts as zero and stays white."""

# Hinges have plateaus at 1/2 and 1. They must lie inside a band, where rounding cannot split them.
_LEVELS = [tenths / 10 + 0.05 for tenths in range(10)]
_BOUNDS = [0.0, _ZERO, *_LEVELS, 1.0001]
_BANDS = ListedColormap(["#ffffff", *(to_hex(LOSS_COLOURS(tenths / 10)) for tenths in range(11))])
_SHADES = BoundaryNorm(_BOUNDS, _BANDS.N)
_SCORES = ("s_1", "s_2", "s_y")
_WIDTH, _HEIGHT = 16.0, 8.6


@dataclass(frozen=True)
class Effort:
    """How fine and how steady a map is."""

    steps: int
    """Of the grid along a side; a multiple of 6 puts the centre and all kinks of the losses on the grid."""
    repetitions: int
    """To average a noised loss over."""


_SMOKE = Effort(steps=12, repetitions=4)
_LEVEL_SETS: dict[Scale, Effort] = {
    "smoke": _SMOKE,
    "short": Effort(steps=60, repetitions=20),
    "paper": Effort(steps=120, repetitions=100),
}
_IMPACT_OF_B: dict[Scale, Effort] = {
    "smoke": _SMOKE,
    "short": Effort(steps=36, repetitions=20),
    "paper": Effort(steps=96, repetitions=100),
}
_IMPACT_OF_EPSILON: dict[Scale, Effort] = {
    "smoke": _SMOKE,
    "short": Effort(steps=48, repetitions=20),
    "paper": Effort(steps=96, repetitions=100),
}


def draw_level_sets(k: int, folder: Path, scale: Scale) -> list[Path]:
    """The paper's first figure (K = 2) and its counterpart in the appendix (K = 1)."""
    columns = level_sets(k, _LEVEL_SETS[scale])
    return publish(folder, f"level-sets-k{k}", columns, lambda columns: _paint_level_sets(k, columns))


def level_sets(k: int, effort: Effort) -> Columns:
    """The points, and each loss there, rescaled to [0, 1]."""
    triangle = triangle_of(effort.steps)
    maps = {loss.column: rescaled(loss.losses(triangle, k, effort.repetitions)) for loss in LANDSCAPES}
    return score_columns(triangle) | maps


def _paint_level_sets(k: int, columns: Columns) -> Figure:
    figure, rows = _two_rows_of_five(title_height=1.95, space_between=1.0)
    mesh = mesh_of(columns)
    for axes, loss in zip(chain(*rows), LANDSCAPES, strict=True):
        _draw_map(axes, mesh, columns[loss.column])
        axes.set_title(loss.name.replace("K", str(k)), fontweight="bold", pad=28 if loss.setting else 10)
        axes.text(0.5, 1.02, loss.setting, transform=axes.transAxes, ha="center", color=QUIET)
    _add_scale(figure)
    headline(
        figure,
        f"Ten losses of three scores, K = {k}",
        "Each point of a triangle is a vector of scores that sum to 2. At the orange corner all of it goes to the true"
        f" label.\nEach loss is rescaled to [0, 1]; white: below {_ZERO}.",
    )
    return figure


def draw_impact_of_b(folder: Path, scale: Scale) -> list[Path]:
    """The paper's panels, overlaid with the middle level line of single repetitions."""
    return publish(folder, "impact-of-b", impact_of_b(_IMPACT_OF_B[scale]), _paint_impact_of_b)


def impact_of_b(effort: Effort) -> Columns:
    """For each K and B the mean over the repetitions, its standard deviation, and some repetitions, on one scale."""
    triangle = triangle_of(effort.steps)
    columns = score_columns(triangle)
    for k in KS:
        for n_samples in DRAWS:
            losses_RP = repeated(
                BALANCED, triangle, k, epsilon=_EPSILON, n_samples=n_samples, repetitions=effort.repetitions
            )
            mean_P = losses_RP.double().mean(0)
            losses_RP = rescaled(losses_RP, like=mean_P)
            panel = f"K={k} B={n_samples}"
            columns[panel] = rescaled(mean_P)
            columns[f"{panel} spread"] = losses_RP.std(0)
            independent = losses_RP[::2][:_SHOWN]  # odd ones are mirror images
            columns |= {f"{panel} repetition {place}": losses_P for place, losses_P in enumerate(independent)}
    return columns


def _paint_impact_of_b(columns: Columns) -> Figure:
    figure, rows = _two_rows_of_five(title_height=1.95, space_between=0.95)
    mesh = mesh_of(columns)
    for k, row in zip(KS, rows, strict=True):
        for n_samples, axes in zip(DRAWS, row, strict=True):
            panel = f"K={k} B={n_samples}"
            _draw_map(axes, mesh, columns[panel])
            for name, losses_P in columns.items():
                if name.startswith(f"{panel} repetition"):
                    axes.tricontour(mesh, losses_P.numpy(), levels=[_LEVEL], colors=ACCENT, linewidths=1.2)
            axes.set_title(f"B = {n_samples}", fontweight="bold", pad=8)
            axes.text(0.5, -0.11, f"± {columns[f'{panel} spread'].mean():.2f}", ha="center", color=ACCENT)
        _name_row(row[0], f"K = {k}")
    _add_scale(figure)
    headline(
        figure,
        f"More draws, less spread: the noised loss, ε = {_EPSILON:g}",
        "Blue: the mean over repetitions, rescaled to [0, 1]. Orange lines: where single repetitions put its level ½.\n"
        "±: standard deviation between repetitions, mean over the triangle.",
    )
    return figure


def draw_impact_of_epsilon(folder: Path, scale: Scale) -> list[Path]:
    """The paper's panels: from the hard hinge with its kinks to straight levels."""
    return publish(folder, "impact-of-epsilon", impact_of_epsilon(_IMPACT_OF_EPSILON[scale]), _paint_impact_of_epsilon)


def impact_of_epsilon(effort: Effort) -> Columns:
    """The points, and for each K and epsilon the mean loss there, each rescaled to [0, 1]."""
    triangle = triangle_of(effort.steps)
    columns = score_columns(triangle)
    for k in KS:
        for epsilon in EPSILONS:
            losses_RP = repeated(
                BALANCED, triangle, k, epsilon=epsilon, n_samples=_N_SAMPLES, repetitions=effort.repetitions
            )
            columns[f"K={k} epsilon={epsilon:g}"] = rescaled(losses_RP.double().mean(0))
    return columns


def _paint_impact_of_epsilon(columns: Columns) -> Figure:
    figure, rows = _two_rows_of_five(title_height=1.95, space_between=0.95)
    mesh = mesh_of(columns)
    for k, row in zip(KS, rows, strict=True):
        for epsilon, axes in zip(EPSILONS, row, strict=True):
            _draw_map(axes, mesh, columns[f"K={k} epsilon={epsilon:g}"])
            axes.set_title(f"ε = {epsilon:g}", fontweight="bold", pad=8)
        _name_row(row[0], f"K = {k}")
    _add_scale(figure)
    headline(
        figure,
        f"More noise, rounder levels: the noised loss, B = {_N_SAMPLES}",
        f"Mean over repetitions, each panel rescaled to [0, 1]; white: below {_ZERO}.\n"
        "With K = 2 of 3 the rival is the lowest perturbed score: much noise pushes it so far down"
        " that the loss is 0.",
    )
    return figure


def score_columns(triangle: Triangle) -> dict[str, Tensor]:
    """The points of the grid, for the file of numbers."""
    return dict(zip(_SCORES, triangle.scores_PL.unbind(1), strict=True))


def mesh_of(columns: Columns) -> Triangulation:
    """The points of a file of numbers in the plane, and which of them are neighbours."""
    scores_PL = torch.stack([columns[name] for name in _SCORES], 1)
    steps = (math.isqrt(8 * len(scores_PL) + 1) - 3) // 2  # P = (steps + 1) (steps + 2) / 2
    x, y = places(scores_PL).unbind(1)
    return Triangulation(x.numpy(), y.numpy(), triangle_of(steps).cells_T3.numpy())


def _two_rows_of_five(title_height: float, space_between: float) -> tuple[Figure, list[list[Axes]]]:
    """A wide figure of panels, laid out as in the paper; lengths in inches."""
    figure = Figure(figsize=(_WIDTH, _HEIGHT))
    left, right, bottom = 0.8, 14.5, 0.35
    height = (_HEIGHT - title_height - bottom - space_between) / 2
    grid = figure.subplots(
        2,
        5,
        gridspec_kw={
            "left": left / _WIDTH,
            "right": right / _WIDTH,
            "bottom": bottom / _HEIGHT,
            "top": 1 - title_height / _HEIGHT,
            "wspace": 0.04,
            "hspace": space_between / height,
        },
    )
    for axes in grid.flat:
        axes.set_axis_off()
        axes.set_aspect("equal")
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, CORNERS[LABEL, 1].item() + 0.04))
    return figure, [list(row) for row in grid]


def _draw_map(axes: Axes, mesh: Triangulation, losses_P: Tensor) -> None:
    """Draw bands of equal loss in [0, 1], and mark the true label's corner."""
    axes.tricontourf(mesh, losses_P.numpy(), levels=_BOUNDS, cmap=_BANDS, norm=_SHADES)
    if losses_P.max() > _ZERO:
        axes.tricontour(mesh, losses_P.numpy(), levels=_LEVELS, colors="white", linewidths=0.7)
    else:
        axes.text(0.5, 0.27, "0 everywhere", ha="center", va="center", color=QUIET)
    axes.fill(*CORNERS.T.numpy(), fill=False, edgecolor=INK, linewidth=1.4, joinstyle="round")
    axes.plot(*CORNERS[LABEL].tolist(), "o", color=ACCENT, markersize=9, clip_on=False)


def _name_row(first: Axes, name: str) -> None:
    """Write a row's name left of its first panel."""
    first.text(-0.14, 0.4, name, ha="center", va="center", rotation=90, fontweight="bold")


def _add_scale(figure: Figure) -> None:
    """Show what the colours mean, at the right edge."""
    axes = figure.add_axes((0.93, 0.16, 0.014, 0.5))
    bar = figure.colorbar(ScalarMappable(_SHADES, _BANDS), cax=axes, spacing="proportional")
    bar.set_ticks([0, 0.5, 1], labels=["0", "½", "1"])
    bar.outline.set_visible(False)
    axes.tick_params(which="both", length=0)
    axes.set_title("loss", loc="left", pad=12)
