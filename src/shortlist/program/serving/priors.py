"""A prior for places or months: how much more likely each class is there, as a file of weights."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program.text import counted, did_you_mean, some_of

_LONGEST_NAME = 100


def read_prior(path: Path, classes: Sequence[str]) -> tuple[dict[str, list[float]], list[str]]:
    """The weights of all classes for each column of a CSV file, and the names in it that are no class.

    The first column holds class names; every other column is a place, a month or the like, with one weight >= 0 for
    each class. Only ratios within a column count. A class of weight 0 is not suggested there.

    Raises:
        ShortlistError: The file cannot be read, lacks a class, or holds something that is no weight.
    """
    header, rows = _read(path)
    columns = [name.strip() for name in header[1:]]
    if not columns or "" in columns or len({*columns}) < len(columns) or max(map(len, columns)) > _LONGEST_NAME:
        raise ShortlistError(
            f"{path} must begin with a line of headings: one for the class names, and a different one of at most "
            f"{_LONGEST_NAME} letters for each place or month, got {header!r}"
        )
    weights: dict[str, list[float]] = {}
    for number, row in enumerate(rows, 2):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(header):
            raise ShortlistError(f"line {number} of {path} must have {len(header)} cells, got {len(row)}")
        if row[0] in weights:
            raise ShortlistError(f"{path} has two lines for {row[0]!r}: delete one of them")
        weights[row[0]] = [_weight(cell, path, number, name) for cell, name in zip(row[1:], columns, strict=True)]
    unknown = sorted(weights.keys() - {*classes})
    missing = [name for name in classes if name not in weights]
    if missing:
        hint = did_you_mean(missing[0], unknown)
        raise ShortlistError(
            f"{path} has no line for {counted(len(missing), 'class', 'classes')} of the run ({some_of(missing)}): add "
            f"them, with a weight of 1 where nothing is known{hint}"
        )
    found = {name: [weights[of_class][place] for of_class in classes] for place, name in enumerate(columns)}
    for name, column in found.items():
        if not any(column):
            raise ShortlistError(f"every weight of {name!r} in {path} is 0: at least one class must be possible")
    return found, unknown


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    if not path.is_file():
        raise ShortlistError(f"there is no file {path}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ShortlistError(f"{path} cannot be read as a CSV file in UTF-8: {error}") from None
    return (lines[0] if lines else [], lines[1:])


def _weight(cell: str, path: Path, line: int, column: str) -> float:
    try:
        weight = float(cell)
    except ValueError:
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ShortlistError(f"line {line} of {path}: the weight for {column!r} must be a number >= 0, got {cell!r}")
    return weight
