"""What a measurement is, and the CSV file that keeps them: one row each, the whole file rewritten as each comes in."""

import csv
import dataclasses
import io
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import write_file
from shortlist.program.text import spreadsheet_cell

QUICK_NOTE = "quick: says that it works, not how fast"
"""How the notes of quick measurements begin."""
NOT_CAPTURED = "not captured as a CUDA graph"
"""How notes begin where the GPU's own clock could not be had."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What was put before a contender. None: the contender has no such thing."""

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
    """Times are in milliseconds, each with its 20th and 80th percentile; None: could not be had, and ``note`` says why.

    ``gpu`` times are the GPU's alone (a replayed CUDA graph); ``wall`` times are what a training script waits.
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
    """Most memory held at once during a step, beyond the inputs."""
    note: str = ""
    versions: str = ""
    date: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """What two measurements of the same thing share."""
        return (self.suite, self.entry, self.device, self.machine, *(getattr(self, name) for name in _CASE))


_CASE = tuple(field.name for field in dataclasses.fields(Case))
_OWN = tuple(field.name for field in dataclasses.fields(Measurement) if field.name not in _CASE)
COLUMNS = (*_OWN[:4], *_CASE, *_OWN[4:])
"""Of the file, in this order: who and where, the case, the figures, the circumstances."""
_TYPES = typing.get_type_hints(Measurement)


class ResultsFile:
    """A CSV that grows by a row a measurement and is whole at any moment; what it held before stays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.measurements = read_measurements([path]) if path.exists() else []

    def append(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(_as_text(each) for each in self.measurements)
        write_file(self.path, text.getvalue().encode())


def read_measurements(paths: Iterable[Path]) -> list[Measurement]:
    """All rows of the files, in order."""
    found = []
    for path in paths:
        try:
            rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
        except OSError as wrong:
            raise ShortlistError(f"cannot read {path}: {wrong.strerror}") from None
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise ShortlistError(f"{path} is not a file of measurements: its columns must be {', '.join(COLUMNS)}")
        for line, row in enumerate(rows, 2):
            try:
                found.append(Measurement(**{name: _parsed(row[name], _TYPES[name]) for name in COLUMNS}))
            except (TypeError, ValueError) as wrong:
                raise ShortlistError(f"{path}, line {line} is damaged: {wrong}") from None
    return found


def latest(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The last measurement of each thing, in the order in which things were first measured; quick ones do not count."""
    return list({each.key: each for each in measurements if not each.note.startswith(QUICK_NOTE)}.values())


def _as_text(measurement: Measurement) -> dict[str, str]:
    values = dataclasses.asdict(measurement)
    # A note is one line: it may come from an exception.
    texts = {name: "" if value is None else " ".join(str(value).split()) for name, value in values.items()}
    return {name: str(spreadsheet_cell(text)) for name, text in texts.items()}


def _parsed(text: str, kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        number, _ = typing.get_args(kind)
        return None if text == "" else number(text)
    return kind(text)
