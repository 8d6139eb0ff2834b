"""The smoothed operators, and cases for them."""

from typing import Protocol

import pytest
import torch
from torch import Tensor

from shortlist import smooth_topk, smooth_topk_sum
from tests.support.drawing import SHAPES, normal

HALF_TYPES = [torch.float16, torch.bfloat16]
FLOAT_TYPES = [*HALF_TYPES, torch.float32, torch.float64]


class Operator(Protocol):
    """``smooth_topk`` or ``smooth_topk_sum``, which at epsilon = 0 are ``topk_value`` and ``topk_sum``."""

    def __call__(
        self,
        x: Tensor,
        k: int,
        *,
        epsilon: float,
        n_samples: int = 5,
        dim: int = -1,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor: ...


both_operators = pytest.mark.parametrize("operator", [smooth_topk, smooth_topk_sum])


# Rows, classes, draws and K: the first, one inside, the last.
Case = tuple[int, int, int, int]
CASES: list[Case] = [(*shape, k) for shape in SHAPES for k in sorted({1, min(3, shape[1]), shape[1]})]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
hard_and_smooth = pytest.mark.parametrize("epsilon", [0.0, 0.7])


def weight_of(operator: Operator, k: int) -> int:
    """How many scores the operator adds up."""
    return k if operator is smooth_topk_sum else 1


def drawn(case: Case) -> tuple[Tensor, Tensor, int]:
    """Scores, noise and K."""
    rows, num_classes, n_samples, k = case
    return normal(rows, num_classes), normal(rows, num_classes, n_samples, seed=1), k
