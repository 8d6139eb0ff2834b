"""Data that stays in image files, read by worker processes while the network computes."""

import hashlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.base import Preprocess, Split
from shortlist.program.data.image_io import Transform, evaluation_transform, read_image
from shortlist.program.seeds import mix_seed

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
