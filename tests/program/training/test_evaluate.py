"""Evaluation as its callers see it."""

import pytest
import torch
from torch import nn

from shortlist.data.splits import Problem
from shortlist.data.tensors import TensorSplit
from shortlist.evaluation import evaluate


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_is_without_dropout_and_leaves_the_network_in_its_mode(training: bool) -> None:
    scores = torch.rand(40, 6)
    split = TensorSplit(scores, torch.arange(40) % 6)
    problem = Problem(tuple("abcdef"), split, split, split, (6,))
    network = nn.Sequential(nn.Dropout(0.5)).train(training)
    result = evaluate(network, problem, split, (1, 3), device=torch.device("cpu"), batch_size=16)
    assert torch.equal(result.scores, scores.sort(descending=True).values)
    assert network.training == training
