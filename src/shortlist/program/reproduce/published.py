"""What the paper prints: ``published.csv``, number by number, with the label of the table or figure it stands in."""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("published.csv")


@dataclass(frozen=True)
class Published:
    """A number as printed, with the half-width of its 95% interval where there is one. Accuracies are in percent."""

    source: str
    row: str
    column: str
    metric: str
    K: str
    value: str
    interval: str


@cache
def published() -> dict[tuple[str, str, str, str], Published]:
    """The numbers by label, row, column and metric.

    Example:
        >>> published()["table:cifar100-top5-acc", "0.4", "noised", "test_micro"].value
        '87.8'
    """
    with _FILE.open(newline="", encoding="utf-8") as file:
        numbers = [Published(**row) for row in csv.DictReader(file)]
    return {(each.source, each.row, each.column, each.metric): each for each in numbers}
