"""Inputs to try an exported file on: the run's own held-out images, or pictures made for the purpose."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.data.base import Preprocess, Problem

_SIDES = (60, 400)  # smallest and largest side of a picture that is made
_COLOURS = 12  # random ones along each side of such a picture, with smooth passages between them
_THIN_EVERY, _THIN = 10, 30  # which of these pictures are thin, and how many times longer than wide


@dataclass(frozen=True)
class CheckInputs:
    """Inputs of a run as its users have them, before any preprocessing. Iterating reads them, one after another."""

    source: str
    """What they are, in words."""
    labels: Sequence[int]
    """-1 if unknown."""
    read: Callable[[int], Any]
    """The input of a place: an image of Pillow, uint8 pixels ``(C, H, W)``, or a vector."""

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """Inputs and labels. Images that cannot be read are left out."""
        for place, label in enumerate(self.labels):
            try:
                found = self.read(place)
            except ShortlistError:
                continue
            yield found, label

    def batches(self) -> Iterator[np.ndarray[Any, Any]]:
        """Each of them as a batch of one, as an exported file takes it."""
        return (as_batch(given) for given, _ in self)


def as_batch(given: Any) -> np.ndarray[Any, Any]:
    """``(1, C, H, W)`` uint8 pixels of an image, or ``(1, d)`` float32 of a vector."""
    if isinstance(given, Tensor):
        return (given if given.dtype == torch.uint8 else given.float()).unsqueeze(0).numpy()
    pixels = np.atleast_3d(np.asarray(given))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[np.newaxis])


def held_out_inputs(problem: Problem, split: str, most: int, without: Sequence[int] = ()) -> CheckInputs:
    """At most so many inputs of a split, evenly spaced, without the ones of these numbers."""
    images = problem.split(split)
    numbers = torch.arange(len(images))
    numbers = numbers[~torch.isin(numbers, torch.tensor(without, dtype=torch.int64))]
    numbers = numbers[:: max(1, -(-len(numbers) // most))]
    return CheckInputs(
        f"{len(numbers):,} {split} images of the run",
        images.labels[numbers].tolist(),
        lambda place: images.original(int(numbers[place])),
    )


def made_inputs(preprocess: Preprocess | None, width: int, count: int) -> CheckInputs:
    """Pictures of random colours and sizes, some of them thin; or random vectors of this width."""
    if preprocess is None:
        vectors = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
        return CheckInputs(f"{count:,} random vectors", [-1] * count, vectors.__getitem__)
    channels = () if preprocess.channels == 1 else (preprocess.channels,)

    def picture(place: int) -> Image.Image:
        random = np.random.default_rng(place)
        colours = random.integers(0, 256, (_COLOURS, _COLOURS, *channels), dtype=np.uint8)
        width, height = random.integers(*_SIDES, 2, endpoint=True).tolist()
        size = (width, width // _THIN) if place % _THIN_EVERY == 0 else (width, height)
        return Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC)

    return CheckInputs(f"{count:,} pictures made for the purpose", [-1] * count, picture)
