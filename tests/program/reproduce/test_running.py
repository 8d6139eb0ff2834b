"""The runs of an experiment: none is repeated, and one that fails does not stop the others."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shortlist as sl
from shortlist.program import recipes
from shortlist.program.atomic_files import locked
from shortlist.program.reproduce import running
from shortlist.program.reproduce.experiment import Cell
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
from shortlist.program.training.loop import DivergedError, Interrupted, Trainer
from tests.support.reproducing import SMALL, Place, TrainedPlaces, fail_in, interrupt_in


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


def test_an_interrupted_set_goes_on_where_it_stopped(
    place: Place, trained: TrainedPlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_in(patch, step=10)  # within the second run
        with pytest.raises(Interrupted, match="the same command"):
            place.run(SMALL)
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


def test_a_file_that_fails_does_not_stop_the_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_once(trainer: Trainer) -> None:
        monkeypatch.undo()
        raise FileNotFoundError("somebody deleted the folder")

    monkeypatch.setattr(Trainer, "fit", fails_once)
    results, failures = place.run(SMALL)
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
    place: Place, monkeypatch: pytest.MonkeyPatch, failing: tuple[int, ...], error: Exception, succeeded: int
) -> None:
    experiment = replace(SMALL, cells=EXPERIMENTS["imagenet"].cells[:4])
    fail_in(monkeypatch, *failing, error=error)
    results, (message,) = place.run(experiment)
    assert len(results) == succeeded
    assert "2 of 4 runs failed" in message
    assert str(error) in message


def test_results_that_could_not_be_written_once_are_written_with_the_next(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count(1)

    def update(*arguments: Any) -> list[Result]:
        if next(calls) == 2:  # the first is before any training
            raise OSError("no space left")
        return update_results(*arguments)

    monkeypatch.setattr(running, "update_results", update)
    results, (message,) = place.run(SMALL)
    assert [result.column for result in results] == [cell.column for cell in SMALL.cells]
    assert "no space left" in message


def test_a_disk_that_stays_full_is_told_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count(1)

    def update(*arguments: Any) -> list[Result]:
        if next(calls) > 1:
            raise OSError("no space left")
        return []

    monkeypatch.setattr(running, "update_results", update)
    _, failures = place.run(SMALL)
    assert len(failures) == 1


def test_no_cell_has_two_seeds_before_all_have_one(place: Place) -> None:
    two_cells = replace(SMALL, cells=SMALL.cells[:2])
    place.run(two_cells, seeds=(0, 1))
    in_order = sorted(place.finished().items(), key=lambda run: run[1])
    assert [name.rpartition("-s")[2] for name, _ in in_order] == ["0", "0", "1", "1"]


def test_what_was_compiled_serves_until_another_network_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[str] = []
    config = recipes.build("cifar100_table4_noised_p00")
    config = replace(config, train=replace(config.train, compile=True))
    for network in ("first", "first", "second", "first"):
        monkeypatch.setattr(torch.compiler, "reset", lambda network=network: resets.append(network))
        running.free_earlier_runs(replace(config, model=replace(config.model, name=network)))
    assert resets == ["first", "second", "first"]


def test_a_run_tells_at_which_epochs_it_was_begun_and_resumed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, only = EXPERIMENTS["epoch-time"], ["5/smooth"]
    with monkeypatch.context() as patch:
        interrupt_in(patch, step=2)
        with pytest.raises(Interrupted):
            place.run(experiment, only=only)
    (result,), _ = place.run(experiment, only=only)
    environment = RunFolder(place.runs_root / result.run).read_json("environment.json")
    assert [environment["epoch"], *(process["epoch"] for process in environment["resumed"])] == [0, 0]


def test_runs_are_timed_by_one_process_at_a_time(place: Place) -> None:
    with locked(place.runs_root / ".timing.lock"):
        with pytest.raises(sl.ShortlistError, match="another process is timing"):
            place.run(EXPERIMENTS["epoch-time"], only=["5/smooth"])
        place.run(SMALL, only=["1/noised"])  # its results do not depend on what else runs
    assert place.run(EXPERIMENTS["epoch-time"], only=["5/smooth"])[0]


def test_a_run_that_another_process_is_at_is_left_to_it(place: Place) -> None:
    """Several processes can share an experiment."""
    first = replace(SMALL.config(SMALL.cells[0], "smoke", place.runs_root), seed=0)
    said: list[str] = []
    with RunFolder(default_folder(first, place.runs_root)).claim(first, resume=True):
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
