"""From a configuration to the loss it names."""

import inspect
import math
from collections.abc import Callable

from torch import Tensor, nn

from shortlist import losses
from shortlist.errors import ShortlistError
from shortlist.program.config import SETTINGS_OF, LossConfig, LossName, RunConfig

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


def refuse_cosines_without_scale(config: RunConfig) -> None:
    """Raise an error if the network's scores are cosines and the loss has nothing to spread them with.

    Cross-entropy of scores between -1 and 1 cannot get small however well the classes are told apart.
    """
    if config.model.head == "cosine" and "scale" not in SETTINGS_OF[config.loss.name]:
        raise ShortlistError(
            f"model.head must be linear for {config.loss.name}, which has no scale to spread cosines with; "
            "cross-entropy with one is loss.name ldam with loss.max_margin 0"
        )


def refuse_large_ks(config: RunConfig, classes: int) -> None:
    """Raise an error, which tells of all of them at once, if there are too few classes for a K."""
    if classes < 2:
        raise ShortlistError(f"the data must have at least 2 classes, got {classes}")
    k, ks = config.loss.k, config.train.ks
    if k >= classes or max(ks) > classes:
        smaller = [str(each) for each in ks if each < classes] or ["1"]
        raise ShortlistError(
            f"loss.k must be below the number of classes, {classes}, and no train.ks above it, got {k} and {ks}: "
            f"try --loss.k {min(k, classes - 1)} --train.ks {' '.join(smaller)}"
        )


def build_loss(config: LossConfig, class_counts: Tensor) -> nn.Module:
    """The configured loss for classes with these numbers of training images."""
    if config.k >= len(class_counts):
        raise ShortlistError(f"loss.k must be below the number of classes, {len(class_counts)}, got {config.k}")
    settings = {name: getattr(config, name) for name in SETTINGS_OF[config.name]}
    if settings.get("n_samples", math.inf) != math.inf:
        settings["n_samples"] = int(settings["n_samples"])
    module = _MODULES[config.name]
    knows_counts = "class_counts" in inspect.signature(module).parameters
    return module(class_counts, **settings) if knows_counts else module(**settings)
