"""Do probabilities mean what they say? Of images with a confidence of 80 %, are 80 % right?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shortlist.ops.class_counts import size_groups

BINS = 15


@dataclass(frozen=True)
class ReliabilityBin:
    """Images whose best class has a similar probability."""

    place: int
    """From 0 for the lowest probabilities to ``BINS - 1``."""
    images: int
    confidence: float
    """Mean probability of the best class."""
    accuracy: float
    """Share of images of which the best class is the label."""


def reliability(probabilities: Tensor, labels: Tensor) -> tuple[ReliabilityBin, ...]:
    """The bins of equal width that hold an image, the lowest first.

    Example:
        >>> reliability(torch.tensor([[0.9, 0.1]] * 3 + [[0.4, 0.6]]), torch.tensor([0, 0, 1, 1]))[1].accuracy
        0.6666666666666666
    """
    best = probabilities.double().max(1)
    place = (best.values * BINS).long().clamp(max=BINS - 1)
    images = place.bincount(minlength=BINS)
    right, confidence = (
        torch.zeros(BINS, dtype=torch.float64, device=place.device).index_add_(0, place, values) / images
        for values in ((best.indices == labels).double(), best.values)
    )
    found = zip(images.tolist(), confidence.tolist(), right.tolist(), strict=True)
    return tuple(ReliabilityBin(at, *values) for at, values in enumerate(found) if values[0])


def calibration_error(bins: Sequence[ReliabilityBin]) -> float | None:
    """Expected calibration error: the mean difference of confidence and accuracy over images; None without images.

    Example:
        >>> calibration_error(reliability(torch.tensor([[0.9, 0.1]] * 10), torch.tensor([0] * 9 + [1])))
        0.0
    """
    images = sum(found.images for found in bins)
    if images == 0:
        return None
    return round(sum(found.images * abs(found.accuracy - found.confidence) for found in bins) / images, 6)


def reliability_by_size(
    probabilities: Tensor, labels: Tensor, class_counts: Tensor
) -> dict[str, tuple[ReliabilityBin, ...]]:
    """The bins of all images, and of those of classes with few, a medium number of and many training images."""
    groups = {"all": torch.ones_like(class_counts, dtype=torch.bool)} | size_groups(class_counts)
    return {
        name: reliability(probabilities[members[labels]], labels[members[labels]]) for name, members in groups.items()
    }
