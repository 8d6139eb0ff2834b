"""What a configuration does to the training images of any data set: fewer of some classes, some labels wrong."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.label_noise import consecutive_groups, redraw_within_groups
from shortlist.program.data.long_tail import long_tailed_subset
from shortlist.program.seeds import mix_seed


def thinned(labels: Tensor, num_classes: int, config: DataConfig) -> tuple[Tensor, dict[str, Any]]:
    """Indices of the training images that ``config.imbalance`` keeps, and a note of it for the run."""
    if config.imbalance == 1:
        return torch.arange(len(labels)), {}
    kept = long_tailed_subset(
        labels,
        num_classes,
        imbalance=config.imbalance,
        kind=config.imbalance_kind,
        generator=seeded(config, "imbalance"),
    )
    return kept, {"imbalance": {"kept": len(kept), "of": len(labels)}}


def noisy(
    labels: Tensor, num_classes: int, config: DataConfig, superclasses: Sequence[str] = ()
) -> tuple[Tensor, dict[str, Any]]:
    """Training labels with the noise that ``config.label_noise`` asks for, and a note of how many are wrong now.

    ``superclasses`` names the superclass of each class, where the data has any.
    """
    if config.label_noise == 0:
        return labels, {}
    if config.noise_groups == "consecutive":
        groups = consecutive_groups(num_classes)
    elif superclasses:
        names = sorted(set(superclasses))
        groups = torch.tensor([names.index(name) for name in superclasses])
    else:
        raise ShortlistError(
            f"data.noise_groups must be consecutive for {config.name}, which has no superclasses, "
            f"got {config.noise_groups}"
        )
    changed = redraw_within_groups(labels, groups, config.label_noise, seeded(config, "label noise"))
    return changed, {"label_noise": {"changed": int((changed != labels).sum()), "of": len(labels)}}


def seeded(config: DataConfig, purpose: str) -> torch.Generator:
    """Random numbers for one purpose: asking for one alteration must not change what another one draws."""
    return torch.Generator().manual_seed(mix_seed(config.seed, *purpose.encode()))
