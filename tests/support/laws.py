"""Statistical tests that two ways of drawing have the same distribution."""

from collections.abc import Callable

import numpy as np
import torch
from scipy import stats
from torch import Tensor

LEVEL = 1e-4
"""Significance level: how often one test of correct code fails, over the choice of its seed."""

Draws = Callable[[], tuple[Tensor, Tensor]]
"""Values and positions, both ``(R, B)``: independent rows of the same scores, with draws that must be independent."""

_LEAST_COUNT = 20


def assert_same_law(draw_fast: Draws, draw_dense: Draws) -> None:
    """Three tests: values, their means over the draws of a row, and positions together with values.

    Values and means are compared by the two-sample Kolmogorov-Smirnov test; the means would have another variance if
    the draws of a row were dependent. Positions are compared by the chi-square test of homogeneity. Each position is
    split by whether the value is above the common median, and rare ones are pooled.
    """
    (fast, fast_position), (dense, dense_position) = draw_fast(), draw_dense()
    assert fast.isfinite().all()
    for ours, theirs in ((fast.flatten(), dense.flatten()), (fast.mean(1), dense.mean(1))):
        p_value = stats.ks_2samp(ours.double().numpy(), theirs.double().numpy()).pvalue
        assert p_value > LEVEL, f"distributions of the values differ: p = {p_value:.1e}"
    median = torch.cat([fast, dense]).double().median()
    kinds = [2 * position + (value > median) for position, value in ((fast_position, fast), (dense_position, dense))]
    p_value = _homogeneity(*kinds)
    assert p_value > LEVEL, f"distributions of the positions differ: p = {p_value:.1e}"


def _homogeneity(first: Tensor, second: Tensor) -> float:
    """p-value of the chi-square test that two samples of small integers have the same distribution."""
    size = int(max(first.max(), second.max())) + 1
    counts = np.stack([torch.bincount(kind.flatten(), minlength=size).numpy() for kind in (first, second)])
    common = counts.sum(0) >= _LEAST_COUNT
    table = np.concatenate([counts[:, common], counts[:, ~common].sum(1, keepdims=True)], 1)
    table = table[:, table.sum(0) > 0]
    return 1.0 if table.shape[1] < 2 else float(stats.chi2_contingency(table).pvalue)
