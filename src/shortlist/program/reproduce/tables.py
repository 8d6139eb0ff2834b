"""Tables of our results beside the paper's numbers, for a terminal and for the document."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.table import Table

from shortlist.program import recipes
from shortlist.program.compare.intervals import interval
from shortlist.program.report.summary import ABSENT, PLUS_MINUS
from shortlist.program.reproduce.experiment import Experiment
from shortlist.program.reproduce.registry import COLUMN_NAMES
from shortlist.program.reproduce.results import Result
from shortlist.program.text import counted

_FILE = Path(__file__).with_name("published.csv")


Length = tuple[str, int]
"""A scale and a number of epochs."""


@dataclass(frozen=True)
class Published:
    """A number as printed in the paper, with the half-width of its 95% interval if given. Accuracies are in percent."""

    source: str
    row: str
    column: str
    metric: str
    K: str
    value: str
    interval: str


@cache
def published() -> dict[tuple[str, str, str, str], Published]:
    """The numbers of ``published.csv`` by label of the table or figure, row, column and metric.

    Example:
        >>> published()["table:cifar100-top5-acc", "0.4", "noised", "test_micro"].value
        '87.8'
    """
    with _FILE.open(newline="", encoding="utf-8") as file:
        numbers = [Published(**row) for row in csv.DictReader(file)]
    return {(number.source, number.row, number.column, number.metric): number for number in numbers}


@dataclass(frozen=True)
class Line:
    """A row of a table, from one source."""

    row: str
    source: str
    seeds: str
    values: tuple[str, ...]
    """A value a column of the experiment; empty if not run."""


def latest_setups(results: Sequence[Result]) -> list[Result]:
    """For each cell and length, the results of the latest configuration: different ones must not be averaged."""
    last: dict[tuple[str, str, str, int], Result] = {}
    for result in results:
        cell = (result.row, result.column, result.scale, result.epochs)
        if cell not in last or result.date > last[cell].date:
            last[cell] = result
    return [
        result
        for result in results
        if result.config == last[result.row, result.column, result.scale, result.epochs].config
    ]


def shorter_runs(results: Sequence[Result]) -> list[Result]:
    """Results that longer runs have replaced: all cells of their row and length were run at the greatest length too."""
    found = []
    for row in dict.fromkeys(result.row for result in results):
        longest, *others = _lengths(_of_row(results, row))
        columns = {length: {result.column for result in _at(results, row, length)} for length in (longest, *others)}
        for length in others:
            if columns[length] <= columns[longest]:
                found += _at(results, row, length)
    return found


def comparison(experiment: Experiment, results: Sequence[Result]) -> list[Line]:
    """For each row the paper's line, if it has a number, and one of ours for each length that was run, longest first.

    A row that was not run gets an empty line at the shortest length of all, to show what is missing.
    """
    results = latest_setups([result for result in results if result.scale != "smoke"] or results)
    lengths = _lengths(results)
    lines = []
    for row in experiment.rows:
        of_paper = _line_of_paper(experiment, row)
        if any(of_paper.values):
            lines.append(of_paper)
        lines += _lines_of_ours(experiment, row, results, _lengths(_of_row(results, row)) or lengths[-1:])
        if not lengths:
            lines.append(_line_of_ours(experiment, row, "ours", []))
    return lines


def _of_row(results: Sequence[Result], row: str) -> list[Result]:
    return [result for result in results if result.row == row]


def _at(results: Sequence[Result], row: str, length: Length) -> list[Result]:
    return [result for result in _of_row(results, row) if (result.scale, result.epochs) == length]


def _lengths(results: Sequence[Result]) -> list[Length]:
    """Those that were run, the longest first."""
    found = {(result.scale, result.epochs) for result in results}
    return sorted(found, key=lambda length: length[1], reverse=True)


def _lines_of_ours(
    experiment: Experiment, row: str, results: Sequence[Result], lengths: Sequence[Length]
) -> Iterator[Line]:
    for scale, epochs in lengths:
        who = "tiny data" if scale == "smoke" else "ours"
        source = f"{who}, {counted(epochs, 'epoch')}"
        yield _line_of_ours(experiment, row, source, _at(results, row, (scale, epochs)))


def _line_of_paper(experiment: Experiment, row: str) -> Line:
    values = []
    for column in experiment.columns:
        printed = [published().get((experiment.source, row, column, metric)) for metric in experiment.metrics]
        values.append(_beside([_as_printed(number) if number else "" for number in printed]))
    epochs = recipes.build(experiment.cells[0].recipe).train.epochs
    source = "paper" if experiment.paper_epochs else f"paper, {counted(epochs, 'epoch')}"
    return Line(row, source, f"{experiment.paper_seeds or ''}", tuple(values))


def _line_of_ours(experiment: Experiment, row: str, source: str, results: Sequence[Result]) -> Line:
    values, seeds = [], set()
    for column in experiment.columns:
        numbers = []
        for metric in experiment.metrics:
            found = [result.value for result in results if (result.column, result.metric) == (column, metric)]
            if found:
                seeds.add(len(found))
            numbers.append(_mean_and_interval(found, experiment, first=metric == experiment.metrics[0]))
        values.append(_beside(numbers))
    count = "" if not seeds else f"{min(seeds)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
    return Line(row, source, count, tuple(values))


def _as_printed(number: Published) -> str:
    return number.value + (f"{PLUS_MINUS}{number.interval}" if number.interval else "")


def _mean_and_interval(values: Sequence[float], experiment: Experiment, *, first: bool) -> str:
    """The main number has an interval; those in parentheses have none, as in the paper."""
    found = interval(values)
    if found is None:
        return ""
    mean = f"{found.mean:.{experiment.decimals}f}"
    return mean + (f"{PLUS_MINUS}{found.half:.{experiment.decimals}f}" if first and found.half is not None else "")


def _beside(numbers: Sequence[str]) -> str:
    """The first number, with the others in parentheses if there are any.

    Example:
        >>> _beside(["42.4", "23.9", "46.3", "72.1"])
        '42.4 (23.9/46.3/72.1)'
    """
    first, *others = numbers
    return f"{first} ({'/'.join(number or ABSENT for number in others)})" if any(others) else first


def _headings(experiment: Experiment) -> list[str]:
    return [experiment.row_heading, "", "seeds", *(COLUMN_NAMES.get(column, column) for column in experiment.columns)]


def terminal_table(experiment: Experiment, results: Sequence[Result]) -> Table:
    table = Table(box=None, pad_edge=False)
    for place, heading in enumerate(_headings(experiment)):
        table.add_column(heading, justify="left" if place < 2 else "right", no_wrap=True)
    for line in comparison(experiment, results):
        table.add_row(line.row, line.source, line.seeds, *line.values)
    return table


def markdown_table(experiment: Experiment, results: Sequence[Result]) -> str:
    return _markdown(experiment, comparison(experiment, results))


def markdown_table_of_runs(experiment: Experiment, results: Sequence[Result]) -> str:
    """What was run alone: no numbers of the paper, and no empty lines."""
    lines = [
        line
        for row in experiment.rows
        for line in _lines_of_ours(experiment, row, results, _lengths(_of_row(results, row)))
    ]
    return _markdown(experiment, lines)


def _markdown(experiment: Experiment, lines: Sequence[Line]) -> str:
    headings = _headings(experiment)
    rule = ["---", "---", *("---:" for _ in headings[2:])]
    cells = [(line.row, line.source, line.seeds, *line.values) for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *cells))
