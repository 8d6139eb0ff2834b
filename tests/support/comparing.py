"""Comparisons small enough for tests: two losses, two trials and two seeds, of two epochs each."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shortlist.program.cli.compare import CompareArguments
from shortlist.program.cli.parsing import parse_recipe
from shortlist.program.compare.candidates import Candidate, find_candidates
from shortlist.program.compare.results import write_results
from shortlist.program.compare.running import compare, default_out
from shortlist.program.compare.search import Budget
from shortlist.program.compare.standings import Standings
from shortlist.program.config import RunConfig
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.loop import Trainer

DATA = "points.npz"
LOSSES = ("cross_entropy", "ldam")
TRIALS, SEEDS, EPOCHS = 2, (0, 1), 2
SETTINGS = f"--loss.k 3 --train.ks 1 3 --train.device cpu --train.batch-size 64 --train.epochs {EPOCHS}".split()
OPTIONS = ["--losses", *LOSSES, "--trials", str(TRIALS), "--seeds", *map(str, SEEDS)]
COMMAND = ["compare", DATA, *SETTINGS, *OPTIONS]


def base_config() -> RunConfig:
    return parse_recipe(CompareArguments, ["embeddings", "--data.root", DATA, *SETTINGS], "compare")[1]


def run_comparison(
    *callbacks: Callback,
    candidates: Sequence[Candidate] = (),
    trials: int = TRIALS,
    seeds: Sequence[int] = SEEDS,
    say: Callable[[str], None] = lambda message: None,
    pause: Callable[[], None] = lambda: time.sleep(0.05),
) -> Standings:
    """What ``COMMAND`` does, in the working folder, with callbacks."""
    base, candidates = base_config(), candidates or find_candidates(LOSSES)
    budget = Budget(trials=trials, epochs=EPOCHS, fixed=[word[2:] for word in SETTINGS if word.startswith("--")])
    found = compare(base, candidates, budget, seeds=seeds, say=say, quiet=True, pause=pause, callbacks=callbacks)
    write_results(found, default_out(base, candidates, budget))
    return found


class Trainings(Callback):
    """Counts the trainings that begin, or continue, in this process."""

    def __init__(self) -> None:
        self.begun: list[Path] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.begun.append(trainer.run.path)


class Die(Trainings):
    """SIGKILL in this training, counted from 1: after its first epoch, or after its last."""

    def __init__(self, training: int, *, after_last: bool) -> None:
        super().__init__()
        self._training, self._after_last = training, after_last

    def on_checkpoint(self, trainer: Trainer) -> None:
        if not self._after_last:
            self._die()

    def on_fit_end(self, trainer: Trainer) -> None:
        self._die()

    def _die(self) -> None:
        if len(self.begun) == self._training:
            os.kill(os.getpid(), signal.SIGKILL)
