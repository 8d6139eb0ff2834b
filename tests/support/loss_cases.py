"""The losses under test, each beside its obvious version and with one setting of its hyper-parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shortlist as sl
from shortlist import functional as F
from tests.support import literal_formulas as obvious

K, N_SAMPLES = 2, 3


def class_counts(num_classes: int) -> Tensor:
    return torch.arange(num_classes) ** 2 + 1


def noise_for(scores: Tensor, n_samples: int = N_SAMPLES) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*scores.shape, n_samples, generator=generator, dtype=torch.float64).to(scores)


@dataclass(frozen=True)
class LossCase:
    name: str
    function: Callable[..., Tensor]
    """Called with scores, target and the shared keywords; ``noise`` too where the loss is noised."""
    module: Callable[..., nn.Module]
    """Called with the number of classes and the shared keywords."""
    literal: Callable[..., Tensor]
    """Called with one row, its label and its noise (L, B)."""
    noised: bool = False
    has_gradient: bool = True
    has_margins: bool = False
    """Whether the loss tells classes apart by their counts."""

    def __call__(self, scores: Tensor, target: Tensor, **shared: Any) -> Tensor:
        if self.noised:
            shared.setdefault("noise", noise_for(scores))
        return self.function(scores, target, **shared)

    def given(self, noise: Tensor) -> dict[str, Tensor]:
        """As a keyword, for the losses that take it."""
        return {"noise": noise} if self.noised else {}


def _counts_of(scores: Tensor) -> Tensor:
    return class_counts(scores.shape[min(1, scores.dim() - 1)])


LOSSES = [
    LossCase(
        "topk_error",
        lambda s, y, **kw: F.topk_error(s, y, K, **kw),
        lambda _, **kw: sl.TopKError(K, **kw),
        lambda row, label, _: obvious.topk_error(row, label, K),
        has_gradient=False,
    ),
    LossCase(
        "topk_hinge",
        lambda s, y, **kw: F.topk_hinge(s, y, K, **kw),
        lambda _, **kw: sl.TopKHinge(K, **kw),
        lambda row, label, _: obvious.topk_hinge(row, label, K),
    ),
    LossCase(
        "convex_topk_hinge",
        lambda s, y, **kw: F.convex_topk_hinge(s, y, K, **kw),
        lambda _, **kw: sl.ConvexTopKHinge(K, **kw),
        lambda row, label, _: obvious.convex_topk_hinge(row, label, K),
    ),
    LossCase(
        "calibrated_topk_hinge",
        lambda s, y, **kw: F.calibrated_topk_hinge(s, y, K, **kw),
        lambda _, **kw: sl.CalibratedTopKHinge(K, **kw),
        lambda row, label, _: obvious.calibrated_topk_hinge(row, label, K),
    ),
    LossCase(
        "smooth_topk_hinge",
        lambda s, y, **kw: F.smooth_topk_hinge(s, y, K, tau=0.5, **kw),
        lambda _, **kw: sl.SmoothTopKHinge(K, tau=0.5, **kw),
        lambda row, label, _: obvious.smooth_topk_hinge(row, label, K, tau=0.5),
    ),
    LossCase(
        "focal",
        lambda s, y, **kw: F.focal(s, y, gamma=1.5, **kw),
        lambda _, **kw: sl.FocalLoss(gamma=1.5, **kw),
        lambda row, label, _: obvious.focal(row, label, gamma=1.5),
    ),
    LossCase(
        "ldam",
        lambda s, y, **kw: F.ldam(s, y, _counts_of(s), max_margin=0.3, scale=4.0, **kw),
        lambda num_classes, **kw: sl.LDAMLoss(class_counts(num_classes), max_margin=0.3, scale=4.0, **kw),
        lambda row, label, _: obvious.ldam(row, label, class_counts(len(row)), max_margin=0.3, scale=4.0),
        has_margins=True,
    ),
    LossCase(
        "logit_adjusted",
        lambda s, y, **kw: F.logit_adjusted(s, y, _counts_of(s), tau=1.5, **kw),
        lambda num_classes, **kw: sl.LogitAdjustedLoss(class_counts(num_classes), tau=1.5, **kw),
        lambda row, label, _: obvious.logit_adjusted(row, label, class_counts(len(row)), tau=1.5),
        has_margins=True,
    ),
    LossCase(
        "balanced_softmax",
        lambda s, y, **kw: F.logit_adjusted(s, y, _counts_of(s), **kw),
        lambda num_classes, **kw: sl.LogitAdjustedLoss(class_counts(num_classes), **kw),
        lambda row, label, _: obvious.balanced_softmax(row, label, class_counts(len(row))),
        has_margins=True,
    ),
    LossCase(
        "noised_topk_hinge",
        lambda s, y, **kw: F.noised_topk_hinge(s, y, K, epsilon=0.5, **kw),
        lambda _, **kw: sl.NoisedTopKHinge(K, epsilon=0.5, **kw),
        lambda row, label, noise: obvious.noised_topk_hinge(row, label, K, 0.5, noise),
        noised=True,
    ),
    LossCase(
        "imbalanced_noised_topk_hinge",
        lambda s, y, **kw: F.imbalanced_noised_topk_hinge(
            s, y, _counts_of(s), K, epsilon=0.5, max_margin=0.3, scale=4.0, **kw
        ),
        lambda num_classes, **kw: sl.ImbalancedNoisedTopKHinge(
            class_counts(num_classes), K, epsilon=0.5, max_margin=0.3, scale=4.0, **kw
        ),
        lambda row, label, noise: obvious.imbalanced_noised_topk_hinge(
            row, label, K, 0.5, noise, class_counts(len(row)), max_margin=0.3, scale=4.0
        ),
        noised=True,
        has_margins=True,
    ),
]

every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda case: case.name)
every_differentiable_loss = pytest.mark.parametrize(
    "loss", [case for case in LOSSES if case.has_gradient], ids=lambda case: case.name
)
