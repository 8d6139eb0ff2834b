"""Class sizes that fall from a large head to a small tail, as in the CIFAR-LT benchmarks (Cao et al. 2019)."""

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.data.stratify import shuffled_within_classes


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
