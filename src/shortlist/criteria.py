"""From a configuration to the loss it names."""

import math
from collections.abc import Callable

from torch import Tensor, nn

from shortlist import losses
from shortlist.config import SETTINGS_OF, LossConfig, LossName
from shortlist.errors import ShortlistError

_MODULES: dict[LossName, Callable[..., nn.Module]] = {
    "cross_entropy": nn.CrossEntropyLoss,
    "focal": losses.FocalLoss,
    "ldam": losses.LDAMLoss,
    "logit_adjusted": losses.LogitAdjustedLoss,
    "balanced_softmax": losses.LogitAdjustedLoss,
    "topk_hinge": losses.TopKHinge,
    "convex_topk_hinge": losses.ConvexTopKHinge,
    "calibrated_topk_hinge": losses.CalibratedTopKHinge,
    "smooth_topk_hinge": losses.SmoothTopKHinge,
    "noised_topk_hinge": losses.NoisedTopKHinge,
    "imbalanced_noised_topk_hinge": losses.ImbalancedNoisedTopKHinge,
}
_KNOW_CLASS_COUNTS = (losses.LDAMLoss, losses.LogitAdjustedLoss, losses.ImbalancedNoisedTopKHinge)


def build_loss(config: LossConfig, class_counts: Tensor) -> nn.Module:
    """The configured loss for classes with these numbers of training images."""
    if config.k >= len(class_counts):
        raise ShortlistError(f"loss.k must be below the number of classes, {len(class_counts)}, got {config.k}")
    settings = {name: getattr(config, name) for name in SETTINGS_OF[config.name]}
    if settings.get("n_samples", math.inf) != math.inf:
        settings["n_samples"] = int(settings["n_samples"])
    module = _MODULES[config.name]
    return module(class_counts, **settings) if module in _KNOW_CLASS_COUNTS else module(**settings)
