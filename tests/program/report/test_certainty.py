"""The parts of the page about calibrated runs."""

import shutil
from pathlib import Path

import pytest
import torch

from shortlist.program.predicting.calibration import METHODS, calibrate
from shortlist.program.predicting.certainty import COVERAGES, Certainty, measured_certainty
from shortlist.program.predicting.reliability import BINS
from shortlist.program.report.summary import ABSENT
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.scores import Scores, write_scores
from tests.support.report_pages import numbers_of, page_of, part_of, spread_of
from tests.support.run_folders import World, make_run

TITLES = ("How sure it is", "Sets of varying size")


def calibrated_run(folder: Path, world: World, loss: str, seed: int) -> tuple[RunFolder, Certainty]:
    run = make_run(folder, world, loss, seed, skill=3.0)
    run.write_json("facts.json", {})
    run.save_best(f"weights of {folder.name}".encode())
    splits = {}
    for name, split_seed in (("val", 1), ("test", 2)):
        parts = [world.scores(3.0, 100 * seed + 10 * split_seed + part) for part in range(5)]
        scores, labels = (torch.cat(list(tensors)) for tensors in zip(*parts, strict=True))
        splits[name] = Scores(scores, labels, torch.arange(len(labels)))
    write_scores(run, **splits)
    return run, measured_certainty(run, calibrate(run))


@pytest.fixture(scope="module")
def calibrated(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[RunFolder, Certainty]]]:
    """Two seeds of one loss and one of another, by the label of the loss."""
    root = tmp_path_factory.mktemp("calibrated")
    return {
        "Cross-entropy": [calibrated_run(root / f"ce-{seed}", world, "cross_entropy", seed) for seed in (0, 1)],
        "LDAM": [calibrated_run(root / "ldam", world, "ldam", 2)],
    }


def test_runs_that_are_not_calibrated_have_no_such_part(runs: list[RunFolder], tmp_path: Path) -> None:
    page = page_of(runs, tmp_path)
    assert not [section for section in page.all("section") if next(iter(section)).text in TITLES]


def test_a_calibrated_run_without_scores_is_shown_without_them(
    calibrated: dict[str, list[tuple[RunFolder, Certainty]]], tmp_path: Path
) -> None:
    copy = shutil.copytree(calibrated["LDAM"][0][0].path, tmp_path / "copy")
    (copy / "scores.safetensors").unlink()
    page = page_of([RunFolder(copy)], tmp_path)
    assert not [section for section in page.all("section") if next(iter(section)).text in TITLES]
    assert page.all("table", "results")


def test_the_errors_and_diagrams_are_those_of_the_runs(
    calibrated: dict[str, list[tuple[RunFolder, Certainty]]], runs: list[RunFolder], tmp_path: Path
) -> None:
    every = [run for found in calibrated.values() for run, _ in found]
    part = part_of(page_of([*every, runs[-2]], tmp_path), "How sure it is")  # one run more, without a calibration
    (body,) = part.all("table")[0].all("tbody")
    rows = {row.all("th")[0].text: [cell.text for cell in row.all("td")] for row in body.all("tr")}
    assert rows == {
        label: [spread_of([found.error[group] or 0 for _, found in of_loss]) for group in of_loss[0][1].error]
        for label, of_loss in calibrated.items()
    }
    for figure, group in zip(part.all("figure"), ("all", "few", "medium", "many"), strict=True):
        shown = list(numbers_of(figure).values())
        assert len(shown) == BINS
        for column, of_loss in enumerate(calibrated.values()):
            for place, cells in enumerate(shown):
                values = [
                    item.accuracy
                    for _, found in of_loss
                    for item in found.reliability[group]
                    if item.place == place and item.images >= 10
                ]
                assert cells[column] == (spread_of(values) if values else ABSENT)


def test_the_table_of_sets_is_that_of_the_runs(
    calibrated: dict[str, list[tuple[RunFolder, Certainty]]], tmp_path: Path
) -> None:
    every = [run for found in calibrated.values() for run, _ in found]
    part = part_of(page_of(every, tmp_path), "Sets of varying size")
    covered = [f"{group}_coverage" for group in ("macro", "few", "medium", "many", "micro")]
    for table, of in zip(part.all("table"), METHODS, strict=True):
        (body,) = table.all("tbody")
        rows = iter(body.all("tr"))
        for label, of_loss in calibrated.items():
            for coverage in COVERAGES:
                sets, plain = next(rows), next(rows)
                assert sets.all("th")[0].text == f"{label}, {100 * coverage:g} %"
                found = [
                    item
                    for _, certainty in of_loss
                    for item in certainty.sets
                    if (item.of, item.coverage) == (of, coverage)
                ]
                for row, values in ((sets, [item.metrics for item in found]), (plain, [item.top_k for item in found])):
                    cells = [cell.text for cell in row.all("td")][1:]
                    assert cells == [spread_of([value[name] or 0 for value in values]) for name in covered]
    assert len(part.all("figure")) == len(METHODS)
