"""Maps of losses over the triangle, side by side."""

import math

import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.tri import Triangulation
from torch import Tensor

from shortlist.program.figure_files import INK
from shortlist.program.reproduce.figures.numbers import Columns
from shortlist.program.reproduce.figures.style import ACCENT, LOSS_COLOURS, QUIET
from shortlist.program.reproduce.figures.triangle import CORNERS, LABEL, Triangle, places, triangle_of

NOTHING = 0.01
"""Below this share of its range a loss counts as nothing, and stays white."""

# Hinges have plateaus at 1/2 and 1: these must lie inside a band, where rounding cannot tear them apart.
_LEVELS = [tenths / 10 + 0.05 for tenths in range(10)]
_BOUNDS = [0.0, NOTHING, *_LEVELS, 1.0001]
_BANDS = ListedColormap(["#ffffff", *(to_hex(LOSS_COLOURS(tenths / 10)) for tenths in range(11))])
_SHADES = BoundaryNorm(_BOUNDS, _BANDS.N)
_SCORES = ("s_1", "s_2", "s_y")
_WIDTH, _HEIGHT = 16.0, 8.6


def score_columns(triangle: Triangle) -> dict[str, Tensor]:
    """The points of the grid, for the file of numbers."""
    return dict(zip(_SCORES, triangle.scores_PL.unbind(1), strict=True))


def mesh_of(columns: Columns) -> Triangulation:
    """Where the numbers of a file lie on the paper, and which points are neighbours."""
    scores_PL = torch.stack([columns[name] for name in _SCORES], 1)
    steps = (math.isqrt(8 * len(scores_PL) + 1) - 3) // 2  # P = (steps + 1) (steps + 2) / 2
    x, y = places(scores_PL).unbind(1)
    return Triangulation(x.numpy(), y.numpy(), triangle_of(steps).cells_T3.numpy())


def two_rows_of_five(title_height: float, space_between: float) -> tuple[Figure, list[list[Axes]]]:
    """A wide slide of panels, laid out as in the paper; lengths in inches."""
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


def draw_map(axes: Axes, mesh: Triangulation, losses_P: Tensor) -> None:
    """Bands of equal loss in [0, 1], with the true label's corner marked."""
    axes.tricontourf(mesh, losses_P.numpy(), levels=_BOUNDS, cmap=_BANDS, norm=_SHADES)
    if losses_P.max() > NOTHING:
        axes.tricontour(mesh, losses_P.numpy(), levels=_LEVELS, colors="white", linewidths=0.7)
    else:
        axes.text(0.5, 0.27, "0 everywhere", ha="center", va="center", color=QUIET)
    axes.fill(*CORNERS.T.numpy(), fill=False, edgecolor=INK, linewidth=1.4, joinstyle="round")
    axes.plot(*CORNERS[LABEL].tolist(), "o", color=ACCENT, markersize=9, clip_on=False)


def name_row(first: Axes, name: str) -> None:
    """Left of the first panel of a row."""
    first.text(-0.14, 0.4, name, ha="center", va="center", rotation=90, fontweight="bold")


def loss_scale(figure: Figure) -> None:
    """What the colours mean, at the right edge."""
    axes = figure.add_axes((0.93, 0.16, 0.014, 0.5))
    bar = figure.colorbar(ScalarMappable(_SHADES, _BANDS), cax=axes, spacing="proportional")
    bar.set_ticks([0, 0.5, 1], labels=["0", "½", "1"])
    bar.outline.set_visible(False)
    axes.tick_params(which="both", length=0)
    axes.set_title("loss", loc="left", pad=12)
