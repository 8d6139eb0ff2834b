"""The scores of three classes that sum to two, as a grid over a triangle with the true label at the top.

Shape suffixes: P points of the grid, L the three classes, T small triangles between the points.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

NUM_CLASSES = 3
LABEL = 2
"""The true class, whose corner is at the top; class 0 has the left corner, class 1 the right one."""
MIRROR = (1, 0, 2)
"""The classes as seen in a mirror: the wrong ones change places."""
TOTAL = 2.0
"""The sum of the scores: with 1 no score could lead the others by more than the margin of the hinges."""
CORNERS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]])
"""Of an equilateral triangle on the paper, class by class."""


class Triangle(NamedTuple):
    """A grid of scores, from the bottom row (``s_y = 0``) to the top corner (``s_y = 2``), each row left to right."""

    scores_PL: Tensor
    target_P: Tensor
    cells_T3: Tensor
    """The points at the corners of each small triangle."""


def triangle_of(steps: int) -> Triangle:
    """A grid with so many steps along each side.

    Example:
        >>> triangle_of(steps=1).scores_PL
        tensor([[2., 0., 0.],
                [0., 2., 0.],
                [0., 0., 2.]])
    """
    points: list[tuple[int, int, int]] = []
    cells: list[tuple[int, int, int]] = []
    for height in range(steps + 1):
        first, width = len(points), steps + 1 - height
        points += [(width - 1 - place, place, height) for place in range(width)]
        cells += [(left, left + 1, left + width) for left in range(first, first + width - 1)]
        cells += [(left, left + width, left + width - 1) for left in range(first + 1, first + width - 1)]
    # Counted in steps first: classes with equal scores tie exactly.
    scores_PL = torch.tensor(points) * (TOTAL / steps)
    return Triangle(scores_PL, torch.full((len(points),), LABEL), torch.tensor(cells))


def places(scores_PL: Tensor) -> Tensor:
    """``(P, 2)`` where the scores lie on the paper: the means of the corners, weighted by the scores."""
    return scores_PL / TOTAL @ CORNERS.to(scores_PL.dtype)


def rescaled(losses: Tensor, like: Tensor | None = None) -> Tensor:
    """Losses moved and scaled so that ``like``, by default they themselves, fill [0, 1]; a constant becomes 0.

    Example:
        >>> rescaled(torch.tensor([2.0, 4.0, 3.0]))
        tensor([0.0000, 1.0000, 0.5000], dtype=torch.float64)
    """
    low, high = (losses if like is None else like).double().aminmax()
    return (losses.double() - low) / torch.where(high > low, high - low, 1)
