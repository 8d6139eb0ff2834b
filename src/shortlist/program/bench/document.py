"""docs/performance.md from the CSV files alone: what a person wrote in it stays, what was measured is made anew."""

import re
from collections.abc import Sequence
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program.bench import plots
from shortlist.program.bench.measurements import NOT_CAPTURED, Measurement, latest, read_measurements
from shortlist.program.bench.tables import SUITES, Results, size
from shortlist.program.marked_pages import MarkedPage

_NAME = "performance"


def write_performance(files: Sequence[Path], docs: Path) -> Path:
    """Rewrite the tables of ``docs/performance.md`` and the plots of ``docs/performance/``.

    Args:
        files: CSV files of ``shortlist bench``; of measurements of the same thing the last counts.
        docs: The folder of the document, which must hold the two marks.

    Returns:
        The document.
    """
    if not files:
        raise ShortlistError("name the CSV files, e.g. shortlist bench --document bench.csv")
    page = MarkedPage(docs / f"{_NAME}.md", "shortlist bench --document")
    if not (sections := _sections(latest(read_measurements(files)), docs)):
        raise ShortlistError(
            f"there is nothing to show in {', '.join(map(str, files))}: quick measurements do not count"
        )
    page.rewrite("\n\n".join(sections))
    return page.path


def _sections(measurements: Sequence[Measurement], docs: Path) -> list[str]:
    """A chapter a machine, a section a suite."""
    parts = []
    for machine in dict.fromkeys(each.machine for each in measurements):
        here = [each for each in measurements if each.machine == machine]
        parts += [f"## {machine}", _circumstances(here)]
        for suite, (heading, tables) in SUITES.items():
            results = Results([each for each in here if each.suite == suite])
            if results.measurements:
                parts += [f"### {heading}", *_plot(results, suite, machine, docs), *tables(results)]
        parts += _remarks(here)
    return parts


def _circumstances(measurements: Sequence[Measurement]) -> str:
    days = sorted({each.date[:10] for each in measurements})
    versions = "; ".join(
        dict.fromkeys(each.versions.replace("=", " ").replace(" ", "\N{NO-BREAK SPACE}") for each in measurements)
    )
    return f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))} with {versions}."


def _plot(results: Results, suite: str, machine: str, docs: Path) -> list[str]:
    if suite not in plots.PLOTS:
        return []
    description, draw = plots.PLOTS[suite]
    figure = draw(results)
    if figure is None:
        return []
    name = f"{suite}-{re.sub('[^a-z0-9]+', '-', machine.lower()).strip('-')}"
    plots.save(figure, docs / _NAME / name)
    return [f"![{description}]({_NAME}/{name}.png)"]


def _remarks(measurements: Sequence[Measurement]) -> list[str]:
    """Why a figure is missing."""
    lacking = [each for each in measurements if each.note and (each.wall_ms is None or NOT_CAPTURED in each.note)]
    lines = dict.fromkeys(f"- {each.suite}, {each.entry}, {size(each.N, each.L)}: {each.note}" for each in lacking)
    return ["### What could not be measured", "\n".join(lines)] if lines else []
