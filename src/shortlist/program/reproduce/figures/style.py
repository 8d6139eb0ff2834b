"""The common look of the figures, and their files: SVG, PNG, and the plotted numbers as CSV."""

import csv
import io
from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

from shortlist.program.atomic_files import write_file
from shortlist.program.documents import LOOK, save_figure

QUIET = "#5d6b77"
ACCENT = "#d0621b"
"""Draws the eye: an orange that stays distinct from the blues with any colour blindness."""
SERIES = ("#5a9bdc", "#0b62c4", "#062f60")
"""Colours of ordered curves, from light to dark."""
LOSS_COLOURS = LinearSegmentedColormap.from_list("loss", ["#e4f0fb", "#7fb2e5", "#0b62c4", "#04203f"])
"""From low to high loss. Lightness falls steadily, so the map also reads in grey; zero is white."""

_LINE_HEIGHT = 0.06
"""Of the name of a curve, as a share of the panel."""
_LOOK = LOOK | {"font.size": 15, "axes.titlesize": 15}

Columns = Mapping[str, Tensor]
"""One-dimensional tensors of equal length, by name."""


def publish(folder: Path, name: str, columns: Columns, paint: Callable[[Columns], Figure]) -> list[Path]:
    """Write the numbers, then paint the figure from the written file: the file can always rebuild the figure."""
    numbers = folder / f"{name}.csv"
    write_columns(numbers, columns)
    return [*save(folder, name, lambda: paint(read_columns(numbers))), numbers]


def save(folder: Path, name: str, paint: Callable[[], Figure]) -> list[Path]:
    """Write a figure as SVG and PNG."""
    with mpl.rc_context(_LOOK):
        return save_figure(paint(), folder / name)


def headline(figure: Figure, title: str, explanation: str) -> None:
    """Put a title at the top of the figure and an explanation below it."""
    width, height = figure.get_size_inches()
    margin = 0.25
    figure.text(margin / width, 1 - 0.2 / height, title, fontsize=20, fontweight="bold", va="top")
    figure.text(margin / width, 1 - 0.64 / height, explanation, color=QUIET, va="top", linespacing=1.35)


def finish(axes: Axes, ends: Mapping[str, tuple[float, str]]) -> None:
    """Add a light grid, and the name of each curve beside its end, without overlaps."""
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    bottom, top = axes.get_ylim()
    height = -1.0
    for place, (name, (value, colour)) in enumerate(sorted(ends.items(), key=lambda end: end[1][0]), 1):
        room_for_the_others = 1 - _LINE_HEIGHT * (len(ends) - place)
        height = max(min((value - bottom) / (top - bottom), room_for_the_others), height + _LINE_HEIGHT)
        axes.text(1.02, height, name, transform=axes.transAxes, color=colour, va="center", fontweight="bold")


def write_columns(path: Path, columns: Columns) -> None:
    """Write each number with six significant digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    writer.writerows([f"{value:.6g}" for value in row] for row in rows)
    write_file(path, text.getvalue().encode())


def read_columns(path: Path) -> dict[str, Tensor]:
    with path.open(newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    values = torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)
    return dict(zip(names, values.unbind(1), strict=True))
