"""From a configuration to the loss it names."""

import math

from torch import Tensor, nn

from shortlist import losses
from shortlist.config import LossConfig
from shortlist.errors import ShortlistError


def build_loss(config: LossConfig, class_counts: Tensor) -> nn.Module:
    """The configured loss for classes with these numbers of training images."""
    if config.k >= len(class_counts):
        raise ShortlistError(f"loss.k must be below the number of classes, {len(class_counts)}, got {config.k}")
    k, epsilon = config.k, config.epsilon
    n_samples = math.inf if config.n_samples == math.inf else int(config.n_samples)
    match config.name:
        case "cross_entropy":
            return nn.CrossEntropyLoss()
        case "focal":
            return losses.FocalLoss(gamma=config.gamma)
        case "ldam":
            return losses.LDAMLoss(class_counts, max_margin=config.max_margin, scale=config.scale)
        case "logit_adjusted":
            return losses.LogitAdjustedLoss(class_counts, tau=config.tau)
        case "balanced_softmax":
            return losses.LogitAdjustedLoss(class_counts)
        case "topk_hinge":
            return losses.TopKHinge(k)
        case "convex_topk_hinge":
            return losses.ConvexTopKHinge(k)
        case "calibrated_topk_hinge":
            return losses.CalibratedTopKHinge(k)
        case "smooth_topk_hinge":
            return losses.SmoothTopKHinge(k, tau=config.tau)
        case "noised_topk_hinge":
            return losses.NoisedTopKHinge(k, epsilon=epsilon, n_samples=n_samples)
        case "imbalanced_noised_topk_hinge":
            return losses.ImbalancedNoisedTopKHinge(
                class_counts, k, epsilon=epsilon, n_samples=n_samples, max_margin=config.max_margin, scale=config.scale
            )
