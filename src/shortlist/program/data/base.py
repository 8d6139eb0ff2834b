"""What every data set gives to the program: three splits of numbered samples, class names, and facts to record."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypedDict

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import Fit
from shortlist.program.seeds import mix_seed

if TYPE_CHECKING:
    from PIL import Image

SPLITS = ("train", "val", "test")


class Fingerprint(TypedDict):
    """Tells whether samples of a split were replaced: ``names`` is then as before, and ``sizes`` is not.

    Samples that were only added change both.
    """

    names: str
    """Digest of the file names; of data in memory, the number of rows."""
    sizes: str
    """Digest of the file sizes; of data in memory, of the rows themselves."""


class Split(ABC):
    """Numbered samples with labels."""

    labels: Tensor
    """``(N,)`` int64, on the CPU. Label noise is included."""
    skipped: Sequence[str] = ()
    """Files that this process could not read and left out."""
    preprocess: "Preprocess | None" = None
    """None for embeddings."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def batches(
        self, plan: Sequence[Tensor], device: torch.device, augment_seed: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each index tensor of the plan: network inputs, labels and the indices themselves, on the device.

        With a seed the inputs are augmented. The augmentation of a sample depends on the seed and its index only: not
        on the batch, the rank or the number of workers. Unreadable images that the user chose to skip are missing from
        their batch, which may be empty.
        """

    def with_preprocess(self, preprocess: "Preprocess") -> Self:
        """The same samples, with inputs made in another way."""
        other = copy.copy(self)
        other.preprocess = preprocess
        return other

    def with_labels(self, labels: Tensor) -> Self:
        """The same samples with other labels."""
        other = copy.copy(self)
        other.labels = labels
        return other

    def fingerprint(self) -> Fingerprint | None:
        """Recorded with a run, to notice replaced samples. No file is read: that would take as long as an epoch."""
        return None

    @abstractmethod
    def content_digest(self) -> str:
        """Changes when an input may have changed, and not with the labels: for what is computed from the inputs alone.

        No file is read.
        """

    @abstractmethod
    def original(self, index: int) -> "Image.Image | Tensor":
        """An input before any preprocessing: a picture, its uint8 pixels ``(C, H, W)``, or a vector."""

    @abstractmethod
    def thumbnail(self, index: int) -> Tensor | None:
        """``(C, H, W)`` uint8 picture of an input for people to look at; None if it is no picture."""


@dataclass(frozen=True)
class Held:
    """What was made of the images of a split."""

    rows: Tensor
    """One for each image; zero for an image that could not be read."""
    is_read: Tensor
    """``(N,)`` bool."""
    skipped: tuple[str, ...] = ()
    """Files that could not be read."""


@dataclass(frozen=True)
class Preprocess:
    """How an image becomes the network's input: enough to repeat it for new images."""

    channels: int
    """1 for grey, 3 for RGB."""
    resize: int
    """Length of the shorter side after resizing, before it is cropped."""
    crop: int
    """Side of the square that the network sees."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: Fit = "crop"
    """How an image becomes square: its middle is cropped, or it is padded with the mean colour."""

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 ``(N, C, H, W)`` to floats of about zero mean and unit deviation."""
        # While torch traces a module, constants are fake tensors, which must not outlive the trace.
        is_plain = type(images) is Tensor and not torch.compiler.is_compiling()
        mean, std = (_cached_mean_and_std if is_plain else _mean_and_std)(self, images.device)
        return (images.float() - mean) / std


def _mean_and_std(preprocess: Preprocess, device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.tensor([preprocess.mean, preprocess.std], device=device).view(2, -1, 1, 1) * 255
    return values[0], values[1]


@cache
def _cached_mean_and_std(preprocess: Preprocess, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cached, because making a GPU tensor from Python numbers waits for the GPU."""
    with torch.inference_mode(False):  # tensors made in that mode cannot be used where gradients are needed
        return _mean_and_std(preprocess, device)


@dataclass(frozen=True)
class Thinning:
    """How many training samples ``data.imbalance`` kept."""

    kept: int
    of: int


@dataclass(frozen=True)
class LabelNoise:
    """How many training labels ``data.label_noise`` made wrong."""

    changed: int
    of: int


@dataclass(frozen=True)
class DataFacts:
    """What was decided while the data was loaded, and what shows later whether it has changed.

    A run keeps it as ``facts.json``. None stands for what did not happen, or what an older version did not record.
    """

    held_out: Mapping[str, tuple[str, ...] | tuple[int, ...]] = field(default_factory=dict)
    """Samples taken from training for a missing split: ``val_files`` and ``test_files``, or row numbers as
    ``val_indices`` and ``test_indices``."""
    train_digest: str | None = None
    """Of the training samples, in order, with their true labels."""
    test_digest: str | None = None
    """Runs that share it were tested on the same samples."""
    imbalance: Thinning | None = None
    label_noise: LabelNoise | None = None
    ignored_files: str | None = None
    """How many files of the data are not used, and the first few of them."""
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    """By split. Filled when a run begins, because looking at every file takes a while."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """What only one data set has to say, by name."""


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
    facts: DataFacts = field(default_factory=DataFacts)
    superclasses: tuple[str, ...] = ()
    """Name of the superclass of each class; empty where the data has none."""
    class_folders: tuple[Path, ...] = ()
    """Folders in which every sub-folder is a class, so that nothing else may be written there."""

    @property
    def class_counts(self) -> Tensor:
        """Training images of each class."""
        return torch.bincount(self.train.labels, minlength=len(self.classes))

    def split(self, name: str) -> Split:
        return {"train": self.train, "val": self.val, "test": self.test}[name]

    def normalised_with(self, mean: tuple[float, ...], std: tuple[float, ...]) -> "Problem":
        """The same problem with this mean and deviation of its images. Embeddings stay as they are."""
        if self.preprocess is None:
            return self
        preprocess = replace(self.preprocess, mean=mean, std=std)
        train, val, test = (self.split(name).with_preprocess(preprocess) for name in SPLITS)
        return replace(self, preprocess=preprocess, train=train, val=val, test=test)

    def refuse_run_folder(self, path: Path) -> None:
        """Raise an error if a run in this folder would become a class of the data, with its pictures for images."""
        for folder in self.class_folders:
            if path.resolve().is_relative_to(folder.resolve()):
                raise ShortlistError(
                    f"{path}, the folder of the run, must not be in {folder}, where every folder is a class: "
                    "choose another with --out, or run the command from elsewhere"
                )


def evaluation_plan(count: int, batch_size: int, rank: int, world_size: int) -> list[Tensor]:
    """Batches of this rank's share. Over all ranks every sample occurs exactly once, without padding."""
    share = torch.arange(count)[rank::world_size]
    return list(torch.split(share, batch_size)) if len(share) else []


def fewest_images(batch_size: int, pieces: int) -> int:
    """Smallest piece of a batch to train on: two images, as one has no batch statistics, unless pieces are of one."""
    return min(2, batch_size // pieces)


def training_plan(
    count: int, batch_size: int, parts: int, seed: int, epoch: int, rank: int, world_size: int
) -> list[list[Tensor]]:
    """Steps of one epoch: a shuffle that depends on seed and epoch only, cut into batches, each divided over the ranks.

    A step is a list of ``parts`` index tensors, to be accumulated. The union over ranks does not depend on their
    number, except for the last batch: it is left out if it cannot give ``fewest_images`` to every rank and part.
    """
    least = fewest_images(batch_size, parts * world_size)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(mix_seed(seed, epoch)))
    steps = []
    for batch in torch.split(order, batch_size):
        pieces = batch.tensor_split(parts * world_size)
        if len(pieces[-1]) >= max(1, least):
            steps.append(list(pieces[rank * parts : (rank + 1) * parts]))
    return steps
