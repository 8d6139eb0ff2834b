"""Whether data still is what a run recorded of it."""

from collections.abc import Sequence
from typing import Any

from shortlist.errors import ShortlistError
from shortlist.program.data.base import Problem
from shortlist.program.runs.folder import RunFolder, is_text
from shortlist.program.runs.records import read_classes
from shortlist.program.wording import counted, some_of

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
