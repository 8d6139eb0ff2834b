"""The losses that the program trains with: one frozen dataclass for each.

Its fields are the settings of the loss, with the defaults of the Module. It also knows how to build the Module, what
people call the loss, and what a search tries. This is all the program knows of a loss: a new one needs its function
(``shortlist.functional``), its Module (``shortlist.losses``), a dataclass here, and a line in the tests.

The settings that every loss has (``COMMON``) are built around the Module: cross-entropy, the prior, class weights.

Standard library only, so that any machine can read a configuration; ``build`` alone needs torch. The attribute
docstrings are the help of the command line.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shortlist.errors import ShortlistError
from shortlist.program.settings import check_choices, check_within
from shortlist.program.text import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Range:
    """Numbers to sample from, uniformly or uniformly in their logarithm."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.high) and self.low < self.high and (self.low > 0 or not self.log)):
            raise ShortlistError(f"a range to sample from must go up from low to high, got {self.low} to {self.high}")

    @property
    def examples(self) -> tuple[float, float, float]:
        """Both ends and one number between them."""
        return self.low, math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2, self.high


LOSSES: "dict[str, type[LossConfig]]" = {}
"""Every loss by its name."""

COMMON = ("cross_entropy_share", "prior", "class_weights", "weight_from")
"""Settings that are not the Module's own."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What all losses have in common."""

    section: ClassVar[str] = "loss"
    label: ClassVar[str]
    """What people call the loss."""
    paper_grid: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    """The values that the paper tries for a setting (its last appendix, "Imbalanced case"). It gives no grid for the
    scale, only the values that were found."""
    ranges: ClassVar[Mapping[str, Range]] = {}
    """Where a search samples a setting. A range contains the paper's grid."""
    takes_cosines: ClassVar[bool] = False
    """True if the loss spreads cosines with a scale of its own."""
    uses_k: ClassVar[bool] = False
    """True if K is part of the loss, and not only of the metric that picks the best epoch."""
    takes_several_k: ClassVar[bool] = False
    """True if the loss can be made for several K at once."""
    contains_prior: ClassVar[bool] = False
    """True if the prior is part of the loss itself."""

    name: str = ""
    """Which loss to train with. Another loss starts from its own defaults."""
    k: int | tuple[int, ...] = 5
    """K, the number of suggestions; the best epoch is picked at it. Some losses take several, such as 1 3 5."""
    cross_entropy_share: float = 0.0
    """Share of cross-entropy in the loss, from 0 to 1. It keeps a network learning where a top-K loss is satisfied."""
    prior: float = 0.0
    """How much of the log class frequencies to add to scores in training; 1 makes rare classes count like others."""
    class_weights: Literal["none", "inverse", "effective"] = "none"
    """Weights of the classes in the loss: one over the number of their images, or over the effective number."""
    weight_from: float = 0.0
    """Share of the run after which the class weights start, such as 0.8; before that all classes weigh the same."""

    def __init_subclass__(cls) -> None:
        if name := cls.__dict__.get("name"):
            LOSSES[name] = cls

    def __post_init__(self) -> None:
        if LOSSES.get(self.name) is not type(self):
            self.kind_called(self.name)
            raise ShortlistError(f"{type(self).__name__} must have the name {type(self).name}, got {self.name}")
        self._check_ks()
        check_within(self, "cross_entropy_share", 0, 1)
        check_within(self, "prior", 0)
        check_within(self, "weight_from", 0, 1)
        check_choices(self, "class_weights")
        if self.prior and self.contains_prior:
            raise ShortlistError(f"loss.prior must be 0 for {self.name}, which contains the prior, got {self.prior}")
        for name in {"epsilon", "tau", "gamma", "margin", "max_margin"} & self.settings().keys():
            check_within(self, name, 0)
        if "scale" in self.settings():
            check_within(self, "scale", 1e-12)
        n_samples = self.settings().get("n_samples", math.inf)
        if n_samples != math.inf and not (n_samples >= 1 and n_samples == int(n_samples)):
            raise ShortlistError(f"loss.n_samples must be a whole number >= 1, or inf, got {n_samples}")

    def _check_ks(self) -> None:
        if not self.ks or not all(isinstance(k, int) and k >= 1 for k in self.ks) or len({*self.ks}) < len(self.ks):
            raise ShortlistError(f"loss.k must be a whole number >= 1, or several different ones, got {self.k!r}")
        if len(self.ks) > 1 and not self.takes_several_k:
            raise ShortlistError(f"loss.k must be one number for {self.name}, got {' '.join(map(str, self.ks))}")
        # One way to write the same: a single K is a number, several are in order.
        object.__setattr__(self, "k", self.ks[0] if len(self.ks) == 1 else tuple(sorted(self.ks)))

    @property
    def ks(self) -> tuple[int, ...]:
        """Every K of the loss."""
        return self.k if isinstance(self.k, tuple) else (self.k,)

    @property
    def largest_k(self) -> int:
        return max(self.ks)

    @staticmethod
    def kind_called(name: Any) -> "type[LossConfig]":
        """The dataclass of the loss with this name."""
        if not isinstance(name, str) or name not in LOSSES:
            raise ShortlistError(
                f"loss.name must be one of {', '.join(LOSSES)}, got {name!r}{did_you_mean(str(name), LOSSES)}"
            )
        return LOSSES[name]

    def settings(self) -> dict[str, Any]:
        """The arguments of the Module beside the class counts."""
        unused = {"name", *COMMON} | (set() if self.uses_k else {"k"})
        names = [field.name for field in dataclasses.fields(self) if field.name not in unused]
        return {name: getattr(self, name) for name in names}

    def build(self, class_counts: "Tensor") -> "nn.Module":
        """The loss for classes with these numbers of training images.

        Class weights are ones: they change during a run, which sets them (``training.class_weights``).
        """
        import torch

        from shortlist.composed_losses import MixedLoss, PriorAdjusted

        weight = None if self.class_weights == "none" else torch.ones(len(class_counts))
        share = self.cross_entropy_share
        if share == 1:
            loss = self._cross_entropy(class_counts, weight)
        elif share > 0:
            parts = [
                (share, self._cross_entropy(class_counts, weight)),
                (1 - share, self._module(class_counts, weight)),
            ]
            loss = MixedLoss(parts)
        else:
            loss = self._module(class_counts, weight)
        if self.prior:
            # The prior belongs to the scores that a softmax sees, which for cosines are those times the scale.
            loss = PriorAdjusted(loss, class_counts, tau=self.prior / self.settings().get("scale", 1.0))
        return loss

    def _module(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        """The loss itself."""
        raise NotImplementedError

    def _cross_entropy(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        """Cross-entropy of the same scores."""
        from torch import nn

        return nn.CrossEntropyLoss(weight)


@dataclass(frozen=True, kw_only=True)
class CrossEntropyConfig(LossConfig):
    label: ClassVar[str] = "Cross-entropy"
    name: str = "cross_entropy"

    def _module(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        return self._cross_entropy(class_counts, weight)


@dataclass(frozen=True, kw_only=True)
class FocalConfig(LossConfig):
    label: ClassVar[str] = "Focal"
    paper_grid: ClassVar[Mapping[str, tuple[float, ...]]] = {"gamma": (0.5, 1.0, 2.0, 5.0)}
    ranges: ClassVar[Mapping[str, Range]] = {"gamma": Range(0.0, 5.0)}
    name: str = "focal"
    gamma: float = 2.0
    """Focus: how much less an example counts that is already classified well."""

    def _module(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        from shortlist.losses import FocalLoss

        return FocalLoss(**self.settings(), weight=weight)


_MARGINS = (0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True, kw_only=True)
class _CosineConfig(LossConfig):
    takes_cosines: ClassVar[bool] = True
    max_margin: float
    """Margin of the rarest class."""
    scale: float
    """What the cosines are multiplied by."""

    def _cross_entropy(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        from shortlist.losses import LDAMLoss

        return LDAMLoss(class_counts, max_margin=0.0, scale=self.scale, weight=weight)


@dataclass(frozen=True, kw_only=True)
class LDAMConfig(_CosineConfig):
    label: ClassVar[str] = "LDAM"
    paper_grid: ClassVar[Mapping[str, tuple[float, ...]]] = {"max_margin": _MARGINS}
    ranges: ClassVar[Mapping[str, Range]] = {"max_margin": Range(0.0, 0.8), "scale": Range(10.0, 100.0, log=True)}
    name: str = "ldam"
    max_margin: float = 0.5
    """Margin of the rarest class."""
    scale: float = 30.0
    """What the cosines are multiplied by."""

    def _module(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        from shortlist.losses import LDAMLoss

        return LDAMLoss(class_counts, **self.settings(), weight=weight)


@dataclass(frozen=True, kw_only=True)
class LogitAdjustedConfig(LossConfig):
    label: ClassVar[str] = "Logit adjustment"
    ranges: ClassVar[Mapping[str, Range]] = {"tau": Range(0.0, 3.0)}
    contains_prior: ClassVar[bool] = True
    name: str = "logit_adjusted"
    tau: float = 1.0
    """How much of the class frequencies to correct for: 0 nothing, 1 all."""

    def _module(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        from shortlist.losses import LogitAdjustedLoss

        return LogitAdjustedLoss(class_counts, **self.settings(), weight=weight)


@dataclass(frozen=True, kw_only=True)
class BalancedSoftmaxConfig(LossConfig):
    """Logit adjustment with tau = 1."""

    label: ClassVar[str] = "Balanced softmax"
    contains_prior: ClassVar[bool] = True
    name: str = "balanced_softmax"

    def _module(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        from shortlist.losses import LogitAdjustedLoss

        return LogitAdjustedLoss(class_counts, weight=weight)


@dataclass(frozen=True, kw_only=True)
class TopKHingeConfig(LossConfig):
    label: ClassVar[str] = "Top-K hinge"
    uses_k: ClassVar[bool] = True
    name: str = "topk_hinge"

    def _module(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        from shortlist.losses import TopKHinge

        return TopKHinge(**self.settings(), weight=weight)


@dataclass(frozen=True, kw_only=True)
class ConvexTopKHingeConfig(LossConfig):
    label: ClassVar[str] = "Convex top-K hinge"
    uses_k: ClassVar[bool] = True
    name: str = "convex_topk_hinge"

    def _module(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        from shortlist.losses import ConvexTopKHinge

        return ConvexTopKHinge(**self.settings(), weight=weight)


@dataclass(frozen=True, kw_only=True)
class CalibratedTopKHingeConfig(LossConfig):
    label: ClassVar[str] = "Calibrated top-K hinge"
    uses_k: ClassVar[bool] = True
    name: str = "calibrated_topk_hinge"

    def _module(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        from shortlist.losses import CalibratedTopKHinge

        return CalibratedTopKHinge(**self.settings(), weight=weight)


@dataclass(frozen=True, kw_only=True)
class SmoothTopKHingeConfig(LossConfig):
    label: ClassVar[str] = "Smoothed top-K hinge"
    paper_grid: ClassVar[Mapping[str, tuple[float, ...]]] = {"tau": (0.1, 1.0)}
    ranges: ClassVar[Mapping[str, Range]] = {"tau": Range(0.01, 10.0, log=True)}
    uses_k: ClassVar[bool] = True
    name: str = "smooth_topk_hinge"
    tau: float = 1.0
    """Temperature of the smoothing."""

    def _module(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        from shortlist.losses import SmoothTopKHinge

        return SmoothTopKHinge(**self.settings(), weight=weight)


@dataclass(frozen=True, kw_only=True)
class TopKCrossEntropyConfig(LossConfig):
    label: ClassVar[str] = "Top-K cross-entropy"
    uses_k: ClassVar[bool] = True
    takes_several_k: ClassVar[bool] = True
    name: str = "topk_cross_entropy"

    def _module(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        from shortlist.losses import TopKCrossEntropy

        return TopKCrossEntropy(**self.settings(), weight=weight)


@dataclass(frozen=True, kw_only=True)
class _NoisedConfig(LossConfig):
    uses_k: ClassVar[bool] = True
    takes_several_k: ClassVar[bool] = True
    epsilon: float = 0.2
    """Scale of the noise."""
    relative: bool = False
    """Measure the scale of the noise in units of the spread of an image's best 2K + 2 scores."""
    n_samples: float = 5
    """Number of noise draws B; inf takes their expectation."""

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        if math.isfinite(self.n_samples) and self.n_samples == int(self.n_samples):
            settings["n_samples"] = int(self.n_samples)
        return settings


@dataclass(frozen=True, kw_only=True)
class NoisedAverageKHingeConfig(LossConfig):
    label: ClassVar[str] = "Noised average-K hinge"
    ranges: ClassVar[Mapping[str, Range]] = {
        "epsilon": Range(0.01, 10.0, log=True),
        "margin": Range(0.3, 10.0, log=True),
    }
    uses_k: ClassVar[bool] = True
    name: str = "noised_average_k_hinge"
    epsilon: float = 0.2
    """Scale of the noise."""
    n_samples: float = math.inf
    """Number of noise draws B; inf solves for the threshold of the batch without noise."""
    margin: float = 1.0
    """By how much the label's score must exceed the threshold of the batch."""

    def _module(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        from shortlist.losses import NoisedAverageKHinge

        return NoisedAverageKHinge(**self.settings(), weight=weight)


@dataclass(frozen=True, kw_only=True)
class NoisedTopKHingeConfig(_NoisedConfig):
    label: ClassVar[str] = "Noised top-K hinge"
    ranges: ClassVar[Mapping[str, Range]] = {
        "epsilon": Range(0.01, 10.0, log=True),
        "margin": Range(0.3, 10.0, log=True),
    }
    name: str = "noised_topk_hinge"
    margin: float = 1.0
    """By how much the label's score must exceed the smoothed (K+1)-th largest."""

    def _module(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        from shortlist.losses import NoisedTopKHinge

        return NoisedTopKHinge(**self.settings(), weight=weight)


@dataclass(frozen=True, kw_only=True)
class ImbalancedNoisedTopKHingeConfig(_CosineConfig, _NoisedConfig):
    label: ClassVar[str] = "Imbalanced noised top-K hinge"
    paper_grid: ClassVar[Mapping[str, tuple[float, ...]]] = {"max_margin": _MARGINS, "epsilon": (0.01, 0.05, 0.1)}
    ranges: ClassVar[Mapping[str, Range]] = {  # of cosines, which are smaller than scores
        "max_margin": Range(0.0, 0.8),
        "epsilon": Range(0.001, 1.0, log=True),
        "scale": Range(10.0, 100.0, log=True),
    }
    name: str = "imbalanced_noised_topk_hinge"
    epsilon: float = 0.01
    """Scale of the noise."""
    max_margin: float = 0.2
    """Margin of the rarest class."""
    scale: float = 50.0
    """What the cosines are multiplied by."""

    def _module(self, class_counts: "Tensor", weight: "Tensor | None") -> "nn.Module":
        from shortlist.losses import ImbalancedNoisedTopKHinge

        return ImbalancedNoisedTopKHinge(class_counts, **self.settings(), weight=weight)
