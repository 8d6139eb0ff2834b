"""Quick benchmarks, and made-up measurements."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from shortlist.program.bench import running
from shortlist.program.bench.measurements import Measurement


def silent(message: str) -> None:
    pass


def run_quick(out: Path, *suites: str) -> list[Measurement]:
    return running.run(suites, quick=True, out=out, device="cpu", say=silent)


def measurement(entry: str = "shortlist", **changes: Any) -> Measurement:
    plain = Measurement(
        suite="loss", entry=entry, device="cpu", machine="CPU, 2 threads", dtype="float32", N=64, L=1_000
    )
    return replace(plain, date="2030-01-01T00:00:00+00:00", versions="torch=1", **changes)
