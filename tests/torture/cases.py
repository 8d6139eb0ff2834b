"""The parts of the torture, their cases and their outcomes."""

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

LISTED = 20
"""Failures that a report shows for each part; the others are only counted."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case."""

    case: int
    what: str
    """The case in words."""
    problems: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    """What the case did, e.g. the number of kills."""


class Part(ABC):
    """A list of cases. It is made before the workers are forked, so slow preparation happens once."""

    name: ClassVar[str]
    promise: ClassVar[str]
    """What holds if no case fails."""

    @abstractmethod
    def __init__(self, seed: int, work: Path) -> None:
        """The cases of this seed; ``work`` is an empty folder."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of cases."""

    @abstractmethod
    def run(self, case: int) -> Outcome:
        """Run one case in this process."""

    def share(self, size: int) -> Sequence[int]:
        """A fixed random sample of the cases."""
        chance = random.Random(self.name)
        return sorted(chance.sample(range(len(self)), min(size, len(self))))


@dataclass
class Tally:
    """The outcomes of a part, added up."""

    part: str
    promise: str
    seed: int
    cases: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.cases += 1
            self.counts.update(outcome.counts)
            if outcome.problems:
                self.failed.append(outcome)


def as_markdown(tallies: Sequence[Tally]) -> str:
    """A table of the parts, then the first failures of each."""
    lines = ["| part | cases | held | failed | seconds | what was done |", "| --- | ---: | ---: | ---: | ---: | --- |"]
    for tally in tallies:
        done = ", ".join(f"{count:,} {what}" for what, count in tally.counts.items())
        held = tally.cases - len(tally.failed)
        lines.append(
            f"| {tally.part} | {tally.cases:,} | {held:,} | {len(tally.failed):,} | {tally.seconds:.0f} | {done} |"
        )
    for tally in tallies:
        if not tally.failed:
            continue
        lines += ["", f"## {tally.part}: {len(tally.failed)} failed", "", f"Promise: {tally.promise}", ""]
        for outcome in tally.failed[:LISTED]:
            lines.append(f"- `--seed {tally.seed} --only {tally.part} --case {outcome.case}`: {outcome.what}")
            lines += [f"  - {_one_line(problem)}" for problem in outcome.problems[:4]]
        if len(tally.failed) > LISTED:
            others = ", ".join(str(outcome.case) for outcome in tally.failed[LISTED:])
            lines.append(f"- and cases {others}")
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:600]


def write_report(path: Path, tallies: Sequence[Tally]) -> None:
    path.write_text(f"# Torture\n\n{as_markdown(tallies)}")
