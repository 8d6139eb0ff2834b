"""Classes added after training, beside a training with them: macro top-5 of the new and of the old classes.

Twenty classes of feathers are held out. A frozen network is computed once, and every run is a last layer on its
features, as a run on embeddings: it is the same training.
"""

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program import recipes
from shortlist.program.atomic_files import write_file
from shortlist.program.compare.intervals import interval
from shortlist.program.config import Changes, RunConfig, changed
from shortlist.program.data.base import SPLITS, Problem, evaluation_plan
from shortlist.program.predicting.add_class import add_classes
from shortlist.program.predicting.predictor import load
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.build import build
from shortlist.program.training.loop import train

NAME = "add-class"
RECIPE = "feathers_frozen"
LOSSES: dict[str, Changes] = {
    "cross_entropy": {},
    "balanced_softmax": {},
    "imbalanced_noised_topk_hinge": {"loss.k": (1, 3, 5), "loss.epsilon": 0.02, "loss.scale": 20.0},
}
"""Two losses on a linear and one on a cosine layer, with their settings."""
SEEDS = (0, 1, 2)
EPOCHS = 15
_ON_FEATURES: Changes = {
    "data.name": "embeddings",
    "data.fit": "crop",
    "data.image_size": 0,
    "model.name": "none",
    "model.frozen": False,
    "model.weights": "",
    "train.epochs": EPOCHS,
}
_HELD_OUT, _FEWEST, _K = 20, 5, 5
_PHOTOS = (1, 5, None)

Say = Callable[[str], None]


@dataclass(frozen=True)
class AddedResult:
    """Macro top-5 with new classes."""

    seed: int
    loss: str
    how: str
    """without, trained or added."""
    photos: int | None
    """Of each new class; None is all."""
    new: float | None
    old: float
    seconds: float
    """Of the training, or of the addition."""


@dataclass(frozen=True)
class _Data:
    """Features by split. New classes have the last labels."""

    classes: list[str]
    features: dict[str, Tensor]
    labels: dict[str, Tensor]

    @property
    def count_old(self) -> int:
        return len(self.classes) - _HELD_OUT

    def write(self, path: Path, photos: int | None, *, with_new: bool) -> Path:
        """A file of embeddings, with the first so many photos of each new class or all of them, or without them."""
        arrays: dict[str, Any] = {}
        for split in SPLITS:
            labels = self.labels[split]
            chosen = labels < self.count_old
            if with_new:
                is_few = split == "train" and photos is not None
                chosen = chosen | (self._first(photos or 0) if is_few else labels >= self.count_old)
            arrays[f"{split}_x"], arrays[f"{split}_y"] = self.features[split][chosen].numpy(), labels[chosen].numpy()
        names = self.classes if with_new else self.classes[: self.count_old]
        np.savez(path, **arrays, classes=np.array(names))
        return path

    def write_new(self, folder: Path, photos: int | None) -> Path:
        """A file of vectors for each new class."""
        folder.mkdir()
        for label in range(self.count_old, len(self.classes)):
            rows = self.features["train"][self.labels["train"] == label]
            np.save(folder / f"{label:04d}.npy", rows[:photos].numpy())
        return folder

    def _first(self, photos: int) -> Tensor:
        chosen = torch.zeros_like(self.labels["train"], dtype=torch.bool)
        for label in range(self.count_old, len(self.classes)):
            chosen[(self.labels["train"] == label).nonzero().flatten()[:photos]] = True
        return chosen


def measure_additions(
    root: str,
    *,
    results: Path,
    seeds: Sequence[int] = SEEDS,
    losses: Collection[str] = tuple(LOSSES),
    say: Say = lambda message: None,
) -> list[AddedResult]:
    """Train with and without the held-out classes, add them, and write what the test images say of both.

    Returns all results of the file, with those of other losses and seeds.

    Args:
        root: Of the data; empty for the usual place.
        results: Folder of the file.
        seeds: Of the trainings, and of which classes are held out.
        losses: Their names, some of ``LOSSES``.
        say: Called with messages.
    """
    path = results / f"{NAME}.json"
    _read_additions(path)  # a damaged file is told before the trainings, not after them
    recipe = changed(recipes.build(RECIPE), {"data.root": root})
    found: list[AddedResult] = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        problem = build(recipe, work / "features").problem
        for seed, loss in itertools.product(seeds, losses):
            config = changed(recipes.with_loss(recipe, loss), {**_ON_FEATURES, **LOSSES[loss], "seed": seed})
            found += _measured(config, _held_out(problem, seed), work / f"{loss}-{seed}", say)
    return update_additions(path, found)


def update_additions(path: Path, found: Sequence[AddedResult]) -> list[AddedResult]:
    """Write what was measured. Other losses and seeds stay in the file; returns all that is there now."""
    measured = {(result.seed, result.loss) for result in found}
    kept = [result for result in _read_additions(path) if (result.seed, result.loss) not in measured]
    everything = sorted((*kept, *found), key=lambda result: (result.seed, result.loss))
    lines = ",\n".join(json.dumps(asdict(result), allow_nan=False) for result in everything)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, f"[\n{lines}\n]\n".encode())
    return everything


def _read_additions(path: Path) -> list[AddedResult]:
    """What the file of results has; nothing if there is none yet."""
    if not path.exists():
        return []
    try:
        return [AddedResult(**entry) for entry in json.loads(path.read_text("utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise ShortlistError(f"{path} is damaged: {error}") from None


def table(found: Sequence[AddedResult]) -> Table:
    """Means over seeds with 95 % intervals: a row for each loss, way and number of photos."""
    shown = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("loss", "how", "photos", "new", "old", "seconds at most"):
        shown.add_column(name, justify="left" if name in ("loss", "how") else "right")
    setups: dict[tuple[str, str, int | None], list[AddedResult]] = {}
    for result in found:
        setups.setdefault((result.loss, result.how, result.photos), []).append(result)
    for (loss, how, photos), results in setups.items():
        new = [result.new for result in results if result.new is not None]
        shown.add_row(
            *(loss, how, "all" if photos is None else str(photos)),
            *(_mean(values) for values in (new, [result.old for result in results])),
            f"{max(result.seconds for result in results):.1f}",
        )
    return shown


def _mean(values: Sequence[float]) -> str:
    found = interval(values)
    if found is None:
        return ""
    return f"{found.mean:.1f}" if found.half is None else f"{found.mean:.1f} ± {found.half:.1f}"


def _measured(config: RunConfig, data: _Data, work: Path, say: Say) -> list[AddedResult]:
    work.mkdir()

    def trained(photos: int | None, *, with_new: bool) -> tuple[RunFolder, float]:
        file = data.write(work / f"data-{photos}-{with_new}.npz", photos, with_new=with_new)
        began = time.monotonic()
        run = train(changed(config, {"data.root": str(file)}), folder=file.with_suffix(""), quiet=True)
        return run, time.monotonic() - began

    def result(how: str, photos: int | None, run: RunFolder, seconds: float) -> AddedResult:
        new, old = _accuracy(run, data)
        found = AddedResult(config.seed, config.loss.name, how, photos, new, old, round(seconds, 1))
        say(json.dumps(asdict(found)))
        return found

    base, seconds = trained(None, with_new=False)
    found = [result("without", 0, base, seconds)]
    for photos in _PHOTOS:
        folder = data.write_new(work / f"new-{photos}", photos)
        began = time.monotonic()
        run = add_classes(base, folder, work / f"added-{photos}")
        found.append(result("added", photos, run, time.monotonic() - began))
    for photos in reversed(_PHOTOS):
        found.append(result("trained", photos, *trained(photos, with_new=True)))
    return found


def _held_out(problem: Problem, seed: int) -> _Data:
    """The features of a problem, with the held-out classes last."""
    tested = torch.bincount(problem.test.labels, minlength=len(problem.classes))
    possible = ((problem.class_counts >= _FEWEST) & (tested > 0)).nonzero().flatten()
    if len(possible) < _HELD_OUT:
        raise ShortlistError(f"{NAME} needs {_HELD_OUT} classes of at least {_FEWEST} photos, got {len(possible)}")
    new = possible[torch.randperm(len(possible), generator=torch.Generator().manual_seed(seed))[:_HELD_OUT]]
    is_new = torch.zeros(len(problem.classes), dtype=torch.bool)
    is_new[new] = True
    order = torch.cat(((~is_new).nonzero().flatten(), is_new.nonzero().flatten()))
    label_of = order.argsort()
    features, labels = {}, {}
    for name in SPLITS:
        split = problem.split(name)
        parts = list(split.batches(evaluation_plan(len(split), 4096, 0, 1), torch.device("cpu")))
        features[name] = torch.cat([rows for rows, _, _ in parts]).float()
        labels[name] = label_of[torch.cat([of_part for _, of_part, _ in parts])]
    return _Data([problem.classes[label] for label in order.tolist()], features, labels)


def _accuracy(run: RunFolder, data: _Data) -> tuple[float | None, float]:
    """Macro top-5 of the test images of the new and of the old classes, in percent."""
    predictor = load(run.path, "cpu")
    best = predictor.scores(data.features["test"]).topk(_K).indices
    labels = data.labels["test"]
    is_right = (best == labels.unsqueeze(1)).any(1).double()
    count = torch.bincount(labels, minlength=len(data.classes))
    accuracy = 100 * torch.bincount(labels, is_right, minlength=len(data.classes)) / count
    old, new = accuracy[: data.count_old], accuracy[data.count_old :]
    knows_new = len(predictor.classes) == len(data.classes)
    return (round(new.nanmean().item(), 2) if knows_new else None), round(old.nanmean().item(), 2)
