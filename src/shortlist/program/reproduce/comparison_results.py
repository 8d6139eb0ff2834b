"""``results/NAME.json``: what a comparison found, read from its run folders and never typed.

The file has every trial of the search and every run with its numbers, so that the page on rare classes can be made
without the runs.
"""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from shortlist.errors import ShortlistError
from shortlist.metrics import TopKMetrics
from shortlist.program.atomic_files import locked, write_file
from shortlist.program.compare.intervals import Interval, interval, paired_difference
from shortlist.program.compare.results import as_json
from shortlist.program.compare.running import compare
from shortlist.program.compare.standings import Standings
from shortlist.program.config import RunConfig, changed, differences, flat, from_dict, identity, to_dict
from shortlist.program.data.alter import thin_validation
from shortlist.program.reproduce import Scale, tiny_data
from shortlist.program.reproduce.comparisons import BASELINES, SEEDS, Comparison
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.model import prior_correction
from shortlist.program.runs.records import read_classes
from shortlist.program.runs.scores import read_scores
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.correction import choose_tau
from shortlist.program.training.evaluate import numbers_of
from shortlist.program.tuning.findings import TrialRecord

_BY_CLASS = "corrected_top5"


@dataclass(frozen=True)
class Run:
    """The numbers of one run. Accuracies are shares."""

    seed: int
    commit: str
    device: str
    started: str
    val: float
    """The metric of the comparison on the validation images, corrected for class sizes."""
    tau: float | None
    plain: Mapping[str, float | None]
    corrected: Mapping[str, float | None]
    """As the network would be used; equal to ``plain`` for a run without a correction."""
    class_accuracy: tuple[float | None, ...]
    """Corrected top-5 accuracy of each class; None for a class without test images."""
    thinned: Mapping[str, float | None] | None = None
    """The same as ``corrected`` with a correction chosen on validation images as long-tailed as the training images, if
    those of the run are not."""


@dataclass(frozen=True)
class Loss:
    """What is known of one loss."""

    name: str
    label: str
    state: str
    config: RunConfig | None
    """With the settings that the search chose; None if no trial finished."""
    searched: tuple[str, ...]
    trials: int
    runs: tuple[Run, ...]

    def values(self, metric: str, *, corrected: bool = True) -> dict[int, float]:
        """A test metric such as ``macro_top5`` by seed, where it is defined."""
        known = {run.seed: (run.corrected if corrected else run.plain).get(metric) for run in self.runs}
        return {seed: value for seed, value in known.items() if value is not None}

    def mean(self, metric: str, *, corrected: bool = True) -> Interval | None:
        return interval(list(self.values(metric, corrected=corrected).values()))

    def thinned(self, metric: str) -> Interval | None:
        """A test metric with the correction of few validation images."""
        return interval([value for run in self.runs if run.thinned and (value := run.thinned.get(metric)) is not None])

    def difference(self, other: "Loss", metric: str) -> Interval | None:
        """To another loss, paired by seed, both corrected."""
        return None if other is self else paired_difference(self.values(metric), other.values(metric))

    @property
    def val(self) -> float:
        """Mean on the validation images, by which losses are ordered; below all others without runs."""
        found = interval([run.val for run in self.runs])
        return found.mean if found else -1.0


@dataclass(frozen=True)
class Found:
    """What is known of a comparison, the best loss on the validation images first."""

    class_counts: tuple[int, ...]
    losses: tuple[Loss, ...]

    def loss(self, name: str) -> Loss | None:
        return next((loss for loss in self.losses if loss.name == name), None)


def comparison_file(folder: Path, comparison: Comparison, scale: Scale) -> Path:
    """Numbers on tiny data mean nothing and are kept apart."""
    return (folder / "smoke" if scale == "smoke" else folder) / f"{comparison.name}.json"


def run_comparison(
    comparison: Comparison,
    *,
    scale: Scale,
    seeds: Sequence[int] = SEEDS,
    only: Sequence[str] = (),
    results: Path = Path("results"),
    say: Callable[[str], None] = lambda message: None,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Standings:
    """Search and train what is not yet there, in ``runs`` in the working folder, and update the file of results.

    A search whose trials are in the file is not repeated: its choice holds for further seeds.

    Args:
        comparison: What to compare.
        scale: ``smoke`` on tiny data; the other scales are the same here.
        seeds: Of every loss.
        only: Patterns for names of losses; by default all. The others stay as they are in the file.
        results: Folder of the file.
        say: Called with messages.
        quiet: Do not show the progress of training.
        callbacks: Of every training.
    """
    contenders = [
        candidate
        for candidate in comparison.contenders()
        if not only or any(fnmatch(candidate.name, pattern) for pattern in only)
    ]
    if not contenders:
        raise ShortlistError(
            f"--only {' '.join(only)} matches no loss of {comparison.name}: it has {', '.join(comparison.candidates)}"
        )
    if scale == "smoke":
        tiny_data.ensure(Path("runs"))
    path = comparison_file(results, comparison, scale)
    if path.exists():
        _refuse_another_recipe(comparison, scale, path)
    standings = compare(
        comparison.base(scale),
        contenders,
        comparison.budget(scale),
        seeds=seeds,
        keep=BASELINES,
        known=_earlier_trials(path) if path.exists() else None,
        say=say,
        quiet=quiet,
        callbacks=callbacks,
    )
    update_comparison(comparison, standings, path)
    say(f"wrote {path}")
    return standings


def update_comparison(comparison: Comparison, standings: Standings, path: Path) -> Path:
    """Write what is known now.

    Losses that the standings lack keep their entry. Seeds that they lack keep their run, if its settings are the same.
    """
    new = {entry["name"]: _with_details(entry) for entry in as_json(standings)["losses"]}
    counts = _class_counts(standings)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent / ".lock"):  # other processes may update it at the same time
        before = _read_json(path) if path.exists() else {"losses": []}
        entries = {entry["name"]: entry for entry in before["losses"]}
        entries |= {name: _with_earlier_seeds(entry, entries.get(name)) for name, entry in new.items()}
        content = {
            "comparison": comparison.name,
            "metric": standings.metric,
            "class_counts": counts or before.get("class_counts", []),
            "losses": [entries[name] for name in comparison.candidates if name in entries],
        }
        # One line a trial and a run: a new one changes one place of the file.
        write_file(path, _lines(content).encode())
    return path


def read_comparison(comparison: Comparison, path: Path) -> Found:
    """What the file of a comparison says."""
    content = _read_json(path)
    labels = {candidate.name: candidate.label for candidate in comparison.contenders()}
    try:
        losses = [_loss(entry, labels.get(entry["name"], entry["name"])) for entry in content["losses"]]
        return Found(tuple(content["class_counts"]), tuple(sorted(losses, key=lambda loss: -loss.val)))
    except (KeyError, TypeError, ValueError) as error:
        raise ShortlistError(f"{path} is damaged: {error!r}") from None


def _loss(entry: Mapping[str, Any], label: str) -> Loss:
    config = entry["config"] and from_dict(entry["config"])
    runs = tuple(_run(run) for run in entry["runs"])
    return Loss(entry["name"], label, entry["state"], config, tuple(entry["searched"]), len(entry["trials"]), runs)


def _run(run: Mapping[str, Any]) -> Run:
    return Run(
        seed=run["seed"],
        commit=run["commit"],
        device=run["device"],
        started=run["started"],
        val=run["val"],
        tau=run["tau"],
        plain=run["test"],
        corrected=run["test_corrected"] or run["test"],
        class_accuracy=tuple(run["class_accuracy"]),
        thinned=run.get("test_thinned"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShortlistError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("losses"), list):
        raise ShortlistError(f"{path} is not a file of a comparison: it has no list of losses")
    return content


def _with_details(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of a comparison with where and when its runs were made, and how each class did."""
    runs = []
    for run in entry["runs"]:
        folder = RunFolder(Path(run["folder"]))
        environment = folder.read_environment()
        runs.append(
            run
            | {
                "commit": " ".join(folder.commits()),
                "device": environment.get("device"),
                "started": environment.get("started"),
                "test": _rounded(run["test"]),
                "test_corrected": run["test_corrected"] and _rounded(run["test_corrected"]),
                "test_thinned": _corrected_by_few(folder),
                "class_accuracy": _class_accuracy(folder.path / "test_per_class.csv"),
            }
        )
    kept = {name: entry[name] for name in ("name", "state", "failure", "config", "searched", "trials")}
    return kept | {"runs": runs}


def _with_earlier_seeds(entry: dict[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """An entry with the runs of the file for seeds that it lacks, unless they have other settings."""
    if before is None or not (entry["config"] and before["config"]):
        return entry
    if identity(from_dict(entry["config"])) != identity(from_dict(before["config"])):
        return entry
    runs = {run["seed"]: run for run in (*before["runs"], *entry["runs"])}
    return entry | {"runs": [runs[seed] for seed in sorted(runs)]}


def _corrected_by_few(run: RunFolder) -> dict[str, float | None] | None:
    """Test metrics after a correction chosen on validation images that are thinned like the training images.

    That is what somebody would get whose validation images are as rare as the training images. Epoch and settings are
    still those chosen on all validation images. None if the run's validation images are thinned, or its data is not.
    """
    config = run.config
    if config.data.imbalance == 1 or config.data.thin_validation:
        return None
    val, test, sizes = read_scores(run, "val"), read_scores(run, "test"), read_classes(run).train_images
    few = thin_validation(val, len(sizes), replace(config.data, thin_validation=True))
    correction = prior_correction(sizes)
    choose_tau(correction, few, config)
    metrics = TopKMetrics(len(sizes), config.all_ks, sizes)
    metrics.update(correction(test.scores), test.labels)
    return _rounded(numbers_of(metrics))


def _refuse_another_recipe(comparison: Comparison, scale: Scale, path: Path) -> None:
    """Losses of one file must differ in what is compared alone, and its trials must hold for new seeds."""
    base = comparison.base(scale)
    candidates = {candidate.name: candidate for candidate in comparison.contenders()}
    for entry in _read_json(path)["losses"]:
        try:
            known, searched = entry["config"] and from_dict(entry["config"]), entry["searched"]
        except (KeyError, TypeError) as error:
            raise ShortlistError(f"{path} is damaged: {error!r}") from None
        candidate = candidates.get(entry["name"])
        if candidate is None or known is None:
            continue
        chosen = {name: value for name, value in flat(to_dict(known)).items() if name in searched}
        others = differences(known, replace(changed(candidate.config(base), chosen), seed=known.seed))
        if others:
            raise ShortlistError(
                f"{path} was made with other settings ({', '.join(others)}): move it away, or name another folder "
                "with --results"
            )


def _earlier_trials(path: Path) -> dict[str, list[TrialRecord]]:
    """The trials in a file of results, by loss."""
    try:
        return {
            entry["name"]: [
                TrialRecord(
                    number=number,
                    state=trial["state"],
                    value=trial["value"],
                    settings=trial["settings"],
                    epochs=trial["epochs"],
                    folder=Path(),
                    worker="",
                    note="",
                )
                for number, trial in enumerate(entry["trials"])
            ]
            for entry in _read_json(path)["losses"]
        }
    except (KeyError, TypeError) as error:
        raise ShortlistError(f"{path} is damaged: {error!r}") from None


def _rounded(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: value if value is None else round(value, 6) for name, value in metrics.items()}


def _class_accuracy(path: Path) -> list[float | None]:
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    column = _BY_CLASS if _BY_CLASS in lines[0] else _BY_CLASS.removeprefix("corrected_")
    return [round(float(line[column]), 3) if line[column] else None for line in lines]


def _class_counts(standings: Standings) -> list[int]:
    for entry in standings.entries:
        for outcome in entry.outcomes:
            return list(read_classes(RunFolder(outcome.folder)).train_images)
    return []


def _lines(content: Mapping[str, Any]) -> str:
    """JSON with a line for each loss, trial and run."""

    def one(value: Any) -> str:
        return json.dumps(value, allow_nan=False)

    losses = []
    for loss in content["losses"]:
        head = ", ".join(f"{one(name)}: {one(value)}" for name, value in loss.items() if name not in ("trials", "runs"))
        lists = ",\n".join(
            f"  {one(name)}: [" + ",".join(f"\n   {one(item)}" for item in loss[name]) + "]"
            for name in ("trials", "runs")
        )
        losses.append(f" {{{head},\n{lists}}}")
    head = "".join(f"{one(name)}: {one(value)},\n" for name, value in content.items() if name != "losses")
    return "{" + head + '"losses": [\n' + ",\n".join(losses) + "\n]}\n"
