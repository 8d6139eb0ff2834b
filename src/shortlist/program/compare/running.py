"""Compares losses on some data: a search with equal budgets, then seeds in rounds.

All that is known is in the run folders and the storage of the studies. So the same call goes on after a kill, several
processes share the work, and a call after the last run rebuilds the result without training.
"""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program.compare.candidates import Candidate
from shortlist.program.compare.search import FOLDER, Budget, Chosen, search_all
from shortlist.program.compare.standings import (
    BASELINE,
    FEWEST_SEEDS,
    Entry,
    Standings,
    hopeless,
    in_order,
    read_outcome,
    refuse_mixed_data,
    validation,
)
from shortlist.program.config import RunConfig, differences, identity
from shortlist.program.runs.folder import FinishedError, InUseError, RunFolder, default_folder
from shortlist.program.text import counted
from shortlist.program.training.build import free_earlier_runs
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.loop import DivergedError, Interrupted, train
from shortlist.program.tuning.findings import TrialRecord
from shortlist.program.tuning.study import refuse_several_ranks


def compare(
    base: RunConfig,
    candidates: Sequence[Candidate],
    budget: Budget,
    *,
    seeds: Sequence[int],
    keep: Collection[str] = (BASELINE,),
    known: Mapping[str, Sequence[TrialRecord]] | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda message: None,
    quiet: bool = False,
    pause: Callable[[], None] = lambda: time.sleep(5),
    callbacks: Sequence[Callback] = (),
) -> Standings:
    """Search the settings of every candidate, and train each with its best settings on every seed.

    Runs that have finished are found by their configuration and not repeated; interrupted ones are resumed; those that
    another process is training are left to it. Choices rest on the validation images alone.

    Args:
        base: The recipe, with the user's settings. Its loss gives the K.
        candidates: What is compared.
        budget: Of the search for each candidate.
        seeds: Of the comparison. The first seed of all candidates comes before the second of any.
        keep: Names of candidates that are trained with every seed, however far they are behind.
        known: Trials of an earlier search, by the name of the candidate. One that tried all settings is not repeated.
        out: Folder for the lists of trials; by default that of ``default_out``.
        say: Called with messages.
        quiet: Do not show the progress of training.
        pause: Called before looking again at what other processes are training.
        callbacks: Of every training.

    Raises:
        ShortlistError: Bad arguments, data or settings; a storage that cannot be used.
        Interrupted: SIGINT or SIGTERM came. The same call continues.
    """
    refuse_several_ranks("compare")
    if not seeds or len({*seeds}) < len(seeds):
        raise ShortlistError(f"--seeds must name different seeds, got {' '.join(map(str, seeds)) or 'none'}")
    if budget.trials < 0 or budget.epochs < 1:
        raise ShortlistError(
            f"--trials must be at least 0 and --search-epochs at least 1, got {budget.trials} and {budget.epochs}"
        )
    for candidate in candidates:
        candidate.config(base)  # raises an error for a loss that does not suit the settings, before any work
    say(
        f"{counted(len(candidates), 'loss', 'losses')} by {base.select_metric} on the validation images: "
        f"{counted(budget.trials, 'trial')} and {counted(len(seeds), 'seed')} each"
    )
    out = out or default_out(base, candidates, budget)
    try:
        chosen = search_all(
            base, candidates, budget, seeds=seeds, out=out, say=say, known=known, pause=pause, callbacks=callbacks
        )
        rounds = _Rounds(chosen, seeds, keep, say, quiet, pause, callbacks)
        rounds.run()
    except KeyboardInterrupt:
        raise Interrupted("stopped; the same command goes on from here") from None
    return Standings(base, tuple(seeds), in_order(rounds.entries))


def default_out(base: RunConfig, candidates: Sequence[Candidate], budget: Budget) -> Path:
    """A folder for this comparison, the same for any number of seeds: with more it is the same question."""
    shared = {name: value for name, value in identity(base).items() if not name.startswith("loss.")}
    names = [candidate.name for candidate in candidates]
    search = [budget.trials, budget.epochs, *budget.search]
    content = json.dumps([shared, base.loss.largest_k, names, search], sort_keys=True)
    return FOLDER / f"{base.recipe}-{hashlib.sha256(content.encode()).hexdigest()[:10]}"


class _Rounds:
    """Trains every candidate on one seed after another, and drops those that are hopeless."""

    def __init__(
        self,
        chosen: Sequence[Chosen],
        seeds: Sequence[int],
        keep: Collection[str],
        say: Callable[[str], None],
        quiet: bool,
        pause: Callable[[], None],
        callbacks: Sequence[Callback],
    ) -> None:
        self._keep = keep
        self._seeds, self._say, self._quiet, self._pause, self._callbacks = seeds, say, quiet, pause, callbacks
        self._entries = {
            found.candidate.name: Entry(found, failure="" if found.config else "no trial finished") for found in chosen
        }
        self._first: RunFolder | None = None

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def run(self) -> None:
        first, later = self._seeds[:FEWEST_SEEDS], self._seeds[FEWEST_SEEDS:]
        self._run_seeds(first)
        for seed in later:
            self._drop_hopeless()
            self._run_seeds([seed])

    def _run_seeds(self, seeds: Sequence[int]) -> None:
        """Train every candidate that is still compared; wait for runs that other processes are training."""
        living = [name for name, entry in self._entries.items() if entry.is_complete]
        waiting = [(seed, name) for seed in seeds for name in living]
        told: set[tuple[int, str]] = set()
        while waiting:
            busy = []
            for seed, name in waiting:
                if not self._entries[name].is_complete:
                    continue
                try:
                    self._add(name, self._trained(name, seed))
                except InUseError:
                    busy.append((seed, name))
                    if (seed, name) not in told:
                        self._say(f"{name}, seed {seed}: another process is training it")
                    told.add((seed, name))
                except DivergedError as error:
                    self._say(f"{name}, seed {seed}: {error}")
                    self._entries[name] = replace(self._entries[name], failure=f"seed {seed}: {error}")
            if len(busy) == len(waiting):
                self._pause()
            waiting = busy

    def _trained(self, name: str, seed: int) -> RunFolder:
        """The finished run of a candidate with this seed, trained now if need be."""
        config = self._entries[name].config
        assert config is not None, "a candidate without settings is not run"
        config = replace(config, seed=seed)
        run = RunFolder(default_folder(config))
        if run.finished and not differences(run.config, config):
            return run
        with run.reserve():
            free_earlier_runs(config)
            self._say(f"{name}, seed {seed} -> {run.path}")
            try:
                return train(config, folder=run.path, resume=True, quiet=self._quiet, callbacks=self._callbacks)
            except FinishedError:  # another process has finished it in the meantime
                return run

    def _add(self, name: str, run: RunFolder) -> None:
        self._first = self._first or run
        refuse_mixed_data(run, self._first)
        entry, outcome = self._entries[name], read_outcome(run)
        # In the order of the seeds: other processes may finish them in any order.
        outcomes = sorted((*entry.outcomes, outcome), key=lambda known: self._seeds.index(known.seed))
        self._entries[name] = replace(entry, outcomes=tuple(outcomes))
        self._say(f"{name}, seed {outcome.seed}: {run.config.select_metric} {100 * outcome.val:.2f}% on validation")

    def _drop_hopeless(self) -> None:
        living = {name: entry for name, entry in self._entries.items() if entry.is_complete}
        for name in hopeless({name: entry.values(validation) for name, entry in living.items()}):
            if name in self._keep:
                continue
            self._entries[name] = replace(self._entries[name], is_dropped=True)
            seeds = counted(len(living[name].outcomes), "seed")
            self._say(f"{name}: dropped after {seeds}, clearly behind the leader on the validation images")
