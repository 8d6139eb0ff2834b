"""What a run wrote down about its data. A file that somebody has edited is named if it does not hold that any more."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shortlist.errors import ShortlistError
from shortlist.program.data.base import Preprocess, Problem
from shortlist.program.runs.folder import METRIC, RunFolder, are_metrics, is_number, is_text, is_whole
from shortlist.program.text import counted, some_of

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


_FACTS, _FINGERPRINTS = "facts.json", "fingerprints"
_PARTS = ("train", "val", "test")
_HELD_OUT = ("val_files", "test_files", "val_indices", "test_indices")


def refuse_other_data(problem: Problem, run: RunFolder) -> None:
    """Raise an error unless labels mean what they meant, and what was held out of training would be so again.

    A file that came or went moves others between the splits: tests would be on images that the run was trained on. Data
    that has splits of its own may have more of it.
    """
    if problem.classes != read_classes(run).names:
        raise ShortlistError(f"the data has changed: its classes are not those that {run.path} was trained on")
    recorded = run.read_record(_FACTS)
    if any(problem.facts[name] != recorded.get(name) for name in _HELD_OUT if name in problem.facts):
        raise ShortlistError(
            f"the data has changed{_where(problem, run)}: other images would be held out for validation and test than "
            f"{run.path} had; put back what it was trained on"
        )


def facts_to_record(problem: Problem) -> dict[str, Any]:
    """What a run must know of its data to tell whether it has changed."""
    fingerprints = {part: problem.split(part).fingerprint() for part in _PARTS}
    return problem.facts | {_FINGERPRINTS: {part: known for part, known in fingerprints.items() if known}}


def has_other_training_images(problem: Problem, run: RunFolder) -> bool:
    """True if files came, went or were replaced since the run began; False if it did not note them."""
    recorded = run.read_record(_FACTS).get("train_digest")
    return recorded is not None and (
        problem.facts.get("train_digest") != recorded or "train" in _replaced(problem, run, ["train"])
    )


def _replaced(problem: Problem, run: RunFolder, parts: Sequence[str]) -> list[str]:
    """Splits whose files have the names that the run noted, and other sizes."""
    recorded = run.read_record(_FACTS, **{_FINGERPRINTS: _are_fingerprints}).get(_FINGERPRINTS, {})
    found = []
    for part in parts:
        before, now = recorded.get(part), problem.split(part).fingerprint() if part in recorded else None
        if before and now and before["names"] == now["names"] and before["sizes"] != now["sizes"]:
            found.append(part)
    return found


def _are_fingerprints(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, dict) and is_text(each.get("names")) and is_text(each.get("sizes")) for each in value.values()
    )


def refuse_other_training_images(problem: Problem, run: RunFolder) -> None:
    """Raise an error unless a run that goes on would go on with the images, and in the order, that it began with.

    Validation and test images may have become more; none may have been replaced.
    """
    if replaced := _replaced(problem, run, _PARTS):
        raise ShortlistError(
            f"the data has changed: an image of {some_of(replaced)} was replaced by another of the same name, of "
            f"another size than {run.path} began with; put it back, or begin a run in another folder"
        )
    if has_other_training_images(problem, run):
        raise ShortlistError(
            f"the data has changed{_where(problem, run)}: the training images are not those that {run.path} began "
            "with; put them back, or begin a run in another folder"
        )


def _where(problem: Problem, run: RunFolder) -> str:
    """Classes whose numbers tell that something came or went. One file for another cannot be seen in these."""
    now, then = problem.class_counts.tolist(), read_classes(run).train_images
    changes = [
        f"{name}: {counted(here, 'training image')}, not {before}"
        for name, here, before in zip(problem.classes, now, then, strict=True)
        if here != before
    ]
    return f" ({some_of(changes)})" if changes else ""
