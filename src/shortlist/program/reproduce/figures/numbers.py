"""Plotted numbers as CSV. Figures are drawn from what the file says, so the file can always rebuild them."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from shortlist.program.atomic_files import write_file

Columns = Mapping[str, Tensor]
"""One-dimensional tensors of equal length, by name."""


def write_columns(path: Path, columns: Columns) -> None:
    """Six digits of each number: finer than any print."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(
        [f"{value:.6g}" for value in row] for row in zip(*(c.tolist() for c in columns.values()), strict=True)
    )
    write_file(path, text.getvalue().encode())


def read_columns(path: Path) -> dict[str, Tensor]:
    with path.open(newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    values = torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)
    return dict(zip(names, values.unbind(1), strict=True))
