"""The paper's figures that need no training. Each function writes SVG, PNG and the plotted numbers as CSV.

The modules are imported when they draw: listing the names must not load torch and matplotlib.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from shortlist.program.reproduce import Scale


def _level_sets(k: int, folder: Path, scale: Scale) -> list[Path]:
    from shortlist.program.reproduce.figures.loss_maps import draw_level_sets

    return draw_level_sets(k, folder, scale)


def _impact_of_b(folder: Path, scale: Scale) -> list[Path]:
    from shortlist.program.reproduce.figures.loss_maps import draw_impact_of_b

    return draw_impact_of_b(folder, scale)


def _impact_of_epsilon(folder: Path, scale: Scale) -> list[Path]:
    from shortlist.program.reproduce.figures.loss_maps import draw_impact_of_epsilon

    return draw_impact_of_epsilon(folder, scale)


def _gradient_sparsity(folder: Path, scale: Scale) -> list[Path]:
    from shortlist.program.reproduce.figures.gradient_sparsity import draw

    return draw(folder, scale)


FIGURES: dict[str, Callable[[Path, Scale], list[Path]]] = {
    "level-sets-k2": partial(_level_sets, 2),
    "level-sets-k1": partial(_level_sets, 1),
    "impact-of-b": _impact_of_b,
    "impact-of-epsilon": _impact_of_epsilon,
    "gradient-sparsity-given-scores": _gradient_sparsity,
}
"""Draw functions by name; the files they write into the folder have that name too."""
