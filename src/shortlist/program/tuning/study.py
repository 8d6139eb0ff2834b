"""Hyper-parameter search: a study of trials, each an ordinary run that is never tested.

A study lives in a storage that processes on one or many machines may share.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import StorageInternalError
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial
from sqlalchemy.exc import SQLAlchemyError

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import refuse_links
from shortlist.program.config import RunConfig, identity
from shortlist.program.losses import Range
from shortlist.program.seeds import mix_seed
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.loop import Interrupted
from shortlist.program.tuning.findings import Findings, write_findings
from shortlist.program.tuning.space import Axis, Grid, Settings, search_axes
from shortlist.program.tuning.storage import open_storage, storage_explained
from shortlist.program.tuning.worker import Judge, Worker, best_epoch, registered_worker


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
    clock: Callable[[], float] = time.time,
) -> Findings:
    """Search for the settings that are best on the validation images. The test images stay unseen.

    Args:
        config: Settings that all trials share, such as a recipe. Its select metric is maximised. A setting that differs
            from its recipe keeps its value, unless ``search`` names it.
        grid: ``paper``: the paper's values for this loss. ``given``: the values of ``search``. ``none``: sample.
            ``auto``: the first of these that is possible.
        search: More settings, or other values for them, such as ``loss.scale=30,50``. A grid tries all values; sampling
            draws from the range between them.
        fixed: Settings such as ``loss.scale`` that keep the value they have in ``config``.
        trials: Number of trials of the whole study; by default the whole grid, or 20.
        storage: A database such as ``sqlite:///study.db``, or a file; by default a file in ``runs/tune/<recipe>``.
        prune: Stop trials that are worse than the median of the others at the same epoch.
        csv_path: File that lists the trials; by default beside the default storage.
        lost_after: Hours without a finished epoch after which a trial of another machine counts as killed.
        say: Called with messages.
        callbacks: Callbacks of every training.
        clock: The current time in seconds, by which trials of other machines count as killed.

    Raises:
        ShortlistError: Bad arguments, data or settings; a storage that cannot be used.
        Interrupted: SIGINT or SIGTERM came. The same call continues the study.
    """
    refuse_several_ranks("tune")
    if trials is not None and trials < 1:
        raise ShortlistError(f"trials must be at least 1, got {trials}")
    if csv_path is not None and (not csv_path.name or csv_path.is_dir()):
        raise ShortlistError(f"csv must name a file, got {csv_path}")
    axes = search_axes(config, grid, search, fixed)
    folder = Path("runs", "tune", config.recipe)
    return run_study(
        study_name(config, axes),
        config,
        axes,
        folder=folder,
        trials=trials,
        storage=storage,
        prune=prune,
        csv_path=csv_path,
        lost_after=lost_after,
        say=say,
        callbacks=callbacks,
        clock=clock,
    )


def run_study(
    name: str,
    config: RunConfig,
    axes: Mapping[str, Axis],
    *,
    folder: Path,
    points: Sequence[Settings] = (),
    judge: Judge = best_epoch,
    trials: int | None = None,
    storage: str = "",
    prune: bool = False,
    csv_path: Path | None = None,
    lost_after: float = 24.0,
    say: Callable[[str], None] = lambda message: None,
    callbacks: Sequence[Callback] = (),
    clock: Callable[[], float] = time.time,
) -> Findings:
    """Work on a study until all its trials are finished or are run by other processes.

    Args:
        name: Of the study in the storage.
        config: Settings that all trials share.
        axes: What is tried for each setting.
        folder: Where the names of the processes are kept and, by default, the storage and the list of trials.
        points: Try these settings; by default all combinations of the values, or samples.
        judge: What a trial is worth, once it is trained.
        trials: As for ``tune``, and all that follow.
        storage: As for ``tune``.
        prune: As for ``tune``.
        csv_path: As for ``tune``.
        lost_after: As for ``tune``.
        say: As for ``tune``.
        callbacks: As for ``tune``.
        clock: As for ``tune``.
    """
    if not 0 <= lost_after < math.inf:
        raise ShortlistError(f"lost_after must be a finite number of hours >= 0, got {lost_after}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for own in ("workers", *([] if storage else ["studies.journal"]), *([] if csv_path else [f"{name}.csv"])):
        refuse_links(folder, folder / own)
    study = _open_study(name, storage, folder, _SeededByTrial(config.seed), _pruner(config, prune))
    say(f"study {name}: {_described(axes)}, by {config.select_metric} on the validation images")
    failures = (StorageInternalError, SQLAlchemyError)
    with storage_explained(storage or str(folder), *failures), registered_worker(folder / "workers") as worker:
        process = Worker(
            study,
            config,
            axes,
            points=points,
            judge=judge,
            worker=worker,
            workers=folder / "workers",
            trials=trials,
            lost_after=lost_after,
            say=say,
            callbacks=callbacks,
            clock=clock,
        )
        csv_path = csv_path or folder / f"{name}.csv"
        write_findings(study, config, axes, csv_path)  # if that fails, better now than after a trial
        try:
            while (trial := process.next_trial()) is not None:
                process.run(trial)
                write_findings(study, config, axes, csv_path)
        except KeyboardInterrupt:
            raise Interrupted("stopped; repeat the command to continue the study") from None
        finally:
            findings = write_findings(study, config, axes, csv_path)
    return findings


def refuse_several_ranks(command: str) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ShortlistError(
            f"{command} trains on one device: start a process for each device, all with the same --storage"
        )


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


def study_name(config: RunConfig, axes: Mapping[str, Axis], *purpose: str | int) -> str:
    """A name for the settings and axes, the same on every machine and for any number of trials.

    Studies of different purposes have different names: their values may not mean the same.
    """
    shared = {name: value for name, value in identity(config).items() if name not in axes}
    content = json.dumps([shared, {name: repr(axis) for name, axis in axes.items()}, *purpose], sort_keys=True)
    return f"{config.recipe}-{hashlib.sha256(content.encode()).hexdigest()[:10]}"


def _described(axes: Mapping[str, Axis]) -> str:
    texts = (
        f"{name} in {axis.low:g} to {axis.high:g}"
        if isinstance(axis, Range)
        else f"{name} = {', '.join(f'{value:g}' for value in axis)}"
        for name, axis in axes.items()
    )
    return "; ".join(texts)


def _pruner(config: RunConfig, prune: bool) -> BasePruner:
    # In the first quarter of the epochs most losses look alike.
    return MedianPruner(n_startup_trials=4, n_warmup_steps=config.train.epochs // 4) if prune else NopPruner()


class _SeededByTrial(BaseSampler):
    """TPE whose random numbers depend only on the seed and the number of the trial.

    Otherwise all processes of a study would start with the same draws.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._number, self._sampler = seed, -1, TPESampler(seed=seed)

    def _of(self, trial: FrozenTrial) -> TPESampler:
        if trial.number != self._number:
            seed = mix_seed(self._seed, trial.number) % 2**32  # the largest seed of NumPy
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
