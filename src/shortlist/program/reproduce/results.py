"""``results/NAME.csv``: the numbers of an experiment, read from run folders and never typed.

``results/configs`` holds the configuration behind each number, for readers who do not have the runs.
"""

import csv
import dataclasses
import io
import json
import math
import statistics
import typing
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import locked, write_file
from shortlist.program.config import RunConfig, from_dict, identity, to_dict
from shortlist.program.reproduce import Scale
from shortlist.program.reproduce.experiment import EPOCH_SECONDS, NONZERO_GRADIENTS, Cell, Experiment
from shortlist.program.reproduce.gradients import nonzero_gradients
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import read_result
from shortlist.program.text import spreadsheet_cell


@dataclass(frozen=True, kw_only=True)
class Result:
    """One number of one run. Accuracies are in percent."""

    recipe: str
    experiment: str
    row: str
    column: str
    scale: str
    epochs: int
    seed: int
    metric: str
    K: int
    value: float
    commit: str
    """The commit of the program; several if the run was resumed with another one."""
    gpu: str
    date: str
    """When the run began."""
    config: str
    """Key of its configuration, the same for all seeds."""
    run: str
    """Its folder below the root of the runs."""


COLUMNS = tuple(field.name for field in dataclasses.fields(Result))
_TYPES = typing.get_type_hints(Result)


def results_file(folder: Path, experiment: Experiment, scale: Scale) -> Path:
    """The file of an experiment. Numbers on tiny data mean nothing and are kept apart."""
    return (folder / "smoke" if scale == "smoke" else folder) / f"{experiment.name}.csv"


def runs_of(config: RunConfig, runs_root: Path) -> Iterator[RunFolder]:
    """The finished runs with this configuration, whatever their seed.

    They are found by their ``config.json``, not by the names of their folders: the key in the name may be that of an
    older version.
    """
    for folder in sorted((runs_root / config.recipe).glob("*-s*")):
        run = RunFolder(folder)
        with suppress(ShortlistError):  # a version with other settings wrote it
            if run.finished and identity(run.config) == identity(config):
                yield run


def measured(run: RunFolder, metric: str, k: int) -> float | None:
    """The value of a metric of an experiment for this run; None for a mean over no classes."""
    if metric == EPOCH_SECONDS:
        if not (times := run.epoch_seconds()):
            raise ShortlistError(f"{run.path} was resumed so often that no epoch can be timed")
        return statistics.median(times)
    if metric == NONZERO_GRADIENTS:
        return nonzero_gradients(run)
    split, _, average = metric.partition("_")
    try:
        share = read_result(run)[split][f"{average}_top{k}"]
    except KeyError:
        raise ShortlistError(f"{run.path}/final.json has no {metric} top-{k}") from None
    return None if share is None else round(100 * share, 4)


def results_of(experiment: Experiment, cell: Cell, scale: Scale, run: RunFolder, runs_root: Path) -> list[Result]:
    """All numbers that a run gives for its cell."""
    config, environment, commits = run.config, run.read_environment(), run.commits()
    try:
        gpu, date = environment["device"], environment["started"]
    except KeyError as missing:
        raise ShortlistError(f"{run.path}/environment.json is damaged: it has no entry {missing}") from None
    found = []
    for metric in experiment.metrics:
        value = measured(run, metric, cell.k)
        if value is not None:
            found.append(
                Result(
                    recipe=config.recipe,
                    experiment=experiment.name,
                    row=cell.row,
                    column=cell.column,
                    scale=scale,
                    epochs=config.train.epochs,
                    seed=config.seed,
                    metric=metric,
                    K=cell.k,
                    value=value,
                    commit=" ".join(commits),
                    gpu=gpu,
                    date=date,
                    config=config.key(),
                    run=run.path.relative_to(runs_root).as_posix(),
                )
            )
    return found


def collected(experiment: Experiment, scale: Scale, runs_root: Path) -> Iterator[Result]:
    """The numbers of all runs of an experiment that are on this disk."""
    for cell in experiment.cells:
        try:
            config = experiment.config(cell, scale, runs_root)
        except ShortlistError:  # a cell without a valid configuration has no runs; running it reports why
            continue
        for run in runs_of(config, runs_root):
            with suppress(ShortlistError):  # the run is damaged; running its cell reports how
                yield from results_of(experiment, cell, scale, run, runs_root)


def update_results(experiment: Experiment, scale: Scale, runs_root: Path, folder: Path) -> list[Result]:
    """Update the file of an experiment from the runs on this disk. Numbers of other runs stay in it.

    Returns:
        All numbers of the file.
    """
    path = results_file(folder, experiment, scale)
    scales: tuple[Scale, ...] = ("smoke",) if scale == "smoke" else ("short", "paper")

    def on_this_disk() -> list[Result]:
        return [result for known in scales for result in collected(experiment, known, runs_root)]

    if not path.exists() and not on_this_disk():
        return []
    with locked(path.parent / ".lock"):  # other processes may update it at the same time
        return _updated(path, experiment, on_this_disk(), runs_root)


def _updated(path: Path, experiment: Experiment, found: list[Result], runs_root: Path) -> list[Result]:
    before = read_results(path) if path.exists() else []
    for result in found:
        _keep_config(result, RunFolder(runs_root / result.run), path.parent)
    # Each seed counts once; runs on this disk replace numbers that were in the file. Scales of equal length share
    # their runs, which then count for the scale named last.
    once = {
        _place(result): result for result in (*(_with_key_of_today(result, path.parent) for result in before), *found)
    }
    results = _in_order(experiment, once.values())
    write_results(path, results)
    return results


def _place(result: Result) -> tuple[object, ...]:
    """What identifies a number: no two numbers of a file may share it."""
    return result.row, result.column, result.metric, result.config, result.seed


def config_file(folder: Path, result: Result) -> Path:
    """Where the configuration behind a number is kept, with seed 0."""
    return folder / "configs" / f"{result.run.rpartition('-s')[0]}.json"


def _with_key_of_today(result: Result, folder: Path) -> Result:
    """The result with the key that this version gives its configuration."""
    try:
        config = from_dict(json.loads(config_file(folder, result).read_text(encoding="utf-8")))
    except (OSError, ValueError):  # it was not kept, or a version with other settings wrote it
        return result
    return dataclasses.replace(result, config=config.key())


def _keep_config(result: Result, run: RunFolder, folder: Path) -> None:
    path = config_file(folder, result)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, (json.dumps(to_dict(dataclasses.replace(run.config, seed=0)), indent=1) + "\n").encode())


def _in_order(experiment: Experiment, results: Iterable[Result]) -> list[Result]:
    """Sort results as the table is read, so that a new number changes one place of the file."""
    places = {(cell.row, cell.column): place for place, cell in enumerate(experiment.cells)}
    metrics = list(experiment.metrics)

    def place(result: Result) -> tuple[object, ...]:
        cell = places.get((result.row, result.column), len(places))
        metric = metrics.index(result.metric) if result.metric in metrics else len(metrics)
        return result.scale, result.epochs, cell, result.seed, result.run, metric

    return sorted(results, key=place)


def write_results(path: Path, results: Iterable[Result]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for result in results:
        writer.writerow({name: spreadsheet_cell(value) for name, value in dataclasses.asdict(result).items()})
    write_file(path, text.getvalue().encode())


def read_results(path: Path) -> list[Result]:
    text = path.read_text(errors="replace")
    if not text.endswith("\n"):
        raise ShortlistError(f"{path} is damaged: its last line is cut off")
    rows = csv.DictReader(text.splitlines())
    if tuple(rows.fieldnames or ()) != COLUMNS:
        raise ShortlistError(f"{path} is not a file of results: its columns must be {', '.join(COLUMNS)}")
    found: dict[tuple[object, ...], Result] = {}
    for line, row in enumerate(rows, 2):
        try:
            if None in row or None in row.values():
                raise ValueError(f"it must have {len(COLUMNS)} fields")
            result = Result(**{name: _TYPES[name](row[name]) for name in COLUMNS})
            if not math.isfinite(result.value):
                raise ValueError(f"its value is {result.value}")
            if _place(result) in found:
                raise ValueError(f"a line before it has the same number of the same seed, {result.seed}")
        except (TypeError, ValueError) as error:
            raise ShortlistError(f"{path}, line {line} is damaged: {error}") from None
        found[_place(result)] = result
    return list(found.values())
