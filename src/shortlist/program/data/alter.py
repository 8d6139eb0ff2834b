"""What a configuration does to the training images of any data set: fewer of some classes, some labels wrong."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.seeds import mix_seed
from shortlist.program.text import some_of


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


PAPER_GROUP_SIZE = 5


def consecutive_groups(num_classes: int) -> Tensor:
    """Blocks of five consecutive labels: the groups of the paper's released code.

    Where five does not divide the number of classes, the last block is smaller.

    Example:
        >>> consecutive_groups(7).tolist()
        [0, 0, 0, 0, 0, 1, 1]
    """
    return torch.arange(num_classes) // PAPER_GROUP_SIZE


def redraw_within_groups(labels: Tensor, group_of_class: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Each label, with probability ``p``, drawn anew from the classes of its group.

    All classes of the group are equally likely, the true one among them: with groups of five, ``p = 0.5`` makes
    0.4 of the labels wrong.

    Example:
        >>> labels = torch.tensor([0, 1, 2, 3])
        >>> noisy = redraw_within_groups(labels, torch.tensor([0, 1, 0, 1]), 1.0, torch.Generator().manual_seed(0))
        >>> (noisy % 2).tolist()
        [0, 1, 0, 1]
    """
    members = group_of_class.argsort(stable=True)
    size = torch.bincount(group_of_class)
    first = size.cumsum(0) - size
    redrawn, which = torch.rand((2, len(labels)), generator=generator, dtype=torch.float64)
    group = group_of_class[labels]
    replacement = members[first[group] + (which * size[group]).long()]
    return torch.where(redrawn < p, replacement, labels)


def size_profile(num_classes: int, imbalance: float, kind: str) -> Tensor:
    """Size of each class as a share of the largest, from 1 down to ``1 / imbalance``, float64.

    ``exponential``: ``imbalance ** (-c / (L - 1))`` for class c of L. ``step``: 1 in the first half, ``1 / imbalance``
    in the second.

    Example:
        >>> size_profile(3, 100, "exponential").tolist()
        [1.0, 0.1, 0.01]
        >>> size_profile(4, 10, "step").tolist()
        [1.0, 1.0, 0.1, 0.1]
    """
    rank = torch.arange(num_classes, dtype=torch.float64)
    exponent = (rank >= num_classes // 2).double() if kind == "step" else rank / max(num_classes - 1, 1)
    return torch.as_tensor(imbalance, dtype=torch.float64) ** -exponent


def sizes_from_profile(profile: Tensor, largest: float) -> Tensor:
    """Whole sizes, rounded down as the benchmarks do, and at least 1."""
    # A hair is added because 500 * 100 ** -1 may come out below 5.
    return (profile * largest + 1e-9).long().clamp(min=1)


def long_tailed_subset(
    labels: Tensor, num_classes: int, *, imbalance: float, kind: str, generator: torch.Generator
) -> Tensor:
    """Sorted indices of a random subset whose class sizes follow the profile, in the order of the labels.

    The head keeps as many images as the largest class has; a class that has fewer than its share keeps them all.

    Example:
        >>> labels = torch.arange(3).repeat_interleave(100)
        >>> kept = long_tailed_subset(labels, 3, imbalance=100, kind="exponential", generator=torch.Generator())
        >>> torch.bincount(labels[kept]).tolist()
        [100, 10, 1]
    """
    available = torch.bincount(labels, minlength=num_classes)
    if not len(labels):
        raise ShortlistError("imbalance needs training images, got none")
    wanted = sizes_from_profile(size_profile(num_classes, imbalance, kind), float(available.max()))
    grouped, place_in_class = shuffled_within_classes(labels, generator)
    kept: Tensor = grouped[place_in_class < wanted[labels[grouped]]].sort().values
    return kept


def hold_out(
    labels: Tensor, classes: Sequence[str], fraction: float, parts: int, generator: torch.Generator
) -> list[Tensor]:
    """Sorted indices of what stays for training, then of each of the ``parts`` held out, drawn at random.

    Each part takes ``fraction`` of every class, at least one image; every class must keep one for training.

    Example:
        >>> labels = torch.tensor([0] * 10 + [1] * 4)
        >>> rest, val = hold_out(labels, ["cat", "dog"], 0.2, 1, torch.Generator().manual_seed(0))
        >>> torch.bincount(labels[rest]).tolist(), torch.bincount(labels[val]).tolist()
        ([8, 3], [2, 1])
    """
    if fraction == 0:
        raise ShortlistError("data.val_fraction must be above 0 where the data has no validation split, got 0")
    available = torch.bincount(labels, minlength=len(classes))
    taken = (available * fraction).round().long().clamp(min=1)
    short = (available <= parts * taken).nonzero().flatten().tolist()
    if short:
        raise ShortlistError(
            f"every class must have at least {parts + 1} images, and more than are held out of it, a share of "
            f"{fraction} (data.val_fraction){' each for validation and test' if parts == 2 else ''}; too few in "
            f"{len(short)} of {len(classes)} classes: "
            + some_of([f"{classes[label]} ({int(available[label])})" for label in short])
        )
    grouped, place_in_class = shuffled_within_classes(labels, generator)
    # 0 stays for training; the first images of each shuffled class are parts 1, 2, ...
    part = place_in_class.div(taken[labels[grouped]], rounding_mode="floor") + 1
    part[part > parts] = 0
    return [grouped[part == number].sort().values for number in range(parts + 1)]


def shuffled_within_classes(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of all images, class after class, at random within each; and the place of each in its class, from 0."""
    shuffled = torch.randperm(len(labels), generator=generator)
    grouped = shuffled[labels[shuffled].argsort(stable=True)]
    sizes = torch.bincount(labels)
    return grouped, torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels[grouped]]
