"""Image files in folders of classes, read by worker processes while the network computes."""

import hashlib
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.alter import hold_out_missing, thin_classes, thin_validation
from shortlist.program.data.base import DataFacts, Fingerprint, Held, Preprocess, Problem, Split, evaluation_plan
from shortlist.program.data.image_io import (
    SUFFIXES,
    MakeTransform,
    RandAugment,
    Transform,
    evaluation_transform,
    file_preprocess,
    random_place_and_flip,
    random_resized_crop_and_flip,
    read_image,
)
from shortlist.program.seeds import mix_seed
from shortlist.program.text import some_of

# A worker that outlives its parent after SIGTERM ends itself. The wait is long, as a validation may be under way.
_GRACE_SECONDS = 300
_HELD_AT_ONCE = 64  # images of a batch that is only read


@dataclass(frozen=True)
class Listing:
    """Image files, relative to the data's root, and their labels."""

    files: Sequence[str]
    labels: Tensor

    def subset(self, indices: Tensor) -> "Listing":
        return Listing([self.files[index] for index in indices.tolist()], self.labels[indices])

    def digest(self) -> str:
        """Of names and labels: reading the files would take as long as an epoch."""
        digest = hashlib.sha256()
        for file, label in zip(self.files, self.labels.tolist(), strict=True):
            digest.update(os.fsencode(f"{file}\n{label}\n"))
        return digest.hexdigest()


@dataclass(frozen=True)
class ClassFolders:
    """The images below one folder of classes."""

    folder: Path
    images: dict[str, list[str]]
    """Of each class folder, relative to the data's root, sorted."""
    ignored: list[str] = field(default_factory=list)
    """Files without the suffix of an image, and pipes, devices and the like with any name."""

    def listing(self, classes: Sequence[str]) -> Listing:
        """All images. A label is the place of the class folder in ``classes``."""
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
    """Each folder inside ``folder`` is a class; its images may be in sub-folders. Links are followed."""
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
    """True if there is an image at any depth. Links are not followed, and hidden files do not count."""
    if _is_hidden(folder.name):
        return False
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        if any(_is_image(name) and not _is_hidden(name) for name in files):
            return True
    return False


def loose_images(folder: Path) -> list[str]:
    """Names of the images in the folder itself."""
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
    """All files at any depth, sorted by path, except hidden ones. Links are followed.

    Returns:
        The regular files, and the others, such as pipes: reading one would wait for ever. A broken link counts as a
        file, so that reading it gives an error.
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
                else:  # the folder says which files are regular: only links cost another call
                    (files if entry.is_file() or not path.exists() else special).append(path)
        to_visit.sort(reverse=True)
    return sorted(files), sorted(special)


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


class FileSplit(Split):
    """Image files below one folder, with their labels.

    Args:
        root: The folder.
        files: Paths of the images, relative to the root.
        labels: ``(N,)`` int64.
        preprocess: How an image becomes the network's input.
        config: Number of workers, and what to do with unreadable images.
        make_training_transform: Makes what replaces the central crop in batches with a seed.
    """

    def __init__(
        self,
        root: Path,
        files: Sequence[str],
        labels: Tensor,
        preprocess: Preprocess,
        config: DataConfig,
        make_training_transform: Callable[[Preprocess], Transform] = evaluation_transform,
    ) -> None:
        assert len(files) == len(labels)
        self.root = root
        self.files = files
        self.labels = labels
        self.preprocess: Preprocess = preprocess
        self._make_training_transform = make_training_transform
        self.workers = config.workers
        self.fails_on_bad_image = config.on_bad_image == "fail"
        self.skipped: list[str] = []

    def batches(
        self, plan: Sequence[Tensor], device: torch.device, augment_seed: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        if not plan:
            return
        transform = evaluation_transform(self.preprocess) if augment_seed is None else self.training_transform
        on_gpu = device.type == "cuda"
        labels = self.labels.to(device)
        for batch in self._read(plan, transform, augment_seed, pin_memory=on_gpu):
            indices = batch.indices.to(device, non_blocking=on_gpu)
            images = batch.images.to(device, non_blocking=on_gpu)
            yield self.preprocess.normalise(images), labels[indices], indices

    @property
    def training_transform(self) -> Transform:
        """Made for the preprocessing of today: padding has its mean colour, which weights to start from may change."""
        return self._make_training_transform(self.preprocess)

    def held(self, transform: Transform) -> tuple[Held, Tensor]:
        """What the transform makes of every image, read once, and ``(N, 2)`` their widths and heights.

        Sizes are 1 for an image that could not be read.
        """
        is_read = torch.zeros(len(self), dtype=torch.bool)
        sizes = torch.ones(len(self), 2)
        rows = torch.zeros(len(self), 0, dtype=torch.uint8)
        for batch in self._read(evaluation_plan(len(self), _HELD_AT_ONCE, 0, 1), transform, None, pin_memory=False):
            if not len(batch.indices):
                continue
            if not is_read.any():  # only now is their shape known
                rows = torch.zeros(len(self), *batch.images.shape[1:], dtype=torch.uint8)
            rows[batch.indices], sizes[batch.indices], is_read[batch.indices] = batch.images, batch.sizes, True
        if not is_read.any():
            raise ShortlistError(f"none of {len(self)} images could be read: {'; '.join(self.skipped[:3])}")
        return Held(rows, is_read, tuple(self.skipped)), sizes

    def _read(
        self, plan: Sequence[Tensor], transform: Transform, augment_seed: int | None, *, pin_memory: bool
    ) -> "Iterator[_Batch]":
        reader = _Reader(self.root, self.files, self.preprocess, transform, augment_seed)
        loader = DataLoader(
            reader,
            batch_sampler=[batch.tolist() for batch in plan],
            num_workers=min(self.workers, os.cpu_count() or 1),
            collate_fn=reader.collate,
            generator=torch.Generator(),  # the default would draw from the run's own random numbers
            pin_memory=pin_memory,
            worker_init_fn=_leave_signals_to_the_parent,
        )
        for batch in loader:
            self._note_unreadable(batch.unreadable)
            yield batch

    def _note_unreadable(self, unreadable: dict[str, str]) -> None:
        for file, reason in unreadable.items():
            if self.fails_on_bad_image:
                raise ShortlistError(f"{reason}. Set data.on_bad_image to skip to leave out such images and count them")
            if file not in self.skipped:
                self.skipped.append(file)

    def fingerprint(self) -> Fingerprint:
        names, sizes = hashlib.sha256(), hashlib.sha256()
        for file in self.files:
            names.update(os.fsencode(f"{file}\n"))
            sizes.update(b"%d\n" % self._size_and_time(file)[0])
        return {"names": names.hexdigest(), "sizes": sizes.hexdigest()}

    def content_digest(self) -> str:
        # With the time of the last change: uncompressed images of other content have the same size.
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(os.fsencode(f"{file}\n") + b"%d %d\n" % self._size_and_time(file))
        return digest.hexdigest()

    def _size_and_time(self, file: str) -> tuple[int, int]:
        try:
            found = (self.root / file).stat()
        except OSError:
            return -1, -1  # the error comes when it is read
        return found.st_size, found.st_mtime_ns

    def original(self, index: int) -> Image.Image:
        return read_image(self.root / self.files[index], self.preprocess.channels)

    def thumbnail(self, index: int) -> Tensor | None:
        return evaluation_transform(self.preprocess)(self.original(index))


def _leave_signals_to_the_parent(worker: int) -> None:
    """Schedulers and terminals signal all processes. The parent stops after a step, and needs workers until then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(_GRACE_SECONDS))


@dataclass(frozen=True)
class _Read:
    index: int
    file: str
    image: Tensor | None
    """None if it could not be read."""
    size: tuple[int, int] = (0, 0)
    """Width and height of the file's image."""
    reason: str = ""
    """Why it could not be read."""


@dataclass(frozen=True)
class _Batch:
    images: Tensor
    sizes: Tensor
    """``(N, 2)`` widths and heights of the images in their files."""
    indices: Tensor
    unreadable: dict[str, str]
    """Reasons by file. If a worker raised an error instead, its traceback would hide the reason."""

    def pin_memory(self) -> "_Batch":
        """Called by the loader, so that the copy to the GPU does not wait."""
        return _Batch(self.images.pin_memory(), self.sizes, self.indices.pin_memory(), self.unreadable)


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
            return _Read(index, file, None, reason=str(error))
        if self.augment_seed is None:
            return _Read(index, file, self.transform(image), image.size)
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would seed the GPUs as well.
            torch.default_generator.manual_seed(mix_seed(self.augment_seed, index))
            return _Read(index, file, self.transform(image), image.size)

    def collate(self, reads: Sequence[_Read]) -> _Batch:
        images = [read.image for read in reads if read.image is not None]
        sizes = [read.size for read in reads if read.image is not None]
        none = torch.empty(0, self.preprocess.channels, self.preprocess.crop, self.preprocess.crop, dtype=torch.uint8)
        return _Batch(
            images=torch.stack(images) if images else none,
            sizes=torch.tensor(sizes, dtype=torch.float32).view(-1, 2),
            indices=torch.tensor([read.index for read in reads if read.image is not None], dtype=torch.int64),
            unreadable={read.file: read.reason for read in reads if read.image is None},
        )


def file_problem(
    config: DataConfig,
    root: Path,
    classes: Sequence[str],
    given: Mapping[str, Listing],
    random_crop: MakeTransform,
    class_folders: Iterable[Path] = (),
) -> Problem:
    """A problem from the listings of ``train`` and, where the data has them, ``val`` and ``test``.

    ``random_crop`` makes the usual transform of training images, where they are cropped. ``class_folders`` are the
    folders whose sub-folders were taken for classes.
    """
    splits, held_out = hold_out_missing(given, classes, config)
    test = splits["test"]
    train, thinning = thin_classes(splits["train"], len(classes), config)
    val = thin_validation(splits["val"], len(classes), config)
    preprocess = file_preprocess(config.image_size, config.fit)
    make_transform = _training_transform(config, random_crop)
    return Problem(
        classes=tuple(classes),
        train=FileSplit(root, train.files, train.labels, preprocess, config, make_transform),
        val=FileSplit(root, val.files, val.labels, preprocess, config),
        test=FileSplit(root, test.files, test.labels, preprocess, config),
        input_shape=(3, preprocess.crop, preprocess.crop),
        preprocess=preprocess,
        facts=DataFacts(
            held_out={f"{split}_files": tuple(splits[split].files) for split in held_out},
            train_digest=train.digest(),
            test_digest=test.digest(),
            imbalance=thinning,
        ),
        class_folders=tuple(class_folders),
    )


def _training_transform(config: DataConfig, random_crop: MakeTransform) -> Callable[[Preprocess], Transform]:
    if config.canvas and config.fit == "crop" and random_crop is not random_resized_crop_and_flip:
        raise ShortlistError(
            f"data.canvas must be 0 for {config.name}, whose training images are cropped as in the paper, "
            f"got {config.canvas}"
        )
    make = random_place_and_flip if config.fit == "pad" else random_crop
    if config.augment == "none":
        make = evaluation_transform

    def transform(preprocess: Preprocess) -> Transform:
        changes = (RandAugment(config.randaugment, preprocess),) if config.randaugment else ()
        return make(preprocess, *changes)

    return transform
