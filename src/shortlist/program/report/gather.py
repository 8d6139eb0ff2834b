"""Reads run folders and groups them: runs on the same data are compared, runs that differ only in the seed averaged."""

import csv
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig, RunConfig
from shortlist.program.predicting.calibration import read_calibration
from shortlist.program.predicting.certainty import Certainty, measured_certainty
from shortlist.program.report.names import short_labels
from shortlist.program.report.summary import Summary, summarise
from shortlist.program.runs.checks import METRIC
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import (
    Classes,
    Correction,
    read_classes,
    read_correction,
    read_facts,
    read_result,
)
from shortlist.program.runs.scores import FILE as SCORES

Value = TypeVar("Value")
_SIDE_BY_SIDE = 4
_SUGGESTIONS = 5


@dataclass(frozen=True, eq=False)
class Predictions:
    """The suggestions of a run for each test image."""

    labels: Tensor
    """``(N,)``, -1 for an image that could not be read."""
    suggestions: Tensor
    """``(N, S)``, the best first."""
    above: Tensor
    """``(N,)`` how many classes are above the label."""


@dataclass(frozen=True, eq=False)
class ClassAccuracy:
    """The accuracy of a run on each class."""

    train_images: Tensor
    """``(L,)``."""
    by_k: dict[int, Tensor]
    """``(L,)`` accuracies for each K, NaN for a class without test images."""


@dataclass(frozen=True, eq=False)
class Run:
    """The contents of a run folder. What is not there is None or empty."""

    folder: RunFolder
    config: RunConfig
    classes: Classes | None
    test_digest: str | None
    """Of the test image files, if recorded."""
    environment: dict[str, Any]
    epochs: list[dict[str, Any]]
    final: dict[str, Any] | None
    """None if the run has not finished."""
    correction: Correction | None
    """None if its scores are not corrected for the prior."""
    predictions: Predictions | None
    class_accuracy: ClassAccuracy | None
    certainty: Certainty | None
    """None if the run is not calibrated."""


@dataclass(frozen=True, eq=False)
class Setup:
    """Runs that share all settings but the seed."""

    label: str
    style: int
    """Selects the colour, marker and dashes everywhere on the page."""
    config: RunConfig
    finished: list[Run] = field(default_factory=list)
    unfinished: list[Run] = field(default_factory=list)
    copies: list[Run] = field(default_factory=list)
    """Runs with the seed of another one. They are left out, since they say nothing about the spread over seeds."""

    @property
    def has_predictions(self) -> bool:
        return any(run.predictions for run in self.finished)

    @property
    def corrections(self) -> list[Correction]:
        """Those of the finished runs, if all of them have one: means over some of the seeds could not be compared."""
        found = [run.correction for run in self.finished if run.correction]
        return found if len(found) == len(self.finished) else []

    def test_metric(self, name: str, *, corrected: bool = False) -> Summary | None:
        """Over the finished runs; None if the metric is undefined, or if it is to be corrected and they are not."""
        if corrected and not self.corrections:
            return None
        key = "test_corrected" if corrected else "test"
        return summarise([run.final[key].get(name) for run in self.finished if run.final])


@dataclass(frozen=True, eq=False)
class Comparison:
    """Set-ups on the same data."""

    data: DataConfig
    class_names: tuple[str, ...]
    train_images: tuple[int, ...]
    setups: list[Setup]

    @property
    def finished(self) -> list[Setup]:
        """The set-ups with results."""
        return [setup for setup in self.setups if setup.finished]

    @property
    def runs(self) -> list[Run]:
        """The finished runs, in the order of their set-ups."""
        return [run for setup in self.setups for run in setup.finished]

    @property
    def has_corrections(self) -> bool:
        return any(setup.corrections for setup in self.finished)

    @property
    def ks(self) -> list[int]:
        """Every K at which all finished runs were measured."""
        measured = [_ks_of(run.final["test"]) for run in self.runs if run.final]
        return sorted(set.intersection(*measured)) if measured else []

    @property
    def main_k(self) -> int | None:
        """The K shown first: that of the losses if they agree, otherwise the largest in common."""
        of_losses = {setup.config.loss.largest_k for setup in self.finished}
        if len(of_losses) == 1 and of_losses <= set(self.ks):
            return of_losses.pop()
        return self.ks[-1] if self.ks else None

    @property
    def suggestions_shown(self) -> int:
        """How many suggestions of an image the page shows."""
        return self.main_k or _SUGGESTIONS

    @property
    def leading(self) -> list[Setup]:
        """The set-ups with the highest macro accuracy, as many as fit side by side, in their original order."""
        chosen = {setup.style for setup in self.ranking[:_SIDE_BY_SIDE]}
        return [setup for setup in self.finished if setup.style in chosen]

    @property
    def ranking(self) -> list[Setup]:
        """The finished set-ups by macro accuracy at the main K, the highest first."""
        return sorted(self.finished, key=self._macro, reverse=True)

    def _macro(self, setup: Setup) -> float:
        summary = setup.test_metric(f"macro_top{self.main_k}")
        return summary.mean if summary else 0.0

    def class_name(self, label: int) -> str:
        name = self.class_names[label] if label < len(self.class_names) else ""  # the file of names may be missing
        return name.strip() or f"class {label}"


def gather(runs: list[RunFolder]) -> list[Comparison]:
    """Group runs into comparisons. Data sets, set-ups and runs keep the order in which they are given."""
    if not runs:
        raise ShortlistError("there is no run to report on: name at least one run folder")
    on_same_data: list[list[Run]] = []
    # A run killed very early has no file of classes: it joins the runs with the same data in their configuration.
    for run in sorted((_read(folder) for folder in runs), key=lambda run: run.classes is None):
        for members in on_same_data:
            if all(_same_data(run, member) for member in members):
                members.append(run)
                break
        else:
            on_same_data.append([run])
    return [_compare(members) for members in on_same_data]


def _compare(runs: list[Run]) -> Comparison:
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        by_key.setdefault(run.config.key(), []).append(run)
    labels = short_labels([members[0].config for members in by_key.values()])
    setups = [
        _setup(label, style, members)
        for style, (label, members) in enumerate(zip(labels, by_key.values(), strict=True))
    ]
    classes = runs[0].classes or Classes((), ())
    return Comparison(runs[0].config.data, classes.names, classes.train_images, setups)


def _setup(label: str, style: int, members: list[Run]) -> Setup:
    """Count one run a seed: the first finished one, or else the first."""
    by_seed: dict[int, Run] = {}
    for run in sorted(members, key=lambda run: (run.config.seed, run.final is None)):
        by_seed.setdefault(run.config.seed, run)
    kept = list(by_seed.values())
    return Setup(
        label,
        style,
        members[0].config,
        finished=[run for run in kept if run.final is not None],
        unfinished=[run for run in kept if run.final is None],
        copies=[run for run in members if run not in kept],
    )


def _same_data(run: Run, other: Run) -> bool:
    """True unless what both runs recorded about their data differs. Where and how they read it does not matter."""
    recorded = ((run.classes, other.classes), (run.test_digest, other.test_digest))
    return _kind_of_data(run) == _kind_of_data(other) and all(a == b or None in (a, b) for a, b in recorded)


def _kind_of_data(run: Run) -> DataConfig:
    usual = DataConfig()
    return replace(
        run.config.data,
        root=usual.root,
        augment=usual.augment,
        image_size=usual.image_size,
        on_bad_image=usual.on_bad_image,
        workers=usual.workers,
    )


def _ks_of(metrics: dict[str, Any]) -> set[int]:
    names = (name for name in metrics if name.startswith("micro_top") and METRIC.fullmatch(name))
    return {int(name.removeprefix("micro_top")) for name in names}


def _read(folder: RunFolder) -> Run:
    finished = folder.finished
    return Run(
        folder=folder,
        config=folder.config,
        classes=read_classes(folder) if folder.has("classes.json") else None,
        test_digest=_optional(lambda: read_facts(folder).test_digest, None),
        environment=_optional(folder.read_environment, {}),
        epochs=folder.metrics(),
        final=read_result(folder) if finished else None,
        correction=read_correction(folder),
        predictions=_predictions(folder.path / "test_predictions.safetensors") if finished else None,
        class_accuracy=_class_accuracy(folder.path / "test_per_class.csv") if finished else None,
        certainty=_certainty(folder) if finished else None,
    )


def _certainty(folder: RunFolder) -> Certainty | None:
    if not folder.has(SCORES):  # a copy for use alone; accuracies can still be shown
        return None
    calibration = read_calibration(folder)
    return None if calibration is None else measured_certainty(folder, calibration)


def _optional(read: Callable[[], Value], default: Value) -> Value:
    """What a record says, or the default if it is missing or damaged: the results can still be shown."""
    try:
        return read()
    except ShortlistError:
        return default


def _predictions(path: Path) -> Predictions | None:
    if not path.is_file():
        return None
    try:
        tensors = safetensors.torch.load_file(path)
        labels, suggestions = tensors["labels"], tensors["suggestions"]
        if labels.ndim != 1 or suggestions.ndim != 2 or len(suggestions) != len(labels) or 0 in suggestions.shape:
            raise ValueError(f"labels of {tuple(labels.shape)}, suggestions of {tuple(suggestions.shape)}")
        if labels.dtype.is_floating_point or suggestions.dtype.is_floating_point:
            raise ValueError("labels and suggestions must be whole numbers")
        if suggestions.min() < 0 or tensors.get("above", labels).shape != labels.shape:
            raise ValueError("suggestions must be classes, one row for each label")
        before_label = ((suggestions == labels.unsqueeze(1)).cumsum(1) == 0).sum(1)
        # Early versions did not record how many classes are above the label. Without ties, these are those before it.
        return Predictions(labels, suggestions, tensors.get("above", before_label))
    except (safetensors.SafetensorError, KeyError, RuntimeError, ValueError) as error:
        raise ShortlistError(f"{path} is damaged: {error}") from None


def _class_accuracy(path: Path) -> ClassAccuracy | None:
    if not path.is_file():
        return None
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        ks = [int(name.removeprefix("top")) for name in lines[0] if name.startswith("top")]
        return ClassAccuracy(
            torch.tensor([int(line["train_images"]) for line in lines]),
            {k: torch.tensor([float(line[f"top{k}"] or "nan") for line in lines], dtype=torch.float64) for k in ks},
        )
    except UnicodeDecodeError:
        raise ShortlistError(f"{path} is damaged: it is not text in UTF-8") from None
    except (KeyError, IndexError, ValueError, TypeError, csv.Error) as error:
        raise ShortlistError(f"{path} is damaged: {error!r}") from None
