"""The paper's figures that need no training: each a function that writes SVG, PNG and the plotted numbers as CSV.

Their modules are imported when they draw: listing the names must not wait for torch and matplotlib.
"""

from collections.abc import Callable
from pathlib import Path

from shortlist.program.reproduce import Scale


def _level_sets_k2(folder: Path, scale: Scale) -> list[Path]:
    from shortlist.program.reproduce.figures.level_sets import draw_k2

    return draw_k2(folder, scale)


def _level_sets_k1(folder: Path, scale: Scale) -> list[Path]:
    from shortlist.program.reproduce.figures.level_sets import draw_k1

    return draw_k1(folder, scale)


def _impact_of_b(folder: Path, scale: Scale) -> list[Path]:
    from shortlist.program.reproduce.figures.impact_of_b import draw

    return draw(folder, scale)


def _impact_of_epsilon(folder: Path, scale: Scale) -> list[Path]:
    from shortlist.program.reproduce.figures.impact_of_epsilon import draw

    return draw(folder, scale)


def _gradient_sparsity(folder: Path, scale: Scale) -> list[Path]:
    from shortlist.program.reproduce.figures.gradient_sparsity import draw

    return draw(folder, scale)


FIGURES: dict[str, Callable[[Path, Scale], list[Path]]] = {
    "level-sets-k2": _level_sets_k2,
    "level-sets-k1": _level_sets_k1,
    "impact-of-b": _impact_of_b,
    "impact-of-epsilon": _impact_of_epsilon,
    "gradient-sparsity-given-scores": _gradient_sparsity,
}
"""How each is drawn into a folder, by name; the files bear the name too."""
