"""Who leads, who is dropped, and whom the seeds cannot tell apart: on made-up numbers."""

from pathlib import Path

import pytest
from scipy import stats

from shortlist.program import recipes
from shortlist.program.compare.candidates import CANDIDATES
from shortlist.program.compare.results import csv_text, notes, table, verdict, winner_command
from shortlist.program.compare.search import Chosen
from shortlist.program.compare.standings import Entry, Outcome, Standings, hopeless, in_order
from shortlist.program.report.summary import ABSENT, PLUS_MINUS

BASE = recipes.build("embeddings")


def entry(name: str, *values: float, dropped: bool = False, failure: str = "") -> Entry:
    """A candidate with these values of seeds 0, 1, ... on validation; the test images say the opposite."""
    outcomes = tuple(
        Outcome(seed, Path(f"run-{seed}"), value, None, {"macro_top5": 1 - value, "micro_top5": 0.5}, None)
        for seed, value in enumerate(values)
    )
    return Entry(Chosen(CANDIDATES[name], CANDIDATES[name].config(BASE)), outcomes, dropped, failure)


def standings(*entries: Entry) -> Standings:
    seeds = max(len(entry.outcomes) for entry in entries)
    return Standings(BASE, tuple(range(seeds)), in_order(entries))


@pytest.mark.parametrize("behind", [(0.50, 0.52, 0.55, 0.51), (0.55, 0.56, 0.62, 0.58), (0.61, 0.59, 0.6, 0.6)])
def test_dropped_is_whose_paired_interval_to_the_leader_is_below_zero(behind: tuple[float, ...]) -> None:
    leader = (0.60, 0.61, 0.66, 0.60)
    values = {"leader": dict(enumerate(leader)), "other": dict(enumerate(behind))}
    expected = stats.ttest_rel(behind, leader).confidence_interval(0.95).high < 0
    assert (hopeless(values) == ["other"]) == expected
    assert hopeless({name: dict(list(seeds.items())[:2]) for name, seeds in values.items()}) == [], "two are too few"


def test_a_difference_that_unpaired_values_hide_is_seen() -> None:
    """The seeds differ by far more than the losses."""
    values = {"a": {0: 0.2, 1: 0.5, 2: 0.8}, "b": {0: 0.19, 1: 0.489, 2: 0.79}}
    assert hopeless(values) == ["b"]


def test_nobody_is_dropped_for_luck_or_without_a_rival() -> None:
    assert hopeless({}) == []
    assert hopeless({"a": {0: 0.5, 1: 0.5, 2: 0.5}}) == []
    assert hopeless({name: {0: 0.5, 1: 0.5, 2: 0.5} for name in "ab"}) == []


def test_the_order_is_that_of_the_validation_images() -> None:
    found = standings(
        entry("cross_entropy", 0.4, 0.5, 0.5),
        entry("ldam", 0.6, 0.7, 0.7, failure="diverged"),
        entry("ldam_prior", 0.8, 0.8, 0.8, dropped=True),
        entry("balanced_softmax_cosine", 0.5, 0.51, 0.6),
    )
    names = [entry.candidate.name for entry in found.entries]
    assert names == ["balanced_softmax_cosine", "cross_entropy", "ldam_prior", "ldam"]
    assert found.leader is found.entries[0]
    assert found.baseline is found.entries[1]
    command = winner_command(found)
    assert command == "shortlist train embeddings --loss.name balanced_softmax --model.head scaled_cosine"


def test_every_candidate_has_a_line_that_names_its_settings() -> None:
    lines = csv_text(standings(*(entry(name, 0.5, 0.6) for name in CANDIDATES))).splitlines()
    assert len(lines) == 1 + len(CANDIDATES)
    (mixture,) = (line for line in lines if line.startswith("mixture,"))
    assert all(
        text in mixture for text in ("K = 5", "ε = 3", "margin = 3", "prior = 1", "share of cross-entropy = 0.5")
    )


def test_what_the_seeds_cannot_tell_apart_is_said() -> None:
    close = standings(
        entry("cross_entropy", 0.5, 0.7, 0.6), entry("ldam", 0.6, 0.6, 0.65), entry("ldam_prior", 0.1, 0.1, 0.1)
    )
    best, undecided = verdict(close)
    assert "LDAM" in best
    assert "3 seeds" in undecided
    assert "Cross-entropy" in undecided
    assert "LDAM with prior" not in undecided
    clear = standings(entry("cross_entropy", 0.5, 0.5, 0.51), entry("ldam", 0.6, 0.6, 0.6))
    assert clear.undecided == []
    assert "--seeds" in verdict(standings(entry("cross_entropy", 0.5), entry("ldam", 0.6)))[1]
    assert verdict(standings(entry("cross_entropy", 0.5, failure="x"), entry("ldam", 0.6, failure="y"))) == [
        "No loss has finished."
    ]


def test_the_table_holds_means_and_paired_differences_in_percent() -> None:
    ours, theirs = (0.6, 0.62, 0.64), (0.5, 0.53, 0.5)
    found = standings(entry("cross_entropy", *theirs), entry("ldam", *ours))
    shown = {str(column.header).replace("\n", " "): list(column.cells) for column in table(found).columns}
    low, high = stats.ttest_rel(theirs, ours).confidence_interval(0.95)
    half = f"{50 * (high - low):.2f}"
    assert shown["loss"] == ["LDAM", "Cross-entropy"]
    assert shown["val to the best"] == [ABSENT, f"\N{MINUS SIGN}11.00{PLUS_MINUS}{half}"]
    assert shown["test macro_top5 to the best"] == [ABSENT, f"+11.00{PLUS_MINUS}{half}"]
    assert shown["test macro_top5 to cross-entropy"] == [f"\N{MINUS SIGN}11.00{PLUS_MINUS}{half}", ABSENT]
    assert shown["test macro_top5 corrected"] == [ABSENT, ABSENT]
    assert len(csv_text(found).splitlines()) == 3
    assert any("test images" in note for note in notes(found))
