"""What the number B of draws does to the noised loss: less spread between one repetition and the next."""

from pathlib import Path

from matplotlib.figure import Figure

from shortlist.program.reproduce import Scale
from shortlist.program.reproduce.figures.effort import Effort
from shortlist.program.reproduce.figures.landscapes import BALANCED
from shortlist.program.reproduce.figures.numbers import Columns
from shortlist.program.reproduce.figures.panels import (
    draw_map,
    loss_scale,
    mesh_of,
    name_row,
    score_columns,
    two_rows_of_five,
)
from shortlist.program.reproduce.figures.repetitions import repeated
from shortlist.program.reproduce.figures.style import ACCENT, headline, publish
from shortlist.program.reproduce.figures.triangle import rescaled, triangle_of

EPSILON = 1.0
KS = (1, 2)
DRAWS = (1, 5, 10, 50, 100)

_SHOWN = 6
"""Repetitions whose level lines are drawn one by one."""
_LEVEL = 0.5
_EFFORTS: dict[Scale, Effort] = {
    "smoke": Effort(steps=12, repetitions=4),
    "short": Effort(steps=36, repetitions=20),
    "paper": Effort(steps=96, repetitions=100),
}


def draw(folder: Path, scale: Scale) -> list[Path]:
    """The paper's panels; over them, what a single repetition makes of the middle level line."""
    return publish(folder, "impact-of-b", numbers(_EFFORTS[scale]), _paint)


def numbers(effort: Effort) -> Columns:
    """For each K and B: the mean over the repetitions, its standard deviation, and some single ones, on one scale."""
    triangle = triangle_of(effort.steps)
    columns = score_columns(triangle)
    for k in KS:
        for n_samples in DRAWS:
            losses_RP = repeated(
                BALANCED, triangle, k, epsilon=EPSILON, n_samples=n_samples, repetitions=effort.repetitions
            )
            mean_P = losses_RP.double().mean(0)
            losses_RP = rescaled(losses_RP, like=mean_P)
            panel = _panel(k, n_samples)
            columns[panel] = rescaled(mean_P)
            columns[f"{panel} spread"] = losses_RP.std(0)
            independent = losses_RP[::2][:_SHOWN]  # odd ones are mirror images
            columns |= {f"{panel} repetition {place}": losses_P for place, losses_P in enumerate(independent)}
    return columns


def _panel(k: int, n_samples: int) -> str:
    return f"K={k} B={n_samples}"


def _paint(columns: Columns) -> Figure:
    figure, rows = two_rows_of_five(title_height=1.95, space_between=0.95)
    mesh = mesh_of(columns)
    for k, row in zip(KS, rows, strict=True):
        for n_samples, axes in zip(DRAWS, row, strict=True):
            panel = _panel(k, n_samples)
            draw_map(axes, mesh, columns[panel])
            for name, losses_P in columns.items():
                if name.startswith(f"{panel} repetition"):
                    axes.tricontour(mesh, losses_P.numpy(), levels=[_LEVEL], colors=ACCENT, linewidths=1.2)
            axes.set_title(f"B = {n_samples}", fontweight="bold", pad=8)
            axes.text(0.5, -0.11, f"± {columns[f'{panel} spread'].mean():.2f}", ha="center", color=ACCENT)
        name_row(row[0], f"K = {k}")
    loss_scale(figure)
    headline(
        figure,
        f"More draws, less spread: the noised loss, ε = {EPSILON:g}",
        "Blue: the mean over repetitions, rescaled to [0, 1]. Orange lines: where single repetitions put its level ½.\n"
        "±: standard deviation between repetitions, mean over the triangle.",
    )
    return figure
