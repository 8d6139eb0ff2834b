"""The losses under test, each with its literal formula and one choice of its settings; and a batch for them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shortlist as sl
from shortlist import functional as F
from tests.support import literal_formulas as literal
from tests.support.drawing import normal, value_and_grad

K, SEVERAL_K, N_SAMPLES = 2, (1, 2), 3


def class_counts(num_classes: int) -> Tensor:
    return torch.arange(num_classes) ** 2 + 1


def noise_for(scores: Tensor, n_samples: int = N_SAMPLES) -> Tensor:
    return normal(*scores.shape, n_samples, seed=1).to(scores)


@dataclass(frozen=True)
class LossCase:
    name: str
    function: Callable[..., Tensor]
    """Called with scores, target and the shared keywords, and ``noise`` if the loss is noised."""
    module: Callable[..., nn.Module]
    """Called with the number of classes and the shared keywords."""
    literal: Callable[..., Tensor]
    """Called with one row, its label and its noise (L, B)."""
    noised: bool = False
    has_gradient: bool = True
    has_margins: bool = False
    """True if the loss depends on the class counts."""
    relative: bool = False
    """True if the noise follows the scores, without a gradient."""

    def __call__(self, scores: Tensor, target: Tensor, **shared: Any) -> Tensor:
        if self.noised:
            shared.setdefault("noise", noise_for(scores))
        return self.function(scores, target, **shared)

    def given(self, noise: Tensor) -> dict[str, Tensor]:
        """The noise as a keyword argument, for the losses that take it."""
        return {"noise": noise} if self.noised else {}


def _counts_of(scores: Tensor) -> Tensor:
    return class_counts(scores.shape[min(1, scores.dim() - 1)])


def _mean(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()


def _mixed(**shared: Any) -> nn.Module:
    return sl.MixedLoss([(0.3, sl.TopKHinge(K, **shared)), (0.7, sl.NoisedTopKHinge(K, epsilon=0.5, **shared))])


LOSSES = [
    LossCase(
        "topk_error",
        lambda s, y, **kw: F.topk_error(s, y, K, **kw),
        lambda _, **kw: sl.TopKError(K, **kw),
        lambda row, label, _: literal.topk_error(row, label, K),
        has_gradient=False,
    ),
    LossCase(
        "topk_hinge",
        lambda s, y, **kw: F.topk_hinge(s, y, K, **kw),
        lambda _, **kw: sl.TopKHinge(K, **kw),
        lambda row, label, _: literal.topk_hinge(row, label, K),
    ),
    LossCase(
        "convex_topk_hinge",
        lambda s, y, **kw: F.convex_topk_hinge(s, y, K, **kw),
        lambda _, **kw: sl.ConvexTopKHinge(K, **kw),
        lambda row, label, _: literal.convex_topk_hinge(row, label, K),
    ),
    LossCase(
        "calibrated_topk_hinge",
        lambda s, y, **kw: F.calibrated_topk_hinge(s, y, K, **kw),
        lambda _, **kw: sl.CalibratedTopKHinge(K, **kw),
        lambda row, label, _: literal.calibrated_topk_hinge(row, label, K),
    ),
    LossCase(
        "smooth_topk_hinge",
        lambda s, y, **kw: F.smooth_topk_hinge(s, y, K, tau=0.5, **kw),
        lambda _, **kw: sl.SmoothTopKHinge(K, tau=0.5, **kw),
        lambda row, label, _: literal.smooth_topk_hinge(row, label, K, tau=0.5),
    ),
    LossCase(
        "topk_cross_entropy",
        lambda s, y, **kw: F.topk_cross_entropy(s, y, K, **kw),
        lambda _, **kw: sl.TopKCrossEntropy(K, **kw),
        lambda row, label, _: literal.topk_cross_entropy(row, label, (K,)),
    ),
    LossCase(
        "focal",
        lambda s, y, **kw: F.focal(s, y, gamma=1.5, **kw),
        lambda _, **kw: sl.FocalLoss(gamma=1.5, **kw),
        lambda row, label, _: literal.focal(row, label, gamma=1.5),
    ),
    LossCase(
        "ldam",
        lambda s, y, **kw: F.ldam(s, y, _counts_of(s), max_margin=0.3, scale=4.0, **kw),
        lambda num_classes, **kw: sl.LDAMLoss(class_counts(num_classes), max_margin=0.3, scale=4.0, **kw),
        lambda row, label, _: literal.ldam(row, label, class_counts(len(row)), max_margin=0.3, scale=4.0),
        has_margins=True,
    ),
    LossCase(
        "logit_adjusted",
        lambda s, y, **kw: F.logit_adjusted(s, y, _counts_of(s), tau=1.5, **kw),
        lambda num_classes, **kw: sl.LogitAdjustedLoss(class_counts(num_classes), tau=1.5, **kw),
        lambda row, label, _: literal.logit_adjusted(row, label, class_counts(len(row)), tau=1.5),
        has_margins=True,
    ),
    LossCase(
        "balanced_softmax",
        lambda s, y, **kw: F.logit_adjusted(s, y, _counts_of(s), **kw),
        lambda num_classes, **kw: sl.LogitAdjustedLoss(class_counts(num_classes), **kw),
        lambda row, label, _: literal.balanced_softmax(row, label, class_counts(len(row))),
        has_margins=True,
    ),
    LossCase(
        "prior_adjusted",
        lambda s, y, **kw: sl.PriorAdjusted(sl.FocalLoss(gamma=1.5, **kw), _counts_of(s), tau=0.7)(s, y),
        lambda num_classes, **kw: sl.PriorAdjusted(sl.FocalLoss(gamma=1.5, **kw), class_counts(num_classes), tau=0.7),
        lambda row, label, _: literal.focal(row + 0.7 * literal.log_prior(class_counts(len(row))), label, gamma=1.5),
        has_margins=True,
    ),
    LossCase(
        "mixed",
        lambda s, y, noise=None, **kw: _mixed(**kw)(s, y, noise=noise),
        lambda _, **kw: _mixed(**kw),
        lambda row, label, noise: (
            0.3 * literal.topk_hinge(row, label, K) + 0.7 * literal.noised_topk_hinge(row, label, K, 0.5, noise)
        ),
        noised=True,
    ),
    LossCase(
        "noised_topk_hinge",
        lambda s, y, **kw: F.noised_topk_hinge(s, y, K, epsilon=0.5, **kw),
        lambda _, **kw: sl.NoisedTopKHinge(K, epsilon=0.5, **kw),
        lambda row, label, noise: literal.noised_topk_hinge(row, label, K, 0.5, noise),
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
        lambda row, label, noise: literal.imbalanced_noised_topk_hinge(
            row, label, K, 0.5, noise, class_counts(len(row)), max_margin=0.3, scale=4.0
        ),
        noised=True,
        has_margins=True,
    ),
    LossCase(
        "several_k_noised_topk_hinge",
        lambda s, y, **kw: F.noised_topk_hinge(s, y, SEVERAL_K, epsilon=0.5, margin=2.0, **kw),
        lambda _, **kw: sl.NoisedTopKHinge(SEVERAL_K, epsilon=0.5, margin=2.0, **kw),
        lambda row, label, noise: _mean(
            literal.noised_topk_hinge(row, label, k, 0.5, noise, margin=2.0) for k in SEVERAL_K
        ),
        noised=True,
    ),
    LossCase(
        "relative_imbalanced_noised_topk_hinge",
        lambda s, y, **kw: F.imbalanced_noised_topk_hinge(
            s, y, _counts_of(s), SEVERAL_K, epsilon=0.5, relative=True, max_margin=0.3, scale=4.0, **kw
        ),
        lambda num_classes, **kw: sl.ImbalancedNoisedTopKHinge(
            class_counts(num_classes), SEVERAL_K, epsilon=0.5, relative=True, max_margin=0.3, scale=4.0, **kw
        ),
        lambda row, label, noise: _mean(
            literal.imbalanced_noised_topk_hinge(
                row,
                label,
                k,
                0.5 * literal.spread(row, max(SEVERAL_K)),
                noise,
                class_counts(len(row)),
                max_margin=0.3,
                scale=4.0,
            )
            for k in SEVERAL_K
        ),
        noised=True,
        has_margins=True,
        relative=True,
    ),
]

every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda case: case.name)
every_differentiable_loss = pytest.mark.parametrize(
    "loss", [case for case in LOSSES if case.has_gradient], ids=lambda case: case.name
)

# A batch for every loss.
N, L = 5, 7
TARGET = torch.tensor([0, 6, 3, 3, 1])
PROBABILITIES = normal(N, L, seed=3).softmax(-1)
labels_and_probabilities = pytest.mark.parametrize("target", [TARGET, PROBABILITIES], ids=["labels", "probabilities"])
every_noised_loss = pytest.mark.parametrize(
    "loss", [case for case in LOSSES if case.noised], ids=lambda case: case.name
)


def given_noise(loss: LossCase, scores: Tensor) -> dict[str, Tensor]:
    return loss.given(noise_for(scores))


def assert_same_value_and_gradient(
    loss: LossCase, got: Callable[[Tensor], Tensor], want: Callable[[Tensor], Tensor], scores: Tensor
) -> None:
    if loss.has_gradient:
        torch.testing.assert_close(value_and_grad(got, scores), value_and_grad(want, scores))
    else:
        torch.testing.assert_close(got(scores), want(scores))
