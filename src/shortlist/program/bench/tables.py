"""The tables of docs/performance.md, made from measurements and nothing else."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shortlist.program.bench import heads, hinge, losses, metrics
from shortlist.program.bench.measurements import Measurement

Clock = Literal["gpu", "wall"]
CLOCKS: dict[Clock, str] = {"gpu": "GPU clock", "wall": "wall clock"}

LOSS_GOALS = {"cuda": 1.0, "cpu": 2.0}
"""Our loss takes no longer than cross-entropy, on a CPU no more than twice as long."""
HEAD_GOAL = 0.5
"""Our head takes half the time of the fastest peer."""

ABSENT = "\N{EN DASH}"
_TIMES = "\N{MULTIPLICATION SIGN}"

# Milliseconds of the smoothed hinge as its authors published it, by (N, L, K); measured earlier, on an H200 too.
_HINGE_OF_ITS_AUTHORS = {
    (64, 100, 5): 16.0,
    (64, 100, 20): 118.0,
    (256, 10_000, 5): 57.0,
    (256, 10_000, 20): 449.0,
    (256, 100_000, 5): 77.0,
    (256, 100_000, 20): 569.0,
}


@dataclass(frozen=True)
class Results:
    """The measurements of one suite on one machine."""

    measurements: Sequence[Measurement]

    def only(self, *entries: str, **case: object) -> "Results":
        """Those of these entries (any, if none is named) and with these values."""
        return Results(
            [
                each
                for each in self.measurements
                if (not entries or each.entry in entries)
                and all(getattr(each, name) == value for name, value in case.items())
            ]
        )

    def distinct(self, *names: str) -> list[tuple[Any, ...]]:
        """Values that occur, smallest first."""
        return sorted({tuple(getattr(each, name) for name in names) for each in self.measurements})

    def times(self, clock: Clock) -> list[float]:
        found = (getattr(each, f"{clock}_ms") for each in self.measurements)
        return [time for time in found if time is not None]

    def best(self, clock: Clock) -> float | None:
        return min(self.times(clock), default=None)

    @property
    def clocks(self) -> list[Clock]:
        return [clock for clock in CLOCKS if self.times(clock)]


def milliseconds(time: float | None) -> str:
    """Three digits that count.

    Example:
        >>> [milliseconds(time) for time in (0.01234, 0.5, 12.34, 1711.4)]
        ['0.0123', '0.500', '12.3', '1,711']
    """
    if time is None:
        return ABSENT
    decimals = next((places for limit, places in ((0.1, 4), (1, 3), (10, 2), (100, 1)) if time < limit), 0)
    return f"{time:,.{decimals}f}"


def ratio(ours: float | None, theirs: float | None) -> str:
    """How many times as long ours takes."""
    if ours is None or theirs is None:
        return ABSENT
    times = ours / theirs
    return f"{times:.2f}{_TIMES}" if times < 10 else f"{times:,.0f}{_TIMES}"


def classes(count: int) -> str:
    """A round number of classes, briefly.

    Example:
        >>> classes(100), classes(1_081), classes(10_000), classes(1_000_000)
        ('100', '1,081', '10k', '1M')
    """
    for unit, letter in ((1_000_000, "M"), (10_000, "k")):
        if count >= unit and count % 1_000 == 0:
            return f"{count // (1_000_000 if letter == 'M' else 1_000)}{letter}"
    return f"{count:,}"


def size(n: int, num_classes: int) -> str:
    return f"{n:,} {_TIMES} {classes(num_classes)}"


def loss_tables(results: Results) -> list[str]:
    """Ratios to cross-entropy on each clock over the whole grid, then times and memory in its middle."""
    single = results.only(dtype="float32")
    parts = [_loss_ratios(single, clock) for clock in single.clocks]
    parts.append(_loss_times(single))
    if halves := [each for each in ("bfloat16", "float16") if results.only(dtype=each).measurements]:
        parts.append(_half_types(results, halves))
    return parts


def _loss_ratios(results: Results, clock: Clock) -> str:
    draws = results.only(losses.OURS).distinct("K", "B")
    rows, ratios = [], []
    for n, num_classes in sizes_of(results):
        here = results.only(N=n, L=num_classes)
        reference = here.only(losses.CROSS_ENTROPY, losses.COMPILED_CROSS_ENTROPY).best(clock)
        cells = []
        for k, n_samples in draws:
            times = here.only(losses.OURS, K=k, B=n_samples).times(clock)
            if not times or reference is None:
                cells.append(ABSENT)
                continue
            ratios += [time / reference for time in times]
            cells.append(f"{ratio(statistics.median(times), reference)} / {ratio(max(times), reference)}")
        rows.append([size(n, num_classes), milliseconds(reference), *cells])
    goal = LOSS_GOALS[results.measurements[0].device]
    met = sum(each <= goal for each in ratios)
    title = (
        f"The noised loss as a multiple of cross-entropy (plain or compiled, whichever is faster), {CLOCKS[clock]}:"
        f" median / worst over score spreads and epsilon. Goal: at most {goal:.1f}{_TIMES};"
        f" met in {met} of {len(ratios)} cases."
    )
    columns = [f"N {_TIMES} L", "cross-entropy, ms", *(f"K={k} B={n_samples}" for k, n_samples in draws)]
    return table(title, columns, rows)


def _loss_times(results: Results) -> str:
    usual = results.only(spread=losses.USUAL_SPREAD)
    ours = usual.only(losses.OURS, epsilon=losses.USUAL_EPSILON)
    columns: dict[str, Results] = {
        losses.CROSS_ENTROPY: usual.only(losses.CROSS_ENTROPY),
        losses.COMPILED_CROSS_ENTROPY: usual.only(losses.COMPILED_CROSS_ENTROPY),
    }
    for k, n_samples in ours.distinct("K", "B"):
        for entry, here in ((losses.PYTOPK, usual.only(losses.PYTOPK)), (losses.OURS, ours)):
            columns[f"{entry} K={k} B={n_samples}"] = here.only(K=k, B=n_samples)
    columns = {name: found for name, found in columns.items() if found.measurements}
    clock = _main_clock(results)
    rows = [
        [size(n, num_classes), *(_time_and_memory(found.only(N=n, L=num_classes), clock) for found in columns.values())]
        for n, num_classes in sizes_of(results)
    ]
    title = (
        f"Milliseconds, {CLOCKS[clock]} (peak extra MiB), at a score spread of {losses.USUAL_SPREAD:g} and"
        f" epsilon = {losses.USUAL_EPSILON:g}."
    )
    return table(title, [f"N {_TIMES} L", *columns], rows)


def _half_types(results: Results, dtypes: Sequence[str]) -> str:
    clock = _main_clock(results)
    rows = []
    for dtype in dtypes:
        here = results.only(dtype=dtype)
        for n, num_classes, k, n_samples in here.only(losses.OURS).distinct("N", "L", "K", "B"):
            case = here.only(N=n, L=num_classes)
            reference = case.only(losses.CROSS_ENTROPY, losses.COMPILED_CROSS_ENTROPY).best(clock)
            ours = case.only(losses.OURS, K=k, B=n_samples).best(clock)
            name = f"{dtype}, {size(n, num_classes)}, K={k} B={n_samples}"
            rows.append([name, milliseconds(reference), milliseconds(ours), ratio(ours, reference)])
    return table(f"Half types, {CLOCKS[clock]}.", ["", "cross-entropy, ms", "shortlist, ms", "ratio"], rows)


def head_tables(results: Results) -> list[str]:
    """Each way to do a layer and its loss, on each size and clock; ours as a multiple of the fastest peer."""
    return [_head_table(results, clock) for clock in results.clocks]


def _head_table(results: Results, clock: Clock) -> str:
    sizes = sizes_of(results)
    entries = [entry for entry in HEAD_ENTRIES if results.only(entry).measurements]
    rows = [
        [entry, *(_time_and_memory(results.only(entry, N=n, L=num_classes), clock) for n, num_classes in sizes)]
        for entry in entries
    ]
    for entry in (heads.OURS, heads.OURS_SPARSE):
        cells = []
        for n, num_classes in sizes:
            here = results.only(N=n, L=num_classes)
            cells.append(ratio(here.only(entry).best(clock), here.only(*HEAD_PEERS).best(clock)))
        rows.append([f"**{entry} / fastest peer**", *cells])
    features, draws = results.distinct("d")[0][0], results.only(heads.OURS).distinct("dtype", "K", "B")
    described = ", ".join(f"{dtype}, K={k}, B={n_samples}" for dtype, k, n_samples in draws)
    title = (
        f"Linear layer (d = {features}) and loss, forward and backward ({described}): milliseconds, {CLOCKS[clock]}"
        f" (peak extra MiB). Goal: at most {HEAD_GOAL:.1f}{_TIMES} the fastest peer."
    )
    return table(title, ["", *(size(n, num_classes) for n, num_classes in sizes)], rows)


HEAD_PEERS = (heads.LINEAR, heads.COMPILED_LINEAR, heads.CUT, heads.LIGER, heads.LINEAR_PYTOPK)
HEAD_ENTRIES = (heads.PRODUCT, *HEAD_PEERS, heads.OURS, heads.OURS_SPARSE)


def hinge_tables(results: Results) -> list[str]:
    """The smoothed hinge beside cross-entropy, and beside what its authors' code took."""
    clock = _main_clock(results)
    rows = []
    for n, num_classes in sizes_of(results):
        here = results.only(N=n, L=num_classes)
        reference = here.only(losses.CROSS_ENTROPY, losses.COMPILED_CROSS_ENTROPY).best(clock)
        for (k,) in here.only(losses.OURS).distinct("K"):
            ours = here.only(losses.OURS, K=k).best(clock)
            theirs = _authors_hinge(results, n, num_classes, k)
            rows.append(
                [
                    size(n, num_classes),
                    f"{k}",
                    milliseconds(reference),
                    milliseconds(ours),
                    ratio(ours, reference),
                    ABSENT if theirs is None else f"{theirs:.0f}",
                    ratio(theirs, ours),
                ]
            )
    title = (
        f"The smoothed hinge, {CLOCKS[clock]}, milliseconds. The column of the authors' code was measured earlier, on"
        " the same GPU model."
    )
    columns = ["cross-entropy", "shortlist", "shortlist / cross-entropy", "authors' code", "authors' code / shortlist"]
    return [table(title, [f"N {_TIMES} L", "K", *columns], rows)]


def metrics_tables(results: Results) -> list[str]:
    rows = [
        [
            each.entry if each.entry != losses.OURS else "shortlist, `TopKMetrics.update`",
            size(each.N, each.L),
            milliseconds(each.gpu_ms),
            milliseconds(each.wall_ms),
            _mebibytes(each.peak_mib),
        ]
        for each in results.measurements
    ]
    columns = ["", f"N {_TIMES} L", "GPU clock, ms", "wall clock, ms", "peak extra MiB"]
    return [table("Counting top-K hits.", columns, rows)]


def epoch_tables(results: Results) -> list[str]:
    reference = results.only(losses.CROSS_ENTROPY).best("wall")
    rows = [
        [
            each.entry,
            ABSENT if each.K is None else f"{each.K}",
            ABSENT if each.B is None else f"{each.B}",
            _seconds(each.wall_ms),
            ratio(each.wall_ms, reference),
        ]
        for each in results.measurements
    ]
    return [table(_notes_of(results), ["loss", "K", "B", "seconds", "ratio to cross-entropy"], rows)]


def loop_tables(results: Results) -> list[str]:
    slowest = max(results.times("wall"), default=None)
    rows = [[each.entry, _seconds(each.wall_ms), ratio(slowest, each.wall_ms)] for each in results.measurements]
    return [table(_notes_of(results), ["", "seconds", "faster than the slower by"], rows)]


SUITES: Mapping[str, tuple[str, Callable[[Results], list[str]]]] = {
    losses.SUITE: ("The noised loss", loss_tables),
    heads.SUITE: ("The head", head_tables),
    hinge.SUITE: ("The smoothed hinge", hinge_tables),
    metrics.SUITE: ("Metrics", metrics_tables),
    "epoch": ("Epochs", epoch_tables),
    "loop": ("The training loop", loop_tables),
}
"""The headings of the document, in order, and how each suite is told."""


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table below a line that says what it shows; numbers to the right."""
    rule = ["---", *("---:" for _ in columns[1:])]
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows)]
    return f"{title}\n\n" + "\n".join(lines)


def _main_clock(results: Results) -> Clock:
    """The GPU's where there is one."""
    return results.clocks[0] if results.clocks else "wall"


def sizes_of(results: Results) -> list[tuple[int, int]]:
    """(N, L), in the order of their products."""
    return sorted({(each.N, each.L) for each in results.measurements}, key=lambda at: (at[0] * at[1], at))


def _time_and_memory(results: Results, clock: Clock) -> str:
    """Of the one measurement there is; on the wall clock, and marked so, where the GPU's could not be had."""
    if not results.measurements:
        return ABSENT
    (each,) = results.measurements
    time = getattr(each, f"{clock}_ms")
    text = milliseconds(time if time is not None else each.wall_ms) + ("" if time is not None else " (wall)")
    return text if each.peak_mib is None else f"{text} ({_mebibytes(each.peak_mib)})"


def _mebibytes(amount: float | None) -> str:
    return ABSENT if amount is None else f"{amount:,.0f}"


def _seconds(time: float | None) -> str:
    return ABSENT if time is None else f"{time / 1000:.2f}"


def _authors_hinge(results: Results, n: int, num_classes: int, k: int) -> float | None:
    on_h200 = all("H200" in each.machine for each in results.measurements)
    return _HINGE_OF_ITS_AUTHORS.get((n, num_classes, k)) if on_h200 else None


def _notes_of(results: Results) -> str:
    return "; ".join(dict.fromkeys(each.note for each in results.measurements)).capitalize() + "."
