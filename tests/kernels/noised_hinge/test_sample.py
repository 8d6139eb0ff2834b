"""The kernels that sample against the plain loss, on the noise that they see."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import shortlist as sl

pytest.importorskip("triton")
from shortlist.kernels.noised_hinge.autograd import Labels, Settings, compute_rows, gradient
from shortlist.kernels.noised_hinge.plan import Plan, plan_for
from tests.support.noised_hinge_kernels import DEVICE, cutoffs_of, draw, lazy_plan, noise_seen, seed_for

# The interpreter computes with infinities and NaNs as a GPU does, and numpy warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def assert_as_plain(
    scores: Tensor,
    target: Tensor,
    k: int | tuple[int, ...],
    epsilon: float,
    n_samples: int,
    plan: Plan | None = None,
    *,
    epsilon_R: Tensor | None = None,
    **settings_of_loss: Any,
) -> tuple[Tensor, Tensor]:
    """Value and gradient of every row; returns the cut-offs of a lazy search, and the noise that it saw.

    Args:
        epsilon_R: What the kernels take if the loss is ``relative``.
    """
    ks = k if isinstance(k, tuple) else (k,)
    plan = plan or plan_for(*scores.shape, ks[-1] + 1, n_samples)
    epsilon_R = None if epsilon_R is None else epsilon_R.to(DEVICE)
    here, labels = scores.to(DEVICE), Labels.of(target.to(DEVICE), None, None, epsilon_R)
    margin = settings_of_loss.get("margin", 1.0)
    settings = Settings.of(ks, 1.0, margin, epsilon, n_samples, -100, "none")
    results, search = compute_rows(here, labels, settings, seed_for(plan, len(scores), n_samples), plan)
    cutoffs = cutoffs_of(search, plan)
    noise = noise_seen(scores, cutoffs, n_samples)
    plain = scores.double().requires_grad_()
    expected = sl.functional.noised_topk_hinge(
        plain, target, k, epsilon=epsilon, noise=noise, reduction="none", **settings_of_loss
    )
    torch.testing.assert_close(results.loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    upstream = torch.arange(1.0, len(target) + 1)
    kept = (labels.target_R, results.classes_RPB, results.slope_RP, results.total_share)
    got = gradient(upstream.to(DEVICE), *kept, scores.shape[1], torch.float32, "none")
    (expected_gradient,) = torch.autograd.grad((expected * upstream.double()).sum(), plain)
    torch.testing.assert_close(got.cpu().double(), expected_gradient, rtol=1e-5, atol=1e-6)
    return torch.empty(0) if cutoffs is None else cutoffs, noise


DENSE = [(3, 40, 3, 2, 0.3, 1.0), (2, 40, 38, 2, 0.3, 1.0), (2, 65, 1, 3, 2.0, 0.0), (1, 2, 1, 1, 0.1, 1.0)]


@pytest.mark.parametrize(("n", "num_classes", "k", "n_samples", "epsilon", "spread"), DENSE)
def test_short_rows_are_the_plain_loss_on_the_same_noise(
    n: int, num_classes: int, k: int, n_samples: int, epsilon: float, spread: float
) -> None:
    assert_as_plain(*draw(n, num_classes, spread), k, epsilon, n_samples)


LAZY = [
    (2, 500, 3, 2, 0.3, 1.0, 1),
    (2, 500, 3, 2, 1.0, 0.1, 1),  # flat: every class may be the one
    (1, 700, 1, 2, 0.01, 3.0, 2),  # steep: a few are certain
    (1, 700, 8, 2, 1.0, 1.0, 1),
    (1, 4000, 2, 2, 0.05, 1.0, 1),  # few are hot, and far below the level
    (1, 97, 30, 1, 0.5, 1.0, 1),  # the level is found too high and must come down
]


@pytest.mark.parametrize(("n", "num_classes", "k", "n_samples", "epsilon", "spread", "splits"), LAZY)
def test_long_rows_are_the_plain_loss_on_noise_that_was_hardly_drawn(
    n: int, num_classes: int, k: int, n_samples: int, epsilon: float, spread: float, splits: int
) -> None:
    scores, target = draw(n, num_classes, spread)
    plan = lazy_plan(scores, k + 1, n_samples, splits=splits)
    assert_as_plain(scores, target, k, epsilon, n_samples, plan)


SEVERAL = [
    (3, 40, (1, 3, 5), 2, 0.3, 1.0, None),
    (2, 40, (1, 2, 38, 39), 2, 0.3, 1.0, None),
    (2, 65, (1, 3), 3, 2.0, 0.0, None),  # all scores are equal
    (2, 500, (1, 3, 5), 2, 0.3, 1.0, 1),
    (1, 700, (1, 2, 8), 2, 1.0, 1.0, 2),
    (1, 97, (1, 30), 1, 0.5, 1.0, 1),  # the level is found too high and must come down
]


@pytest.mark.parametrize(("n", "num_classes", "ks", "n_samples", "epsilon", "spread", "splits"), SEVERAL)
def test_several_ranks_are_found_in_the_same_samples(
    n: int, num_classes: int, ks: tuple[int, ...], n_samples: int, epsilon: float, spread: float, splits: int | None
) -> None:
    scores, target = draw(n, num_classes, spread)
    plan = None if splits is None else lazy_plan(scores, ks[-1] + 1, n_samples, splits=splits)
    assert_as_plain(scores, target, ks, epsilon, n_samples, plan, margin=0.7)


@pytest.mark.parametrize("is_lazy", [False, True])
def test_values_that_are_equal_are_found_for_each_of_their_ranks(is_lazy: bool) -> None:
    """The noise is lost beside these scores, which are equal in pairs."""
    scores = 1e9 * (torch.arange(40.0) // 2).repeat(2, 1)
    labels = Labels.of(torch.tensor([0, 39], device=DEVICE), None, None)
    plan, settings = lazy_plan(scores, 6, 2, is_lazy=is_lazy), Settings.of((1, 2, 3, 5), 1.0, 0.0, 0.1, 2, -100, "none")
    results, _ = compute_rows(scores.to(DEVICE), labels, settings, seed_for(plan, 2, 2), plan)
    below_best = torch.tensor([0.0, 1.0, 1.0, 2.0])  # by ones, at the ranks 2, 3, 4 and 6
    best = torch.tensor([19e9, 0.0])
    expected = (best.unsqueeze(1) - 1e9 * below_best).relu().mean(1)
    torch.testing.assert_close(results.loss.cpu(), expected)
    chosen = scores.to(DEVICE).gather(1, results.classes_RPB.flatten(1).long()).view(2, 4, 2)
    torch.testing.assert_close(chosen[0, :, 0].cpu().flip(0), 1e9 * (19 - below_best), rtol=0, atol=0)


@pytest.mark.parametrize("k", [3, (1, 3)])
@pytest.mark.parametrize("num_classes", [40, 500])
def test_noise_relative_to_each_rows_spread(num_classes: int, k: int | tuple[int, ...]) -> None:
    scores, target = draw(4, num_classes, 1.0)
    scores *= torch.tensor([[0.01], [1.0], [100.0], [0.0]])
    scores[3, : num_classes // 2] = 5.0  # as many equal scores as the spread is taken of, and more
    best = scores.double().topk(8).values
    spread_R = best.std(1, correction=0).float().clamp(min=1e-30)
    plan = lazy_plan(scores, 4, 2) if num_classes == 500 else None
    assert_as_plain(scores, target, k, 0.5, 2, plan, epsilon_R=0.5 * spread_R, relative=True)


def test_a_list_that_is_too_short_raises_the_threshold() -> None:
    scores, target = draw(1, 300, 1.0)
    cutoffs, noise = assert_as_plain(scores, target, 2, 0.3, 2, lazy_plan(scores, 3, 2, capacity=8))
    assert ((scores.unsqueeze(-1) + 0.3 * noise > cutoffs[:, 0]).sum(1) > 8).all(), "the level let no more pass"


def test_flat_rows_are_cold_and_the_level_comes_down() -> None:
    scores, target = draw(2, 2000, 0.1)
    plan = lazy_plan(scores, 6, 3, num_passing=6.0, capacity=32)
    cutoffs, noise = assert_as_plain(scores, target, 5, 1.0, 3, plan)
    level_R1, cold_limit_R1 = cutoffs.split(1, -1)
    assert not (scores - level_R1 > cold_limit_R1).any(), "no class is hot"
    passing = (scores.unsqueeze(-1) + noise > level_R1.unsqueeze(-1)).sum(1)
    assert (passing < 6).any(), "in some sample too few pass at first"


@pytest.mark.parametrize("ruled_out_at", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("alive", [7, 70])
def test_the_noise_of_the_few_that_are_not_ruled_out_counts(alive: int, ruled_out_at: float) -> None:
    """They are neighbours, as in a family of classes: then the best classes of the tiles seem too few."""
    scores, _ = draw(2, 1000, 2.0)
    scores[:, :500], scores[:, 500 + alive :] = ruled_out_at, ruled_out_at
    assert_as_plain(scores, torch.tensor([500, 503]), 3, 0.2, 2, lazy_plan(scores, 4, 2))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("lists_hot_apart", [False, True])
def test_rows_that_many_programs_read(splits: int, lists_hot_apart: bool) -> None:
    """Several parts in ``prepare``, several lists of hot classes, several blocks of the gradient."""
    scores, target = draw(2, 4200, 1.0)
    plan = lazy_plan(scores, 4, 2, splits=splits, lists_hot_apart=lists_hot_apart, tiles_read=64)
    assert_as_plain(scores, target, 3, 0.5, 2, plan)


def test_lists_of_parts_that_are_too_short_are_made_anew() -> None:
    scores, target = draw(2, 700, 1.0)
    assert_as_plain(scores, target, 2, 1.0, 2, lazy_plan(scores, 3, 2, splits=2, capacity=8))


def test_a_row_with_more_hot_classes_than_can_be_listed_does_without() -> None:
    scores, target = draw(1, 2000, 0.1)
    scores[:, 640:] -= 10
    cutoffs, _ = assert_as_plain(scores, target, 2, 1.0, 1, lazy_plan(scores, 3, 1))
    assert cutoffs[0, 1] == math.inf


def test_more_rows_and_draws_than_are_added_at_once() -> None:
    scores, target = draw(6, 3, 1.0)
    plan = replace(plan_for(6, 3, 2, 6), rows_summed=4, samples_summed=4)
    assert_as_plain(scores, target, 1, 0.5, 6, plan)
    losses = {}
    for reduction in ("none", "mean"):
        labels = Labels.of(target.to(DEVICE), None, None)
        settings = Settings.of((1,), 1.0, 1.0, 0.5, 1, -100, reduction)
        losses[reduction] = compute_rows(scores.to(DEVICE), labels, settings, seed_for(plan, 6, 1), plan)[0].loss
    torch.testing.assert_close(losses["mean"], losses["none"].mean())


def test_a_search_that_never_finds_enough_gives_nan() -> None:
    scores, target = draw(1, 300, 1.0)
    plan = lazy_plan(scores, 3, 1, capacity=2, max_tries=2)  # no threshold lists three classes in two places
    labels, settings = Labels.of(target.to(DEVICE), None, None), Settings.of((2,), 1.0, 1.0, 0.3, 1, -100, "none")
    assert compute_rows(scores.to(DEVICE), labels, settings, seed_for(plan, 1, 1), plan)[0].loss.isnan().all()
