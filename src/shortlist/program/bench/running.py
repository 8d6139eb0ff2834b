"""Runs the suites one after another, with a row in the CSV for each measurement."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import torch

from shortlist.errors import ShortlistError
from shortlist.program.bench import Suite
from shortlist.program.bench.contenders import Bench, describe, say_to_stderr
from shortlist.program.bench.measurements import Measurement, ResultsFile
from shortlist.program.devices import pick_device


def run(
    suites: Sequence[str] = (),
    quick: bool = False,
    out: Path | str = "bench.csv",
    *,
    device: str = "auto",
    say: Callable[[str], None] = say_to_stderr,
) -> list[Measurement]:
    """Measure, and add a row to ``out`` after each measurement.

    Args:
        suites: Which ones, in this order; by default all.
        quick: Tiny cases, in seconds: checks that everything works and is correct, not how fast it is.
        out: The CSV file; existing rows stay.
        device: ``auto``, ``cuda`` or ``cpu``; ``auto`` takes a CUDA GPU if there is one.
        say: Called with a line for each measurement, and for each that is left out.

    Returns:
        The new measurements.

    Raises:
        ShortlistError: An unknown suite or device, or one of our functions fails its check.
    """
    for suite in suites:
        if suite not in get_args(Suite):
            raise ShortlistError(f"suites must be some of {', '.join(get_args(Suite))}, got {suite!r}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = pick_device(device)
    if where.type not in ("cuda", "cpu"):
        raise ShortlistError(f"device must be auto, cuda or cpu, got {device!r}: there is no clock for it")
    bench = Bench(where, quick, say)
    results = ResultsFile(Path(out))
    found = []
    for suite in suites or get_args(Suite):
        for measurement in _measure_of(suite)(bench):
            results.append(measurement)
            found.append(measurement)
            say(describe(measurement))
    return found


def _measure_of(suite: str) -> Callable[[Bench], Iterator[Measurement]]:
    """The function of a suite, imported on demand: an epoch needs the whole training program, a loss only torch."""
    if suite in ("loss", "hinge"):
        from shortlist.program.bench import losses

        return losses.measure_noised if suite == "loss" else losses.measure_smoothed
    if suite == "head":
        from shortlist.program.bench import heads

        return heads.measure
    if suite == "metrics":
        from shortlist.program.bench import metrics

        return metrics.measure
    from shortlist.program.bench import epochs

    return epochs.measure_losses if suite == "epoch" else epochs.measure_loops
