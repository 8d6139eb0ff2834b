"""Losses of three scores that sum to two: a grid over a triangle, with the true label's corner at the top.

Shape suffixes: P points of the grid, L the three classes, T small triangles between the points, R repetitions of a
noised loss, H half of them, B draws.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from shortlist import functional

NUM_CLASSES = 3
LABEL = 2
"""The true class, at the top corner. Class 0 is at the left corner, class 1 at the right."""
MIRROR = (1, 0, 2)
"""The classes with the two wrong ones exchanged."""
TOTAL = 2.0
"""The sum of the scores. With a sum of 1 no score could exceed the others by more than the margin of the hinges."""
CORNERS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]])
"""Of an equilateral triangle in the plane, by class."""

_SEED = 2022  # the same for all noised panels, so that only their settings differ


class Triangle(NamedTuple):
    """A grid of scores, in rows from the bottom (``s_y = 0``) to the top corner (``s_y = 2``), left to right."""

    scores_PL: Tensor
    target_P: Tensor
    cells_T3: Tensor
    """The points at the corners of each small triangle."""


def triangle_of(steps: int) -> Triangle:
    """A grid with this many steps along each side.

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
    # Whole numbers first: equal scores then tie exactly.
    scores_PL = torch.tensor(points) * (TOTAL / steps)
    return Triangle(scores_PL, torch.full((len(points),), LABEL), torch.tensor(cells))


def places(scores_PL: Tensor) -> Tensor:
    """``(P, 2)`` positions in the plane: means of the corners, weighted by the scores."""
    return scores_PL / TOTAL @ CORNERS.to(scores_PL.dtype)


def rescaled(losses: Tensor, like: Tensor | None = None) -> Tensor:
    """Losses, shifted and scaled so that ``like`` (by default the losses) fills [0, 1]; a constant becomes 0.

    Example:
        >>> rescaled(torch.tensor([2.0, 4.0, 3.0]))
        tensor([0.0000, 1.0000, 0.5000], dtype=torch.float64)
    """
    low, high = (losses if like is None else like).double().aminmax()
    return (losses.double() - low) / torch.where(high > low, high - low, 1)


class NoisedLoss(Protocol):
    """A loss of scores, labels and K that takes its noise as an argument."""

    def __call__(self, scores: Tensor, target: Tensor, k: int, *, epsilon: float, noise: Tensor) -> Tensor: ...


def repeated(
    loss: NoisedLoss, triangle: Triangle, k: int, *, epsilon: float, n_samples: int, repetitions: int
) -> Tensor:
    """``(R, P)`` losses of each point in each repetition.

    All points of a repetition share one draw of the noise. The loss of each point still has the right distribution,
    and what noise remains in the average moves the level sets as a whole. With independent noise they would fray.
    """
    scores_PL = triangle.scores_PL
    return torch.stack(
        [
            loss(scores_PL, triangle.target_P, k, epsilon=epsilon, noise=noise_LB.expand(len(scores_PL), -1, -1))
            for noise_LB in _mirrored_noise(repetitions, n_samples)
        ]
    )


def _mirrored_noise(repetitions: int, n_samples: int) -> Tensor:
    """``(R, L, B)`` normals. Each odd repetition is the one before it with the wrong classes exchanged.

    The losses are symmetric in the wrong classes; so is their average over an even number of such repetitions.
    """
    generator = torch.Generator().manual_seed(_SEED)
    noise_HLB = torch.randn((repetitions + 1) // 2, NUM_CLASSES, n_samples, generator=generator)
    return torch.stack([noise_HLB, noise_HLB[:, MIRROR]], 1).flatten(0, 1)[:repetitions]


BALANCED: NoisedLoss = partial(functional.noised_topk_hinge, reduction="none")


def with_margin(margin: float) -> NoisedLoss:
    """The imbalanced noised hinge with this margin for every class and, as in the paper, no scale."""

    def loss(scores: Tensor, target: Tensor, k: int, *, epsilon: float, noise: Tensor) -> Tensor:
        counts = [1] * NUM_CLASSES
        return functional.imbalanced_noised_topk_hinge(
            scores, target, counts, k, epsilon=epsilon, noise=noise, max_margin=margin, scale=1.0, reduction="none"
        )

    return loss


@dataclass(frozen=True)
class Landscape:
    """A loss over the triangle."""

    name: str
    setting: str
    losses: Callable[[Triangle, int, int], Tensor]
    """Losses at the points, given the triangle, K, and the number of repetitions to average a noised loss over."""

    @property
    def column(self) -> str:
        return f"{self.name}, {self.setting}" if self.setting else self.name


_Losses = Callable[[Triangle, int, int], Tensor]


def _plain(loss: Callable[..., Tensor], **settings: float) -> _Losses:
    def losses(triangle: Triangle, k: int, repetitions: int) -> Tensor:
        return loss(triangle.scores_PL, triangle.target_P, k, reduction="none", **settings)

    return losses


def _cross_entropy(triangle: Triangle, k: int, repetitions: int) -> Tensor:
    return F.cross_entropy(triangle.scores_PL, triangle.target_P, reduction="none")


def _noised(epsilon: float, n_samples: int, loss: NoisedLoss) -> _Losses:
    def losses(triangle: Triangle, k: int, repetitions: int) -> Tensor:
        losses_RP = repeated(loss, triangle, k, epsilon=epsilon, n_samples=n_samples, repetitions=repetitions)
        return losses_RP.double().mean(0)

    return losses


LANDSCAPES = (
    Landscape("top-K error", "", _plain(functional.topk_error)),
    Landscape("cross-entropy", "", _cross_entropy),
    Landscape("hinge", "", _plain(functional.topk_hinge)),
    Landscape("calibrated hinge", "", _plain(functional.calibrated_topk_hinge)),
    Landscape("convexified hinge", "", _plain(functional.convex_topk_hinge)),
    Landscape("smoothed hinge", "τ = 0.1", _plain(functional.smooth_topk_hinge, tau=0.1)),
    Landscape("smoothed hinge", "τ = 1", _plain(functional.smooth_topk_hinge, tau=1.0)),
    Landscape("noised balanced", "ε = 0.3, B = 30", _noised(0.3, 30, BALANCED)),
    Landscape("noised balanced", "ε = 1, B = 30", _noised(1.0, 30, BALANCED)),
    Landscape("noised imbalanced", "ε = 1, B = 30, m = 5", _noised(1.0, 30, with_margin(5.0))),
)
"""The ten losses of the paper's level sets, in its order and with its settings."""
