"""How the candidates did: read from run folders, ordered by the validation images, told with 95 % intervals."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program.compare.candidates import Candidate
from shortlist.program.compare.intervals import Interval, interval, paired_difference
from shortlist.program.compare.search import Chosen
from shortlist.program.config import RunConfig
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import read_classes, read_correction, read_facts, read_result

BASELINE = "cross_entropy"
"""Every candidate is compared with it."""
FEWEST_SEEDS = 3
"""A candidate is dropped after this many seeds at the earliest."""


@dataclass(frozen=True)
class Outcome:
    """What one run gave."""

    seed: int
    folder: Path
    val: float
    """The metric that the comparison is ordered by, on the validation images, after the correction for class sizes."""
    tau: float | None
    """Of the correction; None without one."""
    test: Mapping[str, float | None]
    corrected: Mapping[str, float | None] | None

    def final(self, metric: str) -> float | None:
        """On the test images, as the run would be used: corrected if it has a correction."""
        return (self.test if self.corrected is None else self.corrected).get(metric)

    def plain(self, metric: str) -> float | None:
        return self.test.get(metric)


def read_outcome(run: RunFolder) -> Outcome:
    """The numbers of a finished run, with and without its correction for class sizes."""
    result, correction, config = read_result(run), read_correction(run), run.config
    metrics = correction.val if correction else result["val"]
    value = metrics.get(config.select_metric)
    if value is None:
        raise run.damaged("final.json", f"it has no value of {config.select_metric} on the validation images")
    tau = correction.tau if correction else None
    return Outcome(config.seed, run.path, value, tau, result["test"], result.get("test_corrected"))


def refuse_mixed_data(run: RunFolder, other: RunFolder) -> None:
    """Raise an error if two runs recorded different data: their numbers must not be compared."""
    ours, theirs = read_facts(run), read_facts(other)
    digests = ((ours.train_digest, theirs.train_digest), (ours.test_digest, theirs.test_digest))
    if read_classes(run) != read_classes(other) or any(a != b and None not in (a, b) for a, b in digests):
        raise ShortlistError(
            f"the data has changed: {run.path} and {other.path} were trained or tested on different images; restore "
            "the data, or delete the runs of before"
        )


def hopeless(values: Mapping[str, Mapping[int, float]]) -> list[str]:
    """The candidates that need no more seeds: the 95 % interval of the paired difference to the leader is below zero.

    Args:
        values: By candidate and seed, on the validation images. The leader has the highest mean.

    Example:
        >>> hopeless({"a": {0: 0.5, 1: 0.6, 2: 0.7}, "b": {0: 0.4, 1: 0.51, 2: 0.6}, "c": {0: 0.6, 1: 0.6, 2: 0.5}})
        ['b']
    """
    leader = max(values.values(), key=lambda seeds: math.fsum(seeds.values()) / len(seeds), default={})
    behind = {name: paired_difference(seeds, leader) for name, seeds in values.items()}
    return [
        name
        for name, difference in behind.items()
        if difference is not None and difference.count >= FEWEST_SEEDS and difference.is_below_zero
    ]


@dataclass(frozen=True)
class Entry:
    """One candidate in the comparison."""

    chosen: Chosen
    outcomes: tuple[Outcome, ...] = ()
    is_dropped: bool = False
    failure: str = ""
    """Why there are no more results; empty if it did not fail."""

    @property
    def candidate(self) -> Candidate:
        return self.chosen.candidate

    @property
    def config(self) -> RunConfig | None:
        return self.chosen.config

    @property
    def is_complete(self) -> bool:
        """True if it has a result for every seed."""
        return not (self.failure or self.is_dropped)

    def values(self, of: Callable[[Outcome], float | None]) -> dict[int, float]:
        """By seed, where defined."""
        known = {outcome.seed: of(outcome) for outcome in self.outcomes}
        return {seed: value for seed, value in known.items() if value is not None}

    def mean(self, of: Callable[[Outcome], float | None]) -> Interval | None:
        return interval(list(self.values(of).values()))

    def difference(self, other: "Entry | None", of: Callable[[Outcome], float | None]) -> Interval | None:
        """To another candidate, over the seeds that both have; None to itself."""
        return None if other is None or other is self else paired_difference(self.values(of), other.values(of))


@dataclass(frozen=True)
class Standings:
    """All candidates, the best first."""

    base: RunConfig
    seeds: tuple[int, ...]
    entries: tuple[Entry, ...]

    @property
    def metric(self) -> str:
        return self.base.select_metric

    @property
    def leader(self) -> Entry | None:
        """The best of those with results for every seed."""
        return next((entry for entry in self.entries if entry.is_complete), None)

    @property
    def baseline(self) -> Entry | None:
        """Cross-entropy."""
        return next((entry for entry in self.entries if entry.candidate.name == BASELINE), None)

    @property
    def undecided(self) -> list[Entry]:
        """Those that the seeds cannot tell apart from the leader, on the validation images."""
        found = [(entry, entry.difference(self.leader, validation)) for entry in self.entries if entry.is_complete]
        return [entry for entry, difference in found if difference is not None and difference.contains_zero]


def validation(outcome: Outcome) -> float:
    return outcome.val


def in_order(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The best on the validation images first; dropped ones, and then those that failed, at the end."""

    def place(entry: Entry) -> tuple[bool, bool, float]:
        mean = entry.mean(validation)
        return bool(entry.failure), entry.is_dropped, -round(mean.mean, 6) if mean else 0.0

    return tuple(sorted(entries, key=place))
