"""Class weights in the loss. They may start late, so that features are first learnt from all images alike."""

import torch
from torch import Tensor, nn

from shortlist.program.config import RunConfig

_BETA = 0.9999  # of the effective number of images, as Cui et al. (2019) and Cao et al. (2019) have it


def class_weights(kind: str, class_counts: Tensor) -> Tensor:
    """``(L,)`` weights with a mean of 1.

    Args:
        kind: ``none``; ``inverse``, one over the number n of images; or ``effective``, one over their effective number,
            ``(1 - beta^n) / (1 - beta)``.
        class_counts: ``(L,)`` number of training images of each class.

    Example:
        >>> class_weights("inverse", torch.tensor([1, 3]))
        tensor([1.5000, 0.5000])
    """
    images = class_counts.clamp(min=1).double()
    numbers = {"none": torch.ones_like(images), "inverse": images, "effective": 1 - _BETA**images}[kind]
    weights = 1 / numbers
    return (weights / weights.mean()).float()


def set_class_weights(loss: nn.Module, config: RunConfig, class_counts: Tensor, epoch: int) -> None:
    """Give the loss, and all losses within it, the weights of this epoch.

    They depend on the epoch alone, so resuming needs no state. They are copied in place: a captured CUDA graph keeps
    reading the same memory.
    """
    if config.loss.class_weights == "none":
        return
    has_begun = epoch >= round(config.loss.weight_from * config.train.epochs)
    weights = class_weights(config.loss.class_weights if has_begun else "none", class_counts)
    for module in loss.modules():
        if isinstance(weight := getattr(module, "weight", None), Tensor):
            weight.copy_(weights)
