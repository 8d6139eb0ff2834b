"""``python -m tests.torture``: run the parts, print the report, exit with 1 if a case failed."""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.support.forked import import_the_program
from tests.torture.bad_calls import BadCalls
from tests.torture.calls import Calls
from tests.torture.cases import Outcome, Part, Tally, as_markdown, write_report
from tests.torture.folders import Folders
from tests.torture.kills import Kills

PARTS: dict[str, type[Part]] = {
    "kills": Kills,
    "folders": Folders,
    "calls": Calls,
    "bad-calls": BadCalls,
}
QUICK = {"kills": 10, "folders": 16, "calls": 300, "bad-calls": 300}
"""How many cases of each part ``--quick`` runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    import_the_program()
    tallies = []
    for name in options.only or PARTS:
        with tempfile.TemporaryDirectory(prefix="torture-") as work:
            part = PARTS[name](options.seed, Path(work))
            cases = _chosen(part, options)
            tally = Tally(name, part.promise, options.seed)
            began = time.monotonic()
            tally.add(_run(part, cases, options.jobs))
            tally.seconds = time.monotonic() - began
            tallies.append(tally)
    print(as_markdown(tallies))
    if options.out is not None:
        write_report(options.out, tallies)
    return 1 if any(tally.failed for tally in tallies) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which random cases (default: 0)")
    parser.add_argument("--quick", action="store_true", help="a small share of the cases, in half a minute")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), help="only these parts")
    parser.add_argument("--case", type=int, help="only this case, with one part")
    parser.add_argument("--out", type=Path, help="write the report here too, as Markdown")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time (default: one a core)")
    return parser


def _chosen(part: Part, options: argparse.Namespace) -> Sequence[int]:
    if options.case is not None:
        return [options.case]
    return part.share(QUICK[part.name]) if options.quick else range(len(part))


def _run(part: Part, cases: Sequence[int], jobs: int) -> Iterator[Outcome]:
    """Run all cases in forked workers; a case may fork children of its own."""
    global _part
    _part = part
    if len(cases) == 1:
        yield part.run(cases[0])
        return
    tenth = max(1, len(cases) // 10)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as workers:
        for number, outcome in enumerate(workers.map(_run_here, cases, chunksize=1 + len(cases) // 2000), 1):
            if number % tenth == 0:
                print(f"{part.name}: {number} of {len(cases)}", file=sys.stderr, flush=True)
            yield outcome


_part: Part | None = None


def _run_here(case: int) -> Outcome:
    assert _part is not None
    return _part.run(case)


if __name__ == "__main__":
    sys.exit(main())
