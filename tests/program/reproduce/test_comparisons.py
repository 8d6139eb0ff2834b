"""The comparisons on rare classes: fair by construction, and their page is made from their results alone."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shortlist as sl
from shortlist.program.cli import research
from shortlist.program.compare import running
from shortlist.program.compare.search import search_points
from shortlist.program.config import RunConfig, identity
from shortlist.program.data.alter import thin_validation
from shortlist.program.documents import END, begin_mark
from shortlist.program.losses import Range
from shortlist.program.reproduce.comparison_results import Found, comparison_file, read_comparison, run_comparison
from shortlist.program.reproduce.comparisons import BASELINES, COMPARISONS
from shortlist.program.reproduce.figures.rare_classes import size_bins
from shortlist.program.reproduce.rare_classes import write_rare_classes
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import read_result
from shortlist.program.runs.scores import read_scores
from shortlist.program.training.loop import Interrupted
from tests.support.reproducing import ROOT

NAME = "rare-cifar100-lt"
TWO = ("cross_entropy", "mixture_k5")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder in which two losses were compared, on tiny data."""
    folder = tmp_path_factory.mktemp("comparison")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        research.reproduce([NAME, "--scale", "smoke", "--only", *TWO, "--seeds", "0", "1"])
    return folder


def copied_with(change: Callable[[Any], None], place: Path, folder: Path) -> None:
    """Put the results of the place into another folder, changed by hand."""
    shutil.copytree(place / "results", folder / "results")
    path = folder / f"results/smoke/{NAME}.json"
    content = json.loads(path.read_text())
    for entry in content["losses"]:
        change(entry)
    path.write_text(json.dumps(content))


def found_in(place: Path) -> Found:
    comparison = COMPARISONS[NAME]
    return read_comparison(comparison, comparison_file(place / "results", comparison, "smoke"))


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_loss_gets_the_same_search_and_the_same_judge(name: str) -> None:
    comparison = COMPARISONS[name]
    base, budget = comparison.base("paper"), comparison.budget("paper")
    assert {*BASELINES} <= {*comparison.candidates}
    for candidate in comparison.contenders():
        config = candidate.config(base)
        assert config.select_metric == "macro_top5"
        assert config.data == base.data
        assert config.train == base.train
        axes = candidate.axes(base, budget.search, budget.fixed)
        shared = {text.partition("=")[0] for text in comparison.search}
        assert shared <= {*axes}, "searched for every loss"
        assert all(isinstance(axis, Range) for axis in axes.values())
        points = search_points(config, axes, budget.trials)
        assert len({tuple(point.items()) for point in points}) == budget.trials


def test_the_file_holds_what_the_runs_say(place: Path) -> None:
    found = found_in(place)
    assert {loss.name for loss in found.losses} == {*TWO}
    content = json.loads((place / f"results/smoke/{NAME}.json").read_text())
    for entry in content["losses"]:
        loss = found.loss(entry["name"])
        assert loss is not None
        assert [run.seed for run in loss.runs] == [0, 1]
        for written, run in zip(entry["runs"], loss.runs, strict=True):
            result = read_result(RunFolder(place / written["folder"]))
            assert run.corrected["macro_top5"] == pytest.approx(result["test_corrected"]["macro_top5"], abs=1e-6)
            assert run.plain["macro_top5"] == pytest.approx(result["test"]["macro_top5"], abs=1e-6)
            # The macro accuracy is the mean over the classes that have test images.
            known = [value for value in run.class_accuracy if value is not None]
            assert sum(known) / len(known) == pytest.approx(result["test_corrected"]["macro_top5"], abs=1e-3)
    assert [loss.val for loss in found.losses] == sorted((loss.val for loss in found.losses), reverse=True)


def test_further_seeds_are_added_to_the_file(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the runs of the earlier seeds are not at hand."""
    shutil.copytree(place / "results", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    research.reproduce([NAME, "--scale", "smoke", "--only", *TWO, "--seeds", "2"])
    assert not Path("runs/compare").exists(), "the settings are in the file: nothing was searched again"
    before, after = found_in(place), found_in(tmp_path)
    for name in TWO:
        earlier, loss = before.loss(name), after.loss(name)
        assert earlier is not None
        assert loss is not None
        assert [run.seed for run in loss.runs] == [0, 1, 2]
        assert loss.runs[:2] == earlier.runs
        assert (loss.config, loss.trials) == (earlier.config, earlier.trials)


@pytest.mark.parametrize("other", [{"epochs": 7}, {"settings": {}}])
def test_a_search_of_another_length_or_over_other_settings_is_repeated(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    def change(entry: Any) -> None:
        entry["trials"] = [trial | other for trial in entry["trials"]]

    copied_with(change, place, tmp_path)
    monkeypatch.chdir(tmp_path)
    research.reproduce([NAME, "--scale", "smoke", "--only", "cross_entropy", "--seeds", "2"])
    assert Path("runs/compare").exists()


@pytest.mark.parametrize("name", [name for name in COMPARISONS if (ROOT / f"results/{name}.json").is_file()])
def test_further_seeds_of_published_comparisons_need_no_search(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they have the settings of the published seeds, so that they join them."""
    trained: list[RunConfig] = []

    def remember(config: RunConfig, **others: object) -> None:
        trained.append(config)
        raise KeyboardInterrupt

    comparison = COMPARISONS[name]
    found = read_comparison(comparison, ROOT / f"results/{name}.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "train", remember)
    for loss in found.losses:
        with pytest.raises(Interrupted):
            run_comparison(comparison, scale="paper", seeds=[9], only=[loss.name], results=ROOT / "results")
        assert loss.config is not None
        assert identity(trained.pop()) == identity(loss.config)
    assert not Path("runs/compare").exists()


def test_a_file_that_was_made_with_another_recipe_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever loss is asked for: all of a file are compared with each other."""

    def change(entry: Any) -> None:
        if entry["name"] == TWO[0]:
            entry["config"]["train"]["batch_size"] += 1

    copied_with(change, place, tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in TWO:
        with pytest.raises(sl.ShortlistError, match=r"rare-cifar100-lt\.json .*train\.batch_size .* --results"):
            run_comparison(COMPARISONS[NAME], scale="smoke", seeds=[2], only=[name])
    assert not list(Path("runs").glob("cifar100*"))


def test_runs_of_other_settings_are_not_kept_beside_new_ones(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def change(entry: Any) -> None:
        entry["config"]["optim"]["weight_decay"] *= 2

    copied_with(change, place, tmp_path)
    monkeypatch.chdir(tmp_path)
    research.reproduce([NAME, "--scale", "smoke", "--only", *TWO, "--seeds", "2"])
    assert all([run.seed for run in loss.runs] == [2] for loss in found_in(tmp_path).losses)


def test_a_correction_by_few_images_is_that_of_thinned_validation_images(place: Path) -> None:
    content = json.loads((place / f"results/smoke/{NAME}.json").read_text())
    written = content["losses"][0]["runs"][0]
    run = RunFolder(place / written["folder"])
    val, test = read_scores(run, "val"), read_scores(run, "test")
    counts = run.read_json("classes.json")["train_images"]
    few = thin_validation(val, len(counts), replace(run.config.data, thin_validation=True))
    assert len(few.labels) < len(val.labels)
    correction = sl.PriorCorrection(counts).fit(few.scores, few.labels, k=5)
    metrics = sl.TopKMetrics(len(counts))
    metrics.update(correction(test.scores), test.labels)
    assert written["test_thinned"]["macro_top5"] == pytest.approx(metrics.compute()["macro_top5"].item(), abs=1e-6)


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_comparison_runs_on_tiny_data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    research.reproduce([name, "--scale", "smoke", "--only", *TWO, "--seeds", "0"])
    comparison = COMPARISONS[name]
    found = read_comparison(comparison, comparison_file(tmp_path / "results", comparison, "smoke"))
    assert [len(loss.runs) for loss in found.losses] == [1, 1]


def test_losses_of_another_command_stay_in_the_file(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(place, tmp_path / "copy")
    monkeypatch.chdir(folder)
    before = found_in(folder).loss("mixture_k5")
    research.reproduce([NAME, "--scale", "smoke", "--only", "cross_entropy", "focal", "--seeds", "0", "1"])
    after = found_in(folder)
    assert {loss.name for loss in after.losses} == {*TWO, "focal"}
    assert after.loss("mixture_k5") == before


def test_the_page_is_rebuilt_exactly_from_the_files(place: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    shutil.copy(place / f"results/smoke/{NAME}.json", results)
    (tmp_path / "rare-classes.md").write_text(
        f"# Mine\n\n{begin_mark('shortlist reproduce --document')}\n{END}\nAfter.\n"
    )
    page = write_rare_classes(results, tmp_path).read_text()
    assert page.startswith("# Mine\n")
    assert page.endswith(f"{END}\nAfter.\n")
    assert page.count("Not run yet.") == len(COMPARISONS), "all but this one, and the last layers"
    mixture = found_in(place).loss("mixture_k5")
    assert mixture is not None
    mean = mixture.mean("macro_top5")
    assert mean is not None
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {mixture.label} | 2 |")]
    assert f"{100 * mean.mean:.1f}" in line
    assert all((tmp_path / "rare-classes" / f"{NAME}-{figure}.png").is_file() for figure in ("class-size", "gain"))
    assert write_rare_classes(results, tmp_path).read_text() == page


def test_the_published_page_is_that_of_the_published_results(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docs/rare-classes.md", tmp_path)
    page = write_rare_classes(ROOT / "results", tmp_path).read_text()
    assert page == (ROOT / "docs/rare-classes.md").read_text(), "shortlist reproduce --document"


def test_a_page_is_not_emptied_and_a_damaged_file_is_named(place: Path, tmp_path: Path) -> None:
    with pytest.raises(sl.ShortlistError, match="no comparisons in"):
        write_rare_classes(tmp_path, ROOT / "docs")
    path = tmp_path / f"{NAME}.json"
    path.write_text("{}")
    with pytest.raises(sl.ShortlistError, match=NAME):
        write_rare_classes(tmp_path, ROOT / "docs")
    content = json.loads((place / f"results/smoke/{NAME}.json").read_text())
    del content["losses"][0]["runs"][0]["tau"]
    path.write_text(json.dumps(content))
    with pytest.raises(sl.ShortlistError, match="tau"):
        read_comparison(COMPARISONS[NAME], path)


def test_a_pattern_without_a_loss_and_another_root_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sl.ShortlistError, match="nonsense"):
        research.reproduce([NAME, "--scale", "smoke", "--only", "nonsense"])
    with pytest.raises(sl.ShortlistError, match="runs-root"):
        research.reproduce([NAME, "--scale", "smoke", "--runs-root", "elsewhere"])


def test_classes_of_a_bin_differ_by_less_than_a_factor_of_two() -> None:
    sizes = [1, 1, 2, 3, 5, 8, 9, 40, 41, 100, 447]
    bins = size_bins(sizes)
    assert sorted(index for group in bins for index in group) == list(range(len(sizes)))
    for group in bins:
        assert max(sizes[index] for index in group) < 2 * min(sizes[index] for index in group)
    means = [sum(sizes[index] for index in group) / len(group) for group in bins]
    assert means == sorted(means)
