"""Accuracy against K and against class size, from what the runs left in their folders."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shortlist.program.report.gather import ClassAccuracy, Predictions

_MOST_BINS = 10


def micro_by_k(predictions: Predictions) -> list[float]:
    """For K = 1, 2, ... the share of images that are correct at K, for as many K as there are suggestions.

    Example:
        >>> labels, suggestions, above = torch.tensor([2, 0]), torch.tensor([[2, 1], [1, 0]]), torch.tensor([0, 1])
        >>> micro_by_k(Predictions(labels, suggestions, above))
        [0.5, 1.0]
    """
    hits_NK, _ = _hits(predictions)
    return list(hits_NK.mean(0).tolist())


def macro_by_k(predictions: Predictions) -> list[float]:
    """The same, as the mean over the classes that occur of the share in each class."""
    hits_NK, labels_N = _hits(predictions)
    _, which_N, images_C = torch.unique(labels_N, return_inverse=True, return_counts=True)
    hits_CK = hits_NK.new_zeros(len(images_C), hits_NK.shape[1]).index_add_(0, which_N, hits_NK)
    return list((hits_CK / images_C.unsqueeze(1)).mean(0).tolist())


def _hits(predictions: Predictions) -> tuple[Tensor, Tensor]:
    could_be_read = predictions.labels >= 0
    labels_N = predictions.labels[could_be_read]
    ks_K = torch.arange(1, predictions.suggestions.shape[1] + 1)
    return (predictions.above[could_be_read].unsqueeze(1) < ks_K).double(), labels_N


@dataclass(frozen=True)
class SizeBin:
    """Classes of about the same number of training images."""

    octave: int
    """Its place on a logarithmic scale: sizes from ``2 ** octave`` on; one below the others for no image at all."""
    octaves: int
    """Its width on that scale."""
    sizes: range
    classes: int

    @property
    def text(self) -> str:
        smallest, largest = self.sizes[0], self.sizes[-1]
        return f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"


def size_bins(train_images: Sequence[int]) -> list[SizeBin]:
    """Bins of doubling size, or quadrupling and so on where doubling would make too many.

    Example:
        >>> [(each.text, each.classes) for each in size_bins([0, 1, 5, 6, 7, 9])]
        [('0', 1), ('1', 1), ('4 to 7', 3), ('8 to 15', 1)]
    """
    sizes = [size for size in train_images if size > 0]
    span = math.log2(max(sizes) / min(sizes)) if sizes else 0.0
    octaves = max(1, math.ceil(span / _MOST_BINS))
    counts = Counter(_octave(size, octaves) for size in sizes)
    bins = [
        SizeBin(octave, octaves, range(2**octave, 2 ** (octave + octaves)), classes)
        for octave, classes in sorted(counts.items())
    ]
    if len(sizes) < len(train_images):
        before = bins[0].octave - octaves if bins else 0
        bins.insert(0, SizeBin(before, octaves, range(1), len(train_images) - len(sizes)))
    return bins


def macro_in_bin(accuracy: ClassAccuracy, k: int, size_bin: SizeBin) -> float | None:
    """Mean accuracy at K of the classes of these sizes that occur in the test images."""
    if k not in accuracy.by_k:  # the file is another run's
        return None
    sizes = accuracy.train_images
    inside = (sizes >= size_bin.sizes[0]) & (sizes <= size_bin.sizes[-1])
    mean = float(accuracy.by_k[k][inside].nanmean())
    return None if math.isnan(mean) else mean


def _octave(size: int, octaves: int) -> int:
    return (size.bit_length() - 1) // octaves * octaves
