"""What the tests of studies share: callbacks for their trainings, and short forms of their results."""

import csv
from collections.abc import Callable
from pathlib import Path

from shortlist.program.training.callbacks import Callback
from shortlist.program.training.loop import Trainer
from shortlist.program.tuning.findings import Findings

EPOCHS = 2


class EpochsBegun(Callback):
    """Records the temperature and the epoch at the first step of each epoch, and at the first step after a resume."""

    def __init__(self) -> None:
        self.noted: list[tuple[float, int]] = []
        self._last = (-1.0, -1)

    def on_fit_start(self, trainer: Trainer) -> None:
        self._last = (-1.0, -1)

    def on_step(self, trainer: Trainer) -> None:
        here = (trainer.config.loss.settings()["tau"], trainer.position.epoch)
        if here != self._last:
            self.noted.append(here)
        self._last = here


class At(Callback):
    """Calls a function at the start or at the end of each training."""

    def __init__(self, *, start: Callable[[], object] | None = None, end: Callable[[], object] | None = None) -> None:
        self._start, self._end = start, end

    def on_fit_start(self, trainer: Trainer) -> None:
        if self._start is not None:
            self._start()

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._end is not None:
            self._end()


def raising(error: BaseException) -> Callback:
    """A callback that raises this error at the start of a training."""

    def fail() -> None:
        raise error

    return At(start=fail)


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def states(findings: Findings) -> list[str]:
    return [trial.state for trial in findings.trials]


def outcome(findings: Findings) -> list[tuple[str, float | None, dict[str, float]]]:
    return [(trial.state, trial.value, dict(trial.settings)) for trial in findings.trials]
