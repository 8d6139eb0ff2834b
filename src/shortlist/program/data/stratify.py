"""Holding images out for validation or test, the same share of every class."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.wording import some_of


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
