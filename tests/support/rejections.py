"""Valid arguments, and the check that an invalid one is rejected with a helpful message."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import shortlist as sl
from tests.support.loss_cases import noise_for

N, L = 3, 4
SCORES = torch.tensor([[0.3, -1.2, 0.8, 0.1], [1.5, 0.2, -0.4, 0.9], [-0.7, 0.6, 1.1, -0.2]])
TARGET = torch.tensor([0, 3, 1])
COUNTS = [1, 4, 9, 16]
NOISE = noise_for(SCORES)


def rejects(name: str, rule: str, value: object) -> pytest.RaisesExc[sl.ShortlistError]:
    message = rf"^{name} must .*{re.escape(rule)}.*, got {re.escape(str(value))}"
    return pytest.raises(sl.ShortlistError, match=message)


def rejected_values(*values: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("value", values, ids=repr)


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "topk_value": sl.topk_value,
    "topk_sum": sl.topk_sum,
    "smooth_topk": partial(sl.smooth_topk, epsilon=0.1),
    "smooth_topk_sum": partial(sl.smooth_topk_sum, epsilon=0.1),
    "exact_topk": partial(sl.exact_topk, epsilon=0.1),
}
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
OPERATORS_OF_DIM = {name: partial(operator, SCORES, 2) for name, operator in OPERATORS.items()}
LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
    "CosineLinear": lambda in_features=5, num_classes=L: sl.CosineLinear(in_features, num_classes),
    "NoisedTopKHead": lambda in_features=5, num_classes=L: sl.NoisedTopKHead(
        in_features, num_classes, sl.NoisedTopKHinge(2)
    ),
    "ClassParallelNoisedTopKHead": lambda in_features=5, num_classes=L: sl.ClassParallelNoisedTopKHead(
        in_features, num_classes, sl.NoisedTopKHinge(2)
    ),
}
