"""One process of a study: it takes trials, trains them, and takes over those of processes that died.

Processes agree through the storage alone. Of all living trials with the same settings, the one with the lowest number
counts, and only the first N trials count. Both can be read from the storage at any time, so nothing is trained twice. A
trial whose process was stopped or killed is marked as failed, and its settings are queued again. The next process
continues from the last checkpoint of its run.
"""

import fcntl
import gc
import math
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.exceptions import TrialPruned, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import locked
from shortlist.program.config import RunConfig, changed
from shortlist.program.data.base import Problem
from shortlist.program.data.catalogue import load_problem
from shortlist.program.losses import Range
from shortlist.program.runs.folder import InUseError, RunFolder, default_folder
from shortlist.program.runs.records import refuse_other_data, refuse_other_training_images, selected_value
from shortlist.program.training.build import Parts, build
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.checkpoint import epochs_done
from shortlist.program.training.loop import DivergedError, Interrupted, Trainer
from shortlist.program.tuning.findings import FOLDER, HEARD, NOTE, SETTINGS, WORKER, living_trials, settings_of
from shortlist.program.tuning.space import Axis, Settings, grid_points

# Names under which the study keeps what it knows of the data.
_IMAGES, _FINGERPRINT = "images", "fingerprint"
_SAMPLED_BY_DEFAULT = 20
_MOST_DUPLICATES = 100  # stop after this many duplicate samples in a row: the space is exhausted
_SECONDS_TO_BE_NAMED = 60


class _EpochReport(Callback):
    """Reports each epoch to the study once it is on disk."""

    def __init__(self, report: Callable[[Sequence[Mapping[str, Any]]], None]) -> None:
        self._report = report

    def on_checkpoint(self, trainer: Trainer) -> None:
        if trainer.position.step == 0:
            self._report(trainer.position.lines)


Judge = Callable[[RunFolder, Callable[[], Parts], Sequence[float]], float]
"""What a trained run is worth, given a way to its parts and the value of each epoch. The highest is looked for."""


def best_epoch(run: RunFolder, parts: Callable[[], Parts], values: Sequence[float]) -> float:
    """The value of the best epoch."""
    return max(values)


class Worker:
    """A process that works on a study."""

    def __init__(
        self,
        study: optuna.Study,
        config: RunConfig,
        axes: Mapping[str, Axis],
        *,
        worker: str,
        workers: Path,
        points: Sequence[Settings] = (),
        judge: Judge = best_epoch,
        trials: int | None = None,
        lost_after: float = 24.0,
        say: Callable[[str], None] = lambda message: None,
        callbacks: Sequence[Callback] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._callbacks, self._clock = callbacks, clock
        self._study, self._config, self._worker, self._workers, self._say = study, config, worker, workers, say
        self._judge = judge
        self._points = (points or grid_points(axes))[:trials]
        self._wanted = len(self._points) or trials or _SAMPLED_BY_DEFAULT
        self._distributions = {name: _distribution(axis) for name, axis in axes.items()}
        self._lost_after = lost_after
        self._stop_asked = False
        self._in_use: list[Settings] = []
        """Settings of runs that processes outside of the study are training."""

    def next_trial(self) -> Trial | None:
        """A trial for this process to run; None if all trials are finished or running elsewhere."""
        duplicates = 0
        while True:
            self._give_back_lost()
            self._queue_missing_points()
            living = living_trials(self._study)
            waiting = any(trial.state == TrialState.WAITING for trial in living)
            if not waiting and (self._points or len(living) >= self._wanted):
                return None
            if duplicates == _MOST_DUPLICATES:
                raise ShortlistError(f"the ranges hold fewer than {self._wanted} different values to sample")
            trial = self._study.ask(self._distributions)  # the first that is waiting, or a new one
            try:
                trial.set_user_attr(WORKER, self._worker)
                trial.set_user_attr(HEARD, self._clock())
                if self._may_run(trial):
                    return trial
                self._study.tell(trial, state=TrialState.FAIL)  # another process runs it
                duplicates += 1
            except BaseException:
                self._give_back(trial.number, trial.params)
                raise

    def _may_run(self, trial: Trial) -> bool:
        earlier = [other for other in living_trials(self._study) if other.number < trial.number]
        if any(settings_of(other) == trial.params for other in earlier):
            return False
        if self._points:  # not sampled because the queue had just become empty, nor a point of a larger study
            return SETTINGS in trial.user_attrs and trial.params in self._points
        return len(earlier) < self._wanted

    def run(self, trial: Trial) -> None:
        """Train a trial, or the rest of it, and tell the study its value."""
        try:
            config = changed(self._config, trial.params)
            run = RunFolder(default_folder(config))
            trial.set_user_attr(FOLDER, str(run.path))
            chosen = ", ".join(f"{name} {value:.4g}" for name, value in trial.params.items())
            self._say(f"trial {trial.number}: {chosen} -> {run.path}")
            value = self._best_value(trial, config, run)
            self._study.tell(trial, value, skip_if_finished=True)
            self._say(f"trial {trial.number}: {self._config.select_metric} {100 * value:.2f}%")
        except (TrialPruned, DivergedError) as reason:
            trial.set_user_attr(NOTE, str(reason))
            self._study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)
            self._say(f"trial {trial.number}: {reason}")
        except InUseError as error:
            self._in_use.append(trial.params)
            self._study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
            self._say(f"trial {trial.number}: {error}; skipping it, repeat the command later for its result")
        except UpdateFinishedTrialError:
            self._say(f"trial {trial.number} counted as lost and was taken over by another process")
        except BaseException:
            self._give_back(trial.number, trial.params)
            raise
        if self._stop_asked:
            raise Interrupted

    def _best_value(self, trial: Trial, config: RunConfig, run: RunFolder) -> float:
        epochs, values = config.train.epochs, list[float]()
        trainer: Trainer | None = None

        def parts() -> Parts:
            return trainer.parts if trainer else build(config, run.path, callbacks=self._callbacks)

        def report_new_epochs(lines: Sequence[Mapping[str, Any]]) -> None:
            for line in lines[len(values) :]:
                value = selected_value(line, config.select_metric)
                if value is None:
                    raise run.damaged_metrics()
                values.append(value)
                trial.report(values[-1], line["epoch"])
                self._say(f"trial {trial.number}: epoch {len(values)}/{epochs}  {100 * values[-1]:.2f}%")
            trial.set_user_attr(HEARD, self._clock())
            if 0 < len(values) < epochs and trial.should_prune():
                raise TrialPruned(f"pruned after epoch {len(values)}")

        report_new_epochs(epochs_done(run, config, self._say))  # the run may have been started, or finished, before
        if len(values) == epochs:
            problem = load_problem(config.data, config.seed)  # values on other data must not be compared
            refuse_other_data(problem, run)
            refuse_other_training_images(problem, run)
        else:
            if torch.cuda.is_available():
                gc.collect()  # the previous trainer is in a reference cycle and holds GPU memory
            trainer = self._trainer(config, run, _EpochReport(report_new_epochs))
            problem = trainer.problem
            self._refuse_other_images(problem)
            try:
                with run.claim(config, resume=True):
                    # No test: settings must not be chosen by their results on the test images.
                    trainer.fit()
            finally:
                self._stop_asked = trainer.stop_asked
            if len(values) < epochs:
                raise run.damaged_metrics()
        self._refuse_other_images(problem)  # another process may have recorded its data meanwhile
        self._study.set_user_attr(_IMAGES, problem.facts.train_digest)
        self._study.set_user_attr(_FINGERPRINT, problem.train.fingerprint())
        return self._judge(run, parts, values)

    def _refuse_other_images(self, problem: Problem) -> None:
        """Raise an error unless the data is that of the study's other trials."""
        attributes = self._study.user_attrs
        recorded, fingerprint = attributes.get(_IMAGES), attributes.get(_FINGERPRINT)
        on_purpose = any(name.startswith("data.") for name in self._distributions)
        others = recorded is not None and problem.facts.train_digest != recorded
        others = others or (fingerprint is not None and problem.train.fingerprint() != fingerprint)
        if others and not on_purpose:
            raise ShortlistError(
                "the data has changed: the trials of this study had other training images; put them back, or start "
                "a new study in another working folder"
            )

    def _trainer(self, config: RunConfig, run: RunFolder, report: Callback) -> Trainer:
        try:
            parts = build(config, run.path, callbacks=self._callbacks)
        except ShortlistError as error:
            with suppress(ShortlistError):
                build(self._config, run.path)  # fails too, unless the trial's own settings are the cause
                raise TrialPruned(str(error)) from error
            raise
        return Trainer(parts, run, callbacks=[report, *self._callbacks])

    def _queue_missing_points(self) -> None:
        present = [settings_of(trial) for trial in living_trials(self._study)]
        for point in self._points:
            if point not in present and point not in self._in_use:
                self._study.enqueue_trial(dict(point), user_attrs={SETTINGS: dict(point)})

    def _give_back_lost(self) -> None:
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if self._is_lost(trial):
                self._say(f"trial {trial.number} was killed; it is queued again")
                self._give_back(trial.number, settings_of(trial))

    def _is_lost(self, trial: FrozenTrial) -> bool:
        worker = trial.user_attrs.get(WORKER, "")
        if worker.startswith(_host()) and (lives := is_alive(self._workers / worker)) is not None:
            return not lives
        began = trial.datetime_start.timestamp() if trial.datetime_start else math.inf
        if not worker:  # killed before it recorded its worker, which it does first
            return self._clock() - began > _SECONDS_TO_BE_NAMED
        return self._clock() - float(trial.user_attrs.get(HEARD, began)) > 3600 * self._lost_after

    def _give_back(self, number: int, settings: Settings) -> None:
        try:
            self._study.tell(number, state=TrialState.FAIL)
        except (ValueError, UpdateFinishedTrialError):  # another process has done it
            return
        if len(settings) == len(self._distributions):  # otherwise it was killed before it got its settings
            self._study.enqueue_trial(dict(settings), user_attrs={SETTINGS: dict(settings)})


def _distribution(axis: Axis) -> BaseDistribution:
    if isinstance(axis, Range):
        return FloatDistribution(axis.low, axis.high, log=axis.log)
    return CategoricalDistribution(axis)


@contextmanager
def registered_worker(workers: Path) -> Iterator[str]:
    """A name for this process, and a file of that name that is locked while the process lives.

    A process that fails leaves the file behind. It may not have given back its trial, because the disk was full, and a
    file without a lock tells the others that the trial is lost.
    """
    path = workers / f"{_host()}{os.getpid()}-{secrets.token_hex(4)}"
    with locked(path):
        yield path.name
        path.unlink()


def is_alive(worker: Path) -> bool | None:
    """True if the process of this file lives; None if there is no such file, or it cannot be known."""
    with suppress(OSError), worker.open("r+") as file:  # NFS locks only what is open for writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    return None


def _host() -> str:
    return f"{platform.node()}-"
