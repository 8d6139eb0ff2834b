"""Trains the runs of an experiment one after another. Several processes can share the work."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import locked
from shortlist.program.config import RunConfig
from shortlist.program.reproduce import Scale, tiny_data
from shortlist.program.reproduce.experiment import EPOCH_SECONDS, NONZERO_GRADIENTS, Cell, Experiment
from shortlist.program.reproduce.gradients import GradientCounts
from shortlist.program.reproduce.results import Result, results_file, results_of, runs_of, update_results
from shortlist.program.runs.folder import FinishedError, InUseError, RunFolder, default_folder
from shortlist.program.text import counted
from shortlist.program.training.build import free_earlier_runs
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.loop import DivergedError, Interrupted, train

# If this many runs at the start fail with one message, the others are skipped.
_EARLY_FAILURES = 2


def reproduce(
    experiment: Experiment,
    *,
    scale: Scale,
    seeds: Sequence[int] = (0,),
    only: Sequence[str] = (),
    runs_root: Path = Path("runs"),
    results: Path = Path("results"),
    say: Callable[[str], None] = lambda message: None,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
) -> tuple[list[Result], list[str]]:
    """Train what is not yet trained, and update the experiment's file of results after each run.

    Finished runs are found by their configuration and not repeated; interrupted runs are resumed. Runs that another
    process is training are left to it, so several processes can share the work. If a run fails, the others still run.

    Args:
        experiment: What to run.
        scale: ``smoke`` on tiny data, ``short`` or ``paper``.
        seeds: Of each cell. The first seed of all cells comes before the second of any.
        only: Patterns for rows, columns, or both, such as ``0.4/noised``; by default all cells.
        runs_root: Folder of all runs.
        results: Folder of the CSV files.
        say: Called with a line for each run.
        quiet: Do not show the progress of training.
        callbacks: Of every training.

    Returns:
        All results of the file, and a message for each cause of failure.

    Raises:
        Interrupted: By SIGINT or SIGTERM; the same call resumes where it stopped.
    """
    if not seeds:
        raise ShortlistError("--seeds must name at least one seed")
    cells = experiment.selected(only)
    if scale == "smoke":
        tiny_data.ensure(runs_root)
    update_results(experiment, scale, runs_root, results)  # finds a damaged file before any training
    failures: dict[str, list[str]] = defaultdict(list)
    elsewhere = 0
    jobs = [(seed, cell) for seed in dict.fromkeys(seeds) for cell in cells]
    try:
        with _alone(experiment, runs_root), _one_thread() if scale == "smoke" else nullcontext():
            for number, (seed, cell) in enumerate(jobs, 1):
                name = f"[{number}/{len(jobs)}] {experiment.name} {cell.label}, seed {seed}"
                try:
                    config = replace(experiment.config(cell, scale, runs_root), seed=seed)
                    run, is_new = _finished(experiment, config, runs_root, quiet, callbacks)
                    described = _described(experiment, cell, scale, run, runs_root)
                    say(f"{name}: {described}{'' if is_new else ' (finished before)'}")
                    if is_new:
                        update_results(experiment, scale, runs_root, results)
                except InUseError:
                    say(f"{name}: skipped, another process is training it")
                    elsewhere += 1
                except (ShortlistError, OSError, RuntimeError) as error:  # such as out of GPU memory
                    say(f"{name}: failed: {error}")
                    failures[str(error)].append(f"{cell.label}, seed {seed}")
                    is_general = not isinstance(error, DivergedError)  # such as missing data
                    if is_general and len(failures[str(error)]) == number == _EARLY_FAILURES:
                        say("the remaining runs would fail the same way; skipping them")
                        break
    except KeyboardInterrupt:
        raise Interrupted("stopped; the same command resumes from here") from None
    try:
        everything = update_results(experiment, scale, runs_root, results)
    except (ShortlistError, OSError) as error:  # such as a full disk; earlier failures must still be reported
        new = [str(error)] if str(error) not in failures else []
        return [], [*_explained(experiment, failures, len(jobs)), *new]
    say(f"wrote {results_file(results, experiment, scale)}" if everything else "there are no results yet")
    if elsewhere:
        say(f"{counted(elsewhere, 'run')} left to other processes: run the command again for the whole table")
    return everything, _explained(experiment, failures, len(jobs))


def _finished(
    experiment: Experiment, config: RunConfig, runs_root: Path, quiet: bool, callbacks: Sequence[Callback]
) -> tuple[RunFolder, bool]:
    """The finished run of a configuration, and whether it was trained now."""
    for run in runs_of(config, runs_root):
        if run.config.seed == config.seed:
            return run, False
    run = RunFolder(default_folder(config, runs_root))
    with run.reserve():
        free_earlier_runs(config)
        counts = [GradientCounts()] if NONZERO_GRADIENTS in experiment.metrics else []
        try:
            return train(config, folder=run.path, resume=True, quiet=quiet, callbacks=[*counts, *callbacks]), True
        except FinishedError:  # another process has finished it in the meantime
            return run, False


def _described(experiment: Experiment, cell: Cell, scale: Scale, run: RunFolder, runs_root: Path) -> str:
    try:
        results = results_of(experiment, cell, scale, run, runs_root)
    except ShortlistError as error:
        raise ShortlistError(f"{error}: delete the run and train it again") from None
    metric = experiment.metrics[0]
    values = [result.value for result in results if result.metric == metric]
    return f"{metric} {values[0]:.{experiment.decimals}f}" if values else "no such class"


def _explained(experiment: Experiment, failures: dict[str, list[str]], jobs: int) -> list[str]:
    """A message for each cause."""
    return [
        f"{experiment.name}: {len(cells)} of {jobs} runs failed ({cells[0]}{', ...' if cells[1:] else ''}): {cause}"
        for cause, cells in failures.items()
    ]


@contextmanager
def _alone(experiment: Experiment, runs_root: Path) -> Iterator[None]:
    """Where time is measured, let no second process in: they would slow each other down."""
    if EPOCH_SECONDS not in experiment.metrics:
        yield
        return
    try:
        with locked(runs_root / ".timing.lock", wait=False):
            yield
    except BlockingIOError:
        raise ShortlistError(f"another process is timing runs in {runs_root}: wait until it has finished") from None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: products of tiny matrices take longer on many."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
