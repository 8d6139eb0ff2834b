"""Whether data still is what a run recorded of it."""

from shortlist.data.splits import Problem
from shortlist.errors import ShortlistError
from shortlist.runs import RunFolder

_HELD_OUT = ("val_files", "test_files", "val_indices", "test_indices")


def refuse_other_data(problem: Problem, run: RunFolder) -> None:
    """Raise an error unless labels mean what they meant, and what was held out of training would be so again.

    A file that came or went moves others between the splits: tests would be on images that the run was trained on. Data
    that has splits of its own may have more of it.
    """
    if list(problem.classes) != run.read_json("classes.json")["names"]:
        raise ShortlistError(f"the data has changed: its classes are not those that {run.path} was trained on")
    recorded = run.read_json("facts.json")
    if any(problem.facts[name] != recorded.get(name) for name in _HELD_OUT if name in problem.facts):
        raise ShortlistError(
            f"the data has changed: other images would be held out for validation and test than {run.path} had; "
            "put back what it was trained on"
        )
