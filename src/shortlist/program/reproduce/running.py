"""The runs of an experiment, one after another; several processes can share them."""

import functools
import gc
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
from shortlist.program.reproduce.gradients import train_and_count
from shortlist.program.reproduce.results import Result, results_file, results_of, runs_of, update_results
from shortlist.program.runs.folder import FinishedError, InUseError, RunFolder, default_folder
from shortlist.program.training.loop import DivergedError, Interrupted, train
from shortlist.program.wording import counted

# So many failures with one message at the very beginning, and the rest is not tried.
_ALIKE = 2


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
) -> tuple[list[Result], list[str]]:
    """Train what is not yet trained, and keep the experiment's file of results up to date on the way.

    A run that has finished is found by its configuration and not repeated; one that was interrupted goes on. One that
    another process is at is left to it, so that the same call in several processes shares the work. One that fails does
    not keep the others from running.

    Args:
        experiment: What to run.
        scale: ``smoke`` on tiny data, ``short`` or ``paper``.
        seeds: Each cell is run with all of them; the first seed of all cells comes before the second of any.
        only: Patterns for rows, columns, or both as in ``0.4/noised``; empty runs all.
        runs_root: Folder of all runs.
        results: Folder of the CSV files.
        say: Called with a line for each run.
        quiet: Do not show the training itself.

    Returns:
        All results of the file, and what went wrong, a message each.

    Raises:
        Interrupted: SIGINT or SIGTERM came; the same call goes on where it stopped.
    """
    if not seeds:
        raise ShortlistError("--seeds must name at least one seed")
    cells = experiment.selected(only)
    if scale == "smoke":
        tiny_data.ensure(runs_root)
    update_results(experiment, scale, runs_root, results)  # a file that is damaged is noticed before any training
    failures: dict[str, list[str]] = defaultdict(list)
    elsewhere = 0
    jobs = [(seed, cell) for seed in dict.fromkeys(seeds) for cell in cells]
    try:
        with _alone(experiment, runs_root), _one_thread() if scale == "smoke" else nullcontext():
            for number, (seed, cell) in enumerate(jobs, 1):
                name = f"[{number}/{len(jobs)}] {experiment.name} {cell.label}, seed {seed}"
                try:
                    config = replace(experiment.config(cell, scale, runs_root), seed=seed)
                    say(f"{name}: {_done(experiment, cell, config, scale, runs_root, quiet=quiet)}")
                    update_results(experiment, scale, runs_root, results)
                except InUseError:
                    say(f"{name}: left to the process that is at it")
                    elsewhere += 1
                except (ShortlistError, OSError, RuntimeError) as wrong:  # such as a GPU's memory that is full
                    say(f"{name}: failed: {wrong}")
                    failures[str(wrong)].append(f"{cell.label}, seed {seed}")
                    its_own_fault = isinstance(wrong, DivergedError)
                    if len(failures[str(wrong)]) == number == _ALIKE and not its_own_fault:
                        say("the other runs would fail alike and are not tried")  # without the data, say
                        break
    except KeyboardInterrupt:
        raise Interrupted("stopped; the same command goes on from here") from None
    try:
        everything = update_results(experiment, scale, runs_root, results)
    except (ShortlistError, OSError) as wrong:  # a full disk: what failed before must be told all the same
        new = [str(wrong)] if str(wrong) not in failures else []
        return [], [*_explained(experiment, failures, len(jobs)), *new]
    say(f"wrote {results_file(results, experiment, scale)}" if everything else "there is no result yet")
    if elsewhere:
        say(f"{counted(elsewhere, 'run')} left to other processes: give the command again for the whole table")
    return everything, _explained(experiment, failures, len(jobs))


def _done(experiment: Experiment, cell: Cell, config: RunConfig, scale: Scale, runs_root: Path, *, quiet: bool) -> str:
    """Have the run finished, and say what came out."""
    before = [run for run in runs_of(config, runs_root) if run.config.seed == config.seed]
    folder = default_folder(config, runs_root)
    try:
        run = before[0] if before else _trained(experiment, config, folder, quiet=quiet)
    except FinishedError:  # by another process, since we looked
        run = RunFolder(folder)
        before = [run]
    try:
        results = results_of(experiment, cell, scale, run, runs_root)
    except ShortlistError as wrong:
        raise ShortlistError(f"{wrong}: delete the run and train it again") from None
    metric = experiment.metrics[0]
    values = [result.value for result in results if result.metric == metric]
    shown = f"{metric} {values[0]:.{experiment.decimals}f}" if values else "no such class"
    return f"{shown} (finished before)" if before else shown


def _trained(experiment: Experiment, config: RunConfig, folder: Path, *, quiet: bool) -> RunFolder:
    RunFolder(folder).check_free()
    _forget_earlier_runs(config)
    if NONZERO_GRADIENTS in experiment.metrics:
        return train_and_count(config, folder=folder, resume=True, quiet=quiet)
    return train(config, folder=folder, resume=True, quiet=quiet)


def _forget_earlier_runs(config: RunConfig) -> None:
    """Networks of before must not keep the GPU's memory, nor others count against the compiler's limit of variants."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where there is no GPU
    if config.train.compile:
        _compile_afresh(config.model.name)


@functools.lru_cache(maxsize=1)
def _compile_afresh(network: str) -> None:
    """Called with the network of the call before, it does nothing: what was compiled for that serves this one too.

    Two last layers are two variants, and the compiler keeps both.
    """
    torch.compiler.reset()


def _explained(experiment: Experiment, failures: dict[str, list[str]], jobs: int) -> list[str]:
    """One message for each cause."""
    return [
        f"{experiment.name}: {len(cells)} of {jobs} runs failed ({cells[0]}{', ...' if cells[1:] else ''}): {cause}"
        for cause, cells in failures.items()
    ]


@contextmanager
def _alone(experiment: Experiment, runs_root: Path) -> Iterator[None]:
    """Where time is measured, the work is not shared: processes at it at once would slow each other down."""
    if EPOCH_SECONDS not in experiment.metrics:
        yield
        return
    try:
        with locked(runs_root / ".timing.lock", wait=False):
            yield
    except BlockingIOError:
        raise ShortlistError(f"another process is timing runs in {runs_root}: wait for it") from None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Products of tiny matrices take longer on many threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
