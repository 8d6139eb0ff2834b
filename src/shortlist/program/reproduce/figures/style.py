"""One look for all figures: large enough for half a slide, one hue from light to dark, words at the thing they name."""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from shortlist.program.figure_files import LOOK, save_figure
from shortlist.program.reproduce.figures.numbers import Columns, read_columns, write_columns

QUIET = "#5d6b77"
ACCENT = "#d0621b"
"""For the one thing to look at: an orange that no colour blindness confuses with the blues."""
SERIES = ("#5a9bdc", "#0b62c4", "#062f60")
"""Curves in order, told apart by lightness."""
LOSS_COLOURS = LinearSegmentedColormap.from_list("loss", ["#e4f0fb", "#7fb2e5", "#0b62c4", "#04203f"])
"""From little to much; lightness falls steadily, so it also reads in grey. Nothing at all is white."""

_LOOK = LOOK | {"font.size": 15, "axes.titlesize": 15}


def publish(folder: Path, name: str, columns: Columns, paint: Callable[[Columns], Figure]) -> list[Path]:
    """Write the numbers, and as SVG and PNG the figure that is painted from the written numbers."""
    numbers = folder / f"{name}.csv"
    write_columns(numbers, columns)
    return [*save(folder, name, lambda: paint(read_columns(numbers))), numbers]


def save(folder: Path, name: str, paint: Callable[[], Figure]) -> list[Path]:
    """Write a figure as SVG and PNG."""
    with mpl.rc_context(_LOOK):
        return save_figure(paint(), folder / name)


def headline(figure: Figure, title: str, explanation: str) -> None:
    """What there is to see, and below it how to read it."""
    width, height = figure.get_size_inches()
    margin = 0.25
    figure.text(margin / width, 1 - 0.2 / height, title, fontsize=20, fontweight="bold", va="top")
    figure.text(margin / width, 1 - 0.64 / height, explanation, color=QUIET, va="top", linespacing=1.35)
