"""Counting the non-zero coordinates of gradients during training."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import shortlist as sl
from shortlist.program.reproduce.gradients import COUNTS, CountingLoss
from shortlist.program.reproduce.registry import EXPERIMENTS
from shortlist.program.reproduce.results import results_file
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.loop import Interrupted
from tests.support.reproducing import Place, TrainedPlaces, interrupt_in

SPARSITY = EXPERIMENTS["gradient-sparsity"]
ONE_CELL = replace(SPARSITY, cells=SPARSITY.selected(["0.1/noised"]))


def test_gradients_are_counted_over_an_interruption(
    place: Place, trained: TrainedPlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_in(patch, step=2)
        with pytest.raises(Interrupted):
            place.run(ONE_CELL)
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
    loss = CountingLoss(nn.CrossEntropyLoss())
    value = loss(scores, target)
    assert torch.equal(value, nn.functional.cross_entropy(scores, target))
    value.backward()
    assert (int(loss.nonzero), loss.images) == (60, 6)
    hard = CountingLoss(sl.TopKHinge(3))
    hard(torch.where(target.unsqueeze(1) == torch.arange(10), 0.0, scores + 5), target).backward()
    assert (int(hard.nonzero), hard.images) == (12, 6)
