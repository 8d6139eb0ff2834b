"""Implementations with wrong results are not timed."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shortlist as sl
from shortlist import functional, metrics
from shortlist.heads.noised import NoisedTopKHead
from tests.support.benching import run_quick

noised_topk_hinge = functional.noised_topk_hinge


def of_the_next_rank(scores: Tensor, target: Tensor, k: int, **settings: Any) -> Tensor:
    return noised_topk_hinge(scores, target, k + 1, **settings)


def too_noisy(scores: Tensor, target: Tensor, k: int, *, epsilon: float, **settings: Any) -> Tensor:
    """Correct with given noise, and in the limit."""
    own_noise = "noise" not in settings and settings["n_samples"] != math.inf
    return noised_topk_hinge(scores, target, k, epsilon=(1.5 if own_noise else 1) * epsilon, **settings)


def with_the_same_noise_always(scores: Tensor, target: Tensor, k: int, **settings: Any) -> Tensor:
    if "noise" not in settings and settings["n_samples"] != math.inf:
        settings["generator"] = torch.Generator().manual_seed(3)
    return noised_topk_hinge(scores, target, k, **settings)


def with_half_its_gradient(scores: Tensor, target: Tensor, k: int, **settings: Any) -> Tensor:
    value = noised_topk_hinge(scores, target, k, **settings)
    return value / 2 + value.detach() / 2


def with_a_dense_gradient(scores: Tensor, target: Tensor, k: int, **settings: Any) -> Tensor:
    """Correct with given noise; the value is always correct."""
    value = noised_topk_hinge(scores, target, k, **settings)
    return value if "noise" in settings else value + 0 * scores.mean() + (scores - scores.detach()).mean()


def off_by_a_little_on_its_own_noise(scores: Tensor, target: Tensor, k: int, **settings: Any) -> Tensor:
    value = noised_topk_hinge(scores, target, k, **settings)
    own_noise = "noise" not in settings and settings["n_samples"] != math.inf
    return value + 0.1 if own_noise else value


WRONG = [
    of_the_next_rank,
    too_noisy,
    with_the_same_noise_always,
    with_half_its_gradient,
    with_a_dense_gradient,
    off_by_a_little_on_its_own_noise,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda function: function.__name__)
def test_a_wrong_loss_is_not_timed(
    wrong: Callable[..., Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "noised_topk_hinge", wrong)
    with pytest.raises(sl.ShortlistError, match=r"noised_topk_hinge \(8 x 40 .* differs"):
        run_quick(tmp_path / "out.csv", "loss")
    assert not (tmp_path / "out.csv").exists()


def test_a_wrong_smoothed_hinge_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = functional.smooth_topk_hinge

    def only_in_float64(scores: Tensor, target: Tensor, k: int) -> Tensor:
        return right(scores, target, k) * (1 if scores.dtype == torch.float64 else 1.001)

    monkeypatch.setattr(functional, "smooth_topk_hinge", only_in_float64)
    with pytest.raises(sl.ShortlistError, match=r"smooth_topk_hinge .* differs"):
        run_quick(tmp_path / "out.csv", "hinge")


def test_wrong_metrics_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = metrics.TopKMetrics.update
    monkeypatch.setattr(metrics.TopKMetrics, "update", lambda self, scores, target: right(self, -scores, target))
    with pytest.raises(sl.ShortlistError, match=r"TopKMetrics.update .* differs"):
        run_quick(tmp_path / "out.csv", "metrics")


def test_wrong_sets_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sl.PredictionSets.forward
    monkeypatch.setattr(sl.PredictionSets, "forward", lambda self, scores: right(self, -scores))
    with pytest.raises(sl.ShortlistError, match=r"PredictionSets .* differs"):
        run_quick(tmp_path / "out.csv", "metrics")


@pytest.mark.parametrize("factor", [0.5, 1.01])
def test_a_wrong_head_is_not_timed(factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = NoisedTopKHead.forward

    def wrong(self: NoisedTopKHead, features: Tensor, target: Tensor, **settings: Any) -> Tensor:
        return factor * right(self, features, target, **settings)

    monkeypatch.setattr(NoisedTopKHead, "forward", wrong)
    with pytest.raises(sl.ShortlistError, match=r"NoisedTopKHead .* differs"):
        run_quick(tmp_path / "out.csv", "head")
