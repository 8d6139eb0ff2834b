"""What the program prints: results to standard output, messages to standard error."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from shortlist.program.text import counted, hide_passwords, printable, some_of

_WIDEST_TABLE = 10**6  # columns


def show(result: object) -> None:
    """Print a line to standard output."""
    print(printable(str(result)))


def say(message: str) -> None:
    """Print a line to standard error."""
    print(printable(hide_passwords(message)), file=sys.stderr)


def say_unpromised(classes: Sequence[str]) -> None:
    """Say which classes the coverage of sets promises nothing for."""
    say(
        f"calibration saw no image of {counted(len(classes), 'class', 'classes')}, and the coverage is not promised "
        f"for them: {some_of(classes)}; more test images would change that"
    )


def print_table(table: Table) -> None:
    """Print a table at its full width: a terminal wraps long lines, but cannot bring back what was cut off."""
    shown = Table(box=table.box, pad_edge=table.pad_edge)
    for column in table.columns:
        shown.add_column(column.header, justify=column.justify, overflow=column.overflow, no_wrap=column.no_wrap)
    for row in zip(*(column.cells for column in table.columns), strict=True):
        shown.add_row(*(printable(str(cell)) for cell in row))
    Console(highlight=False, markup=False, emoji=False, width=_WIDEST_TABLE).print(shown)
