"""Batches with ties, counted by TopKMetrics."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shortlist as sl
from tests.support.drawing import normal

L = 5
KS = (1, 2, 4)
COUNTS = [3, 50, 500, 50, 3]


def numbers(result: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in result.items()}


def approximately(want: dict[str, float]) -> Any:
    return pytest.approx(want, rel=1e-6, nan_ok=True)


def draw_batch(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores with ties, and labels of all classes but the last."""
    return (2 * normal(n, L, seed=seed)).round(), torch.arange(n) % (L - 1)


def counted(*batches: tuple[Tensor, Tensor], **settings: Any) -> sl.TopKMetrics:
    metrics = sl.TopKMetrics(L, **{"ks": KS, "class_counts": COUNTS} | settings)
    for scores, target in batches:
        metrics.update(scores, target)
    return metrics


def states(metrics: sl.TopKMetrics) -> list[Tensor]:
    return [state for state in metrics.metric_state.values() if isinstance(state, Tensor)]
