"""The paper's tables from one command each: on tiny data here, with the code of the real runs."""

import csv
import dataclasses
import functools
import itertools
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from scipy import stats
from torch import nn

import shortlist as sl
from shortlist.program import recipes
from shortlist.program.atomic_files import locked
from shortlist.program.cli import research
from shortlist.program.config import DataConfig, OptimConfig, from_dict, to_dict
from shortlist.program.documents import END, begin_mark
from shortlist.program.reproduce import Scale, running
from shortlist.program.reproduce.document import write_reproduction
from shortlist.program.reproduce.experiment import Cell, Experiment
from shortlist.program.reproduce.figures import FIGURES, from_results
from shortlist.program.reproduce.gradients import COUNTS, CountingLoss
from shortlist.program.reproduce.registry import COLUMN_NAMES, EXPERIMENTS
from shortlist.program.reproduce.results import (
    COLUMNS,
    Result,
    config_file,
    measured,
    read_results,
    results_file,
    update_results,
    write_results,
)
from shortlist.program.reproduce.running import reproduce
from shortlist.program.reproduce.tables import comparison, interval_half_width, latest_setups, published
from shortlist.program.runs.folder import RunFolder, default_folder
from shortlist.program.training.loop import DivergedError, Interrupted, Trainer

BEGIN = begin_mark("shortlist reproduce --document")
ROOT = Path(__file__).parents[3]
SMALL = replace(EXPERIMENTS["imagenet"], cells=EXPERIMENTS["imagenet"].cells[:3])


@dataclasses.dataclass(frozen=True)
class Place:
    """Where runs and results go."""

    folder: Path

    @property
    def runs_root(self) -> Path:
        return self.folder / "runs"

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def run(self, experiment: Experiment, **options: Any) -> tuple[list[Result], list[str]]:
        settings: dict[str, Any] = {"scale": "smoke", "quiet": True} | options
        return reproduce(experiment, runs_root=self.runs_root, results=self.results, **settings)

    def finished(self) -> dict[str, int]:
        """When each result was written."""
        found = self.runs_root.rglob("final.json")
        return {path.parent.relative_to(self.runs_root).as_posix(): path.stat().st_mtime_ns for path in found}

    def command(self, *arguments: str) -> list[str]:
        return [*arguments, "--runs-root", str(self.runs_root), "--results", str(self.results)]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Runs that the experiments may share, as they do in reality."""
    return Place(tmp_path_factory.mktemp("everything"))


# Every name


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_table_comes_from_its_name(name: str, everything: Place, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = EXPERIMENTS[name]
    research.reproduce([name, "--scale", "smoke", *everything.command()])
    shown = capsys.readouterr().out
    assert experiment.title in shown
    assert all(COLUMN_NAMES.get(column, column) in shown for column in experiment.columns)
    results = read_results(results_file(everything.results, experiment, "smoke"))
    assert {(each.row, each.column) for each in results} == {(cell.row, cell.column) for cell in experiment.cells}
    assert {each.metric for each in results} == set(experiment.metrics)
    assert all(math.isfinite(each.value) for each in results)
    for result in results:
        run = RunFolder(everything.runs_root / result.run)
        assert result.value == measured(run, result.metric, result.K), "a cell can be traced to its run"
        config = run.config
        (cell,) = (cell for cell in experiment.cells if (cell.row, cell.column) == (result.row, result.column))
        assert config == replace(experiment.config(cell, "smoke", everything.runs_root), seed=result.seed)
        assert run.path.name == f"{config.key()}-s{result.seed}"
        assert (result.recipe, result.epochs) == (config.recipe, config.train.epochs)
        kept = config_file(everything.results / "smoke", result)
        assert from_dict(json.loads(kept.read_text())) == replace(config, seed=0)


@pytest.mark.parametrize("name", from_results.PAINTERS)
def test_what_the_paper_draws_is_drawn_from_the_longest_runs(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    short = [made_up(50.0, row=cell.row, column=cell.column, epochs=2) for cell in experiment.cells]
    long = [replace(result, value=place, epochs=4) for place, result in enumerate(short, 1)]
    assert from_results.draw(name, [], tmp_path) == []
    files = from_results.draw(name, long, tmp_path)
    alone = [path.read_bytes() for path in files]
    from_results.draw(name, [*short, *long], tmp_path)
    assert [path.read_bytes() for path in files] == alone
    outdated = [replace(each, value=0.0, config="bbbbbbbbbb", date="2025-01-01T00:00:00+00:00") for each in long]
    from_results.draw(name, [*outdated, *long], tmp_path)
    assert [path.read_bytes() for path in files] == alone, "configurations are not mixed"
    drawn = files[0].read_text()
    seeds = [replace(each, value=each.value + off, seed=seed) for each in long for seed, off in ((0, 1), (1, -1))]
    from_results.draw(name, seeds, tmp_path)
    assert files[0].read_text() == drawn, "a point is the mean over the seeds"
    assert all(COLUMN_NAMES[column] in drawn for column in experiment.columns)


def test_the_points_of_the_sparsity_bear_their_values(tmp_path: Path) -> None:
    cells = EXPERIMENTS["gradient-sparsity"].cells
    results = [made_up(10.5 + place, row=cell.row, column=cell.column) for place, cell in enumerate(cells)]
    drawn = from_results.draw("gradient-sparsity", results, tmp_path)[0].read_text()
    places = {}
    for result in results:
        if result.column == "noised":
            (places[result.row],) = re.findall(rf'x="([\d.]+)"[^>]*>{result.value}</text>', drawn)
    in_order = [float(places[row]) for row in sorted(places, key=float)]
    assert in_order == sorted(set(in_order)), "from left to right, none on top of another"


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_comes_from_its_name(name: str, everything: Place, capsys: pytest.CaptureFixture[str]) -> None:
    research.reproduce([name, "--scale", "smoke", *everything.command()])
    files = [Path(line) for line in capsys.readouterr().out.split()]
    assert {path.suffix for path in files} >= {".png", ".svg"}
    assert all(path.is_file() and path.is_relative_to(everything.results / "smoke") for path in files)


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    research.reproduce([])
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in [*EXPERIMENTS, *FIGURES])
    with pytest.raises(sl.ShortlistError, match="'imagenett': did you mean imagenet"):
        research.reproduce(["imagenett"])
    with pytest.raises(sl.ShortlistError, match="name a table or figure"):
        research.reproduce(["--scale", "smoke"])


def test_the_program_writes_to_its_folder_by_default(place: Place) -> None:
    command = [sys.executable, "-m", "shortlist", "reproduce", "imagenet", "--scale", "smoke", "--only", "5/noised"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=place.folder)
    assert done.returncode == 0, done.stderr
    assert "imagenet 5/noised, seed 0" in done.stderr
    assert "90.52" in done.stdout, "the paper's number stands beside ours"
    assert (place.folder / "results/smoke/imagenet.csv").is_file()
    assert len(place.finished()) == 1


@pytest.mark.parametrize("scale", ["short", "paper"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_cell_has_a_full_configuration(name: str, scale: Any) -> None:
    experiment = EXPERIMENTS[name]
    assert len({(cell.row, cell.column) for cell in experiment.cells}) == len(experiment.cells)
    for cell in experiment.cells:
        config = experiment.config(cell, scale, Path())
        assert config.train.precision == "bf16-mixed"
        assert config.data.root == ""
        full = experiment.paper_epochs or recipes.build(cell.recipe).train.epochs
        assert config.train.epochs == (experiment.short_epochs if scale == "short" else full)


# Runs


CELLS = [(experiment, cell) for experiment in EXPERIMENTS.values() for cell in experiment.cells]
KNOWS_K = {"topk_hinge", "smooth_topk_hinge", "noised_topk_hinge", "imbalanced_noised_topk_hinge"}


@pytest.mark.parametrize(("experiment", "cell"), CELLS, ids=[f"{e.name}-{c.label}" for e, c in CELLS])
def test_a_cell_is_the_run_that_its_row_and_column_speak_of(experiment: Experiment, cell: Cell) -> None:
    config = experiment.config(cell, "short", Path())
    loss_of = {
        "cross_entropy": "cross_entropy",
        "smooth": "smooth_topk_hinge",
        "noised": "noised_topk_hinge",
        "exact": "noised_topk_hinge",
        "focal": "focal",
        "ldam": "ldam",
        "cosine_cross_entropy": "ldam",
        "imbalanced": "imbalanced_noised_topk_hinge",
        "logit_adjusted": "logit_adjusted",
        "balanced_softmax": "balanced_softmax",
    }
    column = re.sub(r"_b\d+$|_superclass$", "", cell.column)
    if column in loss_of:
        assert config.loss.name == loss_of[column]
        assert (config.loss.settings()["n_samples"] == math.inf) == (column == "exact")
        assert (config.loss.settings()["max_margin"] == 0) == (column == "cosine_cross_entropy")
    if experiment.row_heading == "trained for K":
        assert (config.loss.k, cell.k) == (int(cell.row), 5)
    elif config.loss.name in KNOWS_K and experiment.name != "cifar100-top1":  # whose models are those of top-5
        assert config.loss.k == cell.k
    if draws := re.search(r"_b(\d+)$", cell.column):
        assert config.loss.settings()["n_samples"] == int(draws[1])
    if experiment.row_heading == "label noise p":
        assert config.data.label_noise == float(cell.row)
        assert (config.data.noise_groups == "superclass") == cell.column.endswith("_superclass")
    if experiment.row_heading == "K":
        assert cell.k == int(cell.row)
    if experiment.row_heading == "learning rate":
        assert config.optim.lr == float(cell.row)
    if experiment.row_heading == "ε" and cell.row != "none":
        assert config.loss.settings()["epsilon"] == float(cell.row)
    if experiment.row_heading == "ε:":
        assert config.loss.settings()["epsilon"] == float(cell.column)
    if experiment.row_heading == "B:":
        assert config.loss.settings()["n_samples"] == float(cell.column)
    counts_gradients = "nonzero_gradients" in experiment.metrics
    assert (config.train.cuda_graph, config.train.compile) == (not counts_gradients, not counts_gradients)


def test_losses_that_know_no_k_share_a_run_on_the_long_tail() -> None:
    for name in ("cifar100-lt", "cifar100-lt-baselines"):
        experiment = EXPERIMENTS[name]
        for column in experiment.columns:
            configs = [experiment.config(cell, "short", Path()) for cell in experiment.cells if cell.column == column]
            knows_k = configs[0].loss.name in KNOWS_K
            assert len({config.key() for config in configs}) == (len(configs) if knows_k else 1)
            # What was searched for one K serves all.
            assert len({replace(config.loss, k=5) for config in configs}) == 1


sgd = functools.partial(OptimConfig, name="sgd", momentum=0.9, schedule="step", decay=0.1)


@pytest.mark.parametrize(
    ("name", "data", "network", "epochs", "batch", "optim", "select"),
    [
        (
            "cifar100-top5",
            DataConfig(name="cifar100", noise_groups="consecutive"),
            "densenet40_40",
            300,
            64,
            sgd(lr=0.1, weight_decay=1e-4, milestones=(0.5, 0.75)),
            "micro",
        ),
        (
            "plantnet-macro",
            DataConfig(name="plantnet300k"),
            "resnet50.tv_in1k",
            30,
            32,
            sgd(lr=2e-3, weight_decay=1e-4, milestones=(2 / 3, 5 / 6)),
            "macro",
        ),
        (
            "imagenet-lt",
            DataConfig(name="imagenet_lt"),
            "resnet34",
            100,
            128,
            sgd(lr=1e-2, weight_decay=2e-3, milestones=(0.6, 0.8)),
            "macro",
        ),
        (  # not the paper's, but that of Cao et al. (2019)
            "cifar100-lt",
            DataConfig(name="cifar100", imbalance=100),
            "resnet32",
            200,
            128,
            sgd(lr=0.1, weight_decay=2e-4, milestones=(0.8, 0.9), decay=0.01, warmup_epochs=5),
            "macro",
        ),
    ],
)
def test_a_protocol_is_that_of_the_paper(
    name: str, data: DataConfig, network: str, epochs: int, batch: int, optim: OptimConfig, select: str
) -> None:
    for cell in EXPERIMENTS[name].cells:
        config = EXPERIMENTS[name].config(cell, "paper", Path())
        assert replace(config.data, label_noise=0.0, workers=data.workers) == data
        assert (config.model.name, config.model.pretrained) == (network, "plantnet" in name)
        assert (config.model.head == "cosine") == (config.loss.name in ("ldam", "imbalanced_noised_topk_hinge"))
        assert (config.train.epochs, config.train.batch_size) == (epochs, batch)
        assert config.optim == optim
        assert config.select_metric == f"{select}_top{config.loss.k}"


@pytest.mark.parametrize(
    ("column", "lr", "weight_decay"), [("cross_entropy", 0.1, 1e-4), ("smooth", 1.0, 2.5e-5), ("noised", 0.1, 1.5e-4)]
)
def test_each_loss_has_a_protocol_of_its_own_on_imagenet(column: str, lr: float, weight_decay: float) -> None:
    experiment = EXPERIMENTS["imagenet"]
    for cell in experiment.selected([column]):
        config = experiment.config(cell, "paper", Path())
        assert config.optim == sgd(lr=lr, weight_decay=weight_decay, milestones=(0.25, 0.5, 0.75))
        assert (config.model.name, config.model.pretrained, config.model.head) == ("resnet18", False, "linear")
        assert (config.train.epochs, config.train.batch_size) == (120, 256)
        assert config.select_metric == f"micro_top{cell.k}"
        assert round(config.data.val_fraction * 1_281_167, -3) == 50_000


def test_finished_runs_are_not_repeated(place: Place) -> None:
    said: list[str] = []
    first, _ = place.run(SMALL)
    before = place.finished()
    assert len(before) == 3
    again, _ = place.run(SMALL, say=said.append)
    assert again == first
    assert place.finished() == before
    assert sum("finished before" in line for line in said) == 3
    more, _ = place.run(SMALL, seeds=(0, 1))
    assert len(place.finished()) == 6
    assert before.items() <= place.finished().items()
    assert {each.seed for each in more} == {0, 1}


def test_a_run_is_found_by_its_configuration_and_not_by_the_name_of_its_folder(place: Place) -> None:
    place.run(SMALL, only=["1/noised"])
    (folder,) = place.runs_root.rglob("*-s0")
    folder.rename(folder.with_name("0123456789-s0"))
    place.run(SMALL, only=["1/noised"])
    assert [Path(run).name for run in place.finished()] == ["0123456789-s0"]
    # With a seed in a folder of the name of today it makes one set-up, also when it is no longer on this disk.
    results, _ = place.run(SMALL, seeds=(0, 1), only=["1/noised"])
    assert len({Path(run).name.partition("-")[0] for run in place.finished()}) == 2
    shutil.rmtree(folder.with_name("0123456789-s0"))
    path = results_file(place.results, SMALL, "smoke")
    write_results(path, [replace(result, config="0123456789") for result in results])
    for found in (results, update_results(SMALL, "smoke", place.runs_root, place.results)):
        assert [result.seed for result in latest_setups(found)] == [0, 1]


def interrupt_in(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """SIGINT in this training step, counted over all runs."""
    original, left = Trainer._step, step

    def counted(self: Trainer, *arguments: Any) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            signal.raise_signal(signal.SIGINT)
        return original(self, *arguments)

    monkeypatch.setattr(Trainer, "_step", counted)


def test_an_interrupted_set_goes_on_where_it_stopped(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with monkeypatch.context() as patch:
        interrupt_in(patch, step=10)  # within the second run
        with pytest.raises(Interrupted, match="the same command resumes"):
            place.run(SMALL)
    before = place.finished()
    assert len(before) == 1
    assert len(list(place.runs_root.rglob("config.json"))) == 2
    assert len(read_results(results_file(place.results, SMALL, "smoke"))) == 1, "what has finished is kept"
    results, failures = place.run(SMALL)
    assert not failures
    assert before.items() <= place.finished().items()
    undisturbed, _ = Place(tmp_path_factory.mktemp("undisturbed")).run(SMALL)
    assert [each.value for each in results] == [each.value for each in undisturbed]


def test_gradients_are_counted_over_an_interruption(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    experiment, only = EXPERIMENTS["gradient-sparsity"], ["0.1/noised"]
    with monkeypatch.context() as patch:
        interrupt_in(patch, step=2)
        with pytest.raises(Interrupted):
            place.run(experiment, only=only)
    (result,), _ = place.run(experiment, only=only)
    (undisturbed,), _ = Place(tmp_path_factory.mktemp("undisturbed")).run(experiment, only=only)
    assert result.value == undisturbed.value
    run = RunFolder(place.runs_root / result.run)
    assert run.read_json(COUNTS)["images"] == sum(run.read_json("classes.json")["train_images"])
    assert 0 < result.value <= 4, "the label and at most B = 3 others"


def test_gradients_that_were_not_counted_over_the_whole_run_are_no_result(place: Place) -> None:
    """As when it is killed between its last checkpoint and its counts."""
    experiment, only = EXPERIMENTS["gradient-sparsity"], ["0.1/noised"]
    (result,), _ = place.run(experiment, only=only)
    run = RunFolder(place.runs_root / result.run)
    (run.path / "final.json").unlink()
    (run.path / COUNTS).unlink()
    results_file(place.results, experiment, "smoke").unlink()
    results, (message,) = place.run(experiment, only=only)
    assert results == []
    assert re.search(r"has counted 0 of \d+ images: delete the run and train it again", message)


def test_gradients_are_counted_coordinate_by_coordinate() -> None:
    scores, target = torch.randn(6, 10, requires_grad=True), torch.arange(6)
    loss = CountingLoss(nn.CrossEntropyLoss())
    value = loss(scores, target)
    assert torch.equal(value, nn.functional.cross_entropy(scores, target))
    value.backward()
    assert (int(loss.nonzero), loss.images) == (60, 6)
    hard = CountingLoss(sl.TopKHinge(3))
    hard(torch.where(target.unsqueeze(1) == torch.arange(10), 0.0, scores + 5), target).backward()
    assert (int(hard.nonzero), hard.images) == (12, 6)


def test_a_run_that_fails_does_not_stop_the_others(place: Place) -> None:
    broken = replace(SMALL, cells=[Cell("1", "smooth", 1, "no_such_recipe"), *SMALL.cells[:1]])
    results, failures = place.run(broken)
    assert [each.column for each in results] == ["cross_entropy"]
    (message,) = failures
    assert "1 of 2 runs failed (1/smooth, seed 0)" in message
    assert "there is no recipe 'no_such_recipe'" in message


def test_a_run_that_lost_files_does_not_stop_the_others(place: Place) -> None:
    results, _ = place.run(SMALL)
    damaged = place.runs_root / results[0].run
    (damaged / "final.json").unlink()
    (damaged / "classes.json").write_text("null")
    results_file(place.results, SMALL, "smoke").unlink()
    others, failures = place.run(SMALL)
    assert {each.run for each in others} == {each.run for each in results} - {results[0].run}
    (message,) = failures
    assert f"{damaged}/classes.json is damaged" in message


def test_a_file_that_fails_does_not_stop_the_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_once(trainer: Trainer) -> None:
        monkeypatch.undo()
        raise FileNotFoundError("somebody deleted the folder")

    monkeypatch.setattr(Trainer, "fit", fails_once)
    results, failures = place.run(SMALL)
    assert len({each.run for each in results}) == len(SMALL.cells) - 1
    assert "somebody deleted the folder" in failures[0]


def fail_in(monkeypatch: pytest.MonkeyPatch, *runs: int, error: Exception) -> None:
    """In the training of these runs, counted from 1."""
    original, numbers = Trainer.fit, itertools.count(1)

    def fit(trainer: Trainer) -> None:
        if next(numbers) in runs:
            raise error
        original(trainer)

    monkeypatch.setattr(Trainer, "fit", fit)


@pytest.mark.parametrize(
    ("failing", "error", "trained"),
    [
        ((1, 2), sl.ShortlistError("there is no data"), 0),
        ((2, 3), sl.ShortlistError("there is no data"), 2),  # it was there for the first
        ((1, 2), DivergedError("the loss became nan"), 2),  # which tells nothing about other losses
    ],
)
def test_only_what_would_fail_alike_is_not_tried(
    place: Place, monkeypatch: pytest.MonkeyPatch, failing: tuple[int, ...], error: Exception, trained: int
) -> None:
    experiment = replace(SMALL, cells=EXPERIMENTS["imagenet"].cells[:4])
    fail_in(monkeypatch, *failing, error=error)
    results, (message,) = place.run(experiment)
    assert len(results) == trained
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
    assert [each.column for each in results] == [cell.column for cell in SMALL.cells]
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


def test_a_number_names_the_programs_of_all_processes_behind_it(place: Place) -> None:
    results, _ = place.run(SMALL, only=["1/noised"])
    run = RunFolder(place.runs_root / results[0].run)
    run.note_environment({"commit": "c" * 40, "dirty": False})
    again, _ = place.run(SMALL, only=["1/noised"])
    assert [each.commit for each in again] == [f"{each.commit} {'c' * 10}" for each in results]


def test_data_that_is_missing_is_said_once_with_what_to_do(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTLIST_DATA", str(place.folder / "nothing"))
    results, failures = place.run(EXPERIMENTS["cifar100-top5"], scale="short", only=["0.4"])
    assert results == []
    (failure,) = failures
    assert "2 of 3 runs failed" in failure, "the third would have failed alike"
    assert "shortlist datasets" in failure
    assert not place.results.exists()
    with pytest.raises(sl.ShortlistError, match="1 of 1 runs failed"):
        research.reproduce(["imagenet", "--only", "1/noised", *place.command()])


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
        running._free_earlier_runs(replace(config, model=replace(config.model, name=network)))
    assert resets == ["first", "second", "first"]


def test_patterns_choose_rows_and_columns(place: Place) -> None:
    experiment = EXPERIMENTS["cifar100-top5"]
    assert [cell.label for cell in experiment.selected(["0.4/noised", "0.4/cross*"])] == [
        "0.4/cross_entropy",
        "0.4/noised",
    ]
    assert {cell.row for cell in experiment.selected(["smooth"])} == set(experiment.rows)
    with pytest.raises(sl.ShortlistError, match=r"its rows are 0\.0, 0\.1"):
        place.run(experiment, only=["0.5"])
    with pytest.raises(sl.ShortlistError, match="--seeds must name at least one"):
        place.run(experiment, seeds=())


def test_patterns_may_mean_cells_of_some_tables_only(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["imagenet", "cifar100-learning-rates"]
    research.reproduce([*names, "--scale", "smoke", "--only", "0.5/noised", *place.command()])
    assert "leaves nothing of imagenet" in capsys.readouterr().err
    assert [name.partition("/")[0] for name in place.finished()] == ["cifar100_table4_noised_p40"]
    with pytest.raises(sl.ShortlistError, match="--only 7/noised means no cell of imagenet, cifar100-learning-rates"):
        research.reproduce([*names, "--scale", "smoke", "--only", "0.5/noised", "7/noised", *place.command()])
    with pytest.raises(sl.ShortlistError, match=r"--only 0\.5 means no cell: figures have none"):
        research.reproduce(["level-sets-k2", "--scale", "smoke", "--only", "0.5", *place.command()])


# Results


def test_results_of_runs_that_are_elsewhere_are_kept(place: Place) -> None:
    results, _ = place.run(SMALL)
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


def test_a_damaged_file_of_results_is_not_overwritten(place: Place) -> None:
    place.run(SMALL, only=["1/noised"])
    path = results_file(place.results, SMALL, "smoke")
    damaged = path.read_text().replace("test_micro,1,", "test_micro,one,")
    path.write_text(damaged)
    with pytest.raises(sl.ShortlistError, match="line 2 is damaged"):
        place.run(SMALL)
    assert path.read_text() == damaged


def made_up(value: float, **fields: Any) -> Result:
    usual: dict[str, Any] = {
        "recipe": "cifar100_table4_noised_p40",
        "experiment": "cifar100-top5",
        "row": "0.4",
        "column": "noised",
        "scale": "short",
        "epochs": 100,
        "seed": 0,
        "metric": "test_micro",
        "K": 5,
        "commit": "0123456789",
        "gpu": "Made-up GPU",
        "date": "2026-01-01T00:00:00+00:00",
    }
    key = fields.pop("key", "aaaaaaaaaa")
    known = usual | fields
    return Result(**known, value=value, config=key, run=f"{known['recipe']}/{key}-s{known['seed']}")


def test_configurations_of_a_cell_are_not_mixed() -> None:
    old = [made_up(1.0, seed=seed) for seed in range(3)]
    new = made_up(2.0, key="bbbbbbbbbb", date="2026-01-02T00:00:00+00:00")
    elsewhere = made_up(3.0, epochs=300)
    assert latest_setups([*old, new, elsewhere]) == [new, elsewhere]
    assert latest_setups([new, *old, elsewhere]) == [new, elsewhere]  # in whatever order the file has them


def test_a_cell_may_have_numbers_of_several_configurations(tmp_path: Path) -> None:
    results = [made_up(85.0), made_up(86.0, key="bbbbbbbbbb")]
    write_results(tmp_path / "results.csv", results)
    assert read_results(tmp_path / "results.csv") == results


def test_an_accuracy_is_kept_in_percent_with_the_digits_that_many_images_give(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    result = {"best_epoch": 0, "select": "macro_top5", "val": {}, "test": {"macro_top5": 12_345 / 50_000}}
    run.write_json("final.json", result | {"train_seconds": 1.0, "skipped_images": 0, "best_sha256": ""})
    assert measured(run, "test_macro", 5) == pytest.approx(24.69, abs=1e-4)


def test_what_failed_of_every_table_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "reproduce", lambda experiment, **options: ([], [f"{experiment.name} has failed"]))
    with pytest.raises(sl.ShortlistError, match="epoch-time has failed"):
        research.reproduce(place.command("imagenet", "epoch-time"))
    assert "imagenet has failed" in capsys.readouterr().err


def timed(folder: Path, ends: Sequence[float], began: Sequence[int]) -> float | None:
    """What is measured of a run whose epochs ended then, in processes that began at these epochs."""
    run = RunFolder(folder)
    for epoch in began:
        run.note_environment({"epoch": epoch})
    for epoch, end in enumerate(ends):
        run.append_metrics({"epoch": epoch, "train_seconds": end})
    return measured(run, "epoch_seconds", 5)


def test_the_time_of_an_epoch_is_the_median_without_the_first(tmp_path: Path) -> None:
    # After compiling, and with one epoch that something else disturbed.
    assert timed(tmp_path, [100.0, 101.0, 104.0, 204.0], began=[0]) == 3.0


def test_the_first_epoch_after_an_interruption_is_not_timed(tmp_path: Path) -> None:
    assert timed(tmp_path, [100.0, 101.0, 201.0, 202.0], began=[0, 2]) == 1.0


def test_a_run_that_was_always_interrupted_has_no_time(tmp_path: Path) -> None:
    with pytest.raises(sl.ShortlistError, match="no epoch is left"):
        timed(tmp_path, [100.0, 200.0], began=[0, 1])


def test_a_run_tells_at_which_epochs_it_was_begun_and_resumed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, only = EXPERIMENTS["epoch-time"], ["5/smooth"]
    with monkeypatch.context() as patch:
        interrupt_in(patch, step=2)
        with pytest.raises(Interrupted):
            place.run(experiment, only=only)
    (result,), _ = place.run(experiment, only=only)
    environment = RunFolder(place.runs_root / result.run).read_json("environment.json")
    assert [environment["epoch"], *(each["epoch"] for each in environment["resumed"])] == [0, 0]


def test_runs_are_timed_by_one_process_at_a_time(place: Place) -> None:
    with locked(place.runs_root / ".timing.lock"):
        with pytest.raises(sl.ShortlistError, match="another process is timing"):
            place.run(EXPERIMENTS["epoch-time"], only=["5/smooth"])
        place.run(SMALL)  # whose results do not depend on what else runs
    assert place.run(EXPERIMENTS["epoch-time"], only=["5/smooth"])[0]


@pytest.mark.parametrize("count", [2, 3, 4, 10, 11, 30])
def test_intervals_are_those_of_student(count: int) -> None:
    values = torch.randn(count, dtype=torch.float64).tolist()
    low, high = stats.t.interval(0.95, count - 1, loc=0, scale=stats.sem(values))
    assert interval_half_width(values) == pytest.approx((high - low) / 2, rel=1e-3)


def test_numbers_of_tiny_data_stand_in_no_table_beside_real_ones() -> None:
    experiment, real = EXPERIMENTS["cifar100-top5"], [made_up(85.0)]
    tiny = made_up(3.0, scale="smoke", epochs=2, seed=1)
    assert comparison(experiment, [*real, tiny]) == comparison(experiment, real)


def test_a_table_has_a_line_for_each_length() -> None:
    experiment = EXPERIMENTS["cifar100-top5"]
    results = [made_up(85.0), made_up(86.0, seed=1), made_up(88.0, scale="paper", epochs=300)]
    results.append(made_up(79.0, column="cross_entropy", recipe="cifar100_table4_cross_entropy_p40"))
    lines = [line for line in comparison(experiment, results) if line.row == "0.4"]
    assert [line.source for line in lines] == ["paper, 300 epochs", "ours, 100 epochs", "ours, 300 epochs"]
    assert [line.seeds for line in lines] == ["4", "1 to 2", "1"]
    shown = [[value.replace("\N{NO-BREAK SPACE}", " ") for value in line.values] for line in lines]
    assert shown == [["83.6 ± 0.2", "87.4 ± 0.1", "87.8 ± 0.6"], ["79.0", "", "85.5 ± 6.4"], ["", "", "88.0"]]


def test_a_length_that_a_row_was_not_run_at_has_no_line_of_it() -> None:
    """But a row that was not run at all has one, for what is missing."""
    results = [made_up(85.0), made_up(88.0, scale="paper", epochs=300)]
    lines = comparison(EXPERIMENTS["cifar100-top5"], results)
    assert [line.source for line in lines if line.row == "0.0"] == ["paper, 300 epochs", "ours, 100 epochs"]


def test_a_run_that_another_process_is_at_is_left_to_it(place: Place) -> None:
    """So that several processes can share an experiment."""
    first = replace(SMALL.config(SMALL.cells[0], "smoke", place.runs_root), seed=0)
    said: list[str] = []
    with RunFolder(default_folder(first, place.runs_root)).claim(first, resume=True):
        results, wrong = place.run(SMALL, say=said.append)
    assert not wrong
    assert {result.column for result in results} == {cell.column for cell in SMALL.cells[1:]}
    assert "another process is training it" in said[0]
    results, wrong = place.run(SMALL)
    assert {result.column for result in results} == {cell.column for cell in SMALL.cells}


def test_a_run_that_another_process_has_just_finished_is_taken(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    results, _ = place.run(SMALL)
    monkeypatch.setattr(running, "runs_of", lambda config, runs_root: iter(()))  # as if looked for before it was there
    again, wrong = place.run(SMALL)
    assert again == results
    assert not wrong


def test_a_file_that_another_process_is_updating_is_waited_for(place: Place) -> None:
    results, _ = place.run(SMALL)
    with ThreadPoolExecutor() as threads, locked(results_file(place.results, SMALL, "smoke").parent / ".lock"):
        waiting = threads.submit(update_results, SMALL, "smoke", place.runs_root, place.results)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        results_file(place.results, SMALL, "smoke").unlink()
    assert waiting.result() == results


@pytest.mark.parametrize("damage", ["cut", "short", "nan", "more"])
def test_a_damaged_line_of_results_is_named(place: Place, damage: str) -> None:
    path = place.folder / "results.csv"
    write_results(path, [made_up(85.0), made_up(86.0, seed=1)])
    text = path.read_text()
    path.write_text(
        {"cut": text[:-4], "short": text[:-60] + "\n", "nan": text.replace("86.0", "nan"), "more": text[:-1] + ",9\n"}[
            damage
        ]
    )
    with pytest.raises(sl.ShortlistError, match=r"line 3 is damaged|last line is cut off"):
        read_results(path)


def test_a_seed_counts_once(tmp_path: Path) -> None:
    """Files that were joined by hand can have it twice: their mean would pass for one of two seeds."""
    path = tmp_path / "results.csv"
    write_results(path, [made_up(85.0), made_up(86.0, seed=1), made_up(85.5, date="2026-01-02T00:00:00+00:00")])
    with pytest.raises(sl.ShortlistError, match=r"line 4 is damaged: .* the same seed, 0"):
        read_results(path)


def few_cells_of(name: str) -> Experiment:
    return replace(EXPERIMENTS[name], cells=EXPERIMENTS[name].cells[:2])


@pytest.mark.parametrize("damage", ["{}", "[]", '{"a":'])
@pytest.mark.parametrize(
    ("experiment", "file"),
    [
        (SMALL, "final.json"),
        (SMALL, "environment.json"),
        (few_cells_of("gradient-sparsity"), "gradients.json"),
        (few_cells_of("epoch-time"), "metrics.jsonl"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_a_damaged_run_is_named_and_does_not_hide_the_others(
    place: Place, experiment: Experiment, file: str, damage: str
) -> None:
    results, _ = place.run(experiment, seeds=(0, 1))
    if file == "metrics.jsonl":
        damage = '{"epoch": 0}\n' * 2
    (place.runs_root / results[0].run / file).write_text(damage)
    results_file(place.results, experiment, "smoke").unlink()
    others, failures = place.run(experiment, seeds=(0, 1))
    assert others == [each for each in results if each.run != results[0].run]
    assert len(failures) == 1
    assert f"{results[0].run}/{file}" in failures[0]
    assert failures[0].endswith("delete the run and train it again")


# The document


def new_docs(folder: Path) -> Path:
    folder.mkdir()
    (folder / "reproduction.md").write_text(f"# Again\n\nBefore.\n\n{BEGIN}\noutdated\n{END}\n\nAfter.\n")
    return folder


def test_the_document_is_rebuilt_exactly_from_the_files(tmp_path: Path) -> None:
    results = tmp_path / "results"
    numbers = [made_up(85.25), made_up(86.5, seed=1)]
    write_results(results / "cifar100-top5.csv", numbers)
    assert read_results(results / "cifar100-top5.csv") == numbers
    first, second = new_docs(tmp_path / "first"), new_docs(tmp_path / "second")
    page = write_reproduction(results, first).read_text()
    assert page.startswith(f"# Again\n\nBefore.\n\n{BEGIN}\n")
    assert page.endswith(f"{END}\n\nAfter.\n")
    assert "outdated" not in page
    assert "| 0.4 | ours, 100 epochs | 2 |  |  | 85.9\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}7.9 |" in page
    assert "| 0.3 | ours, 100 epochs |  |  |  |  |" in page, "what nobody ran is empty"
    assert "Run 2026-01-01 on Made-up GPU, commit 0123456789." in page
    write_reproduction(results, first)
    write_reproduction(results, second)
    assert (first / "reproduction.md").read_text() == (second / "reproduction.md").read_text() == page


def test_a_document_is_not_emptied(tmp_path: Path) -> None:
    docs = new_docs(tmp_path / "docs")
    before = (docs / "reproduction.md").read_text()
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(sl.ShortlistError, match="there are no results in"):
            write_reproduction(folder, docs)
    assert (docs / "reproduction.md").read_text() == before


def test_the_document_has_what_nobody_has_run_too(tmp_path: Path) -> None:
    write_results(tmp_path / "cifar100-top5.csv", [made_up(85.25)])
    page = write_reproduction(tmp_path, new_docs(tmp_path / "docs")).read_text()
    assert page.count("Not run yet.") == len(EXPERIMENTS) - 1
    assert all(f"`shortlist reproduce {name}`" in page for name in EXPERIMENTS)
    ours = [line for line in page.splitlines() if "| ours |" in line]
    assert ours
    assert all(not cell.strip() for line in ours for cell in line.split("|")[3:])


def test_the_document_of_an_installed_package_names_no_commit(tmp_path: Path) -> None:
    write_results(tmp_path / "cifar100-top5.csv", [made_up(85.25, commit="")])
    assert "Run 2026-01-01 on Made-up GPU.\n" in write_reproduction(tmp_path, new_docs(tmp_path / "docs")).read_text()


def test_the_document_is_made_as_a_whole() -> None:
    with pytest.raises(sl.ShortlistError, match="without names"):
        research.reproduce(["cifar100-top5", "--document"])


def test_a_document_without_marks_is_left_alone(tmp_path: Path) -> None:
    write_results(tmp_path / "cifar100-top5.csv", [made_up(85.25)])
    (tmp_path / "reproduction.md").write_text("mine")
    with pytest.raises(sl.ShortlistError, match="must hold the lines"):
        write_reproduction(tmp_path, tmp_path)
    assert (tmp_path / "reproduction.md").read_text() == "mine"


def test_the_published_document_is_that_of_the_published_results(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(ROOT / "docs/reproduction.md", docs)
    if (ROOT / "docs/reproduction").is_dir():
        shutil.copytree(ROOT / "docs/reproduction", docs / "reproduction")
    page = write_reproduction(ROOT / "results", docs).read_text()
    assert page == (ROOT / "docs/reproduction.md").read_text(), "shortlist reproduce --document"


def test_the_readme_shows_what_the_document_says() -> None:
    """In its section on the paper: lines of a table, each as it stands there, and a picture from there."""
    section = (ROOT / "README.md").read_text().partition("## The paper, redone\n")[2].partition("\n## ")[0]
    document = (ROOT / "docs/reproduction.md").read_text().splitlines()
    table = [line for line in section.splitlines() if line.startswith("|")]
    assert any("| ours" in line for line in table)
    assert all(line in document for line in table)
    (picture,) = re.findall(r"\(docs/(reproduction/.*\.png)\)", section)
    assert any(picture in line for line in document)


def test_every_published_result_can_be_traced_to_its_configuration() -> None:
    published = list((ROOT / "results").glob("*.csv"))
    assert published
    for path in published:
        results, experiment = read_results(path), EXPERIMENTS[path.stem]
        configs = [from_dict(json.loads(config_file(ROOT / "results", result).read_text())) for result in results]
        setups = {(result.config, config.key()) for result, config in zip(results, configs, strict=True)}
        assert len(setups) == len(dict(setups)) == len({key for _, key in setups}), "a key means one configuration"
        shown = latest_setups(results)
        for result, config in zip(results, configs, strict=True):
            assert (config.recipe, config.train.epochs) == (result.recipe, result.epochs)
            if result in shown:
                (cell,) = experiment.selected([f"{result.row}/{result.column}"])
                today = experiment.config(cell, cast("Scale", result.scale), Path())
                assert (config, result.K) == (today, cell.k), "the same command would find it"


def test_the_long_tail_is_trained_with_what_its_search_found() -> None:
    search = EXPERIMENTS["cifar100-lt-search"]
    found = {result.row: result.value for result in read_results(results_file(ROOT / "results", search, "paper"))}
    assert found.keys() == set(search.rows)
    best = {cell.recipe: cell for cell in sorted(search.cells, key=lambda cell: found[cell.row])}
    for recipe, cell in best.items():
        chosen = search.config(cell, "paper", Path()).loss
        assert replace(recipes.build(recipe).loss, k=5) == chosen


# The paper's numbers


@pytest.mark.parametrize(
    ("source", "row", "column", "metric", "value", "interval"),
    [
        ("tab:tab-epsilon", "noised", "0.001", "val_micro", "11.4", ""),
        ("tab:tab-B", "noised", "50", "val_micro", "94.64", ""),
        ("fig:epoch-time", "5", "smooth", "epoch_seconds", "81", ""),
        ("table:cifar100-top5-acc", "0.1", "smooth", "test_micro", "92.2", "0.3"),
        ("table:cifar100-top5-acc", "0.4", "noised", "test_micro", "87.8", "0.6"),
        ("table:cifar100-acc", "0.0", "cross_entropy", "test_micro", "76.6", "0.1"),
        ("table:plantnet-300k", "5", "imbalanced", "test_macro", "73.2", "0.5"),
        ("table:plantnet-300k", "1", "imbalanced", "test_few", "23.9", ""),
        ("table:plantnet-300k_appendix", "10", "focal", "test_micro", "97.7", "0.0"),
        ("table:imagenet-lt", "1", "ldam", "test_micro", "39.3", "0.2"),
        ("table:imagenet-lt", "3", "smooth", "test_few", "0.0", ""),
        ("table:imagenet-appendix", "5", "smooth", "test_micro", "90.71", "0.06"),
    ],
)
def test_the_paper_says_so(source: str, row: str, column: str, metric: str, value: str, interval: str) -> None:
    number = published()[source, row, column, metric]
    assert (number.value, number.interval) == (value, interval)


def test_every_number_of_the_paper_has_its_place() -> None:
    places = {
        (experiment.source, cell.row, cell.column, metric): cell.k
        for experiment in EXPERIMENTS.values()
        for cell in experiment.cells
        for metric in experiment.metrics
    }
    assert {key: int(number.K) for key, number in published().items()}.items() <= places.items()
    for number in published().values():
        assert 0 <= float(number.value) <= 100
        assert 0 <= float(number.interval or 0) < 1
