"""A noised loss over the triangle, drawn again and again.

Within a repetition all points of the grid share one draw of the noise. The loss of each point has the right law all the
same, and what is left of the noise in the average moves the level sets as a whole; with noise of its own at each point
they would fray.

Shape suffixes: R repetitions, P points, L classes, B draws.
"""

from typing import Protocol

import torch
from torch import Tensor

from shortlist.functional import imbalanced_noised_topk_hinge
from shortlist.program.reproduce.figures.triangle import MIRROR, NUM_CLASSES, Triangle

_SEED = 2022  # of all noised panels: they differ by their settings, not by luck


class NoisedLoss(Protocol):
    """A loss of scores, labels and K whose noise can be given."""

    def __call__(self, scores: Tensor, target: Tensor, k: int, *, epsilon: float, noise: Tensor) -> Tensor: ...


def repeated(
    loss: NoisedLoss, triangle: Triangle, k: int, *, epsilon: float, n_samples: int, repetitions: int
) -> Tensor:
    """``(R, P)`` losses of each point in each repetition."""
    scores_PL = triangle.scores_PL
    return torch.stack(
        [
            loss(scores_PL, triangle.target_P, k, epsilon=epsilon, noise=noise_LB.expand(len(scores_PL), -1, -1))
            for noise_LB in _mirrored_noise(repetitions, n_samples)
        ]
    )


def _mirrored_noise(repetitions: int, n_samples: int) -> Tensor:
    """``(R, L, B)`` normals, each odd repetition the one before it with the wrong classes exchanged.

    The losses treat the wrong classes alike, and so does their average over an even number of such repetitions.
    """
    generator = torch.Generator().manual_seed(_SEED)
    noise_HLB = torch.randn((repetitions + 1) // 2, NUM_CLASSES, n_samples, generator=generator)
    return torch.stack([noise_HLB, noise_HLB[:, MIRROR]], 1).flatten(0, 1)[:repetitions]


def with_margin(margin: float) -> NoisedLoss:
    """The imbalanced noised hinge with this margin for every class, in the paper's form: without a scale."""

    def loss(scores: Tensor, target: Tensor, k: int, *, epsilon: float, noise: Tensor) -> Tensor:
        alike = [1] * NUM_CLASSES
        return imbalanced_noised_topk_hinge(
            scores, target, alike, k, epsilon=epsilon, noise=noise, max_margin=margin, scale=1.0, reduction="none"
        )

    return loss
