"""Hyper-parameter search: a study of trials, each an ordinary run that stops short of the test images.

A study lives in a storage that processes, on one machine or on many, may share. They agree through it alone: of all
living trials with the same settings the one with the lowest number counts, and so do the first N of them. Both
can be read off the storage at any time, so nobody has to be asked, and nothing is trained twice. A trial that
was given up (its process was stopped or killed) is marked as failed, which is to say dead, and its settings wait in
the queue for the next process, which goes on from the run's last checkpoint.

With ``study_storage.py`` the only file that imports Optuna.
"""

import csv
import fcntl
import gc
import hashlib
import io
import json
import math
import os
import platform
import secrets
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.exceptions import StorageInternalError, TrialPruned, UpdateFinishedTrialError
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from shortlist.errors import ShortlistError
from shortlist.program import recipes
from shortlist.program.atomic_files import locked, refuse_links, write_file
from shortlist.program.config import RunConfig, changed, identity, to_dict
from shortlist.program.data.base import Problem
from shortlist.program.data.catalogue import load_problem
from shortlist.program.losses import Range
from shortlist.program.runs.folder import InUseError, RunFolder, default_folder
from shortlist.program.runs.records import refuse_other_data, refuse_other_training_images
from shortlist.program.seeds import mix_seed
from shortlist.program.text import spreadsheet_cell
from shortlist.program.training.build import build
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.checkpoint import epochs_done
from shortlist.program.training.loop import DivergedError, Interrupted, Trainer
from shortlist.program.tuning.space import Axis, Grid, Settings, grid_points, search_axes
from shortlist.program.tuning.storage import open_storage, storage_explained

# Names of what a trial notes in the storage beside its parameters, and of what the study notes.
_SETTINGS, _WORKER, _HEARD, _FOLDER, _NOTE = "settings", "worker", "heard", "folder", "note"
_IMAGES, _FINGERPRINT = "images", "fingerprint"
_SAMPLED_BY_DEFAULT = 20
# So many samples in a row that were there before, and there are no others.
_MOST_REFUSED = 100
_BEST_SHOWN = 10
_SECONDS_TO_BE_NAMED = 60


@dataclass(frozen=True)
class TrialRecord:
    """One trial of a study, as the storage knows it."""

    number: int
    state: str
    """complete, pruned, running or waiting."""
    value: float | None
    """Best validation value over the epochs; of a trial that was pruned, the last."""
    settings: Settings
    epochs: int
    """How many have been reported."""
    folder: Path
    """Of its run, on the machine that ran it; of a trial that waits, where it would be run here."""
    worker: str
    note: str


@dataclass(frozen=True)
class Findings:
    """What a study has found so far."""

    config: RunConfig
    """What the trials share."""
    names: tuple[str, ...]
    """Of the settings in which they differ."""
    trials: tuple[TrialRecord, ...]
    """In the order of their numbers."""
    csv_path: Path

    @property
    def ranking(self) -> list[TrialRecord]:
        """Complete trials, the best first; of equals, the first."""
        complete = [trial for trial in self.trials if trial.state == "complete"]
        # Rounded: means over the same accuracies, added up in float32 in other orders, are equals too.
        return sorted(complete, key=lambda trial: (-round(trial.value or 0, 6), trial.number))

    @property
    def table(self) -> Table:
        """The best trials."""
        table = Table("trial", f"val {self.config.select_metric}", *self.names, "run", box=None, pad_edge=False)
        for trial in self.ranking[:_BEST_SHOWN]:
            values = (f"{trial.settings[name]:.4g}" for name in self.names)
            table.add_row(str(trial.number), f"{100 * (trial.value or 0):.2f}%", *values, str(trial.folder))
        return table

    @property
    def command(self) -> str | None:
        """What to type to train the best trial; where it was run, its epochs are done and only the test is left.

        One that had been trained before the search has its test too, and is shown.
        """
        if not (ranking := self.ranking):
            return None
        best = ranking[0]
        if RunFolder(best.folder).finished:
            return shlex.join(["shortlist", "report", str(best.folder)])
        config = changed(self.config, best.settings)
        # What does not make it another run, such as the device, is part of its folder's name all the same.
        place = [] if best.folder == default_folder(config) else ["--out", str(best.folder)]
        return f"{command_line(config)} {shlex.join([*place, '--resume'])}"

    def csv_text(self) -> str:
        """A line for each trial."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        metric = f"val_{self.config.select_metric}"
        writer.writerow(["trial", "state", metric, *self.names, "epochs", "run", "worker", "note"])
        for trial in self.trials:
            chosen = [trial.settings[name] for name in self.names]
            outcome = [trial.epochs, trial.folder, trial.worker, trial.note]
            writer.writerow(map(spreadsheet_cell, [trial.number, trial.state, trial.value, *chosen, *outcome]))
        return text.getvalue()


def tune(
    config: RunConfig,
    *,
    grid: Grid = "auto",
    search: Sequence[str] = (),
    fixed: Collection[str] = (),
    trials: int | None = None,
    storage: str = "",
    prune: bool = False,
    csv_path: Path | None = None,
    lost_after: float = 24.0,
    say: Callable[[str], None] = lambda message: None,
    callbacks: Sequence[Callback] = (),
) -> Findings:
    """Search settings by the validation images, and leave a run folder for each trial; the test images stay unseen.

    Args:
        config: What all trials share, e.g. from ``recipes``; its select metric is what is maximised. What is not as in
            its recipe stays as it is, unless ``search`` names it.
        grid: ``paper``: the paper's values for this loss. ``given``: those of ``search`` alone. ``none``: sample.
            ``auto``: the paper's where there are any, else those of ``search``, else sample.
        search: Further settings, or other values for them, as ``loss.scale=30,50``: all of them in a grid, the range
            between them when sampling.
        fixed: Settings, as ``loss.scale``, that stay as in ``config`` even if that is as in the recipe.
        trials: How many in the whole study; by default the whole grid, or 20.
        storage: A database, such as ``sqlite:///study.db``, or a file; by default one in ``runs/tune/<recipe>``.
        prune: End trials that are worse than the median of the others at the same epoch.
        csv_path: Where to list the trials; by default beside the default storage.
        lost_after: Hours without a word after which a trial of another machine counts as killed.
        say: Is told what goes on.
        callbacks: Of every training.

    Raises:
        ShortlistError: Bad arguments, data or settings; a storage that cannot be used.
        Interrupted: SIGINT or SIGTERM came. The same call goes on with the study.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ShortlistError("tune trains on one device: start a process for each, all with the same --storage")
    if trials is not None and trials < 1:
        raise ShortlistError(f"trials must be at least 1, got {trials}")
    if not 0 <= lost_after < math.inf:
        raise ShortlistError(f"lost_after must be a finite number of hours >= 0, got {lost_after}")
    if csv_path is not None and (not csv_path.name or csv_path.is_dir()):
        raise ShortlistError(f"csv must name a file, got {csv_path}")
    axes = search_axes(config, grid, search, fixed)
    folder = Path("runs", "tune", config.recipe)
    name = _study_name(config, axes)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for own in ("workers", *([] if storage else ["studies.journal"]), *([] if csv_path else [f"{name}.csv"])):
        refuse_links(folder, folder / own)
    study = _open_study(name, storage, folder, _SeededByTrial(config.seed), _pruner(config, prune))
    say(f"study {name}: {_described(axes)}, by {config.select_metric} on the validation images")
    failures = (StorageInternalError, SQLAlchemyError)
    with storage_explained(storage or str(folder), *failures), _at_work(folder / "workers") as worker:
        part = _Search(study, config, axes, trials, worker, folder / "workers", lost_after, say, callbacks)
        csv_path = csv_path or folder / f"{name}.csv"
        _write_findings(study, config, axes, csv_path)  # where that cannot be, better now than after a trial
        try:
            while (trial := part.next_trial()) is not None:
                part.run(trial)
                _write_findings(study, config, axes, csv_path)
        except KeyboardInterrupt:
            raise Interrupted("stopped; the same command goes on with the study") from None
        finally:
            findings = _write_findings(study, config, axes, csv_path)
    return findings


def command_line(config: RunConfig) -> str:
    """The command that trains a configuration: its recipe and all that differs from it.

    Example:
        >>> command_line(changed(recipes.build("smoke"), {"loss.max_margin": 0.3}))
        'shortlist train smoke --loss.max-margin 0.3'
    """
    words = ["shortlist", "train", config.recipe]
    recipe = recipes.build(config.recipe)
    if config.loss.name != recipe.loss.name:
        words += ["--loss.name", config.loss.name]
        recipe = recipes.with_loss(recipe, config.loss.name)
    settings, original = to_dict(config), to_dict(recipe)
    if settings["seed"] != original["seed"]:
        words += ["--seed", str(settings["seed"])]
    for section in ("data", "model", "loss", "optim", "train"):
        for name, value in settings[section].items():
            if value == original[section][name]:
                continue
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{section}.{flag}" if value else f"--{section}.no-{flag}")
            else:
                words += [f"--{section}.{flag}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


class _Search:
    """One process's part in a study."""

    def __init__(
        self,
        study: optuna.Study,
        config: RunConfig,
        axes: Mapping[str, Axis],
        trials: int | None,
        worker: str,
        workers: Path,
        lost_after: float,
        say: Callable[[str], None],
        callbacks: Sequence[Callback],
    ) -> None:
        self._callbacks = callbacks
        self._study, self._config, self._worker, self._workers, self._say = study, config, worker, workers, say
        self._points = grid_points(axes)[:trials]
        self._wanted = len(self._points) or trials or _SAMPLED_BY_DEFAULT
        self._distributions = {name: _distribution(axis) for name, axis in axes.items()}
        self._lost_after = lost_after
        self._stop_asked = False
        self._in_use: list[Settings] = []
        """Of runs that processes outside of the study are at."""

    def next_trial(self) -> Trial | None:
        """A trial that is this process's to run; None if all that are wanted are finished or running elsewhere."""
        refused = 0
        while True:
            self._give_back_lost()
            self._queue_missing_points()
            living = _living(self._study)
            waiting = any(trial.state == TrialState.WAITING for trial in living)
            if not waiting and (self._points or len(living) >= self._wanted):
                return None
            if refused == _MOST_REFUSED:
                raise ShortlistError(f"the ranges hold fewer than {self._wanted} different values to sample")
            trial = self._study.ask(self._distributions)  # the first that waits, or else a new one
            try:
                trial.set_user_attr(_WORKER, self._worker)
                trial.set_user_attr(_HEARD, time.time())
                if self._may_run(trial):
                    return trial
                self._study.tell(trial, state=TrialState.FAIL)  # another process was faster
                refused += 1
            except BaseException:
                self._give_back(trial.number, trial.params)
                raise

    def _may_run(self, trial: Trial) -> bool:
        earlier = [each for each in _living(self._study) if each.number < trial.number]
        if any(_settings(each) == trial.params for each in earlier):
            return False
        if self._points:  # and not sampled, as from a queue that had just become empty, nor of a call for more of them
            return _SETTINGS in trial.user_attrs and trial.params in self._points
        return len(earlier) < self._wanted

    def run(self, trial: Trial) -> None:
        """Train a trial, or what is left of it, and tell the study."""
        try:
            config = changed(self._config, trial.params)
            run = RunFolder(default_folder(config))
            trial.set_user_attr(_FOLDER, str(run.path))
            chosen = ", ".join(f"{name} {value:.4g}" for name, value in trial.params.items())
            self._say(f"trial {trial.number}: {chosen} -> {run.path}")
            value = self._best_value(trial, config, run)
            self._study.tell(trial, value, skip_if_finished=True)
            self._say(f"trial {trial.number}: {self._config.select_metric} {100 * value:.2f}%")
        except (TrialPruned, DivergedError) as ended:
            trial.set_user_attr(_NOTE, str(ended))
            self._study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)
            self._say(f"trial {trial.number}: {ended}")
        except InUseError as wrong:
            self._in_use.append(trial.params)
            self._study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
            self._say(f"trial {trial.number}: {wrong}, and is left to it: give the command again for its result")
        except UpdateFinishedTrialError:
            self._say(f"trial {trial.number} was taken for lost, and is another process's now")
        except BaseException:
            self._give_back(trial.number, trial.params)
            raise
        if self._stop_asked:
            raise Interrupted

    def _best_value(self, trial: Trial, config: RunConfig, run: RunFolder) -> float:
        epochs, values = config.train.epochs, list[float]()

        def report_new_epochs(lines: Sequence[Mapping[str, Any]]) -> None:
            for line in lines[len(values) :]:
                value = line.get(f"val_{config.select_metric}")
                if value is None:
                    raise run.damaged_metrics()
                values.append(value)
                trial.report(values[-1], line["epoch"])
                self._say(f"trial {trial.number}: epoch {len(values)}/{epochs}  {100 * values[-1]:.2f}%")
            trial.set_user_attr(_HEARD, time.time())
            if 0 < len(values) < epochs and trial.should_prune():
                raise TrialPruned(f"pruned after epoch {len(values)}")

        report_new_epochs(epochs_done(run, config, self._say))  # of a run that was begun, or even finished, before
        if len(values) == epochs:
            problem = load_problem(config.data)  # what was measured on other data must not be compared
            refuse_other_data(problem, run)
            refuse_other_training_images(problem, run)
        else:
            if torch.cuda.is_available():
                gc.collect()  # the trainer before this one holds itself in a circle, and GPU memory with it
            trainer = self._trainer(config, run, _EpochReport(report_new_epochs))
            problem = trainer.problem
            self._refuse_other_images(problem)
            try:
                with run.claim(config, resume=True):
                    # And no test: settings chosen with an eye on the test images would make it worthless.
                    trainer.fit()
            finally:
                self._stop_asked = trainer.stop_asked
            if len(values) < epochs:
                raise run.damaged_metrics()
        self._refuse_other_images(problem)  # of a process that was faster
        self._study.set_user_attr(_IMAGES, problem.facts.train_digest)
        self._study.set_user_attr(_FINGERPRINT, problem.train.fingerprint())
        return max(values)

    def _refuse_other_images(self, problem: Problem) -> None:
        """Raise an error unless the images are those on which the trials of the study were measured."""
        attributes = self._study.user_attrs
        noted, fingerprint = attributes.get(_IMAGES), attributes.get(_FINGERPRINT)
        on_purpose = any(name.startswith("data.") for name in self._distributions)
        others = noted is not None and problem.facts.train_digest != noted
        others = others or (fingerprint is not None and problem.train.fingerprint() != fingerprint)
        if others and not on_purpose:
            raise ShortlistError(
                "the data has changed: the trials of this study had other training images; put them back, or begin "
                "anew in another working folder"
            )

    def _trainer(self, config: RunConfig, run: RunFolder, report: Callback) -> Trainer:
        try:
            parts = build(config, run.path)
        except ShortlistError as wrong:
            with suppress(ShortlistError):
                build(self._config, run.path)  # which fails, too, unless the trial's own settings are to blame
                raise TrialPruned(str(wrong)) from wrong
            raise
        return Trainer(parts, run, quiet=True, callbacks=[report, *self._callbacks])

    def _queue_missing_points(self) -> None:
        present = [_settings(trial) for trial in _living(self._study)]
        for point in self._points:
            if point not in present and point not in self._in_use:
                self._study.enqueue_trial(dict(point), user_attrs={_SETTINGS: dict(point)})

    def _give_back_lost(self) -> None:
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if self._is_lost(trial):
                self._say(f"trial {trial.number} was killed; it goes on")
                self._give_back(trial.number, _settings(trial))

    def _is_lost(self, trial: FrozenTrial) -> bool:
        worker = trial.user_attrs.get(_WORKER, "")
        if worker.startswith(_host()) and (lives := _is_alive(self._workers / worker)) is not None:
            return not lives
        began = trial.datetime_start.timestamp() if trial.datetime_start else math.inf
        if not worker:  # killed before it could say whose it is, which is the first thing said
            return time.time() - began > _SECONDS_TO_BE_NAMED
        return time.time() - float(trial.user_attrs.get(_HEARD, began)) > 3600 * self._lost_after

    def _give_back(self, number: int, settings: Settings) -> None:
        try:
            self._study.tell(number, state=TrialState.FAIL)
        except (ValueError, UpdateFinishedTrialError):  # somebody else has done it
            return
        if len(settings) == len(self._distributions):  # else it was killed before it had got its settings
            self._study.enqueue_trial(dict(settings), user_attrs={_SETTINGS: dict(settings)})


class _EpochReport(Callback):
    """Tells the study of each epoch that is on disk."""

    def __init__(self, report: Callable[[Sequence[Mapping[str, Any]]], None]) -> None:
        self._report = report

    def on_checkpoint(self, trainer: Trainer) -> None:
        if trainer.position.step == 0:
            self._report(trainer.position.lines)


class _SeededByTrial(BaseSampler):
    """TPE with fresh random numbers for each trial, which depend on the seed and the trial's number alone.

    Processes that share a study, or go on with one, would otherwise all begin with the same draws.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._number, self._sampler = seed, -1, TPESampler(seed=seed)

    def _of(self, trial: FrozenTrial) -> TPESampler:
        if trial.number != self._number:
            seed = mix_seed(self._seed, trial.number) % 2**32  # as large as NumPy takes them
            self._number, self._sampler = trial.number, TPESampler(seed=seed)
        return self._sampler

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._of(trial).sample_independent(study, trial, param_name, param_distribution)


def _pruner(config: RunConfig, prune: bool) -> BasePruner:
    # Before a quarter of the epochs most losses look alike.
    return MedianPruner(n_startup_trials=4, n_warmup_steps=config.train.epochs // 4) if prune else NopPruner()


def _distribution(axis: Axis) -> BaseDistribution:
    if isinstance(axis, Range):
        return FloatDistribution(axis.low, axis.high, log=axis.log)
    return CategoricalDistribution(axis)


def _described(axes: Mapping[str, Axis]) -> str:
    texts = (
        f"{name} in {axis.low:g} to {axis.high:g}"
        if isinstance(axis, Range)
        else f"{name} = {', '.join(f'{value:g}' for value in axis)}"
        for name, axis in axes.items()
    )
    return "; ".join(texts)


def _study_name(config: RunConfig, axes: Mapping[str, Axis]) -> str:
    """The same for the same command on any machine, whatever the number of trials; other settings, another study."""
    shared = {name: value for name, value in identity(config).items() if name not in axes}
    content = json.dumps([shared, {name: repr(axis) for name, axis in axes.items()}], sort_keys=True)
    return f"{config.recipe}-{hashlib.sha256(content.encode()).hexdigest()[:10]}"


def _open_study(name: str, storage: str, folder: Path, sampler: BaseSampler, pruner: BasePruner) -> optuna.Study:
    failures = (ImportError, OSError, RuntimeError, ValueError, SQLAlchemyError, StorageInternalError)
    with storage_explained(storage or str(folder), *failures):
        return optuna.create_study(
            storage=open_storage(storage, folder / "studies.journal"),
            sampler=sampler,
            pruner=pruner,
            study_name=name,
            direction="maximize",
            load_if_exists=True,
        )


def _living(study: optuna.Study) -> list[FrozenTrial]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state != TrialState.FAIL]


def _settings(trial: FrozenTrial) -> Settings:
    """A trial's, also while it waits and has no parameters yet."""
    settings: Settings = trial.user_attrs.get(_SETTINGS, trial.params)
    return settings


def _write_findings(study: optuna.Study, config: RunConfig, axes: Mapping[str, Axis], path: Path) -> Findings:
    with locked(path.with_name(f".{path.name}.lock")):  # or what one process knows could be overwritten by older news
        findings = Findings(config, tuple(axes), _records(study, config, axes), path)
        write_file(path, findings.csv_text().encode())
    return findings


def _records(study: optuna.Study, config: RunConfig, axes: Mapping[str, Axis]) -> tuple[TrialRecord, ...]:
    return tuple(
        TrialRecord(
            number=trial.number,
            state=trial.state.name.lower(),
            value=trial.value,
            settings=_settings(trial),
            epochs=len(trial.intermediate_values),
            folder=Path(trial.user_attrs.get(_FOLDER) or default_folder(changed(config, _settings(trial)))),
            worker=trial.user_attrs.get(_WORKER, ""),
            note=trial.user_attrs.get(_NOTE, ""),
        )
        for trial in _living(study)
        if len(_settings(trial)) == len(axes)  # another process may be about to give it some
    )


def _host() -> str:
    return f"{platform.node()}-"


@contextmanager
def _at_work(workers: Path) -> Iterator[str]:
    """A name for this process, and a file of that name that stays locked for as long as it lives, however it dies.

    What ends early leaves the file: a full disk may have kept it from giving back its trial, and a file without a lock
    says that nobody is at it.
    """
    path = workers / f"{_host()}{os.getpid()}-{secrets.token_hex(4)}"
    with locked(path):
        yield path.name
        path.unlink()


def _is_alive(worker: Path) -> bool | None:
    """Whether the process that has this file lives; None if there is no such file, or nobody can tell."""
    with suppress(OSError), worker.open("r+") as file:  # NFS locks only what is open for writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    return None
