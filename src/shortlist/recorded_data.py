"""Whether data still is what a run recorded of it."""

from shortlist.data.splits import Problem
from shortlist.errors import ShortlistError
from shortlist.run_records import read_classes
from shortlist.runs import RunFolder
from shortlist.wording import counted, some_of

_HELD_OUT = ("val_files", "test_files", "val_indices", "test_indices")


def refuse_other_data(problem: Problem, run: RunFolder) -> None:
    """Raise an error unless labels mean what they meant, and what was held out of training would be so again.

    A file that came or went moves others between the splits: tests would be on images that the run was trained on. Data
    that has splits of its own may have more of it.
    """
    if problem.classes != read_classes(run).names:
        raise ShortlistError(f"the data has changed: its classes are not those that {run.path} was trained on")
    recorded = run.read_record("facts.json")
    if any(problem.facts[name] != recorded.get(name) for name in _HELD_OUT if name in problem.facts):
        raise ShortlistError(
            f"the data has changed{_where(problem, run)}: other images would be held out for validation and test than "
            f"{run.path} had; put back what it was trained on"
        )


def has_other_training_images(problem: Problem, run: RunFolder) -> bool:
    """Whether files came or went since the run began, in whichever way the data was split; False if nobody noted it."""
    recorded = run.read_record("facts.json").get("train_digest")
    return recorded is not None and problem.facts.get("train_digest") != recorded


def refuse_other_training_images(problem: Problem, run: RunFolder) -> None:
    """Raise an error unless a run that goes on would go on with the images, and in the order, that it began with."""
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
