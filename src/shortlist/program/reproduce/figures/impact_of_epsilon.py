"""What the scale of the noise does to the noised loss: from the hard hinge with its kinks to straight levels."""

from pathlib import Path

from matplotlib.figure import Figure

from shortlist.program.reproduce import Scale
from shortlist.program.reproduce.figures.effort import Effort
from shortlist.program.reproduce.figures.landscapes import BALANCED
from shortlist.program.reproduce.figures.numbers import Columns
from shortlist.program.reproduce.figures.panels import (
    NOTHING,
    draw_map,
    loss_scale,
    mesh_of,
    name_row,
    score_columns,
    two_rows_of_five,
)
from shortlist.program.reproduce.figures.repetitions import repeated
from shortlist.program.reproduce.figures.style import headline, publish
from shortlist.program.reproduce.figures.triangle import rescaled, triangle_of

KS = (1, 2)
EPSILONS = (0.01, 0.1, 1.0, 10.0, 100.0)
N_SAMPLES = 50

_EFFORTS: dict[Scale, Effort] = {
    "smoke": Effort(steps=12, repetitions=4),
    "short": Effort(steps=48, repetitions=20),
    "paper": Effort(steps=96, repetitions=100),
}


def draw(folder: Path, scale: Scale) -> list[Path]:
    """The paper's panels, each rescaled on its own."""
    return publish(folder, "impact-of-epsilon", numbers(_EFFORTS[scale]), _paint)


def numbers(effort: Effort) -> Columns:
    """The points, and for each K and epsilon the mean loss there, rescaled to [0, 1]."""
    triangle = triangle_of(effort.steps)
    columns = score_columns(triangle)
    for k in KS:
        for epsilon in EPSILONS:
            losses_RP = repeated(
                BALANCED, triangle, k, epsilon=epsilon, n_samples=N_SAMPLES, repetitions=effort.repetitions
            )
            columns[_panel(k, epsilon)] = rescaled(losses_RP.double().mean(0))
    return columns


def _panel(k: int, epsilon: float) -> str:
    return f"K={k} epsilon={epsilon:g}"


def _paint(columns: Columns) -> Figure:
    figure, rows = two_rows_of_five(title_height=1.95, space_between=0.95)
    mesh = mesh_of(columns)
    for k, row in zip(KS, rows, strict=True):
        for epsilon, axes in zip(EPSILONS, row, strict=True):
            draw_map(axes, mesh, columns[_panel(k, epsilon)])
            axes.set_title(f"ε = {epsilon:g}", fontweight="bold", pad=8)
        name_row(row[0], f"K = {k}")
    loss_scale(figure)
    headline(
        figure,
        f"More noise, rounder levels: the noised loss, B = {N_SAMPLES}",
        f"Mean over repetitions, each panel rescaled to [0, 1]; white: below {NOTHING}.\n"
        "With K = 2 of 3 the rival is the lowest perturbed score: much noise pushes it so far down"
        " that the loss is 0.",
    )
    return figure
