"""CIFAR-100 from its official files, and CIFAR-100-LT, which is CIFAR-100 with ``imbalance`` above 1.

The training images are cut in two: ``val_fraction`` of each class for validation (the paper's 5,000 at 0.1), fixed by
the configuration's seed, and the rest to train on. ``imbalance`` then thins the rest class by class in the
order of the labels, as in the CIFAR-LT benchmarks.
"""

import hashlib
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.alter import hold_out, noisy, seeded, thinned
from shortlist.program.data.augment import CropAndFlip
from shortlist.program.data.base import Preprocess, Problem
from shortlist.program.data.catalogue import data_root
from shortlist.program.data.in_memory import TensorSplit, refuse_other_size
from shortlist.program.data.safe_pickle import load_plain_pickle

FOLDER = "cifar-100-python"
ARCHIVE = "cifar-100-python.tar.gz"
ARCHIVE_MD5 = "eb9058c3a382ffc7106e4002c42a8d85"
FILE_MD5 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}

SIDE = 32
_PREPROCESS = Preprocess(
    channels=3, resize=SIDE, crop=SIDE, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)
)


def load(config: DataConfig) -> Problem:
    refuse_other_size(config, SIDE)
    read = find_files(data_root(config))
    meta = read("meta")
    classes = tuple(name.decode() for name in meta[b"fine_label_names"])
    images, labels, coarse = _images_and_labels(read("train"))
    test_images, test_labels, _ = _images_and_labels(read("test"))
    superclasses = _superclasses(labels, coarse, [name.decode() for name in meta[b"coarse_label_names"]])

    rest, val = hold_out(labels, classes, config.val_fraction, 1, seeded(config, "validation"))
    kept, thinning = thinned(labels[rest], len(classes), config)
    rest = rest[kept]
    train_labels, noise = noisy(labels[rest], len(classes), config, superclasses)
    return Problem(
        classes=classes,
        train=TensorSplit(images[rest], train_labels, _PREPROCESS, CropAndFlip() if config.augment == "auto" else None),
        val=TensorSplit(images[val], labels[val], _PREPROCESS),
        test=TensorSplit(test_images, test_labels, _PREPROCESS),
        input_shape=(3, SIDE, SIDE),
        preprocess=_PREPROCESS,
        facts={"val_indices": val.tolist(), **thinning, **noise},
        superclasses=superclasses,
    )


def find_files(root: Path) -> Callable[[str], Any]:
    """A reader for the files ``train``, ``test`` and ``meta``, out of the folder or the archive under ``root``."""
    for folder in (root / FOLDER, root):
        if all((folder / name).is_file() for name in FILE_MD5):
            return lambda name: _checked(folder / name, (folder / name).read_bytes(), name)
    if (root / ARCHIVE).is_file():
        return lambda name: _checked(root / ARCHIVE / FOLDER / name, _member(root / ARCHIVE, name), name)
    raise ShortlistError(
        f"CIFAR-100 must be in {root}: the folder {FOLDER} with its files train, test and meta, or {ARCHIVE}; "
        "neither is there. `shortlist datasets` says where to get it"
    )


def _member(archive: Path, name: str) -> bytes:
    try:
        with tarfile.open(archive) as tar:
            file = tar.extractfile(f"{FOLDER}/{name}")
            return file.read() if file else b""
    except (OSError, EOFError, KeyError, tarfile.TarError) as error:
        raise ShortlistError(f"{archive} is damaged ({error}): fetch it again") from error


def _checked(path: Path, content: bytes, name: str) -> Any:
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != FILE_MD5[name]:
        raise ShortlistError(
            f"{path} must have the MD5 {FILE_MD5[name]} of the official file, got {found}: fetch it again"
        )
    return load_plain_pickle(content, str(path))


def _images_and_labels(stored: Any) -> tuple[Tensor, Tensor, Tensor]:
    images = torch.from_numpy(stored[b"data"].copy()).view(-1, 3, SIDE, SIDE)
    return images, torch.tensor(stored[b"fine_labels"]), torch.tensor(stored[b"coarse_labels"])


def _superclasses(labels: Tensor, coarse: Tensor, names: list[str]) -> tuple[str, ...]:
    """Each class lies in one superclass, which any of its images tells."""
    of_class = torch.zeros(int(labels.max()) + 1, dtype=torch.int64)
    of_class[labels] = coarse
    return tuple(names[number] for number in of_class.tolist())
