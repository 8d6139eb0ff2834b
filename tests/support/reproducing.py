"""Where the tests of ``reproduce`` train, how they interrupt training, and made-up results."""

import dataclasses
import itertools
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shortlist.program.reproduce.experiment import Experiment
from shortlist.program.reproduce.registry import EXPERIMENTS
from shortlist.program.reproduce.results import Result
from shortlist.program.reproduce.running import reproduce
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.loop import Trainer

ROOT = Path(__file__).parents[2]
SMALL = replace(EXPERIMENTS["imagenet"], cells=EXPERIMENTS["imagenet"].cells[:3])


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder for runs and results."""

    folder: Path

    @property
    def runs_root(self) -> Path:
        return self.folder / "runs"

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def run(self, experiment: Experiment, **options: Any) -> tuple[list[Result], list[str]]:
        settings: dict[str, Any] = {"scale": "smoke", "quiet": True} | options
        return reproduce(experiment, runs_root=self.runs_root, results=self.results, **settings)

    def finished(self) -> dict[str, int]:
        """When each run finished, by folder."""
        found = self.runs_root.rglob("final.json")
        return {path.parent.relative_to(self.runs_root).as_posix(): path.stat().st_mtime_ns for path in found}

    def command(self, *arguments: str) -> list[str]:
        return [*arguments, "--runs-root", str(self.runs_root), "--results", str(self.results)]


class TrainedPlaces:
    """Places with trained experiments. Each is trained once, and restored from a copy for every test."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._results: dict[str, list[Result]] = {}

    def __call__(self, experiment: Experiment, seeds: Sequence[int] = (0,)) -> tuple[Place, list[Result]]:
        # At a fixed path: a run's configuration names its data, and so its place.
        name = f"{experiment.name}-{len(experiment.cells)}-{len(seeds)}"
        place, copy = Place(self._root / name), self._root / f"{name}-copy"
        if name not in self._results:
            self._results[name], _ = place.run(experiment, seeds=seeds)
            shutil.copytree(place.folder, copy)
        shutil.rmtree(place.folder)
        shutil.copytree(copy, place.folder)
        return place, self._results[name]


def made_up(value: float, **fields: Any) -> Result:
    usual: dict[str, Any] = {
        "recipe": "cifar100_table4_noised_p40",
        "experiment": "cifar100-top5",
        "row": "0.4",
        "column": "noised",
        "scale": "short",
        "epochs": 100,
        "seed": 0,
        "metric": "test_micro",
        "K": 5,
        "commit": "0123456789",
        "gpu": "Made-up GPU",
        "date": "2026-01-01T00:00:00+00:00",
    }
    key = fields.pop("key", "aaaaaaaaaa")
    known = usual | fields
    return Result(**known, value=value, config=key, run=f"{known['recipe']}/{key}-s{known['seed']}")


class FailingRuns(Callback):
    """Raises an error in the training of these runs, counted from 1."""

    def __init__(self, *runs: int, error: Exception) -> None:
        self._runs, self._error, self._numbers = runs, error, itertools.count(1)

    def on_fit_start(self, trainer: Trainer) -> None:
        if next(self._numbers) in self._runs:
            raise self._error
