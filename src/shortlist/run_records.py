"""What a run wrote down about its data. A file that somebody has edited is named if it does not hold that any more."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shortlist.data.splits import Preprocess
from shortlist.errors import ShortlistError
from shortlist.runs import RunFolder

_CLASSES, _PREPROCESS = "classes.json", "preprocess.json"


@dataclass(frozen=True)
class Classes:
    """The classes in the order of their labels."""

    names: tuple[str, ...]
    train_images: tuple[int, ...]


def read_classes(run: RunFolder) -> Classes:
    names, sizes = _entries(run, _CLASSES, ("names", "train_images"))
    if not _is_list_of(str, names):
        raise _damaged(run, _CLASSES, "names must be a list of strings")
    if not _is_list_of(int, sizes) or len(sizes) != len(names) or any(size < 0 for size in sizes):
        raise _damaged(run, _CLASSES, f"train_images must be a list of {len(names)} whole numbers >= 0, one a class")
    return Classes(tuple(names), tuple(sizes))


def read_preprocess(run: RunFolder) -> Preprocess:
    channels, resize, crop, mean, std = _entries(
        run, _PREPROCESS, [field.name for field in dataclasses.fields(Preprocess)]
    )
    if type(channels) is not int or channels not in (1, 3):
        raise _damaged(run, _PREPROCESS, f"channels must be 1 or 3, got {channels!r}")
    for name, side in (("resize", resize), ("crop", crop)):
        if type(side) is not int or side < 1:
            raise _damaged(run, _PREPROCESS, f"{name} must be a whole number >= 1, got {side!r}")
    for name, values in (("mean", mean), ("std", std)):
        if not _is_list_of((int, float), values) or len(values) != channels or not all(map(math.isfinite, values)):
            raise _damaged(run, _PREPROCESS, f"{name} must be a list of {channels} numbers, got {values!r}")
    if 0 in std:
        raise _damaged(run, _PREPROCESS, f"std must not be 0, got {std!r}")
    return Preprocess(channels, resize, crop, tuple(mean), tuple(std))


def _entries(run: RunFolder, file: str, names: Iterable[str]) -> list[Any]:
    content = run.read_json(file)
    for name in names:
        if not isinstance(content, dict) or name not in content:
            raise _damaged(run, file, f"it has no entry {name}")
    return [content[name] for name in names]


def _is_list_of(kinds: type | tuple[type, ...], values: Any) -> bool:
    of_kind = isinstance(values, list) and all(isinstance(value, kinds) for value in values)
    return of_kind and not any(isinstance(value, bool) for value in values)  # which Python takes for whole numbers


def _damaged(run: RunFolder, file: str, why: str) -> ShortlistError:
    return ShortlistError(f"{run.path / file} is damaged: {why}")
