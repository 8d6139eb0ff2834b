"""The data of the examples: thirty classes that look alike in fives, most of them with few training images.

It is synthetic and drawn from a seed. Every class is a pattern of colours; the five classes of a group share most of
theirs. Images are noisy, so one suggestion is often wrong, and a few suggestions are nearly always enough. Training
images are long-tailed: 200 of the most frequent class, 4 of the rarest. Validation and test have ten of each.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_CLASSES = 30
CLASSES_IN_GROUP = 5
TRAINING_IMAGES = (200 * (4 / 200) ** (torch.arange(NUM_CLASSES) / (NUM_CLASSES - 1))).round().long()
PATTERN = (3, 4, 4)  # channels, rows, columns
SIDE = 16  # of an image


class Samples(NamedTuple):
    inputs: Tensor
    labels: Tensor


class Splits(NamedTuple):
    train: Samples
    val: Samples
    test: Samples


def embeddings(seed: int = 0, *, held_out_of_class: int = 10) -> Splits:
    """Vectors ``(N, 48)`` and labels, as from a network that is not trained any further."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randn(NUM_CLASSES // CLASSES_IN_GROUP, *PATTERN, generator=generator)
    patterns = groups.repeat_interleave(CLASSES_IN_GROUP, 0)
    patterns = patterns + 0.35 * torch.randn(NUM_CLASSES, *PATTERN, generator=generator)
    # Shuffled, so that each group has frequent and rare classes.
    sizes = TRAINING_IMAGES[torch.randperm(NUM_CLASSES, generator=generator)]
    held_out = torch.full((NUM_CLASSES,), held_out_of_class)

    def draw(images_of_class: Tensor) -> Samples:
        labels = torch.arange(NUM_CLASSES).repeat_interleave(images_of_class)
        labels = labels[torch.randperm(len(labels), generator=generator)]
        noise = torch.randn(len(labels), *PATTERN, generator=generator)
        return Samples((patterns[labels] + noise).flatten(1), labels)

    return Splits(draw(sizes), draw(held_out), draw(held_out))


def images(seed: int = 0, *, held_out_of_class: int = 10) -> Splits:
    """The same as small images ``(N, 3, 16, 16)`` with values from 0 to 1."""

    def paint(samples: Samples) -> Samples:
        patterns = samples.inputs.unflatten(1, PATTERN)
        pictures = F.interpolate(patterns, size=(SIDE, SIDE), mode="bilinear")
        return Samples((0.5 + pictures / 6).clamp(0, 1), samples.labels)

    train, val, test = embeddings(seed, held_out_of_class=held_out_of_class)
    return Splits(paint(train), paint(val), paint(test))
