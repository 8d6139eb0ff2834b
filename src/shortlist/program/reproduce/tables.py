"""Tables of our results beside the paper's numbers, for a terminal and for the document."""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.table import Table

from shortlist.program import recipes
from shortlist.program.report.summary import ABSENT, PLUS_MINUS
from shortlist.program.reproduce.experiment import Experiment
from shortlist.program.reproduce.registry import COLUMN_NAMES
from shortlist.program.reproduce.results import Result
from shortlist.program.text import counted

_FILE = Path(__file__).with_name("published.csv")


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


# 97.5% quantiles of Student's t for 1 to 9 degrees of freedom.
_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True)
class Line:
    """A row of a table, from one source."""

    row: str
    source: str
    seeds: str
    values: tuple[str, ...]
    """A value a column of the experiment; empty if not run."""


def interval_half_width(values: Sequence[float]) -> float:
    """Half the width of the 95% interval of the mean, by Student's t.

    Example:
        >>> round(interval_half_width([1.0, 2.0, 3.0]), 3)
        2.484
    """
    degrees = len(values) - 1
    return _t_quantile(degrees) * statistics.stdev(values) / math.sqrt(len(values))


def _t_quantile(degrees: int) -> float:
    if degrees <= len(_QUANTILES):
        return _QUANTILES[degrees - 1]
    z = _NORMAL_QUANTILE  # first terms of the expansion around the normal quantile
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(degrees) ** power for power, term in enumerate(terms, 1))


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


def comparison(experiment: Experiment, results: Sequence[Result]) -> list[Line]:
    """For each row the paper's line, if it has a number, and one of ours for each length that was run.

    A row that was not run gets an empty line at the shortest length of all, to show what is missing.
    """
    results = latest_setups([result for result in results if result.scale != "smoke"] or results)
    lengths = _lengths(results)
    lines = []
    for row in experiment.rows:
        of_paper = _line_of_paper(experiment, row)
        if any(of_paper.values):
            lines.append(of_paper)
        for scale, epochs in _lengths([result for result in results if result.row == row]) or lengths[:1]:
            here = [result for result in results if (result.row, result.scale, result.epochs) == (row, scale, epochs)]
            who = "tiny data" if scale == "smoke" else "ours"
            lines.append(_line_of_ours(experiment, row, f"{who}, {counted(epochs, 'epoch')}", here))
        if not lengths:
            lines.append(_line_of_ours(experiment, row, "ours", []))
    return lines


def _lengths(results: Sequence[Result]) -> list[tuple[str, int]]:
    """Scales and numbers of epochs, the shortest first."""
    return sorted({(result.scale, result.epochs) for result in results}, key=lambda length: length[1])


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
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{experiment.decimals}f}"
    with_interval = first and len(values) > 1
    return mean + (f"{PLUS_MINUS}{interval_half_width(values):.{experiment.decimals}f}" if with_interval else "")


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
    headings = _headings(experiment)
    rule = ["---", "---", *("---:" for _ in headings[2:])]
    lines = [(line.row, line.source, line.seeds, *line.values) for line in comparison(experiment, results)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *lines))
