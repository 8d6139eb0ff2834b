"""The paper's figures that need no training: each a function that writes SVG, PNG and the plotted numbers as CSV."""

from collections.abc import Callable
from pathlib import Path

from shortlist.reproduce import Scale
from shortlist.reproduce.figures import gradient_sparsity, impact_of_b, impact_of_epsilon, level_sets

FIGURES: dict[str, Callable[[Path, Scale], list[Path]]] = {
    "level-sets-k2": level_sets.draw_k2,
    "level-sets-k1": level_sets.draw_k1,
    "impact-of-b": impact_of_b.draw,
    "impact-of-epsilon": impact_of_epsilon.draw,
    "gradient-sparsity-given-scores": gradient_sparsity.draw,
}
"""How each is drawn into a folder, by name; the files bear the name too."""
