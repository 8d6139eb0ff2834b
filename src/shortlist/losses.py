"""Module twins of ``shortlist.functional``: they hold the settings, the functions do the work.

All are called as ``loss(scores, target)``, with the shapes that ``nn.CrossEntropyLoss`` takes.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from shortlist import functional
from shortlist.ops.batch import Reduction, check_reduction, checked_num_classes
from shortlist.ops.checks import (
    ClassCounts,
    can_read,
    check_at_least_one,
    check_integer,
    check_k,
    check_n_samples,
    check_not_negative,
    check_per_class,
    check_positive,
    check_weight,
    checked_class_counts,
)
from shortlist.ops.class_counts import class_margins, margins_for
from shortlist.ops.dtypes import working_dtype
from shortlist.ops.noised_hinge import noised_hinge

__all__ = [
    "CalibratedTopKHinge",
    "ConvexTopKHinge",
    "FocalLoss",
    "ImbalancedNoisedTopKHinge",
    "LDAMLoss",
    "LogitAdjustedLoss",
    "NoisedTopKHinge",
    "SmoothTopKHinge",
    "TopKError",
    "TopKHinge",
]


class _Loss(nn.Module):
    """Settings that every loss takes, as ``nn.CrossEntropyLoss`` does."""

    weight: Tensor | None
    _shown: tuple[str, ...] = ()

    def __init__(self, weight: Tensor | None, ignore_index: int, reduction: Reduction) -> None:
        super().__init__()
        check_reduction(reduction)
        check_integer("ignore_index", ignore_index)
        if weight is not None:
            check_weight(weight, None)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction: Reduction = reduction

    def _shared(self) -> dict[str, Any]:
        return {"weight": self.weight, "ignore_index": self.ignore_index, "reduction": self.reduction}

    def extra_repr(self) -> str:
        shown = {name: getattr(self, name) for name in (*self._shown, "reduction")}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items() if value is not None)


class _ClassCountLoss(_Loss):
    """The training images of each class, a buffer."""

    class_counts: Tensor

    def _hold_class_counts(self, class_counts: ClassCounts) -> int:
        """Register them as a buffer; returns the number of classes."""
        counts = checked_class_counts(class_counts)
        if counts.is_floating_point() and can_read(counts) and torch.equal(counts, counts.round()):
            counts = counts.long()  # which ``half()`` leaves alone
        if self.weight is not None:
            check_weight(self.weight, len(counts))
        self.register_buffer("class_counts", counts)
        return len(counts)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        saved = state_dict.get(f"{prefix}class_counts")
        if saved is not None and saved.is_floating_point():
            # Copied into whole numbers they would lose what is behind the point.
            self.class_counts = self.class_counts.to(saved.dtype)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class _TopKLoss(_Loss):
    _shown: tuple[str, ...] = ("k",)

    def __init__(
        self,
        k: int,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(weight, ignore_index, reduction)
        check_at_least_one("k", k)
        self.k = k


class TopKError(_TopKLoss):
    """1 if the K-th largest score is strictly above the label's, else 0: ``shortlist.functional.topk_error``.

    Args:
        k: Number of suggestions.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> TopKError(2)(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([2]))
        tensor(1.)
    """

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.topk_error(scores, target, self.k, **self._shared())


class TopKHinge(_TopKLoss):
    """``(1 + K-th largest of the others - s_y)_+``: ``shortlist.functional.topk_hinge``.

    Args:
        k: Number of suggestions.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> TopKHinge(1)(torch.tensor([[3.0, 2.5, 1.0]]), torch.tensor([0]))
        tensor(0.5000)
    """

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.topk_hinge(scores, target, self.k, **self._shared())


class ConvexTopKHinge(_TopKLoss):
    """``(mean of the K largest of (1 - delta_y + s) - s_y)_+``: ``shortlist.functional.convex_topk_hinge``.

    Args:
        k: Number of suggestions.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> ConvexTopKHinge(2)(torch.tensor([[3.0, 2.5, 1.0]]), torch.tensor([0]))
        tensor(0.2500)
    """

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.convex_topk_hinge(scores, target, self.k, **self._shared())


class CalibratedTopKHinge(_TopKLoss):
    """``(1 + (K+1)-th largest - s_y)_+``: ``shortlist.functional.calibrated_topk_hinge``.

    Args:
        k: Number of suggestions.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> CalibratedTopKHinge(1)(torch.tensor([[3.0, 2.5, 1.0]]), torch.tensor([2]))
        tensor(2.5000)
    """

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.calibrated_topk_hinge(scores, target, self.k, **self._shared())


class SmoothTopKHinge(_TopKLoss):
    """Top-K hinge, smoothed by a log-sum over all subsets of K classes: ``shortlist.functional.smooth_topk_hinge``.

    Args:
        k: Number of suggestions.
        tau: Temperature.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> SmoothTopKHinge(1, tau=1.0)(torch.tensor([[3.0, 2.5, 1.0]]), torch.tensor([0]))
        tensor(1.1041)
    """

    _shown = ("k", "tau")

    def __init__(
        self,
        k: int,
        *,
        tau: float = 1.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(k, weight=weight, ignore_index=ignore_index, reduction=reduction)
        check_not_negative("tau", tau)
        self.tau = tau

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.smooth_topk_hinge(scores, target, self.k, tau=self.tau, **self._shared())


class FocalLoss(_Loss):
    """``(1 - p_y)^gamma`` times cross-entropy: ``shortlist.functional.focal``.

    Args:
        gamma: Focus on hard examples; 0 gives the cross-entropy.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> FocalLoss(gamma=1.0)(torch.tensor([[1.0, 1.0]]), torch.tensor([0]))
        tensor(0.3466)
    """

    _shown = ("gamma",)

    def __init__(
        self,
        *,
        gamma: float = 2.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(weight, ignore_index, reduction)
        check_not_negative("gamma", gamma)
        self.gamma = gamma

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.focal(scores, target, gamma=self.gamma, **self._shared())


class LDAMLoss(_ClassCountLoss):
    """Cross-entropy with larger margins for rarer classes: ``shortlist.functional.ldam``; the counts are a buffer.

    Args:
        class_counts, max_margin, scale: As in the function.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> LDAMLoss([1, 16], max_margin=0.1, scale=10.0)(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        tensor(1.3133)
    """

    _shown = ("max_margin", "scale")

    def __init__(
        self,
        class_counts: ClassCounts,
        *,
        max_margin: float = 0.5,
        scale: float = 30.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(weight, ignore_index, reduction)
        check_not_negative("max_margin", max_margin)
        check_positive("scale", scale)
        self._hold_class_counts(class_counts)
        self.max_margin = max_margin
        self.scale = scale

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.ldam(
            scores, target, self.class_counts, max_margin=self.max_margin, scale=self.scale, **self._shared()
        )


class LogitAdjustedLoss(_ClassCountLoss):
    """Cross-entropy of ``s + tau log class_counts``: ``shortlist.functional.logit_adjusted``; the counts are a buffer.

    Args:
        class_counts, tau: As in the function.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> LogitAdjustedLoss([1, 3])(torch.zeros(1, 2), torch.tensor([0]))
        tensor(1.3863)
    """

    _shown = ("tau",)

    def __init__(
        self,
        class_counts: ClassCounts,
        *,
        tau: float = 1.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(weight, ignore_index, reduction)
        check_not_negative("tau", tau)
        self._hold_class_counts(class_counts)
        self.tau = tau

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.logit_adjusted(scores, target, self.class_counts, tau=self.tau, **self._shared())


class _NoisedLoss(_TopKLoss):
    def __init__(
        self,
        k: int,
        *,
        epsilon: float,
        n_samples: float,
        eval_n_samples: float | None,
        weight: Tensor | None,
        ignore_index: int,
        reduction: Reduction,
    ) -> None:
        super().__init__(k, weight=weight, ignore_index=ignore_index, reduction=reduction)
        check_not_negative("epsilon", epsilon)
        check_n_samples(n_samples)
        if eval_n_samples is not None:
            check_n_samples(eval_n_samples, "eval_n_samples")
        self.epsilon = epsilon
        self.n_samples = n_samples
        self.eval_n_samples = eval_n_samples

    def draws(self) -> float:
        """B for this call, which may differ in evaluation mode."""
        return self.n_samples if self.training or self.eval_n_samples is None else self.eval_n_samples

    def check_settings(self, dtype: torch.dtype) -> None:
        """Whether the arithmetic of this dtype can hold them."""
        check_not_negative("epsilon", self.epsilon, dtype)

    def of_lead(self, lead_R: Tensor, index_R: Tensor) -> Tensor:
        """Each row's loss from how far its smoothed (K+1)-th largest score is above its label's, and its label."""
        return (1 + lead_R).relu()


class NoisedTopKHinge(_NoisedLoss):
    """Calibrated hinge, its (K+1)-th largest averaged over noise: ``shortlist.functional.noised_topk_hinge``.

    ``noise`` and ``generator`` are given at call time.

    Args:
        k, epsilon, n_samples: As in the function.
        eval_n_samples: Draws in evaluation mode; None takes ``n_samples``, ``math.inf`` makes evaluation deterministic.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> loss = NoisedTopKHinge(1, epsilon=1.0, eval_n_samples=math.inf).eval()
        >>> loss(torch.zeros(1, 2), torch.tensor([0]))
        tensor(0.4358)
    """

    _shown = ("k", "epsilon", "n_samples", "eval_n_samples")

    def __init__(
        self,
        k: int,
        *,
        epsilon: float = 0.2,
        n_samples: float = 5,
        eval_n_samples: float | None = None,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            k,
            epsilon=epsilon,
            n_samples=n_samples,
            eval_n_samples=eval_n_samples,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
        )

    def forward(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return functional.noised_topk_hinge(
            scores,
            target,
            self.k,
            epsilon=self.epsilon,
            n_samples=self.draws(),
            noise=noise,
            generator=generator,
            **self._shared(),
        )


class ImbalancedNoisedTopKHinge(_NoisedLoss, _ClassCountLoss):
    """The noised hinge with larger margins for rarer classes: ``shortlist.functional.imbalanced_noised_topk_hinge``.

    The class counts are a buffer; ``noise`` and ``generator`` are given at call time. Margins are derived from the
    counts when the loss is made, or a state loaded: for other counts make another loss.

    Args:
        class_counts, k, epsilon, n_samples, max_margin, scale: As in the function.
        eval_n_samples: Draws in evaluation mode; None takes ``n_samples``, ``math.inf`` makes evaluation deterministic.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> loss = ImbalancedNoisedTopKHinge([1, 2, 3], k=1, epsilon=0.0, max_margin=0.3)
        >>> loss(torch.tensor([[0.9, 0.7, 0.5]]), torch.tensor([0]))
        tensor(5.0000)
    """

    relative_margins: Tensor
    _shown = ("k", "epsilon", "n_samples", "eval_n_samples", "max_margin", "scale")

    def __init__(
        self,
        class_counts: ClassCounts,
        k: int,
        *,
        epsilon: float = 0.01,
        n_samples: float = 5,
        max_margin: float = 0.2,
        scale: float = 50.0,
        eval_n_samples: float | None = None,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            k,
            epsilon=epsilon,
            n_samples=n_samples,
            eval_n_samples=eval_n_samples,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        check_not_negative("max_margin", max_margin)
        check_positive("scale", scale)
        num_classes = self._hold_class_counts(class_counts)
        self.register_buffer("relative_margins", self._relative_margins(), persistent=False)
        check_k(k, num_classes - 1, num_classes)
        self.max_margin = max_margin
        self.scale = scale

    def forward(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        check_per_class("class_counts", self.class_counts, checked_num_classes(scores))
        self.check_settings(working_dtype(scores.dtype))
        return noised_hinge(
            scores,
            target,
            self.k,
            margins_L=self.max_margin * self._relative_margins_for(scores),
            scale=self.scale,
            epsilon=self.epsilon,
            n_samples=self.draws(),
            noise=noise,
            generator=generator,
            **self._shared(),
        )

    def check_settings(self, dtype: torch.dtype) -> None:
        super().check_settings(dtype)
        check_not_negative("max_margin", self.max_margin, dtype)
        check_positive("scale", self.scale, dtype)

    def of_lead(self, lead_R: Tensor, index_R: Tensor) -> Tensor:
        margin_R = self.max_margin * self._relative_margins_for(lead_R)[index_R].to(lead_R.dtype)
        return self.scale * (margin_R + lead_R).relu()

    def _relative_margins(self) -> Tensor:
        """Those of the rarest class are 1. Kept, as a GPU would need nine launches for them at every step."""
        return class_margins(self.class_counts, 1.0)

    def _relative_margins_for(self, scores: Tensor) -> Tensor:
        if scores.dtype == torch.float64:
            return margins_for(scores, self.class_counts, 1.0)
        return self.relative_margins.to(scores.device)

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]
        self.relative_margins = self._relative_margins()  # which half() has rounded
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.relative_margins = self._relative_margins()
