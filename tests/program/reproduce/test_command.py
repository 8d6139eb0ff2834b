"""``shortlist reproduce``: each table comes from one command, here on tiny data."""

import json
import math
from dataclasses import replace

import pytest

import shortlist as sl
from shortlist.program.cli import research
from shortlist.program.config import from_dict
from shortlist.program.reproduce import running
from shortlist.program.reproduce.figures import FIGURES
from shortlist.program.reproduce.registry import COLUMN_NAMES, EXPERIMENTS
from shortlist.program.reproduce.results import config_file, measured, read_results, results_file
from shortlist.program.runs.folder import RunFolder
from tests.support.reproducing import Place


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Runs that the experiments share, as they do in real use."""
    return Place(tmp_path_factory.mktemp("everything"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_table_comes_from_its_name(name: str, everything: Place, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = EXPERIMENTS[name]
    research.reproduce([name, "--scale", "smoke", *everything.command()])
    shown = capsys.readouterr().out
    assert experiment.title in shown
    assert all(COLUMN_NAMES.get(column, column) in shown for column in experiment.columns)
    results = read_results(results_file(everything.results, experiment, "smoke"))
    cells = {(cell.row, cell.column): cell for cell in experiment.cells}
    assert {(result.row, result.column) for result in results} == set(cells)
    assert {result.metric for result in results} == set(experiment.metrics)
    for result in results:
        assert math.isfinite(result.value)
        run = RunFolder(everything.runs_root / result.run)
        assert result.value == measured(run, result.metric, result.K), "a cell can be traced to its run"
        config = run.config
        cell = cells[result.row, result.column]
        assert config == replace(experiment.config(cell, "smoke", everything.runs_root), seed=result.seed)
        assert run.path.name == f"{config.key()}-s{result.seed}"
        assert (result.recipe, result.epochs) == (config.recipe, config.train.epochs)
        kept = config_file(everything.results / "smoke", result)
        assert from_dict(json.loads(kept.read_text())) == replace(config, seed=0)


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    research.reproduce([])
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in [*EXPERIMENTS, *FIGURES])
    with pytest.raises(sl.ShortlistError, match=r"'imagenett'.* imagenet"):
        research.reproduce(["imagenett"])
    with pytest.raises(sl.ShortlistError, match="name a table or figure"):
        research.reproduce(["--scale", "smoke"])


def test_the_program_writes_to_its_folder_by_default(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place.folder)
    research.reproduce(["imagenet", "--scale", "smoke", "--only", "5/noised"])
    shown = capsys.readouterr()
    assert "imagenet 5/noised, seed 0" in shown.err
    assert "90.52" in shown.out, "the paper's number is shown beside ours"
    assert (place.folder / "results/smoke/imagenet.csv").is_file()
    assert len(place.finished()) == 1


def test_patterns_may_mean_cells_of_some_tables_only(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["imagenet", "cifar100-learning-rates"]
    research.reproduce([*names, "--scale", "smoke", "--only", "0.5/noised", *place.command()])
    assert "no cell of imagenet" in capsys.readouterr().err
    assert [name.partition("/")[0] for name in place.finished()] == ["cifar100_table4_noised_p40"]
    with pytest.raises(sl.ShortlistError, match=r"--only 7/noised .* imagenet, cifar100-learning-rates"):
        research.reproduce([*names, "--scale", "smoke", "--only", "0.5/noised", "7/noised", *place.command()])
    with pytest.raises(sl.ShortlistError, match=r"--only 0\.5 .*figures"):
        research.reproduce(["level-sets-k2", "--scale", "smoke", "--only", "0.5", *place.command()])


def test_what_failed_of_every_table_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "reproduce", lambda experiment, **options: ([], [f"{experiment.name} has failed"]))
    with pytest.raises(sl.ShortlistError, match="epoch-time has failed"):
        research.reproduce(place.command("imagenet", "epoch-time"))
    assert "imagenet has failed" in capsys.readouterr().err


def test_data_that_is_missing_is_said_once_with_what_to_do(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTLIST_DATA", str(place.folder / "nothing"))
    results, failures = place.run(EXPERIMENTS["cifar100-top5"], scale="short", only=["0.4"])
    assert results == []
    (failure,) = failures
    assert "2 of 3 runs failed" in failure, "the third would have failed the same way"
    assert "shortlist datasets" in failure
    assert not place.results.exists()
    with pytest.raises(sl.ShortlistError, match="1 of 1 runs failed"):
        research.reproduce(["imagenet", "--only", "1/noised", *place.command()])
