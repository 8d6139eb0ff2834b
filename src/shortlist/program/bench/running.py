"""Running the suites one after another, with a row in the CSV for each measurement."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import torch

from shortlist.errors import ShortlistError
from shortlist.program.bench import Suite
from shortlist.program.bench.contenders import Bench, describe, say_to_stderr
from shortlist.program.bench.measurements import Measurement, ResultsFile
from shortlist.program.training.device import pick_device

_MODULES: dict[str, str] = {
    "loss": "losses",
    "head": "heads",
    "hinge": "hinge",
    "metrics": "metrics",
    "epoch": "epochs",
    "loop": "loop",
}


def run(
    suites: Sequence[str] = (),
    quick: bool = False,
    out: Path | str = "bench.csv",
    *,
    device: str = "auto",
    say: Callable[[str], None] = say_to_stderr,
) -> list[Measurement]:
    """Measure, and add a row to ``out`` as soon as each measurement is there.

    Args:
        suites: Which, in this order; by default all.
        quick: Tiny cases, in seconds: whether everything works and matches its twin, not how fast it is.
        out: The CSV file; rows that it already has stay.
        device: Where to measure; ``auto`` takes a CUDA GPU if there is one.
        say: Called with a line for each measurement, and for each that is left out.

    Returns:
        The new measurements.

    Raises:
        ShortlistError: No such suite or device, or something of ours does not match its twin.
    """
    for suite in suites:
        if suite not in get_args(Suite):
            raise ShortlistError(f"suites must be some of {', '.join(get_args(Suite))}, got {suite!r}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = pick_device(device)
    if where.type not in ("cuda", "cpu"):
        raise ShortlistError(f"device must be auto, cuda or cpu: there is no clock for {device!r}")
    bench = Bench(where, quick, say)
    results = ResultsFile(Path(out))
    found = []
    for suite in suites or get_args(Suite):
        for measurement in _measured(suite, bench):
            results.append(measurement)
            found.append(measurement)
            say(describe(measurement))
    return found


def _measured(suite: str, bench: Bench) -> Iterator[Measurement]:
    # Imported when asked for: the losses need only torch, an epoch needs all that training does.
    module = importlib.import_module(f"shortlist.program.bench.{_MODULES[suite]}")
    measure: Callable[[Bench], Iterator[Measurement]] = module.measure
    return measure(bench)
