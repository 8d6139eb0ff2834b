"""The CSV files of results, and the numbers that they take from runs."""

import csv
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import shortlist as sl
from shortlist.program.atomic_files import locked
from shortlist.program.config import to_dict
from shortlist.program.reproduce.registry import EXPERIMENTS
from shortlist.program.reproduce.results import (
    COLUMNS,
    measured,
    read_results,
    results_file,
    update_results,
    write_results,
)
from shortlist.program.runs.folder import RunFolder
from tests.support.reproducing import SMALL, Place, TrainedPlaces, made_up


def test_results_of_runs_that_are_elsewhere_are_kept(trained: TrainedPlaces) -> None:
    place, results = trained(SMALL)
    path = results_file(place.results, SMALL, "smoke")
    written = path.read_bytes()
    shutil.rmtree(place.runs_root / results[0].run)
    assert update_results(SMALL, "smoke", place.runs_root, place.results) == results
    assert path.read_bytes() == written
    assert tuple(next(csv.reader(path.read_text().splitlines()))) == COLUMNS


def test_scales_of_the_same_length_share_their_runs(place: Place) -> None:
    experiment = EXPERIMENTS["gradient-sparsity"]
    (result,), _ = place.run(experiment, only=["0.1/noised"])
    (cell,) = experiment.selected(["0.1/noised"])
    config = experiment.config(cell, "short", place.runs_root)
    assert config == experiment.config(cell, "paper", place.runs_root)
    RunFolder(place.runs_root / result.run).write_json("config.json", to_dict(config))
    (real,) = update_results(experiment, "short", place.runs_root, place.results)
    assert (real.scale, real.value) == ("paper", result.value)
    assert read_results(place.results / "gradient-sparsity.csv") == [real]


def test_a_number_names_the_programs_of_all_processes_behind_it(trained: TrainedPlaces) -> None:
    place, results = trained(SMALL)
    run = RunFolder(place.runs_root / results[0].run)
    run.note_environment({"commit": "c" * 40, "dirty": False})
    again, _ = place.run(SMALL)
    assert again == [replace(results[0], commit=f"{results[0].commit} {'c' * 10}"), *results[1:]]


def test_a_file_that_another_process_is_updating_is_waited_for(trained: TrainedPlaces) -> None:
    place, results = trained(SMALL)
    with ThreadPoolExecutor() as threads, locked(results_file(place.results, SMALL, "smoke").parent / ".lock"):
        waiting = threads.submit(update_results, SMALL, "smoke", place.runs_root, place.results)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        results_file(place.results, SMALL, "smoke").unlink()
    assert waiting.result() == results


def test_a_damaged_file_of_results_is_not_overwritten(trained: TrainedPlaces) -> None:
    place, _ = trained(SMALL)
    path = results_file(place.results, SMALL, "smoke")
    damaged = path.read_text().replace("test_micro,1,", "test_micro,one,")
    path.write_text(damaged)
    with pytest.raises(sl.ShortlistError, match="line 2"):
        place.run(SMALL)
    assert path.read_text() == damaged


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-4],
        lambda text: text[:-60] + "\n",
        lambda text: text.replace("86.0", "nan"),
        lambda text: text[:-1] + ",9\n",
    ],
    ids=["cut", "short", "nan", "more"],
)
def test_a_damaged_line_of_results_is_named(tmp_path: Path, damage: Callable[[str], str]) -> None:
    path = tmp_path / "results.csv"
    write_results(path, [made_up(85.0), made_up(86.0, seed=1)])
    path.write_text(damage(path.read_text()))
    with pytest.raises(sl.ShortlistError, match=r"line 3|last line"):
        read_results(path)


def test_a_seed_counts_once(tmp_path: Path) -> None:
    """Files joined by hand may have it twice: their mean would look like that of two seeds."""
    path = tmp_path / "results.csv"
    write_results(path, [made_up(85.0), made_up(86.0, seed=1), made_up(85.5, date="2026-01-02T00:00:00+00:00")])
    with pytest.raises(sl.ShortlistError, match=r"line 4.*seed, 0"):
        read_results(path)


def test_a_cell_may_have_numbers_of_several_configurations(tmp_path: Path) -> None:
    results = [made_up(85.0), made_up(86.0, key="bbbbbbbbbb")]
    write_results(tmp_path / "results.csv", results)
    assert read_results(tmp_path / "results.csv") == results


def test_an_accuracy_is_kept_in_percent_with_the_digits_that_many_images_give(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    result = {"best_epoch": 0, "select": "macro_top5", "val": {}, "test": {"macro_top5": 12_345 / 50_000}}
    run.write_json("final.json", result | {"train_seconds": 1.0, "skipped_images": 0, "best_sha256": ""})
    assert measured(run, "test_macro", 5) == pytest.approx(24.69, abs=1e-4)


def timed(folder: Path, ends: Sequence[float], began: Sequence[int]) -> float | None:
    """The epoch time of a run whose epochs ended at these seconds, in processes that began at these epochs."""
    run = RunFolder(folder)
    for epoch in began:
        run.note_environment({"epoch": epoch})
    for epoch, end in enumerate(ends):
        run.append_metrics({"epoch": epoch, "train_seconds": end})
    return measured(run, "epoch_seconds", 5)


def test_the_time_of_an_epoch_is_the_median_without_the_first(tmp_path: Path) -> None:
    # The first epoch includes compilation, and one was disturbed.
    assert timed(tmp_path, [100.0, 101.0, 104.0, 204.0], began=[0]) == 3.0


def test_the_first_epoch_after_an_interruption_is_not_timed(tmp_path: Path) -> None:
    assert timed(tmp_path, [100.0, 101.0, 201.0, 202.0], began=[0, 2]) == 1.0


def test_a_run_that_was_always_interrupted_has_no_time(tmp_path: Path) -> None:
    with pytest.raises(sl.ShortlistError, match="no epoch can be timed"):
        timed(tmp_path, [100.0, 200.0], began=[0, 1])
