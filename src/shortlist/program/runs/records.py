"""What a run wrote down about its data. A file that somebody has edited is named if it does not hold that any more."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shortlist.errors import ShortlistError
from shortlist.program.data.base import Preprocess
from shortlist.program.runs.folder import METRIC, RunFolder, are_metrics, is_number, is_text, is_whole

_CLASSES, _PREPROCESS, _RESULT = "classes.json", "preprocess.json", "final.json"
_LARGEST_SIDE = 2**14  # of images in pixels


@dataclass(frozen=True)
class Classes:
    """The classes in the order of their labels."""

    names: tuple[str, ...]
    train_images: tuple[int, ...]


def read_classes(run: RunFolder) -> Classes:
    names, sizes = _entries(run, _CLASSES, ("names", "train_images"))
    if not isinstance(names, list) or not all(map(is_text, names)):
        raise _damaged(run, _CLASSES, "names must be a list of strings")
    if not isinstance(sizes, list) or len(sizes) != len(names) or not all(map(is_whole, sizes)):
        raise _damaged(run, _CLASSES, f"train_images must be a list of {len(names)} whole numbers >= 0, one a class")
    return Classes(tuple(names), tuple(sizes))


def read_preprocess(run: RunFolder) -> Preprocess:
    channels, resize, crop, mean, std = _entries(
        run, _PREPROCESS, [field.name for field in dataclasses.fields(Preprocess)]
    )
    if type(channels) is not int or channels not in (1, 3):
        raise _damaged(run, _PREPROCESS, f"channels must be 1 or 3, got {channels!r}")
    for name, side in (("resize", resize), ("crop", crop)):
        if not is_whole(side) or not 1 <= side <= _LARGEST_SIDE:
            raise _damaged(run, _PREPROCESS, f"{name} must be a whole number in [1, {_LARGEST_SIDE}], got {side!r}")
    for name, values in (("mean", mean), ("std", std)):
        if not isinstance(values, list) or len(values) != channels or not all(map(is_number, values)):
            raise _damaged(run, _PREPROCESS, f"{name} must be a list of {channels} numbers, got {values!r}")
    if 0 in std:
        raise _damaged(run, _PREPROCESS, f"std must not be 0, got {std!r}")
    return Preprocess(channels, resize, crop, tuple(mean), tuple(std))


def read_result(run: RunFolder) -> dict[str, Any]:
    """What ``final.json`` says, with all the entries that tables and pages show."""
    checks: dict[str, Callable[[Any], bool]] = {
        "best_epoch": is_whole,
        "select": lambda value: is_text(value) and METRIC.fullmatch(value) is not None,
        "val": _is_metrics,
        "test": _is_metrics,
        "train_seconds": is_number,
    }
    result = run.read_record(_RESULT, **checks)
    for name in checks:
        if name not in result:
            raise _damaged(run, _RESULT, f"it has no entry {name}")
    return result


def _is_metrics(value: Any) -> bool:
    return isinstance(value, dict) and are_metrics(value)


def _entries(run: RunFolder, file: str, names: Iterable[str]) -> list[Any]:
    content = run.read_record(file)
    for name in names:
        if name not in content:
            raise _damaged(run, file, f"it has no entry {name}")
    return [content[name] for name in names]


def _damaged(run: RunFolder, file: str, why: str) -> ShortlistError:
    return ShortlistError(f"{run.path / file} is damaged: {why}")
