"""The kernels that sample against the plain loss, on the noise that they see."""

import math
from dataclasses import replace

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
    scores: Tensor, target: Tensor, k: int, epsilon: float, n_samples: int, plan: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """Value and gradient of every row; returns the cut-offs of a lazy search, and the noise that it saw."""
    plan = plan or plan_for(*scores.shape, k + 1, n_samples)
    here, labels = scores.to(DEVICE), Labels.of(target.to(DEVICE), None, None)
    settings = Settings.of(k, 1.0, epsilon, n_samples, -100, "none")
    results, search = compute_rows(here, labels, settings, seed_for(plan, len(scores), n_samples), plan)
    cutoffs = cutoffs_of(search, plan)
    noise = noise_seen(scores, cutoffs, n_samples)
    plain = scores.double().requires_grad_()
    expected = sl.functional.noised_topk_hinge(plain, target, k, epsilon=epsilon, noise=noise, reduction="none")
    torch.testing.assert_close(results.loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    upstream = torch.arange(1.0, len(target) + 1)
    kept = (labels.target_R, results.classes_RB, results.slope_R, results.total_share)
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
        settings, labels = Settings.of(1, 1.0, 0.5, 1, -100, reduction), Labels.of(target.to(DEVICE), None, None)
        losses[reduction] = compute_rows(scores.to(DEVICE), labels, settings, seed_for(plan, 6, 1), plan)[0].loss
    torch.testing.assert_close(losses["mean"], losses["none"].mean())


def test_a_search_that_never_finds_enough_gives_nan() -> None:
    scores, target = draw(1, 300, 1.0)
    plan = lazy_plan(scores, 3, 1, capacity=2, max_tries=2)  # no threshold lists three classes in two places
    labels, settings = Labels.of(target.to(DEVICE), None, None), Settings.of(2, 1.0, 0.3, 1, -100, "none")
    assert compute_rows(scores.to(DEVICE), labels, settings, seed_for(plan, 1, 1), plan)[0].loss.isnan().all()
