"""Checks of values read from the files of a run, which somebody may have edited."""

import re
import sys
from typing import Any

METRIC = re.compile(r"(micro|macro|few|medium|many)_top\d{1,9}")
"""Names of accuracies."""


def is_number(value: Any) -> bool:
    """True for a finite number; True and False are not numbers here."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def is_whole(value: Any) -> bool:
    """True for 0, 1, 2 and so on."""
    return type(value) is int and 0 <= value <= sys.maxsize


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def are_metrics(values: dict[str, Any]) -> bool:
    """True for finite numbers by name, None where undefined; accuracies must lie in [0, 1]."""
    if not all(value is None or is_number(value) for value in values.values()):
        return False
    accuracies = (
        value
        for name, value in values.items()
        if METRIC.fullmatch(name.removeprefix("corrected_").removeprefix("val_"))
    )
    return all(value is None or 0 <= value <= 1 for value in accuracies)


def is_metrics_line(line: Any) -> bool:
    """True for what training writes about an epoch: its number, and its metrics by name."""
    return isinstance(line, dict) and is_whole(line.get("epoch")) and are_metrics(line)
