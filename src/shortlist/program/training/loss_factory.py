"""Building the loss of a run, and what must hold between a loss and the data."""

from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.program.config import RunConfig
from shortlist.program.losses import LossConfig


def refuse_cosines_without_scale(config: RunConfig) -> None:
    """Raise an error if the scores are cosines and the loss has no scale.

    Cross-entropy of scores between -1 and 1 stays large however well the classes are separated.
    """
    if config.model.head == "cosine" and not config.loss.takes_cosines:
        raise ShortlistError(
            f"model.head must be linear for {config.loss.name}, which has no scale for cosines; "
            "for cross-entropy of scaled cosines, use loss.name ldam with loss.max_margin 0"
        )


def refuse_large_ks(config: RunConfig, classes: int) -> None:
    """Raise an error that names every K that is too large for this number of classes."""
    if classes < 2:
        raise ShortlistError(f"the data must have at least 2 classes, got {classes}")
    k, ks = config.loss.k, config.train.ks
    if k >= classes or max(ks) > classes:
        smaller = [str(k) for k in ks if k < classes] or ["1"]
        raise ShortlistError(
            f"loss.k must be below the number of classes, {classes}, and no train.ks above it, got {k} and {ks}: "
            f"try --loss.k {min(k, classes - 1)} --train.ks {' '.join(smaller)}"
        )


def build_loss(config: LossConfig, class_counts: Tensor) -> nn.Module:
    """The loss for classes with these numbers of training images."""
    if config.k >= len(class_counts):
        raise ShortlistError(f"loss.k must be below the number of classes, {len(class_counts)}, got {config.k}")
    return config.build(class_counts)
