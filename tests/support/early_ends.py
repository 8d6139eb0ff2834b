"""Trainings that end before they have finished, by callbacks."""

import signal
from pathlib import Path

from shortlist.program.config import RunConfig
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.loop import Interrupted, Trainer, train


class Killed(BaseException):
    """Stands for a kill: nothing in the program catches it."""


class KillBeforeTest(Callback):
    def on_fit_end(self, trainer: Trainer) -> None:
        raise Killed


class StopAfterStep(Callback):
    """SIGINT after this step, counted from 1 over all trainings that have the callback."""

    def __init__(self, step: int) -> None:
        self._left = step

    def on_step(self, trainer: Trainer) -> None:
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGINT)


def train_until_test(config: RunConfig, folder: Path, *callbacks: Callback) -> Path:
    """All epochs, and a kill before the test images are evaluated."""
    try:
        train(config, folder=folder, quiet=True, callbacks=[*callbacks, KillBeforeTest()])
    except Killed:
        return folder
    raise AssertionError("the training has finished")


def train_until_step(config: RunConfig, folder: Path, step: int) -> Path:
    """An interruption after this step."""
    try:
        train(config, folder=folder, quiet=True, callbacks=[StopAfterStep(step)])
    except Interrupted:
        return folder
    raise AssertionError("the training has finished")
