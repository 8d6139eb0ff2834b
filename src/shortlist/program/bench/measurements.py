"""A measurement, the CSV file that keeps them, and the selections of them that tables and plots show."""

import csv
import dataclasses
import io
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import write_file
from shortlist.program.text import spreadsheet_cell

QUICK_NOTE = "quick: says that it works, not how fast"
"""How the notes of quick measurements begin."""
NOT_CAPTURED = "not captured as a CUDA graph"
"""How the note begins where there is no time by the GPU's clock."""

Clock = Literal["gpu", "wall"]
CLOCKS: dict[Clock, str] = {"gpu": "GPU clock", "wall": "wall clock"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """The input of a measurement. None: not applicable."""

    dtype: str
    N: int
    """Rows of the batch."""
    L: int
    """Classes."""
    d: int | None = None
    """Features in front of the linear layer."""
    K: int | None = None
    B: int | None = None
    """Draws of the noise."""
    spread: float | None = None
    """Standard deviation of the scores of a row."""
    epsilon: float | None = None
    """Scale of the noise."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Case):
    """Times in milliseconds, each with its 20th and 80th percentile. None: not measured, and ``note`` says why.

    ``gpu`` times are of the GPU alone (a replayed CUDA graph); ``wall`` times are what a training script waits.
    """

    suite: str
    entry: str
    device: str
    machine: str
    gpu_ms: float | None = None
    gpu_p20: float | None = None
    gpu_p80: float | None = None
    wall_ms: float | None = None
    wall_p20: float | None = None
    wall_p80: float | None = None
    peak_mib: float | None = None
    """Peak memory of a step, beyond its inputs."""
    note: str = ""
    versions: str = ""
    date: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for two measurements of the same thing."""
        return (self.suite, self.entry, self.device, self.machine, *(getattr(self, name) for name in _CASE))

    def time(self, clock: Clock) -> float | None:
        return self.gpu_ms if clock == "gpu" else self.wall_ms


_CASE = tuple(field.name for field in dataclasses.fields(Case))
_OWN = tuple(field.name for field in dataclasses.fields(Measurement) if field.name not in _CASE)
COLUMNS = (*_OWN[:4], *_CASE, *_OWN[4:])
"""Of the file: what and where, the case, the times, the circumstances."""
_TYPES = typing.get_type_hints(Measurement)


class ResultsFile:
    """A CSV that gains a row with each measurement and is complete at any moment; existing rows stay."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.measurements = read_measurements([path]) if path.exists() else []

    def append(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(_as_text, self.measurements))
        write_file(self.path, text.getvalue().encode())


def read_measurements(paths: Iterable[Path]) -> list[Measurement]:
    """All rows of the files, in order."""
    found = []
    for path in paths:
        try:
            rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
        except OSError as error:
            raise ShortlistError(f"cannot read {path}: {error.strerror}") from None
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise ShortlistError(f"{path} is not a file of measurements: its columns must be {', '.join(COLUMNS)}")
        for line, row in enumerate(rows, 2):
            try:
                found.append(Measurement(**{name: _parsed(row[name], _TYPES[name]) for name in COLUMNS}))
            except (TypeError, ValueError) as error:
                raise ShortlistError(f"{path}, line {line} is damaged: {error}") from None
    return found


def latest(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The last measurement of each thing, in the order of the first ones; quick measurements are left out."""
    return list({row.key: row for row in measurements if not row.note.startswith(QUICK_NOTE)}.values())


def _as_text(measurement: Measurement) -> dict[str, str]:
    values = dataclasses.asdict(measurement)
    # On one line: a note may be the message of an exception.
    texts = {name: "" if value is None else " ".join(str(value).split()) for name, value in values.items()}
    return {name: str(spreadsheet_cell(text)) for name, text in texts.items()}


def _parsed(text: str, kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        number, _ = typing.get_args(kind)
        return None if text == "" else number(text)
    return kind(text)


@dataclass(frozen=True)
class Selection:
    """Some measurements of one suite on one machine."""

    measurements: Sequence[Measurement]

    def only(self, *entries: str, **case: object) -> "Selection":
        """Those of these entries (any, if none is given) and with these values."""
        return Selection(
            [
                row
                for row in self.measurements
                if (not entries or row.entry in entries)
                and all(getattr(row, name) == value for name, value in case.items())
            ]
        )

    def distinct(self, *names: str) -> list[tuple[Any, ...]]:
        """The values that occur, sorted."""
        return sorted({tuple(getattr(row, name) for name in names) for row in self.measurements})

    def times(self, clock: Clock) -> list[float]:
        return [time for row in self.measurements if (time := row.time(clock)) is not None]

    def best(self, clock: Clock) -> float | None:
        return min(self.times(clock), default=None)

    @property
    def clocks(self) -> list[Clock]:
        return [clock for clock in CLOCKS if self.times(clock)]

    @property
    def main_clock(self) -> Clock:
        """The GPU's, if there are times by it."""
        return self.clocks[0] if self.clocks else "wall"

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(N, L), in the order of their products."""
        return sorted({(row.N, row.L) for row in self.measurements}, key=lambda size: (size[0] * size[1], size))


def milliseconds(time: float) -> str:
    """Three significant digits.

    Example:
        >>> [milliseconds(time) for time in (0.01234, 0.5, 12.34, 1711.4)]
        ['0.0123', '0.500', '12.3', '1,711']
    """
    decimals = next((places for limit, places in ((0.1, 4), (1, 3), (10, 2), (100, 1)) if time < limit), 0)
    return f"{time:,.{decimals}f}"


def class_count(count: int) -> str:
    """A round number of classes, abbreviated.

    Example:
        >>> class_count(100), class_count(1_081), class_count(10_000), class_count(1_000_000)
        ('100', '1,081', '10k', '1M')
    """
    for unit, letter in ((1_000_000, "M"), (10_000, "k")):
        if count >= unit and count % 1_000 == 0:
            return f"{count // (1_000_000 if letter == 'M' else 1_000)}{letter}"
    return f"{count:,}"


def size_text(n: int, num_classes: int) -> str:
    return f"{n:,} \N{MULTIPLICATION SIGN} {class_count(num_classes)}"
