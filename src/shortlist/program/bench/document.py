"""Rewrites the generated part of docs/performance.md from CSV files: a chapter a machine, a section a suite.

All numbers come from the files of ``shortlist bench``, except the times of the smoothed hinge's original code: they are
in ``authors_hinge.csv``, which names their source.
"""

import csv
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program.bench import Suite, heads, losses, metrics, plots
from shortlist.program.bench.measurements import (
    CLOCKS,
    NOT_CAPTURED,
    Clock,
    Measurement,
    Selection,
    latest,
    milliseconds,
    read_measurements,
    size_text,
)
from shortlist.program.documents import MarkedPage
from shortlist.program.report.summary import ABSENT

_NAME = "performance"
_TIMES = "\N{MULTIPLICATION SIGN}"
_SIZE_HEADING = f"N {_TIMES} L"
_AUTHORS_HINGE = Path(__file__).with_name("authors_hinge.csv")


def write_performance(files: Sequence[Path], docs: Path) -> Path:
    """Rewrite the tables of ``docs/performance.md`` and the plots of ``docs/performance/``.

    Args:
        files: CSV files of ``shortlist bench``; of several measurements of the same thing the last counts.
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
    parts = []
    for machine in dict.fromkeys(row.machine for row in measurements):
        here = [row for row in measurements if row.machine == machine]
        parts += [f"## {machine}", _circumstances(here)]
        for suite, (heading, tables) in _SUITES.items():
            selection = Selection([row for row in here if row.suite == suite])
            if selection.measurements:
                parts += [f"### {heading}", *_plot(selection, suite, machine, docs), *tables(selection)]
        parts += _missing_times(here)
    return parts


def _circumstances(measurements: Sequence[Measurement]) -> str:
    days = sorted({row.date[:10] for row in measurements})
    versions = "; ".join(
        dict.fromkeys(row.versions.replace("=", " ").replace(" ", "\N{NO-BREAK SPACE}") for row in measurements)
    )
    return f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))} with {versions}."


def _plot(selection: Selection, suite: Suite, machine: str, docs: Path) -> list[str]:
    if suite not in plots.PLOTS:
        return []
    description, draw = plots.PLOTS[suite]
    figure = draw(selection)
    if figure is None:
        return []
    name = f"{suite}-{re.sub('[^a-z0-9]+', '-', machine.lower()).strip('-')}"
    plots.save(figure, docs / _NAME / name)
    return [f"![{description}]({_NAME}/{name}.png)"]


def _missing_times(measurements: Sequence[Measurement]) -> list[str]:
    """Why a time is missing."""
    lacking = [row for row in measurements if row.note and (row.wall_ms is None or NOT_CAPTURED in row.note)]
    lines = dict.fromkeys(f"- {row.suite}, {row.entry}, {size_text(row.N, row.L)}: {row.note}" for row in lacking)
    return ["### What could not be measured", "\n".join(lines)] if lines else []


def _loss_tables(selection: Selection) -> list[str]:
    """Ratios to cross-entropy by each clock over the whole grid, then times and memory in its middle."""
    single = selection.only(dtype="float32")
    parts = [_loss_ratios(single, clock) for clock in single.clocks]
    parts.append(_loss_times(single))
    if halves := [dtype for dtype in ("bfloat16", "float16") if selection.only(dtype=dtype).measurements]:
        parts.append(_half_types(selection, halves))
    return parts


def _loss_ratios(selection: Selection, clock: Clock) -> str:
    draws = selection.only(losses.OURS).distinct("K", "B")
    rows, ratios = [], []
    for n, num_classes in selection.sizes:
        here = selection.only(N=n, L=num_classes)
        reference = _cross_entropy(here, clock)
        cells = []
        for k, n_samples in draws:
            times = here.only(losses.OURS, K=k, B=n_samples).times(clock)
            if not times or reference is None:
                cells.append(ABSENT)
                continue
            ratios += [time / reference for time in times]
            cells.append(f"{_ratio(statistics.median(times), reference)} / {_ratio(max(times), reference)}")
        rows.append([size_text(n, num_classes), _milliseconds(reference), *cells])
    goal = losses.GOALS[selection.measurements[0].device]
    met = sum(ratio <= goal for ratio in ratios)
    title = (
        f"The noised loss as a multiple of cross-entropy (plain or compiled, whichever is faster), {CLOCKS[clock]}:"
        f" median / worst over score spreads and epsilon. Goal: at most {goal:.1f}{_TIMES};"
        f" met in {met} of {len(ratios)} cases."
    )
    columns = [_SIZE_HEADING, "cross-entropy, ms", *(f"K={k} B={n_samples}" for k, n_samples in draws)]
    return _table(title, columns, rows)


def _loss_times(selection: Selection) -> str:
    usual = selection.only(spread=losses.USUAL_SPREAD)
    ours = usual.only(losses.OURS, epsilon=losses.USUAL_EPSILON)
    columns: dict[str, Selection] = {
        losses.CROSS_ENTROPY: usual.only(losses.CROSS_ENTROPY),
        losses.COMPILED_CROSS_ENTROPY: usual.only(losses.COMPILED_CROSS_ENTROPY),
    }
    for k, n_samples in ours.distinct("K", "B"):
        for entry, here in ((losses.PYTOPK, usual.only(losses.PYTOPK)), (losses.OURS, ours)):
            columns[f"{entry} K={k} B={n_samples}"] = here.only(K=k, B=n_samples)
    columns = {name: column for name, column in columns.items() if column.measurements}
    clock = selection.main_clock
    rows = [
        [
            size_text(n, num_classes),
            *(_time_and_memory(column.only(N=n, L=num_classes), clock) for column in columns.values()),
        ]
        for n, num_classes in selection.sizes
    ]
    title = (
        f"Milliseconds, {CLOCKS[clock]} (peak extra MiB), at a score spread of {losses.USUAL_SPREAD:g} and"
        f" epsilon = {losses.USUAL_EPSILON:g}."
    )
    return _table(title, [_SIZE_HEADING, *columns], rows)


def _half_types(selection: Selection, dtypes: Sequence[str]) -> str:
    clock = selection.main_clock
    rows = []
    for dtype in dtypes:
        here = selection.only(dtype=dtype)
        for n, num_classes, k, n_samples in here.only(losses.OURS).distinct("N", "L", "K", "B"):
            case = here.only(N=n, L=num_classes)
            reference = _cross_entropy(case, clock)
            ours = case.only(losses.OURS, K=k, B=n_samples).best(clock)
            name = f"{dtype}, {size_text(n, num_classes)}, K={k} B={n_samples}"
            rows.append([name, _milliseconds(reference), _milliseconds(ours), _ratio(ours, reference)])
    return _table(f"Half types, {CLOCKS[clock]}.", ["", "cross-entropy, ms", "shortlist, ms", "ratio"], rows)


def _head_tables(selection: Selection) -> list[str]:
    return [_head_table(selection, clock) for clock in selection.clocks]


def _head_table(selection: Selection, clock: Clock) -> str:
    """Each implementation at each size, and ours as a multiple of the fastest peer."""
    sizes = selection.sizes
    rows = [
        [entry, *(_time_and_memory(selection.only(entry, N=n, L=num_classes), clock) for n, num_classes in sizes)]
        for entry in heads.ENTRIES
        if selection.only(entry).measurements
    ]
    for entry in (heads.OURS, heads.OURS_SPARSE):
        cells = []
        for n, num_classes in sizes:
            here = selection.only(N=n, L=num_classes)
            cells.append(_ratio(here.only(entry).best(clock), here.only(*heads.PEERS).best(clock)))
        rows.append([f"**{entry} / fastest peer**", *cells])
    features, draws = selection.distinct("d")[0][0], selection.only(heads.OURS).distinct("dtype", "K", "B")
    described = ", ".join(f"{dtype}, K={k}, B={n_samples}" for dtype, k, n_samples in draws)
    title = (
        f"Linear layer (d = {features}) and loss, forward and backward ({described}): milliseconds, {CLOCKS[clock]}"
        f" (peak extra MiB). Goal: at most {heads.GOAL:.1f}{_TIMES} the fastest peer."
    )
    return _table(title, ["", *(size_text(n, num_classes) for n, num_classes in sizes)], rows)


def _hinge_tables(selection: Selection) -> list[str]:
    """The smoothed hinge beside cross-entropy and its original code."""
    clock = selection.main_clock
    rows = []
    for n, num_classes in selection.sizes:
        here = selection.only(N=n, L=num_classes)
        reference = _cross_entropy(here, clock)
        for (k,) in here.only(losses.OURS).distinct("K"):
            ours = here.only(losses.OURS, K=k).best(clock)
            theirs = _authors_hinge().get((here.measurements[0].machine, n, num_classes, k))
            rows.append(
                [
                    size_text(n, num_classes),
                    f"{k}",
                    _milliseconds(reference),
                    _milliseconds(ours),
                    _ratio(ours, reference),
                    ABSENT if theirs is None else f"{theirs:.0f}",
                    _ratio(theirs, ours),
                ]
            )
    title = (
        f"The smoothed hinge, {CLOCKS[clock]}, milliseconds. The times of the authors' code were measured apart from"
        f" `shortlist bench`, on the same GPU model (`{_AUTHORS_HINGE.name}`)."
    )
    columns = ["cross-entropy", "shortlist", "shortlist / cross-entropy", "authors' code", "authors' code / shortlist"]
    return [_table(title, [_SIZE_HEADING, "K", *columns], rows)]


@cache
def _authors_hinge() -> dict[tuple[str, int, int, int], float]:
    """Milliseconds by machine, N, L and K."""
    with _AUTHORS_HINGE.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        return {(row["machine"], int(row["N"]), int(row["L"]), int(row["K"])): float(row["ms"]) for row in rows}


def _metrics_tables(selection: Selection) -> list[str]:
    names = {losses.OURS: "shortlist, `TopKMetrics.update`", metrics.SETS: "shortlist, `PredictionSets`"}
    rows = [
        [
            names.get(row.entry, row.entry),
            size_text(row.N, row.L),
            _milliseconds(row.gpu_ms),
            _milliseconds(row.wall_ms),
            _mebibytes(row.peak_mib),
        ]
        for row in selection.measurements
    ]
    columns = ["", _SIZE_HEADING, "GPU clock, ms", "wall clock, ms", "peak extra MiB"]
    return [_table("Counting top-K hits, and sets.", columns, rows)]


def _epoch_tables(selection: Selection) -> list[str]:
    reference = selection.only(losses.CROSS_ENTROPY).best("wall")
    rows = [
        [
            row.entry,
            ABSENT if row.K is None else f"{row.K}",
            ABSENT if row.B is None else f"{row.B}",
            _seconds(row.wall_ms),
            _ratio(row.wall_ms, reference),
        ]
        for row in selection.measurements
    ]
    return [_table(_notes(selection), ["loss", "K", "B", "seconds", "ratio to cross-entropy"], rows)]


def loop_tables(selection: Selection) -> list[str]:
    slowest = max(selection.times("wall"), default=None)
    rows = [[row.entry, _seconds(row.wall_ms), _ratio(slowest, row.wall_ms)] for row in selection.measurements]
    return [_table(_notes(selection), ["", "seconds", "faster than the slower by"], rows)]


_SUITES: Mapping[Suite, tuple[str, Callable[[Selection], list[str]]]] = {
    "loss": ("The noised loss", _loss_tables),
    "head": ("The head", _head_tables),
    "hinge": ("The smoothed hinge", _hinge_tables),
    "metrics": ("Metrics", _metrics_tables),
    "epoch": ("Epochs", _epoch_tables),
    "loop": ("The training loop", loop_tables),
}
"""The heading and the tables of each suite, in the order of the document."""


def _cross_entropy(selection: Selection, clock: Clock) -> float | None:
    """The faster of plain and compiled cross-entropy."""
    return selection.only(losses.CROSS_ENTROPY, losses.COMPILED_CROSS_ENTROPY).best(clock)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table below its title, with numbers aligned to the right."""
    rule = ["---", *("---:" for _ in columns[1:])]
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows)]
    return f"{title}\n\n" + "\n".join(lines)


def _ratio(ours: float | None, theirs: float | None) -> str:
    if ours is None or theirs is None:
        return ABSENT
    ratio = ours / theirs
    return f"{ratio:.2f}{_TIMES}" if ratio < 10 else f"{ratio:,.0f}{_TIMES}"


def _time_and_memory(selection: Selection, clock: Clock) -> str:
    """Of a single measurement; by the wall clock, and marked so, if there is no time by the GPU's."""
    if not selection.measurements:
        return ABSENT
    (only,) = selection.measurements
    time = only.time(clock)
    text = _milliseconds(only.wall_ms) + " (wall)" if time is None else milliseconds(time)
    return text if only.peak_mib is None else f"{text} ({_mebibytes(only.peak_mib)})"


def _milliseconds(time: float | None) -> str:
    return ABSENT if time is None else milliseconds(time)


def _mebibytes(amount: float | None) -> str:
    return ABSENT if amount is None else f"{amount:,.0f}"


def _seconds(time: float | None) -> str:
    return ABSENT if time is None else f"{time / 1000:.2f}"


def _notes(selection: Selection) -> str:
    return "; ".join(dict.fromkeys(row.note for row in selection.measurements)).capitalize() + "."
