"""Callbacks: code that runs at certain moments of a training, such as progress on the terminal and loggers."""

import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from shortlist.program.runs.records import corrected_name, selected_value
from shortlist.program.text import printable
from shortlist.program.training.evaluate import Evaluation

if TYPE_CHECKING:
    from shortlist.program.training.loop import Trainer


class Callback:
    """Override the moments you need. Every rank has its own callbacks, and an exception in one ends the training."""

    def on_features(self, done: int, total: int) -> None:
        """Before training with ``model.frozen``: features of so many images are computed, of those not yet kept."""

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Training is about to start, or to continue from a checkpoint."""

    def on_step(self, trainer: "Trainer") -> None:
        """A step is done. Its loss may still be on the GPU; ``trainer.read_loss`` waits for it."""

    def on_validation(self, trainer: "Trainer", evaluation: Evaluation) -> None:
        """The network was evaluated on the validation images after an epoch."""

    def on_epoch_end(self, trainer: "Trainer", line: dict[str, Any]) -> None:
        """An epoch is done, and ``line`` is its line of ``metrics.jsonl``; its checkpoint is still to come."""

    def on_checkpoint(self, trainer: "Trainer") -> None:
        """The training state is on disk: after an epoch (``trainer.position.step`` is 0), or before an interruption."""

    def on_fit_end(self, trainer: "Trainer") -> None:
        """The last epoch is done; the test, if there is one, comes next."""

    def on_message(self, message: str) -> None:
        """There is something to tell the user."""

    def close(self) -> None:
        """Training has ended, successfully or not."""


class ProgressDisplay(Callback):
    """On standard error: a bar with loss, speed and time left on a terminal, and a line an epoch anywhere."""

    _REFRESH_SECONDS = 0.5
    _SECONDS_BETWEEN_LINES = 15

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, emoji=False)
        self._refreshed = 0.0
        self._validated = ""
        self._features: TaskID | None = None
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not sys.stderr.isatty(),
            transient=True,
        )

    def on_features(self, done: int, total: int) -> None:
        if self._features is None:
            self._bar.start()
            self._features = self._bar.add_task("features", total=total, now="")
        self._bar.update(self._features, completed=done)
        if self._bar.disable and time.monotonic() - self._refreshed > self._SECONDS_BETWEEN_LINES:
            self._refreshed = time.monotonic()
            self.on_message(f"features of {done:,} of {total:,} images")

    def on_fit_start(self, trainer: "Trainer") -> None:
        if self._features is not None:
            self._bar.remove_task(self._features)
        self._bar.start()
        self._task = self._bar.add_task("training", total=trainer.epochs * trainer.parts.steps, now="")

    def on_step(self, trainer: "Trainer") -> None:
        # Not at every step: reading the loss makes a GPU wait.
        if self._bar.disable or time.monotonic() - self._refreshed < self._REFRESH_SECONDS:
            return
        position, loss = trainer.position, trainer.read_loss()
        self._refreshed = time.monotonic()
        self._bar.update(
            self._task,
            completed=position.epoch * trainer.parts.steps + position.step,
            description=f"epoch {position.epoch + 1}/{trainer.epochs}",
            now=f"loss {loss:.4f}{self._validated}  {trainer.images_per_second:,.0f} images/s",
        )

    def on_epoch_end(self, trainer: "Trainer", line: dict[str, Any]) -> None:
        metric, epoch = trainer.parts.config.select_metric, line["epoch"] + 1
        which = f"corrected {metric}" if corrected_name(metric) in line else metric
        self._validated = f"  val {which} {100 * (selected_value(line, metric) or 0):.2f}%"
        rate = len(trainer.parts.problem.train) * epoch / line["train_seconds"]
        is_kept = trainer.position.best_epoch == line["epoch"]
        mark = ("  kept" if trainer.parts.config.train.select_latest else "  best so far") if is_kept else ""
        self.on_message(
            f"epoch {epoch}/{trainer.epochs}  loss {line['train_loss']:.4f}{self._validated}"
            f"  {rate:,.0f} images/s{mark}"
        )

    def on_message(self, message: str) -> None:
        # One line whatever the width of the window: programs read these lines too.
        self._console.print(printable(message), soft_wrap=True, markup=False)

    def close(self) -> None:
        self._bar.stop()
