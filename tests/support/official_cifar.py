"""Small files in the format of the official CIFAR-100: pickles as Python 2 and numpy 1 wrote them in 2009."""

import hashlib
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortlist.program.data.sets import cifar100

SUPERCLASSES = ["fish", "fowl", "flower"]
CLASSES = [f"class {label}" for label in range(6)]


def official_pickle(value: Any) -> bytes:
    """Protocol 2, with the string opcodes of Python 2."""
    return pickle.PROTO + b"\x02" + _written(value) + pickle.STOP


def _written(value: Any) -> bytes:
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return pickle.BINSTRING + struct.pack("<i", len(value)) + value
    if isinstance(value, bool):
        return pickle.NEWTRUE if value else pickle.NEWFALSE
    if isinstance(value, int):
        return pickle.BININT + struct.pack("<i", value)
    if isinstance(value, dict):
        items = b"".join(_written(part) for item in value.items() for part in item)
        return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS
    if isinstance(value, list):
        return pickle.EMPTY_LIST + pickle.MARK + b"".join(map(_written, value)) + pickle.APPENDS
    if isinstance(value, tuple):
        return pickle.MARK + b"".join(map(_written, value)) + pickle.TUPLE
    assert isinstance(value, np.ndarray)
    ndarray = b"cnumpy\nndarray\n" + _written((0,)) + _written("b") + pickle.TUPLE3
    dtype_state = _written((3, "|"))[:-1] + pickle.NONE * 3 + _written(-1) + _written(-1) + _written(0) + pickle.TUPLE
    dtype = b"cnumpy\ndtype\n" + _written((value.dtype.str[1:], 0, 1)) + pickle.REDUCE + dtype_state + pickle.BUILD
    state = _written((1, value.shape))[:-1] + dtype + _written(False) + _written(value.tobytes()) + pickle.TUPLE
    return b"cnumpy.core.multiarray\n_reconstruct\n" + ndarray + pickle.REDUCE + state + pickle.BUILD


def make_files(images_a_class: int = 20) -> dict[str, bytes]:
    """A small CIFAR of 6 classes in 3 superclasses. The first pixel of an image is its label."""
    files = {"meta": official_pickle({"fine_label_names": CLASSES, "coarse_label_names": SUPERCLASSES})}
    for seed, (name, count) in enumerate({"train": images_a_class, "test": 4}.items()):
        random = np.random.default_rng(seed)
        labels = random.permutation(np.arange(6).repeat(count))
        pixels = random.integers(0, 256, (len(labels), 3072), dtype=np.uint8)
        pixels[:, 0] = labels
        files[name] = official_pickle(
            {
                "filenames": [f"{number}.png" for number in range(len(labels))],
                "fine_labels": labels.tolist(),
                "coarse_labels": (labels % 3).tolist(),
                "data": pixels,
            }
        )
    return files


def expect(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    """Let these files pass as the official ones."""
    sums = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(cifar100, "FILE_MD5", sums)


def put_folder(root: Path, files: dict[str, bytes]) -> None:
    folder = root / cifar100.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def put_archive(root: Path, files: dict[str, bytes], scratch: Path) -> Path:
    put_folder(scratch, files)
    path = root / cifar100.DOWNLOAD.file
    with tarfile.open(path, "w:gz") as tar:
        tar.add(scratch / cifar100.FOLDER, cifar100.FOLDER)
    return path
