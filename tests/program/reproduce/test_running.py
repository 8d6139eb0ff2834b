"""The runs of an experiment: none is repeated, and one that fails does not stop the others."""

import itertools
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shortlist as sl
from shortlist.program.atomic_files import locked
from shortlist.program.reproduce import running
from shortlist.program.reproduce.experiment import Cell
from shortlist.program.reproduce.gradients import COUNTS, GradientCounts
from shortlist.program.reproduce.registry import EXPERIMENTS
from shortlist.program.reproduce.results import (
    Result,
    read_results,
    results_file,
    update_results,
    write_results,
)
from shortlist.program.reproduce.tables import latest_setups
from shortlist.program.runs.folder import RunFolder, default_folder
from shortlist.program.training.loop import DivergedError, Interrupted
from tests.support.early_ends import StopAfterStep
from tests.support.reproducing import SMALL, FailingRuns, Place, TrainedPlaces

SPARSITY = EXPERIMENTS["gradient-sparsity"]
ONE_CELL = replace(SPARSITY, cells=SPARSITY.selected(["0.1/noised"]))


def test_finished_runs_are_not_repeated(trained: TrainedPlaces) -> None:
    said: list[str] = []
    place, first = trained(SMALL)
    before = place.finished()
    assert len(before) == 3
    again, _ = place.run(SMALL, say=said.append)
    assert again == first
    assert place.finished() == before
    assert sum("finished before" in line for line in said) == 3
    more, _ = place.run(SMALL, seeds=(0, 1))
    assert len(place.finished()) == 6
    assert before.items() <= place.finished().items()
    assert {result.seed for result in more} == {0, 1}


def test_a_run_is_found_by_its_configuration_and_not_by_the_name_of_its_folder(place: Place) -> None:
    place.run(SMALL, only=["1/noised"])
    (folder,) = place.runs_root.rglob("*-s0")
    folder.rename(folder.with_name("0123456789-s0"))
    place.run(SMALL, only=["1/noised"])
    assert [Path(run).name for run in place.finished()] == ["0123456789-s0"]
    # With a seed in a folder of today's name it makes one set-up, also when it is no longer on this disk.
    results, _ = place.run(SMALL, seeds=(0, 1), only=["1/noised"])
    assert len({Path(run).name.partition("-")[0] for run in place.finished()}) == 2
    shutil.rmtree(folder.with_name("0123456789-s0"))
    path = results_file(place.results, SMALL, "smoke")
    write_results(path, [replace(result, config="0123456789") for result in results])
    for found in (results, update_results(SMALL, "smoke", place.runs_root, place.results)):
        assert [result.seed for result in latest_setups(found)] == [0, 1]


def test_an_interrupted_set_goes_on_where_it_stopped(place: Place, trained: TrainedPlaces) -> None:
    with pytest.raises(Interrupted, match="the same command"):
        place.run(SMALL, callbacks=[StopAfterStep(10)])  # within the second run
    before = place.finished()
    assert len(before) == 1
    assert len(list(place.runs_root.rglob("config.json"))) == 2
    assert len(read_results(results_file(place.results, SMALL, "smoke"))) == 1, "the finished run counts"
    results, failures = place.run(SMALL)
    assert not failures
    assert before.items() <= place.finished().items()
    _, undisturbed = trained(SMALL)
    assert [result.value for result in results] == [result.value for result in undisturbed]


def test_a_run_that_fails_does_not_stop_the_others(place: Place) -> None:
    broken = replace(SMALL, cells=[Cell("1", "smooth", 1, "no_such_recipe"), *SMALL.cells[:1]])
    results, failures = place.run(broken)
    assert [result.column for result in results] == ["cross_entropy"]
    (message,) = failures
    assert "1 of 2 runs failed (1/smooth, seed 0)" in message
    assert "no_such_recipe" in message


def test_a_run_that_lost_files_does_not_stop_the_others(trained: TrainedPlaces) -> None:
    place, results = trained(SMALL)
    damaged = place.runs_root / results[0].run
    (damaged / "final.json").unlink()
    (damaged / "classes.json").write_text("null")
    results_file(place.results, SMALL, "smoke").unlink()
    others, failures = place.run(SMALL)
    assert {result.run for result in others} == {result.run for result in results} - {results[0].run}
    (message,) = failures
    assert f"{damaged}/classes.json is damaged" in message


def test_a_file_that_fails_does_not_stop_the_others(place: Place) -> None:
    fails_once = FailingRuns(1, error=FileNotFoundError("somebody deleted the folder"))
    results, failures = place.run(SMALL, callbacks=[fails_once])
    assert len({result.run for result in results}) == len(SMALL.cells) - 1
    assert "somebody deleted the folder" in failures[0]


@pytest.mark.parametrize(
    ("failing", "error", "succeeded"),
    [
        ((1, 2), sl.ShortlistError("there is no data"), 0),
        ((2, 3), sl.ShortlistError("there is no data"), 2),  # the first one had it
        ((1, 2), DivergedError("the loss became nan"), 2),  # says nothing about other losses
    ],
)
def test_only_what_would_fail_alike_is_not_tried(
    place: Place, failing: tuple[int, ...], error: Exception, succeeded: int
) -> None:
    experiment = replace(SMALL, cells=EXPERIMENTS["imagenet"].cells[:4])
    results, (message,) = place.run(experiment, callbacks=[FailingRuns(*failing, error=error)])
    assert len(results) == succeeded
    assert "2 of 4 runs failed" in message
    assert str(error) in message


def fill_disk(monkeypatch: pytest.MonkeyPatch, *updates: int) -> None:
    """Let these updates of the results fail, counted from 1, which is before any training."""
    numbers = itertools.count(1)

    def update(*arguments: Any) -> list[Result]:
        if next(numbers) in updates:
            raise OSError("no space left")
        return update_results(*arguments)

    monkeypatch.setattr(running, "update_results", update)


def test_results_that_could_not_be_written_once_are_written_with_the_next(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, 2)
    results, (message,) = place.run(SMALL)
    assert [result.column for result in results] == [cell.column for cell in SMALL.cells]
    assert "no space left" in message


def test_a_disk_that_stays_full_is_told_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch, *range(2, 9))
    _, (message,) = place.run(SMALL)
    assert "no space left" in message


def test_no_cell_has_two_seeds_before_all_have_one(place: Place) -> None:
    two_cells = replace(SMALL, cells=SMALL.cells[:2])
    place.run(two_cells, seeds=(0, 1))
    in_order = sorted(place.finished().items(), key=lambda run: run[1])
    assert [name.rpartition("-s")[2] for name, _ in in_order] == ["0", "0", "1", "1"]


def test_a_run_tells_at_which_epochs_it_was_begun_and_resumed(place: Place) -> None:
    experiment, only = EXPERIMENTS["epoch-time"], ["5/smooth"]
    with pytest.raises(Interrupted):
        place.run(experiment, only=only, callbacks=[StopAfterStep(2)])
    (result,), _ = place.run(experiment, only=only)
    environment = RunFolder(place.runs_root / result.run).read_json("environment.json")
    assert [environment["epoch"], *(process["epoch"] for process in environment["resumed"])] == [0, 0]


def test_runs_are_timed_by_one_process_at_a_time(place: Place) -> None:
    with locked(place.runs_root / ".timing.lock"):
        with pytest.raises(sl.ShortlistError, match="another process is timing"):
            place.run(EXPERIMENTS["epoch-time"], only=["5/smooth"])
        place.run(SMALL, only=["1/noised"])  # its results do not depend on what else runs
    assert place.run(EXPERIMENTS["epoch-time"], only=["5/smooth"])[0]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_run_that_another_process_is_at_is_left_to_it(place: Place, is_prepared: bool) -> None:
    """Several processes can share an experiment."""
    first = replace(SMALL.config(SMALL.cells[0], "smoke", place.runs_root), seed=0)
    run = RunFolder(default_folder(first, place.runs_root))
    said: list[str] = []
    with run.reserve() if is_prepared else run.claim(first, resume=True):
        results, failures = place.run(SMALL, say=said.append)
    assert not failures
    assert {result.column for result in results} == {cell.column for cell in SMALL.cells[1:]}
    assert "another process is training it" in said[0]
    results, _ = place.run(SMALL)
    assert {result.column for result in results} == {cell.column for cell in SMALL.cells}


def test_a_run_that_another_process_has_just_finished_is_taken(
    trained: TrainedPlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, results = trained(SMALL)
    monkeypatch.setattr(running, "runs_of", lambda config, runs_root: iter(()))  # as if it had not finished yet
    assert place.run(SMALL) == (results, [])


@pytest.mark.parametrize(
    ("name", "file", "damage"),
    [
        *itertools.product(["imagenet"], ["final.json", "environment.json"], ["{}", "[]", '{"a":']),
        *itertools.product(["gradient-sparsity"], ["gradients.json"], ["{}", "[]", '{"a":']),
        ("epoch-time", "metrics.jsonl", '{"epoch": 0}\n' * 2),
    ],
)
def test_a_damaged_run_is_named_and_does_not_hide_the_others(
    trained: TrainedPlaces, name: str, file: str, damage: str
) -> None:
    experiment = replace(EXPERIMENTS[name], cells=EXPERIMENTS[name].cells[:2])
    place, results = trained(experiment, seeds=(0, 1))
    (place.runs_root / results[0].run / file).write_text(damage)
    results_file(place.results, experiment, "smoke").unlink()
    others, failures = place.run(experiment, seeds=(0, 1))
    assert others == [result for result in results if result.run != results[0].run]
    (message,) = failures
    assert f"{results[0].run}/{file}" in message
    assert "delete the run" in message


def test_gradients_are_counted_over_an_interruption(place: Place, trained: TrainedPlaces) -> None:
    with pytest.raises(Interrupted):
        place.run(ONE_CELL, callbacks=[StopAfterStep(2)])
    (result,), _ = place.run(ONE_CELL)
    _, (undisturbed,) = trained(ONE_CELL)
    assert result.value == undisturbed.value
    run = RunFolder(place.runs_root / result.run)
    assert run.read_json(COUNTS)["images"] == sum(run.read_json("classes.json")["train_images"])
    assert 0 < result.value <= 4, "the label and at most B = 3 others"


def test_gradients_that_were_not_counted_over_the_whole_run_are_no_result(trained: TrainedPlaces) -> None:
    """As when a run is killed between its last checkpoint and its counts."""
    place, (result,) = trained(ONE_CELL)
    run = RunFolder(place.runs_root / result.run)
    (run.path / "final.json").unlink()
    (run.path / COUNTS).unlink()
    results_file(place.results, ONE_CELL, "smoke").unlink()
    results, (message,) = place.run(ONE_CELL)
    assert results == []
    assert re.search(r" 0 of \d+ images.*delete the run", message)


def test_gradients_are_counted_coordinate_by_coordinate() -> None:
    scores, target = torch.randn(6, 10, requires_grad=True), torch.arange(6)
    loss, counts = nn.CrossEntropyLoss(), GradientCounts()
    counts.watch(loss)
    value = loss(scores, target)
    assert torch.equal(value, nn.functional.cross_entropy(scores, target))
    value.backward()
    assert (int(counts.nonzero), counts.images) == (60, 6)
    hard, counts = sl.TopKHinge(3), GradientCounts()
    counts.watch(hard)
    hard(torch.where(target.unsqueeze(1) == torch.arange(10), 0.0, scores + 5), target).backward()
    assert (int(counts.nonzero), counts.images) == (12, 6)
