"""CIFAR-100 from its official files, and CIFAR-100-LT, which is CIFAR-100 with ``imbalance`` above 1.

``val_fraction`` of each class of the training images is held out for validation (at 0.1 the paper's 5,000), drawn by
the configuration's seed. ``imbalance`` then thins the rest, class by class in the order of the labels, as in the
CIFAR-LT benchmarks.
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
from shortlist.program.data.augment import CropAndFlip
from shortlist.program.data.base import Preprocess, Problem
from shortlist.program.data.download import Download
from shortlist.program.data.in_memory import Rows, refuse_settings_of_files, tensor_problem
from shortlist.program.data.safe_pickle import load_plain_pickle

FOLDER = "cifar-100-python"
DOWNLOAD = Download(
    url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    file="cifar-100-python.tar.gz",
    md5="eb9058c3a382ffc7106e4002c42a8d85",
)
FILE_MD5 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}

SIDE = 32
_PREPROCESS = Preprocess(
    channels=3, resize=SIDE, crop=SIDE, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)
)


def load(config: DataConfig, root: Path) -> Problem:
    refuse_settings_of_files(config, SIDE)
    read = find_files(root)
    meta = read("meta")
    classes = tuple(name.decode() for name in meta[b"fine_label_names"])
    train = read("train")
    rows = {"train": _rows(train), "test": _rows(read("test"))}
    coarse_names = [name.decode() for name in meta[b"coarse_label_names"]]
    return tensor_problem(
        config,
        classes,
        rows,
        preprocess=_PREPROCESS,
        augmentation=CropAndFlip(),
        superclasses=_superclasses(rows["train"].labels, torch.tensor(train[b"coarse_labels"]), coarse_names),
    )


def find_files(root: Path) -> Callable[[str], Any]:
    """A reader for the files ``train``, ``test`` and ``meta``, from the folder or the archive under ``root``."""
    for folder in (root / FOLDER, root):
        if all((folder / name).is_file() for name in FILE_MD5):
            return lambda name: _checked(folder / name, (folder / name).read_bytes(), name)
    archive = root / DOWNLOAD.file
    if archive.is_file():
        return lambda name: _checked(archive / FOLDER / name, _member(archive, name), name)
    raise ShortlistError(
        f"CIFAR-100 must be in {root}: the folder {FOLDER} with its files train, test and meta, or {DOWNLOAD.file}; "
        "neither is there. `shortlist datasets` says where to get it"
    )


def _member(archive: Path, name: str) -> bytes:
    try:
        with tarfile.open(archive) as tar:
            file = tar.extractfile(f"{FOLDER}/{name}")
            return file.read() if file else b""
    except (OSError, EOFError, KeyError, tarfile.TarError) as error:
        raise ShortlistError(f"{archive} is damaged: {error}; fetch it again") from error


def _checked(path: Path, content: bytes, name: str) -> Any:
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != FILE_MD5[name]:
        raise ShortlistError(
            f"{path} must have the MD5 {FILE_MD5[name]} of the official file, got {found}: fetch it again"
        )
    return load_plain_pickle(content, str(path))


def _rows(stored: Any) -> Rows:
    images = torch.from_numpy(stored[b"data"].copy()).view(-1, 3, SIDE, SIDE)
    return Rows(images, torch.tensor(stored[b"fine_labels"]))


def _superclasses(labels: Tensor, coarse: Tensor, names: list[str]) -> tuple[str, ...]:
    """The superclass of each class, which is that of any of its images."""
    of_class = torch.zeros(int(labels.max()) + 1, dtype=torch.int64)
    of_class[labels] = coarse
    return tuple(names[number] for number in of_class.tolist())
