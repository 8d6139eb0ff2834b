"""Evaluation as its callers see it."""

import csv
import json
import sys

import pytest
import torch
from torch import nn

from shortlist.prior_correction import PriorCorrection
from shortlist.program.cli import main as cli
from shortlist.program.config import TrainConfig
from shortlist.program.data.base import Problem
from shortlist.program.data.in_memory import TensorSplit
from shortlist.program.losses import CrossEntropyConfig
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.evaluate import evaluate, evaluate_run
from shortlist.program.training.loop import train
from tests.support.small_runs import small_config, write_embeddings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run whose loss has a K that is not among those it is measured at."""
    folder = tmp_path_factory.mktemp("run")
    settings = TrainConfig(epochs=1, batch_size=64, ks=(1, 3), device="cpu")
    loss = CrossEntropyConfig(k=2)
    config = small_config(write_embeddings(folder / "points.npz", images=200), loss=loss, train=settings)
    return train(config, folder=folder / "run", quiet=True)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_is_without_dropout_and_leaves_the_network_in_its_mode(training: bool) -> None:
    scores = torch.rand(40, 6)
    split = TensorSplit(scores, torch.arange(40) % 6)
    problem = Problem(tuple("abcdef"), split, split, split, (6,))
    network = nn.Sequential(nn.Dropout(0.5)).train(training)
    result = evaluate(network, problem, split, (1, 3), device=torch.device("cpu"), batch_size=16)
    assert torch.equal(result.scores, scores.sort(descending=True).values)
    assert network.training == training


def test_a_class_without_images_here_has_no_accuracy_whatever_it_was_trained_on() -> None:
    scores = torch.eye(3)
    train = TensorSplit(scores, torch.tensor([0, 1, 1]))  # nothing of class 2
    test = TensorSplit(scores, torch.tensor([0, 2, 2]))  # nothing of class 1
    problem = Problem(("a", "b", "c"), train, test, test, (3,))
    result = evaluate(nn.Identity(), problem, test, (1,), device=torch.device("cpu"), batch_size=3)
    rows = list(csv.DictReader(result.per_class_csv(problem).splitlines()))
    assert [(row["train_images"], row["images"]) for row in rows] == [("1", "1"), ("2", "0"), ("0", "2")]
    assert [row["top1"] for row in rows] == ["1.000000", "", "0.500000"]


def test_classes_are_listed_with_plain_and_with_corrected_accuracy() -> None:
    split = TensorSplit(torch.tensor([[1.0, 0.0], [1.0, 0.9]]), torch.tensor([0, 1]))
    train = TensorSplit(torch.zeros(10, 2), torch.tensor([0] * 9 + [1]))
    problem = Problem(("common", "rare"), train, split, split, (2,))
    correction = PriorCorrection(problem.class_counts)
    correction.tau.fill_(0.1)
    result = evaluate(
        nn.Identity(), problem, split, (1,), device=torch.device("cpu"), batch_size=2, correction=correction
    )
    rows = list(csv.DictReader(result.per_class_csv(problem).splitlines()))
    assert [row["top1"] for row in rows] == ["1.000000", "0.000000"]
    assert [row["corrected_top1"] for row in rows] == ["1.000000", "1.000000"]


def test_a_run_is_evaluated_at_the_ks_that_it_was_tested_at(run: RunFolder) -> None:
    assert evaluate_run(run, device="cpu")[0].metrics == run.read_json("final.json")["test"]


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_command_evaluates_the_split_that_it_is_asked_for(
    run: RunFolder, split: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", str(run.path), "--split", split, "--no-correction", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["shortlist", *arguments])
    cli.main()
    final = run.read_json("final.json")
    assert json.loads(capsys.readouterr().out) == final[split]
    assert final["val"] != final["test"]
