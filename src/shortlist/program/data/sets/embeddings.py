"""A file of embeddings with labels, ``.npz`` or ``.safetensors``, to train a last layer alone.

Arrays: ``train_x`` (N, d) of floats and ``train_y`` (N,) of whole numbers from 0 (or ``x`` and ``y``); the same for
``val_`` and ``test_`` if there are any, else they are taken from the training data, ``val_fraction`` of each class for
each, and the row numbers noted in the run. Names of classes: an array of strings ``classes`` in an ``.npz``; the entry
``classes`` of the metadata, a JSON list, in a ``.safetensors``.
"""

import hashlib
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
from shortlist.program.data.alter import hold_out, noisy, seeded, thinned
from shortlist.program.data.base import Problem
from shortlist.program.data.in_memory import TensorSplit, refuse_other_size
from shortlist.program.text import some_of

_PARTS = ("train", "val", "test")
_LABELS = ("y", *(f"{part}_y" for part in _PARTS))
_ARRAYS = ("x", *(f"{part}_x" for part in _PARTS), *_LABELS)
Rows = tuple[Tensor, Tensor]
"""Embeddings ``(N, d)`` and labels ``(N,)``."""


def load(config: DataConfig) -> Problem:
    refuse_other_size(config, 0)
    if not config.root:
        raise ShortlistError("data.root must name the file of your embeddings, .npz or .safetensors, got ''")
    path = Path(config.root).expanduser()
    arrays, names = read_file(path)
    parts = {part: rows for part in _PARTS if (rows := _rows(path, arrays, part)) is not None}
    labels = parts["train"][1]
    largest = int(labels.max())
    if not names and largest >= len(labels):
        raise ShortlistError(
            f"labels of {path} must be the whole numbers from 0 to the number of classes - 1, each of them in use; "
            f"{len(labels)} rows cannot use all up to {largest}"
        )
    classes = names or [str(label) for label in range(largest + 1)]
    for part in parts:
        _check_against_training(path, part, parts, classes)

    facts: dict[str, Any] = {}
    missing = [part for part in _PARTS if part not in parts]
    if missing:
        x, y = parts["train"]
        held_out = hold_out(y, classes, config.val_fraction, len(missing), seeded(config, "validation"))
        parts |= {part: (x[rows], y[rows]) for part, rows in zip(("train", *missing), held_out, strict=True)}
        facts |= {f"{part}_indices": rows.tolist() for part, rows in zip(missing, held_out[1:], strict=True)}
    x, y = parts["train"]
    facts["train_digest"] = _digest(x, y)
    kept, thinning = thinned(y, len(classes), config)
    labels, noise = noisy(y[kept], len(classes), config)
    return Problem(
        classes=tuple(classes),
        train=TensorSplit(x[kept], labels),
        val=TensorSplit(*parts["val"]),
        test=TensorSplit(*parts["test"]),
        input_shape=(x.shape[1],),
        facts={**facts, **thinning, **noise},
    )


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_file(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Embeddings and labels of a file, and its names of classes, if any. Nothing in the file is executed."""
    if not path.is_file():
        raise ShortlistError(f"data.root must be a file of embeddings, .npz or .safetensors: there is no file {path}")
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise ShortlistError(f"a file of embeddings must end in .npz or .safetensors, got {path.name}")
    try:
        return readers[path.suffix](path)
    except Exception as error:  # each format has its own exceptions for damage
        raise ShortlistError(f"{path} cannot be read: {error}") from error


def _read_npz(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    if not zipfile.is_zipfile(path):
        raise ShortlistError("it is no .npz file, or not a whole one")
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in _arrays_of_use(file.files)}
        names = file["classes"].tolist() if "classes" in file.files else []
    return {name: _tensor(name, array) for name, array in arrays.items()}, _checked_names(names)


def _arrays_of_use(there: Collection[str]) -> list[str]:
    """Of the arrays in a file; what else somebody keeps there is nothing to us."""
    if not {"x", "y", "train_x", "train_y"} & {*there}:
        raise ShortlistError(f"it must hold train_x and train_y, or x and y; it holds {some_of(sorted(there))}")
    return [name for name in _ARRAYS if name in there]


def _tensor(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError:  # its message is for programmers
        if name not in _LABELS:
            raise ShortlistError(f"{name} must hold numbers, got {array.dtype}") from None
        raise ShortlistError(
            f"{name} must hold labels as whole numbers from 0, got {array.dtype}; the names of classes, in the order "
            "of the labels, belong in an array of strings called classes"
        ) from None


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        arrays = {name: file.get_tensor(name) for name in _arrays_of_use(file.keys())}
        names = json.loads((file.metadata() or {}).get("classes", "[]"))
    return arrays, _checked_names(names)


def _checked_names(names: Any) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ShortlistError("the names of its classes must be a list of strings")
    return names


def _rows(path: Path, arrays: dict[str, Tensor], part: str) -> Rows | None:
    for x_name, y_name in ((f"{part}_x", f"{part}_y"), *([("x", "y")] if part == "train" else [])):
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
            return x, y.long()
    return None


def _check_against_training(path: Path, part: str, parts: dict[str, Rows], classes: list[str]) -> None:
    x, y = parts[part]
    width = parts["train"][0].shape[1]
    if x.shape[1] != width:
        raise ShortlistError(f"{part}_x of {path} must have {width} columns as train_x has, got {x.shape[1]}")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= len(classes):
        raise ShortlistError(f"{part}_y of {path} must be in [0, {len(classes) - 1}], got {low if low < 0 else high}")
    if part == "train":
        empty = (torch.bincount(y, minlength=len(classes)) == 0).nonzero().flatten().tolist()
        if empty:
            raise ShortlistError(
                f"every class of {path} must have training rows; {len(empty)} have none: "
                + some_of([classes[label] for label in empty])
            )
