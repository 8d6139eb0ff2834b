"""What the training program knows of data: three splits of numbered images, and the names of their classes."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shortlist.program.seeds import mix_seed


class Split(ABC):
    """Numbered inputs with labels."""

    labels: Tensor
    """``(N,)`` int64, on the CPU; what training sees, so with any label noise in it."""
    skipped: Sequence[str] = ()
    """Files that this process could not read and left out."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def batches(
        self, plan: Sequence[Tensor], device: torch.device, augment_seed: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each index tensor of the plan: network inputs, labels and the indices themselves, on the device.

        With a seed the inputs are augmented, each in a way that depends on the seed and its own index alone: not on the
        batch, the rank or the number of workers. Unreadable images that the user chose to skip are missing from
        their batch, which may be empty.
        """

    def fingerprint(self) -> dict[str, str] | None:
        """``names`` and ``sizes`` of its files as digests; None where the facts tell the data itself apart.

        What is known of files without reading them, which would take as long as an epoch.
        """
        return None

    @abstractmethod
    def thumbnail(self, index: int) -> Tensor | None:
        """``(C, H, W)`` uint8 picture of an input for people to look at; None if it is no picture."""


@dataclass(frozen=True)
class Preprocess:
    """How an image becomes the network's input; enough to do it again for an image that a user brings."""

    channels: int
    """1 for grey, 3 for RGB."""
    resize: int
    """Length of the shorter side after resizing."""
    crop: int
    """Side of the central square that the network sees."""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 ``(N, C, H, W)`` to floats of about zero mean and unit deviation."""
        # While torch traces a module, constants are fake tensors, which must not outlive the trace.
        plain = type(images) is Tensor and not torch.compiler.is_compiling()
        mean, std = (_kept_mean_and_std if plain else _mean_and_std)(self, images.device)
        return (images.float() - mean) / std


def _mean_and_std(preprocess: Preprocess, device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.tensor([preprocess.mean, preprocess.std], device=device).view(2, -1, 1, 1) * 255
    return values[0], values[1]


@cache
def _kept_mean_and_std(preprocess: Preprocess, device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept, because a tensor made from Python numbers on a GPU waits for the GPU."""
    with torch.inference_mode(False):  # tensors made in that mode could not be used where gradients are wanted
        return _mean_and_std(preprocess, device)


@dataclass(frozen=True)
class Problem:
    """A classification problem: what to learn from, choose by and report on."""

    classes: tuple[str, ...]
    """Names, in the order of the labels."""
    train: Split
    val: Split
    test: Split
    input_shape: tuple[int, ...]
    """Of one network input: ``(C, H, W)`` of images, ``(d,)`` of embeddings."""
    preprocess: Preprocess | None = None
    """None for embeddings."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What was decided on the way (files of a split made here, labels changed by noise, ...): kept with the run."""
    superclasses: tuple[str, ...] = ()
    """Name of the superclass of each class; empty where the data has none."""

    @property
    def class_counts(self) -> Tensor:
        """Training images of each class."""
        return torch.bincount(self.train.labels, minlength=len(self.classes))

    def split(self, name: str) -> Split:
        return {"train": self.train, "val": self.val, "test": self.test}[name]


def evaluation_plan(count: int, batch_size: int, rank: int, world_size: int) -> list[Tensor]:
    """Batches of this rank's share: every image once over all ranks, none twice, nothing padded."""
    mine = torch.arange(count)[rank::world_size]
    return list(torch.split(mine, batch_size)) if len(mine) else []


def fewest_images(batch_size: int, pieces: int) -> int:
    """In a piece of a batch: two where pieces have more than one, as a single image has no batch statistics."""
    return min(2, batch_size // pieces)


def training_plan(
    count: int, batch_size: int, parts: int, seed: int, epoch: int, rank: int, world_size: int
) -> list[list[Tensor]]:
    """Steps of one epoch: a shuffle that depends on seed and epoch alone, cut into batches, each cut among the ranks.

    Each step is a list of ``parts`` index tensors, to be accumulated. The union over ranks is the same for any number
    of ranks, but for the last batch: it is left out if it is too small to give every rank and part its
    ``fewest_images``.
    """
    least = fewest_images(batch_size, parts * world_size)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(mix_seed(seed, epoch)))
    steps = []
    for batch in torch.split(order, batch_size):
        pieces = batch.tensor_split(parts * world_size)
        if len(pieces[-1]) >= max(1, least):
            steps.append(list(pieces[rank * parts : (rank + 1) * parts]))
    return steps
