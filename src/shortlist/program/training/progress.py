"""What a person sees while it trains: a bar on a terminal, a line an epoch elsewhere. All of it on standard error."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shortlist.program.text import printable


class TrainingProgress:
    """Shows steps as a bar with loss, images a second and time left, and sums up each epoch in a line.

    Quiet ranks and tests pass ``enabled=False``.
    """

    _REFRESH_SECONDS = 0.5

    def __init__(self, epochs: int, steps: int, *, enabled: bool) -> None:
        self._console = Console(stderr=True, quiet=not enabled, highlight=False, emoji=False)
        self._epochs, self._steps = epochs, steps
        self._refreshed = 0.0
        self._validated = ""
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (enabled and sys.stderr.isatty()),
            transient=True,
        )
        self._task = self._bar.add_task("training", total=epochs * steps, now="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def due(self) -> bool:
        """Whether enough time has passed to show a step: reading its loss makes a GPU wait."""
        return not self._bar.disable and time.monotonic() - self._refreshed > self._REFRESH_SECONDS

    def step(self, epoch: int, step: int, loss: float, images_per_second: float) -> None:
        self._refreshed = time.monotonic()
        self._bar.update(
            self._task,
            completed=epoch * self._steps + step,
            description=f"epoch {epoch + 1}/{self._epochs}",
            now=f"loss {loss:.4f}{self._validated}  {images_per_second:,.0f} images/s",
        )

    def epoch(self, epoch: int, train_loss: float, metric: str, value: float, rate: float, best: bool) -> None:
        self._validated = f"  val {metric} {100 * value:.2f}%"
        mark = "  best so far" if best else ""
        self.say(
            f"epoch {epoch + 1}/{self._epochs}  loss {train_loss:.4f}{self._validated}  {rate:,.0f} images/s{mark}"
        )

    def say(self, message: str) -> None:
        # One line whatever the width of the window: lines are read by programs too.
        self._console.print(printable(message), soft_wrap=True, markup=False)
