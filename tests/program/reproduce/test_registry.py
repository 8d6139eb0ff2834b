"""Every cell of a table is the run that its row and column name, with the paper's protocol."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import shortlist as sl
from shortlist.program import recipes
from shortlist.program.config import DataConfig, OptimConfig, from_dict, identity
from shortlist.program.reproduce import Scale
from shortlist.program.reproduce.experiment import Cell, Experiment
from shortlist.program.reproduce.registry import EXPERIMENTS
from shortlist.program.reproduce.results import config_file, read_results, results_file
from shortlist.program.reproduce.tables import latest_setups
from tests.support.reproducing import ROOT, Place


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


CELLS = [(experiment, cell) for experiment in EXPERIMENTS.values() for cell in experiment.cells]
WITH_K = {"topk_hinge", "smooth_topk_hinge", "noised_topk_hinge", "imbalanced_noised_topk_hinge"}


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
        assert (config.loss.settings().get("n_samples") == math.inf) == (column == "exact")
        assert (config.loss.settings().get("max_margin") == 0) == (column == "cosine_cross_entropy")
    if experiment.row_heading == "trained for K":
        assert (config.loss.k, cell.k) == (int(cell.row), 5)
    elif config.loss.name in WITH_K and experiment.name != "cifar100-top1":  # which uses the models of top-5
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
            has_k = configs[0].loss.name in WITH_K
            assert len({config.key() for config in configs}) == (len(configs) if has_k else 1)
            # The settings found for one K serve all.
            assert len({replace(config.loss, k=5) for config in configs}) == 1


def sgd(lr: float, weight_decay: float, milestones: tuple[float, ...], **others: Any) -> OptimConfig:
    usual: dict[str, Any] = {"momentum": 0.9, "schedule": "step", "decay": 0.1} | others
    return OptimConfig(name="sgd", lr=lr, weight_decay=weight_decay, milestones=milestones, **usual)


LABEL_NOISE = DataConfig(name="cifar100", noise_groups="consecutive")
PLANTNET = DataConfig(name="plantnet300k")
TAIL = DataConfig(name="cifar100", imbalance=100)


@pytest.mark.parametrize(
    ("name", "data", "network", "epochs", "batch", "select", "optim"),
    [
        ("cifar100-top5", LABEL_NOISE, "densenet40_40", 300, 64, "micro", sgd(0.1, 1e-4, (0.5, 0.75))),
        ("plantnet-macro", PLANTNET, "resnet50.tv_in1k", 30, 32, "macro", sgd(2e-3, 1e-4, (2 / 3, 5 / 6))),
        ("imagenet-lt", DataConfig(name="imagenet_lt"), "resnet34", 100, 128, "macro", sgd(1e-2, 2e-3, (0.6, 0.8))),
        # From Cao et al. (2019), not from the paper.
        ("cifar100-lt", TAIL, "resnet32", 200, 128, "macro", sgd(0.1, 2e-4, (0.8, 0.9), decay=0.01, warmup_epochs=5)),
    ],
)
def test_a_protocol_is_that_of_the_paper(
    name: str, data: DataConfig, network: str, epochs: int, batch: int, select: str, optim: OptimConfig
) -> None:
    for cell in EXPERIMENTS[name].cells:
        config = EXPERIMENTS[name].config(cell, "paper", Path())
        assert replace(config.data, label_noise=0.0, redraw_noise=False, workers=data.workers) == data
        assert config.data.redraw_noise == (config.data.label_noise > 0)
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
        assert config.optim == sgd(lr, weight_decay, (0.25, 0.5, 0.75))
        assert (config.model.name, config.model.pretrained, config.model.head) == ("resnet18", False, "linear")
        assert (config.train.epochs, config.train.batch_size) == (120, 256)
        assert config.select_metric == f"micro_top{cell.k}"
        assert round(config.data.val_fraction * 1_281_167, -3) == 50_000


def test_patterns_choose_rows_and_columns(place: Place) -> None:
    experiment = EXPERIMENTS["cifar100-top5"]
    chosen = [cell.label for cell in experiment.selected(["0.4/noised", "0.4/cross*"])]
    assert chosen == ["0.4/cross_entropy", "0.4/noised"]
    assert {cell.row for cell in experiment.selected(["smooth"])} == set(experiment.rows)
    with pytest.raises(sl.ShortlistError, match=r"0\.0, 0\.1"):
        place.run(experiment, only=["0.5"])
    with pytest.raises(sl.ShortlistError, match="--seeds"):
        place.run(experiment, seeds=())


def test_the_long_tail_is_trained_with_what_its_search_found() -> None:
    search = EXPERIMENTS["cifar100-lt-search"]
    found = {result.row: result.value for result in read_results(results_file(ROOT / "results", search, "paper"))}
    assert found.keys() == set(search.rows)
    best = {cell.recipe: cell for cell in sorted(search.cells, key=lambda cell: found[cell.row])}
    for recipe, cell in best.items():
        chosen = search.config(cell, "paper", Path()).loss
        assert replace(recipes.build(recipe).loss, k=5) == chosen


def test_every_published_result_can_be_traced_to_its_configuration() -> None:
    published = list((ROOT / "results").glob("*.csv"))
    assert published
    for path in published:
        results, experiment = read_results(path), EXPERIMENTS[path.stem]
        configs = [from_dict(json.loads(config_file(ROOT / "results", result).read_text())) for result in results]
        assert [result.config for result in results] == [config.key() for config in configs]
        shown = latest_setups(results)
        for result, config in zip(results, configs, strict=True):
            assert (config.recipe, config.train.epochs) == (result.recipe, result.epochs)
            if result in shown:
                (cell,) = experiment.selected([f"{result.row}/{result.column}"])
                today = experiment.config(cell, cast("Scale", result.scale), Path())
                assert (identity(config), result.K) == (identity(today), cell.k), "the same command would find it"
