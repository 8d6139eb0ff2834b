"""Building the loss of a run, and what must hold between a loss and the data."""

from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.program.config import RunConfig
from shortlist.program.losses import LossConfig


def refuse_cosines_without_scale(config: RunConfig) -> None:
    """Raise an error if the network's scores are cosines and the loss has nothing to spread them with.

    Cross-entropy of scores between -1 and 1 cannot get small however well the classes are told apart.
    """
    if config.model.head == "cosine" and not config.loss.takes_cosines:
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
    return config.build(class_counts)
