"""Every loss as a Module: it keeps the settings, and its function in ``shortlist.functional`` does the work.

All are called as ``loss(scores, target)``, with the shapes that ``nn.CrossEntropyLoss`` takes: ``(N, L)`` scores and
``(N,)`` labels or ``(N, L)`` probabilities, with or without further dimensions.
"""

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from shortlist import functional
from shortlist.ops.batch import Reduction, check_reduction
from shortlist.ops.checks import (
    ClassCounts,
    Ks,
    can_read,
    check_at_least_one,
    check_flag,
    check_floating,
    check_integer,
    check_n_samples,
    check_not_negative,
    check_positive,
    check_weight,
    checked_class_counts,
    sorted_ks,
)
from shortlist.ops.class_counts import class_margins

__all__ = [
    "CalibratedTopKHinge",
    "ConvexTopKHinge",
    "FocalLoss",
    "ImbalancedNoisedTopKHinge",
    "LDAMLoss",
    "LogitAdjustedLoss",
    "NoisedAverageKHinge",
    "NoisedTopKHinge",
    "SmoothTopKHinge",
    "TopKCrossEntropy",
    "TopKError",
    "TopKHinge",
]


class _Loss(nn.Module):
    """The settings that every loss shares with ``nn.CrossEntropyLoss``."""

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
    """A loss with the number of training images of each class as a buffer."""

    class_counts: Tensor

    def _register_class_counts(self, class_counts: ClassCounts) -> int:
        """Returns the number of classes."""
        counts = checked_class_counts(class_counts)
        if counts.is_floating_point() and can_read(counts) and torch.equal(counts, counts.round()):
            counts = counts.long()  # so that ``half()`` does not round them
        if self.weight is not None:
            check_weight(self.weight, len(counts))
        self.register_buffer("class_counts", counts)
        return len(counts)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        saved = state_dict.get(f"{prefix}class_counts")
        if saved is not None and saved.is_floating_point():
            # Loading copies into the buffer: an integer buffer would round the counts.
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
    """Top-K error: 1 if the K-th largest score is strictly above the label's, else 0.

    Module of ``shortlist.functional.topk_error``.

    Args:
        k: Number of suggestions, from 1 to L.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> TopKError(2)(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([2]))
        tensor(1.)
    """

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.topk_error(scores, target, self.k, **self._shared())


class TopKHinge(_TopKLoss):
    """Top-K hinge: ``(1 + K-th largest of the other scores - s_y)_+``.

    Module of ``shortlist.functional.topk_hinge``.

    Args:
        k: Number of suggestions, from 1 to L - 1.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> TopKHinge(1)(torch.tensor([[3.0, 2.5, 1.0]]), torch.tensor([0]))
        tensor(0.5000)
    """

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.topk_hinge(scores, target, self.k, **self._shared())


class ConvexTopKHinge(_TopKLoss):
    """Convex top-K hinge: ``(mean of the K largest of (1 - delta_y + s) - s_y)_+``.

    Module of ``shortlist.functional.convex_topk_hinge``.

    Args:
        k: Number of suggestions, from 1 to L - 1.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> ConvexTopKHinge(2)(torch.tensor([[3.0, 2.5, 1.0]]), torch.tensor([0]))
        tensor(0.2500)
    """

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.convex_topk_hinge(scores, target, self.k, **self._shared())


class CalibratedTopKHinge(_TopKLoss):
    """Calibrated top-K hinge: ``(1 + (K+1)-th largest score - s_y)_+``.

    Module of ``shortlist.functional.calibrated_topk_hinge``.

    Args:
        k: Number of suggestions, from 1 to L - 1.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> CalibratedTopKHinge(1)(torch.tensor([[3.0, 2.5, 1.0]]), torch.tensor([2]))
        tensor(2.5000)
    """

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.calibrated_topk_hinge(scores, target, self.k, **self._shared())


class SmoothTopKHinge(_TopKLoss):
    """Top-K hinge, smoothed by a log-sum-exp over all subsets of K classes.

    Module of ``shortlist.functional.smooth_topk_hinge``.

    Args:
        k: Number of suggestions, from 1 to L - 1.
        tau: Temperature; 0 gives the limit without smoothing.
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


class TopKCrossEntropy(_Loss):
    """Top-K cross-entropy: ``-log P(y is among the K largest of s + G)``, G independent standard Gumbel noise.

    Module of ``shortlist.functional.topk_cross_entropy``.

    Args:
        k: Number of suggestions, from 1 to L - 1; or a tuple of several, whose probabilities are averaged.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> TopKCrossEntropy(2)(torch.zeros(1, 3), torch.tensor([0]))
        tensor(0.4055)
    """

    _shown = ("k",)

    def __init__(
        self,
        k: Ks,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(weight, ignore_index, reduction)
        sorted_ks(k)
        self.k = k

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.topk_cross_entropy(scores, target, self.k, **self._shared())


class FocalLoss(_Loss):
    """Focal loss: ``-(1 - p_y)^gamma log p_y``, where p is the softmax of the scores.

    Module of ``shortlist.functional.focal``.

    Args:
        gamma: How much well-classified examples are down-weighted; 0 gives the cross-entropy.
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
    """LDAM loss: cross-entropy of ``scale (s - m_y delta_y)``, with a margin ``m_y`` that is larger for rarer classes.

    Module of ``shortlist.functional.ldam``. The class counts are a buffer.

    Args:
        class_counts: ``(L,)`` number of training images of each class.
        max_margin: Margin of the rarest class.
        scale: Factor of the scores.
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
        self._register_class_counts(class_counts)
        self.max_margin = max_margin
        self.scale = scale

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.ldam(
            scores, target, self.class_counts, max_margin=self.max_margin, scale=self.scale, **self._shared()
        )


class LogitAdjustedLoss(_ClassCountLoss):
    """Logit-adjusted loss: cross-entropy of ``s + tau log class_counts``; ``tau = 1`` is the balanced softmax.

    Module of ``shortlist.functional.logit_adjusted``. The class counts are a buffer.

    Args:
        class_counts: ``(L,)`` number of training images of each class.
        tau: Strength of the adjustment; 0 gives the cross-entropy.
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
        self._register_class_counts(class_counts)
        self.tau = tau

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.logit_adjusted(scores, target, self.class_counts, tau=self.tau, **self._shared())


class _NoisedLoss(_Loss):
    scale = 1.0

    def __init__(
        self,
        k: Ks,
        *,
        epsilon: float,
        relative: bool,
        n_samples: float,
        eval_n_samples: float | None,
        weight: Tensor | None,
        ignore_index: int,
        reduction: Reduction,
    ) -> None:
        super().__init__(weight, ignore_index, reduction)
        ks = sorted_ks(k)
        self.k = ks if len(ks) > 1 else ks[0]
        check_not_negative("epsilon", epsilon)
        check_flag("relative", relative)
        check_n_samples(n_samples)
        if eval_n_samples is not None:
            check_n_samples(eval_n_samples, "eval_n_samples")
        self.epsilon = epsilon
        self.relative = relative
        self.n_samples = n_samples
        self.eval_n_samples = eval_n_samples

    def active_n_samples(self) -> float:
        """The number of draws in the current mode, training or evaluation."""
        return self.n_samples if self.training or self.eval_n_samples is None else self.eval_n_samples

    def check_settings(self, dtype: torch.dtype) -> None:
        """Raise an error if a setting would be infinite in this dtype."""
        check_not_negative("epsilon", self.epsilon, dtype)

    def margins_of(self, labels_R: Tensor, dtype: torch.dtype) -> Tensor | float:
        """Each row's margin, for heads that compute the loss themselves."""
        raise NotImplementedError


class NoisedTopKHinge(_NoisedLoss):
    """Noised top-K hinge: the calibrated hinge with its (K+1)-th largest score averaged over Gaussian noise.

    ``(margin + mean over B draws of the (K+1)-th largest of (s + epsilon Z) - s_y)_+``; for several K the mean of their
    losses, all from the same draws. Module of ``shortlist.functional.noised_topk_hinge``; give ``noise`` or
    ``generator`` when you call it.

    Args:
        k: Number of suggestions, from 1 to L - 1; or several different ones, such as ``(1, 3, 5)``.
        epsilon: Standard deviation of the noise, in units of the scores.
        relative: Measure ``epsilon`` in units of the standard deviation of each row's 2K + 2 largest scores instead, K
            being the largest of several.
        n_samples: Number B of draws; ``math.inf`` computes the expectation without noise.
        eval_n_samples: The same in evaluation mode; by default ``n_samples``. ``math.inf`` makes evaluation
            deterministic.
        margin: By how much the label's score must exceed the smoothed (K+1)-th largest.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> loss = NoisedTopKHinge(1, epsilon=1.0, eval_n_samples=math.inf).eval()
        >>> loss(torch.zeros(1, 2), torch.tensor([0]))
        tensor(0.4358)
    """

    _shown = ("k", "epsilon", "relative", "n_samples", "eval_n_samples", "margin")

    def __init__(
        self,
        k: Ks,
        *,
        epsilon: float = 0.2,
        relative: bool = False,
        n_samples: float = 5,
        margin: float = 1.0,
        eval_n_samples: float | None = None,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            k,
            epsilon=epsilon,
            relative=relative,
            n_samples=n_samples,
            eval_n_samples=eval_n_samples,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        check_not_negative("margin", margin)
        self.margin = margin

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
            relative=self.relative,
            n_samples=self.active_n_samples(),
            margin=self.margin,
            noise=noise,
            generator=generator,
            **self._shared(),
        )

    def check_settings(self, dtype: torch.dtype) -> None:
        super().check_settings(dtype)
        check_not_negative("margin", self.margin, dtype)

    def margins_of(self, labels_R: Tensor, dtype: torch.dtype) -> float:
        return self.margin


class ImbalancedNoisedTopKHinge(_NoisedLoss, _ClassCountLoss):
    """Noised top-K hinge with a margin ``m_y`` that is larger for rarer classes.

    ``scale (m_y + mean over B draws of the (K+1)-th largest of (s + epsilon Z) - s_y)_+``. Module of
    ``shortlist.functional.imbalanced_noised_topk_hinge``; give ``noise`` or ``generator`` when you call it. The class
    counts are a buffer. The margins follow from them when the Module is built or its state is loaded; to change the
    counts, build another Module.

    Args:
        class_counts: ``(L,)`` number of training images of each class.
        k, epsilon, relative, n_samples, eval_n_samples: As in ``NoisedTopKHinge``.
        max_margin: Margin of the rarest class.
        scale: Factor of the loss.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``.

    Example:
        >>> loss = ImbalancedNoisedTopKHinge([1, 2, 3], k=1, epsilon=0.0, max_margin=0.3)
        >>> loss(torch.tensor([[0.9, 0.7, 0.5]]), torch.tensor([0]))
        tensor(5.0000)
    """

    relative_margins: Tensor
    _shown = ("k", "epsilon", "relative", "n_samples", "eval_n_samples", "max_margin", "scale")

    def __init__(
        self,
        class_counts: ClassCounts,
        k: Ks,
        *,
        epsilon: float = 0.01,
        relative: bool = False,
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
            relative=relative,
            n_samples=n_samples,
            eval_n_samples=eval_n_samples,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        check_not_negative("max_margin", max_margin)
        check_positive("scale", scale)
        num_classes = self._register_class_counts(class_counts)
        self.register_buffer("relative_margins", class_margins(self.class_counts, 1.0), persistent=False)
        sorted_ks(k, num_classes - 1, num_classes)
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
        check_floating("scores", scores)
        return functional.hinge_with_margins(
            scores,
            target,
            self.k,
            relative_margins_L=self._relative_margins_for(scores.device, scores.dtype),
            max_margin=self.max_margin,
            scale=self.scale,
            epsilon=self.epsilon,
            relative=self.relative,
            n_samples=self.active_n_samples(),
            noise=noise,
            generator=generator,
            **self._shared(),
        )

    def check_settings(self, dtype: torch.dtype) -> None:
        super().check_settings(dtype)
        check_not_negative("max_margin", self.max_margin, dtype)
        check_positive("scale", self.scale, dtype)

    def margins_of(self, labels_R: Tensor, dtype: torch.dtype) -> Tensor:
        return self.max_margin * self._relative_margins_for(labels_R.device, dtype)[labels_R].to(dtype)

    def _relative_margins_for(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Fractions of the largest margin; float64 if the scores are."""
        if dtype == torch.float64:
            return class_margins(self.class_counts.to(device, dtype), 1.0)
        return self.relative_margins.to(device)

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]
        self.relative_margins = class_margins(self.class_counts, 1.0)  # half() has rounded them
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.relative_margins = class_margins(self.class_counts, 1.0)


class NoisedAverageKHinge(_Loss):
    """Noised average-K hinge: the label's score must exceed a threshold that is the same for the whole batch.

    ``(margin + mean over B draws of the (K N + 1)-th largest of all N L scores (s + epsilon Z) - s_y)_+``: a loss to
    train for sets of varying size, of K classes on average. Module of ``shortlist.functional.noised_average_k_hinge``;
    give ``noise`` or ``generator`` when you call it.

    Args:
        k: Number of classes in a set on average, from 1 to L - 1.
        epsilon: Standard deviation of the noise, in units of the scores.
        n_samples: Number B of draws; ``math.inf`` solves for the threshold instead.
        margin: By how much the label's score must exceed the threshold.
        weight, ignore_index, reduction: As in ``nn.CrossEntropyLoss``. Ignored rows do not move the threshold.

    Example:
        >>> loss = NoisedAverageKHinge(1, epsilon=0.0, reduction="none")
        >>> loss(torch.tensor([[3.0, 2.5, 1.0], [0.0, 4.0, 2.0]]), torch.tensor([0, 2]))
        tensor([0.5000, 1.5000])
    """

    compares_rows = True
    """A constant added to the scores of one image changes the loss. Other losses do not have this attribute."""
    _shown = ("k", "epsilon", "n_samples", "margin")

    def __init__(
        self,
        k: int,
        *,
        epsilon: float = 0.2,
        n_samples: float = math.inf,
        margin: float = 1.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(weight, ignore_index, reduction)
        check_at_least_one("k", k)
        check_not_negative("epsilon", epsilon)
        check_n_samples(n_samples)
        check_not_negative("margin", margin)
        self.k, self.epsilon, self.n_samples, self.margin = k, epsilon, n_samples, margin

    def forward(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return functional.noised_average_k_hinge(
            scores,
            target,
            self.k,
            epsilon=self.epsilon,
            n_samples=self.n_samples,
            margin=self.margin,
            noise=noise,
            generator=generator,
            **self._shared(),
        )
