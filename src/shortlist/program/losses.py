"""The losses that the program trains with: one frozen dataclass for each.

Its fields are the settings of the loss, with the defaults of the Module. It also knows how to build the Module, what
people call the loss, and what a search tries. This is all the program knows of a loss: a new one needs its function
(``shortlist.functional``), its Module (``shortlist.losses``), a dataclass here, and a line in the tests.

Standard library only, so that any machine can read a configuration; ``build`` alone needs torch. The attribute
docstrings are the help of the command line.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shortlist.errors import ShortlistError
from shortlist.program.settings import check_within
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

    name: str = ""
    """Which loss to train with. Another loss starts from its own defaults."""
    k: int = 5
    """K, the number of suggestions. Top-K losses are made for it, and the best epoch is picked at it."""

    def __init_subclass__(cls) -> None:
        if name := cls.__dict__.get("name"):
            LOSSES[name] = cls

    def __post_init__(self) -> None:
        if LOSSES.get(self.name) is not type(self):
            self.kind_called(self.name)
            raise ShortlistError(f"{type(self).__name__} must have the name {type(self).name}, got {self.name}")
        check_within(self, "k", 1)
        for name in {"epsilon", "tau", "gamma", "margin", "max_margin"} & self.settings().keys():
            check_within(self, name, 0)
        if "scale" in self.settings():
            check_within(self, "scale", 1e-12)
        n_samples = self.settings().get("n_samples", math.inf)
        if n_samples != math.inf and not (n_samples >= 1 and n_samples == int(n_samples)):
            raise ShortlistError(f"loss.n_samples must be a whole number >= 1, or inf, got {n_samples}")

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
        unused = {"name"} if self.uses_k else {"name", "k"}
        names = [field.name for field in dataclasses.fields(self) if field.name not in unused]
        return {name: getattr(self, name) for name in names}

    def build(self, class_counts: "Tensor") -> "nn.Module":
        """The loss for classes with these numbers of training images."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class CrossEntropyConfig(LossConfig):
    label: ClassVar[str] = "Cross-entropy"
    name: str = "cross_entropy"

    def build(self, class_counts: "Tensor") -> "nn.Module":
        from torch import nn

        return nn.CrossEntropyLoss()


@dataclass(frozen=True, kw_only=True)
class FocalConfig(LossConfig):
    label: ClassVar[str] = "Focal"
    paper_grid: ClassVar[Mapping[str, tuple[float, ...]]] = {"gamma": (0.5, 1.0, 2.0, 5.0)}
    ranges: ClassVar[Mapping[str, Range]] = {"gamma": Range(0.0, 5.0)}
    name: str = "focal"
    gamma: float = 2.0
    """Focus: how much less an example counts that is already classified well."""

    def build(self, class_counts: "Tensor") -> "nn.Module":
        from shortlist.losses import FocalLoss

        return FocalLoss(**self.settings())


_MARGINS = (0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True, kw_only=True)
class LDAMConfig(LossConfig):
    label: ClassVar[str] = "LDAM"
    paper_grid: ClassVar[Mapping[str, tuple[float, ...]]] = {"max_margin": _MARGINS}
    ranges: ClassVar[Mapping[str, Range]] = {"max_margin": Range(0.0, 0.8), "scale": Range(10.0, 100.0, log=True)}
    takes_cosines: ClassVar[bool] = True
    name: str = "ldam"
    max_margin: float = 0.5
    """Margin of the rarest class."""
    scale: float = 30.0
    """What the cosines are multiplied by."""

    def build(self, class_counts: "Tensor") -> "nn.Module":
        from shortlist.losses import LDAMLoss

        return LDAMLoss(class_counts, **self.settings())


@dataclass(frozen=True, kw_only=True)
class LogitAdjustedConfig(LossConfig):
    label: ClassVar[str] = "Logit adjustment"
    ranges: ClassVar[Mapping[str, Range]] = {"tau": Range(0.0, 3.0)}
    name: str = "logit_adjusted"
    tau: float = 1.0
    """How much of the class frequencies to correct for: 0 nothing, 1 all."""

    def build(self, class_counts: "Tensor") -> "nn.Module":
        from shortlist.losses import LogitAdjustedLoss

        return LogitAdjustedLoss(class_counts, **self.settings())


@dataclass(frozen=True, kw_only=True)
class BalancedSoftmaxConfig(LossConfig):
    """Logit adjustment with tau = 1."""

    label: ClassVar[str] = "Balanced softmax"
    name: str = "balanced_softmax"

    def build(self, class_counts: "Tensor") -> "nn.Module":
        from shortlist.losses import LogitAdjustedLoss

        return LogitAdjustedLoss(class_counts)


@dataclass(frozen=True, kw_only=True)
class TopKHingeConfig(LossConfig):
    label: ClassVar[str] = "Top-K hinge"
    uses_k: ClassVar[bool] = True
    name: str = "topk_hinge"

    def build(self, class_counts: "Tensor") -> "nn.Module":
        from shortlist.losses import TopKHinge

        return TopKHinge(**self.settings())


@dataclass(frozen=True, kw_only=True)
class ConvexTopKHingeConfig(LossConfig):
    label: ClassVar[str] = "Convex top-K hinge"
    uses_k: ClassVar[bool] = True
    name: str = "convex_topk_hinge"

    def build(self, class_counts: "Tensor") -> "nn.Module":
        from shortlist.losses import ConvexTopKHinge

        return ConvexTopKHinge(**self.settings())


@dataclass(frozen=True, kw_only=True)
class CalibratedTopKHingeConfig(LossConfig):
    label: ClassVar[str] = "Calibrated top-K hinge"
    uses_k: ClassVar[bool] = True
    name: str = "calibrated_topk_hinge"

    def build(self, class_counts: "Tensor") -> "nn.Module":
        from shortlist.losses import CalibratedTopKHinge

        return CalibratedTopKHinge(**self.settings())


@dataclass(frozen=True, kw_only=True)
class SmoothTopKHingeConfig(LossConfig):
    label: ClassVar[str] = "Smoothed top-K hinge"
    paper_grid: ClassVar[Mapping[str, tuple[float, ...]]] = {"tau": (0.1, 1.0)}
    ranges: ClassVar[Mapping[str, Range]] = {"tau": Range(0.01, 10.0, log=True)}
    uses_k: ClassVar[bool] = True
    name: str = "smooth_topk_hinge"
    tau: float = 1.0
    """Temperature of the smoothing."""

    def build(self, class_counts: "Tensor") -> "nn.Module":
        from shortlist.losses import SmoothTopKHinge

        return SmoothTopKHinge(**self.settings())


@dataclass(frozen=True, kw_only=True)
class _NoisedConfig(LossConfig):
    uses_k: ClassVar[bool] = True
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
class NoisedTopKHingeConfig(_NoisedConfig):
    label: ClassVar[str] = "Noised top-K hinge"
    ranges: ClassVar[Mapping[str, Range]] = {
        "epsilon": Range(0.01, 10.0, log=True),
        "margin": Range(0.3, 10.0, log=True),
    }
    name: str = "noised_topk_hinge"
    margin: float = 1.0
    """By how much the label's score must exceed the smoothed (K+1)-th largest."""

    def build(self, class_counts: "Tensor") -> "nn.Module":
        from shortlist.losses import NoisedTopKHinge

        return NoisedTopKHinge(**self.settings())


@dataclass(frozen=True, kw_only=True)
class ImbalancedNoisedTopKHingeConfig(_NoisedConfig):
    label: ClassVar[str] = "Imbalanced noised top-K hinge"
    paper_grid: ClassVar[Mapping[str, tuple[float, ...]]] = {"max_margin": _MARGINS, "epsilon": (0.01, 0.05, 0.1)}
    ranges: ClassVar[Mapping[str, Range]] = {  # of cosines, which are smaller than scores
        "max_margin": Range(0.0, 0.8),
        "epsilon": Range(0.001, 1.0, log=True),
        "scale": Range(10.0, 100.0, log=True),
    }
    takes_cosines: ClassVar[bool] = True
    name: str = "imbalanced_noised_topk_hinge"
    epsilon: float = 0.01
    """Scale of the noise."""
    max_margin: float = 0.2
    """Margin of the rarest class."""
    scale: float = 50.0
    """What the cosines are multiplied by."""

    def build(self, class_counts: "Tensor") -> "nn.Module":
        from shortlist.losses import ImbalancedNoisedTopKHinge

        return ImbalancedNoisedTopKHinge(class_counts, **self.settings())
