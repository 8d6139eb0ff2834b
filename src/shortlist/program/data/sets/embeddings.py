"""A file of embeddings with labels, ``.npz`` or ``.safetensors``, to train only a last layer.

Arrays: ``train_x`` (N, d) of floats and ``train_y`` (N,) of whole numbers from 0 (or ``x`` and ``y``), and the same
with ``val_`` and ``test_``. A split without arrays is taken from the training data, ``val_fraction`` of each class, and
its row numbers are recorded in the run. Class names: an array of strings ``classes`` in an ``.npz``; the metadata entry
``classes``, a JSON list, in a ``.safetensors``.
"""

import json
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.base import SPLITS, Problem
from shortlist.program.data.in_memory import Rows, refuse_settings_of_files, tensor_problem
from shortlist.program.text import some_of

_LABELS = ("y", *(f"{split}_y" for split in SPLITS))
_ARRAYS = ("x", *(f"{split}_x" for split in SPLITS), *_LABELS)


def load(config: DataConfig, path: Path) -> Problem:
    refuse_settings_of_files(config, 0)
    if not config.root:
        raise ShortlistError("data.root must name the file of your embeddings, .npz or .safetensors, got ''")
    arrays, names = read_file(path)
    given = {split: rows for split in SPLITS if (rows := _rows(path, arrays, split)) is not None}
    labels = given["train"].labels
    largest = int(labels.max())
    if not names and largest >= len(labels):
        raise ShortlistError(
            f"labels of {path} must be the whole numbers from 0 to the number of classes - 1, each of them in use; "
            f"{len(labels)} rows cannot use all up to {largest}"
        )
    classes = names or [str(label) for label in range(largest + 1)]
    for split in given:
        _check_against_training(path, split, given, classes)
    return tensor_problem(config, classes, given)


def read_file(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Embeddings and labels of a file, and its class names, if any. No code in the file is run."""
    if not path.is_file():
        raise ShortlistError(f"data.root must be a file of embeddings, .npz or .safetensors: there is no file {path}")
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise ShortlistError(f"a file of embeddings must end in .npz or .safetensors, got {path.name}")
    try:
        return readers[path.suffix](path)
    except Exception as error:  # each format has its own errors for damage
        raise ShortlistError(f"{path} cannot be read: {error}") from error


def _read_npz(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    if not zipfile.is_zipfile(path):
        raise ShortlistError("it is not an .npz file, or it is incomplete")
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in _known_arrays(file.files)}
        names = file["classes"].tolist() if "classes" in file.files else []
    return {name: _tensor(name, array) for name, array in arrays.items()}, _checked_names(names)


def _known_arrays(found: Collection[str]) -> list[str]:
    """Names of the arrays to read. Others are ignored."""
    if not {"x", "y", "train_x", "train_y"} & {*found}:
        raise ShortlistError(f"it must hold train_x and train_y, or x and y; it holds {some_of(sorted(found))}")
    return [name for name in _ARRAYS if name in found]


def _tensor(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError:  # torch's message is for programmers
        if name not in _LABELS:
            raise ShortlistError(f"{name} must hold numbers, got {array.dtype}") from None
        raise ShortlistError(
            f"{name} must hold labels as whole numbers from 0, got {array.dtype}; put the class names, in the order "
            "of the labels, in an array of strings called classes"
        ) from None


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        arrays = {name: file.get_tensor(name) for name in _known_arrays(file.keys())}
        names = json.loads((file.metadata() or {}).get("classes", "[]"))
    return arrays, _checked_names(names)


def _checked_names(names: Any) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ShortlistError("its class names must be a list of strings")
    return names


def _rows(path: Path, arrays: dict[str, Tensor], split: str) -> Rows | None:
    for x_name, y_name in ((f"{split}_x", f"{split}_y"), *([("x", "y")] if split == "train" else [])):
        if (x_name in arrays) != (y_name in arrays):
            raise ShortlistError(f"{path} must hold both {x_name} and {y_name}, or neither")
        if x_name in arrays:
            x, y = arrays[x_name], arrays[y_name]
            if x.ndim != 2 or not x.is_floating_point() or 0 in x.shape:
                raise ShortlistError(f"{x_name} of {path} must be (N, d) floats, got {tuple(x.shape)} of {x.dtype}")
            if y.shape != x.shape[:1] or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
                raise ShortlistError(
                    f"{y_name} of {path} must be ({len(x)},) whole numbers, got {tuple(y.shape)} of {y.dtype}"
                )
            x = x.float() if x.dtype == torch.float64 else x
            if not bool(x.isfinite().all()):
                row = int((~x.isfinite()).any(1).nonzero()[0])
                raise ShortlistError(f"{x_name} of {path} must be finite in {x.dtype}, and row {row} is not")
            return Rows(x, y.long())
    return None


def _check_against_training(path: Path, split: str, given: dict[str, Rows], classes: list[str]) -> None:
    x, y = given[split].inputs, given[split].labels
    width = given["train"].inputs.shape[1]
    if x.shape[1] != width:
        raise ShortlistError(f"{split}_x of {path} must have {width} columns as train_x has, got {x.shape[1]}")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= len(classes):
        raise ShortlistError(f"{split}_y of {path} must be in [0, {len(classes) - 1}], got {low if low < 0 else high}")
    if split == "train":
        empty = (torch.bincount(y, minlength=len(classes)) == 0).nonzero().flatten().tolist()
        if empty:
            raise ShortlistError(
                f"every class of {path} must have training rows; {len(empty)} have none: "
                + some_of([classes[label] for label in empty])
            )
