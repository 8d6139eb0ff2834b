"""Data that stays in image files, read by worker processes while the network computes."""

import hashlib
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.alter import hold_out, noisy, seeded, thinned
from shortlist.program.data.base import Preprocess, Problem, Split
from shortlist.program.data.image_io import SUFFIXES, Transform, evaluation_transform, file_preprocess, read_image
from shortlist.program.seeds import mix_seed
from shortlist.program.text import some_of

# A worker that nobody ends after a signal ends itself: later than schedulers would, as a validation may be under way.
_GRACE_SECONDS = 300


class FileSplit(Split):
    """Image files below one folder, with their labels.

    Args:
        root: The folder.
        files: Paths of the images, relative to the root.
        labels: ``(N,)`` int64.
        preprocess: What the network wants.
        config: Number of workers, and what to do with unreadable images.
        training_transform: Used in place of the central crop when a batch is asked for with a seed.
    """

    def __init__(
        self,
        root: Path,
        files: Sequence[str],
        labels: Tensor,
        preprocess: Preprocess,
        config: DataConfig,
        training_transform: Transform | None = None,
    ) -> None:
        assert len(files) == len(labels)
        self.root = root
        self.files = files
        self.labels = labels
        self.preprocess = preprocess
        self.training_transform = training_transform
        self.workers = config.workers
        self.fails_on_bad_image = config.on_bad_image == "fail"
        self.skipped: list[str] = []

    def batches(
        self, plan: Sequence[Tensor], device: torch.device, augment_seed: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        if not plan:
            return
        transform = self.training_transform if augment_seed is not None else None
        transform = transform or evaluation_transform(self.preprocess)
        on_gpu = device.type == "cuda"
        labels = self.labels.to(device)
        reader = _Reader(self.root, self.files, self.preprocess, transform, augment_seed)
        loader = DataLoader(
            reader,
            batch_sampler=[batch.tolist() for batch in plan],
            num_workers=min(self.workers, os.cpu_count() or 1),
            collate_fn=reader.together,
            generator=torch.Generator(),  # else the loader draws from the one that the run's own seed set
            pin_memory=on_gpu,
            worker_init_fn=_leave_signals_to_the_parent,
        )
        for batch in loader:
            self._note_unreadable(batch.unreadable)
            indices = batch.indices.to(device, non_blocking=on_gpu)
            images = batch.images.to(device, non_blocking=on_gpu)
            yield self.preprocess.normalise(images), labels[indices], indices

    def _note_unreadable(self, unreadable: dict[str, str]) -> None:
        for file, reason in unreadable.items():
            if self.fails_on_bad_image:
                raise ShortlistError(f"{reason}. With data.on_bad_image skip it would be left out and counted")
            if file not in self.skipped:
                self.skipped.append(file)

    def fingerprint(self) -> dict[str, str]:
        names, sizes = hashlib.sha256(), hashlib.sha256()
        for file in self.files:
            names.update(os.fsencode(f"{file}\n"))
            try:
                size = (self.root / file).stat().st_size
            except OSError:
                size = -1  # reading it will tell
            sizes.update(b"%d\n" % size)
        return {"names": names.hexdigest(), "sizes": sizes.hexdigest()}

    def thumbnail(self, index: int) -> Tensor | None:
        image = read_image(self.root / self.files[index], self.preprocess.channels)
        return evaluation_transform(self.preprocess)(image)


def _leave_signals_to_the_parent(worker: int) -> None:
    """Schedulers and terminals signal all processes. The parent obeys after a step, for which it needs its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(_GRACE_SECONDS))


@dataclass(frozen=True)
class _Read:
    index: int
    file: str
    image: Tensor | None
    """None if it could not be read."""
    reason: str = ""


@dataclass(frozen=True)
class _Batch:
    images: Tensor
    indices: Tensor
    unreadable: dict[str, str]
    """Files, and what is wrong with them. A worker that raised instead would bury it under its own traceback."""

    def pin_memory(self) -> "_Batch":
        """Called by the loader, so that the copy to the GPU need not wait."""
        return _Batch(self.images.pin_memory(), self.indices.pin_memory(), self.unreadable)


@dataclass(frozen=True)
class _Reader(Dataset[_Read]):
    root: Path
    files: Sequence[str]
    preprocess: Preprocess
    transform: Transform
    augment_seed: int | None

    def __getitem__(self, index: int) -> _Read:
        file = self.files[index]
        try:
            image = read_image(self.root / file, self.preprocess.channels)
        except ShortlistError as error:
            return _Read(index, file, None, str(error))
        if self.augment_seed is None:
            return _Read(index, file, self.transform(image))
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would seed the GPUs as well.
            torch.default_generator.manual_seed(mix_seed(self.augment_seed, index))
            return _Read(index, file, self.transform(image))

    def together(self, reads: Sequence[_Read]) -> _Batch:
        images = [read.image for read in reads if read.image is not None]
        none = torch.empty(0, self.preprocess.channels, self.preprocess.crop, self.preprocess.crop, dtype=torch.uint8)
        return _Batch(
            images=torch.stack(images) if images else none,
            indices=torch.tensor([read.index for read in reads if read.image is not None], dtype=torch.int64),
            unreadable={read.file: read.reason for read in reads if read.image is None},
        )


@dataclass(frozen=True)
class Listing:
    """Image files, relative to the data's root, and their labels."""

    files: Sequence[str]
    labels: Tensor

    def subset(self, indices: Tensor) -> "Listing":
        return Listing([self.files[index] for index in indices.tolist()], self.labels[indices])


@dataclass(frozen=True)
class ClassFolders:
    """What lies below one folder of classes."""

    folder: Path
    images: dict[str, list[str]]
    """For each class folder its images, relative to the data's root, sorted."""
    ignored: list[str] = field(default_factory=list)
    """Files that are no images by their names, and pipes, devices and the like whatever they are called."""

    def listing(self, classes: Sequence[str]) -> Listing:
        """All images, labelled by the place of their class folder among ``classes``."""
        label_of = {name: label for label, name in enumerate(classes)}
        unknown = sorted(name for name, images in self.images.items() if images and name not in label_of)
        if unknown:
            raise ShortlistError(
                f"every class of {self.folder} must have a folder of the same name with training images; "
                f"{len(unknown)} have none: {some_of(unknown)}"
            )
        pairs = [(file, label_of[name]) for name, files in self.images.items() for file in files]
        return Listing([file for file, _ in pairs], torch.tensor([label for _, label in pairs], dtype=torch.int64))

    def require_images(self) -> None:
        """Raise an error unless there are at least two classes, each with an image."""
        if len(self.images) < 2:
            raise ShortlistError(
                f"{self.folder} must hold a folder of images for each of at least two classes, got {len(self.images)}"
            )
        empty = sorted(name for name, images in self.images.items() if not images)
        if empty:
            raise ShortlistError(
                f"every class folder of {self.folder} must hold images; {len(empty)} hold none: {some_of(empty)}"
            )


def scan_classes(root: Path, folder: Path) -> ClassFolders:
    """Each folder inside ``folder`` is a class; its images may lie in folders of their own. Links are followed."""
    images: dict[str, list[str]] = {}
    ignored: list[str] = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not _is_hidden(entry.name):
            files, special = files_below(entry)
            found = [file.relative_to(root).as_posix() for file in files]
            images[entry.name] = [file for file in found if _is_image(file)]
            ignored += [file for file in found if not _is_image(file)]
            ignored += [file.relative_to(root).as_posix() for file in special]
        elif not entry.is_dir() and _is_image(entry.name) and not _is_hidden(entry.name):
            ignored.append(entry.relative_to(root).as_posix())  # an image of no class
    return ClassFolders(folder, images, ignored)


def holds_folders(folder: Path) -> bool:
    return any(entry.is_dir() and not _is_hidden(entry.name) for entry in folder.iterdir())


def holds_images(folder: Path) -> bool:
    """Somewhere below it, other than behind links; what is hidden does not count. Ends with the first that it finds."""
    if _is_hidden(folder.name):
        return False
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        if any(_is_image(name) and not _is_hidden(name) for name in files):
            return True
    return False


def loose_images(folder: Path) -> list[str]:
    """Names of the images that lie in the folder itself."""
    entries = (entry for entry in folder.iterdir() if not entry.is_dir() and not _is_hidden(entry.name))
    return sorted(entry.name for entry in entries if _is_image(entry.name))


def natural_order(name: str) -> tuple[tuple[str | int, ...], str]:
    """Key that sorts ``class2`` before ``class10``.

    Example:
        >>> sorted(["class10", "Class9", "class2"], key=natural_order)
        ['class2', 'Class9', 'class10']
    """
    parts = re.split(r"(\d+)", name.casefold())
    return tuple(int(part) if place % 2 else part for place, part in enumerate(parts)), name


def files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """All files that are not hidden, in folders that are not, in the order of their paths. Links are followed.

    Returns:
        The files, and what is no regular file: reading a pipe would wait for ever. A link that leads nowhere counts as
        a file, so that reading it tells of it.
    """
    files: list[Path] = []
    special: list[Path] = []
    visited: set[Path] = set()
    to_visit = [folder]
    while to_visit:
        here = to_visit.pop()
        if here.resolve() in visited:  # links may run in a circle
            continue
        visited.add(here.resolve())
        with os.scandir(here) as entries:
            for entry in entries:
                path = here / entry.name
                if _is_hidden(entry.name):
                    continue
                if entry.is_dir():
                    to_visit.append(path)
                else:  # of a regular file the folder says what it is; only links cost a look
                    (files if entry.is_file() or not path.exists() else special).append(path)
        to_visit.sort(reverse=True)
    return sorted(files), sorted(special)


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def file_problem(
    config: DataConfig,
    root: Path,
    classes: Sequence[str],
    given: dict[str, Listing],
    training_transform: Callable[[Preprocess], Transform],
) -> Problem:
    """A problem out of the listings of ``train`` and, where the data has them, ``val`` and ``test``.

    What is missing is taken from the training images, ``config.val_fraction`` of each class for each, and the files are
    noted in the facts; of images that may be millions, only a digest.
    """
    given = dict(given)
    facts: dict[str, Any] = {}
    missing = [part for part in ("val", "test") if part not in given]
    if missing:
        train = given["train"]
        held_out = hold_out(train.labels, classes, config.val_fraction, len(missing), seeded(config, "validation"))
        for part, indices in zip(("train", *missing), held_out, strict=True):
            given[part] = train.subset(indices)
        facts |= {f"{part}_files": list(given[part].files) for part in missing}

    kept, thinning = thinned(given["train"].labels, len(classes), config)
    train = given["train"].subset(kept)
    train_labels, noise = noisy(train.labels, len(classes), config)
    preprocess = file_preprocess(config.image_size)
    transform = training_transform(preprocess) if config.augment == "auto" else None
    val, test = given["val"], given["test"]
    facts |= {"train_digest": _digest(train), "test_digest": _digest(test)}
    return Problem(
        classes=tuple(classes),
        train=FileSplit(root, train.files, train_labels, preprocess, config, transform),
        val=FileSplit(root, val.files, val.labels, preprocess, config),
        test=FileSplit(root, test.files, test.labels, preprocess, config),
        input_shape=(3, preprocess.crop, preprocess.crop),
        preprocess=preprocess,
        facts={**facts, **thinning, **noise},
    )


def _digest(listing: Listing) -> str:
    digest = hashlib.sha256()
    for file, label in zip(listing.files, listing.labels.tolist(), strict=True):
        digest.update(os.fsencode(f"{file}\n{label}\n"))
    return digest.hexdigest()
