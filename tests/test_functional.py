"""Properties of single losses: hinges, margins, limits of the settings."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

import shortlist as sl
from shortlist import functional as F
from tests.support import literal_formulas as literal
from tests.support.drawing import normal
from tests.support.loss_cases import LOSSES, K, LossCase, noise_for

REDUCTIONS = ("none", "mean", "sum")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (4, 5, 3), (2, 5, 2, 3), (0, 5), (2, 5, 0)], ids=str)
@pytest.mark.parametrize("kind", ["labels", "ignored", "probabilities"])
def test_without_focus_focal_is_cross_entropy(
    reduction: str, weighted: bool, shape: tuple[int, ...], kind: str
) -> None:
    scores = normal(*shape).requires_grad_()
    weight = torch.linspace(0.5, 2, 5, dtype=torch.float64) if weighted else None
    if kind == "probabilities":
        target = normal(*shape).softmax(min(1, len(shape) - 1))
    else:
        target = torch.randint(5, shape[:1] + shape[2:] if len(shape) > 1 else ())
    kwargs: dict[str, Any] = {
        "weight": weight,
        "reduction": reduction,
        "ignore_index": 2 if kind == "ignored" else -100,
    }
    got, want = (
        F.focal(scores, target, gamma=0.0, **kwargs),
        torch.nn.functional.cross_entropy(scores, target, **kwargs),
    )
    torch.testing.assert_close(got, want, equal_nan=True)
    (got_grad,), (want_grad,) = (torch.autograd.grad(loss.sum(), scores) for loss in (got, want))
    torch.testing.assert_close(got_grad, want_grad, equal_nan=True)


def test_losses_in_float64_keep_its_digits_where_the_odds_are_long() -> None:
    """Above 20, the softplus of torch returns its argument."""
    odds = torch.arange(15.0, 35.0, dtype=torch.float64)
    scores, target = torch.stack([torch.zeros_like(odds), odds], 1), torch.zeros(20, dtype=torch.int64)
    want = odds + torch.log1p(torch.exp(-odds))
    torch.testing.assert_close(F.focal(scores, target, gamma=0.0, reduction="none"), want, rtol=1e-14, atol=0)


@pytest.mark.parametrize("assign", [False, True])
def test_margins_are_those_of_the_counts_that_were_loaded(assign: bool) -> None:
    scores, target = normal(4, 3), torch.tensor([0, 1, 2, 0])
    trained, fresh = (sl.ImbalancedNoisedTopKHinge(counts, 1, epsilon=0.0) for counts in ([1, 2, 30], [9, 9, 9]))
    assert trained(scores, target) != fresh(scores, target)
    fresh.load_state_dict(trained.state_dict(), assign=assign)
    assert trained(scores, target) == fresh(scores, target)
    assert copy.deepcopy(fresh)(scores, target) == trained(scores, target)


def test_settings_may_be_numbers_of_numpy() -> None:
    scores, target = normal(4, 6), torch.tensor([0, 5, 2, 3])
    noise = noise_for(scores)
    numpys = F.noised_topk_hinge(scores, target, np.int64(2), epsilon=np.float32(0.5), noise=noise)  # type: ignore[arg-type]
    assert numpys == F.noised_topk_hinge(scores, target, 2, epsilon=0.5, noise=noise)
    module = sl.ImbalancedNoisedTopKHinge([1, 2, 3, 4, 5, 6], np.int64(2), max_margin=np.float32(0.5))  # type: ignore[arg-type]
    assert module(scores, target, noise=noise).isfinite()


def test_equal_margins_and_unit_scale_are_the_balanced_loss() -> None:
    scores, target = normal(4, 6), torch.tensor([0, 5, 2, 3])
    noise = noise_for(scores)
    balanced = F.noised_topk_hinge(scores, target, 3, epsilon=0.1, noise=noise)
    equal = F.imbalanced_noised_topk_hinge(
        scores, target, [7] * 6, 3, epsilon=0.1, max_margin=1.0, scale=1.0, noise=noise
    )
    torch.testing.assert_close(equal, balanced)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_without_noise_the_noised_loss_is_the_calibrated_hinge(k: int) -> None:
    scores, target = normal(8, 6), torch.randint(6, (8,))
    calibrated = torch.stack([literal.calibrated_topk_hinge(s, int(y), k) for s, y in zip(scores, target, strict=True)])
    noise = noise_for(scores)
    for epsilon in (0.0, 1e-6):
        noised = F.noised_topk_hinge(scores, target, k, epsilon=epsilon, noise=noise, reduction="none")
        torch.testing.assert_close(noised, calibrated, atol=epsilon * noise.abs().max().item() + 1e-15, rtol=0)


def test_infinitely_many_samples_are_the_mean_of_many() -> None:
    scores, target = normal(3, 6), torch.tensor([5, 1, 0])
    exact = F.noised_topk_hinge(scores, target, K, epsilon=0.4, n_samples=math.inf, reduction="none")
    draws = torch.randn(3, 6, 20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    perturbed = scores[..., None] + 0.4 * draws
    rivals = perturbed.sort(1, descending=True).values[:, K]
    mean, error = rivals.mean(-1), rivals.std(-1) / math.sqrt(rivals.shape[-1])
    own = scores.gather(1, target[:, None]).squeeze(1)
    assert (exact > 0).all(), "the hinge must be active for the comparison to say something"
    assert ((exact - (1 + mean - own)).abs() < 5 * error).all()


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("topk_error", 4),
        ("topk_hinge", 3),
        ("convex_topk_hinge", 3),
        ("calibrated_topk_hinge", 3),
        ("noised_topk_hinge", 3),
    ],
)
def test_every_k_up_to_the_largest_works_and_the_loss_falls_with_k(name: str, largest: int) -> None:
    scores, target = normal(6, 4), torch.randint(4, (6,))
    noise = {"noise": noise_for(scores)} if name == "noised_topk_hinge" else {}
    values = [getattr(F, name)(scores, target, k, reduction="none", **noise) for k in range(1, largest + 1)]
    for easier, harder in zip(values[1:], values, strict=False):
        assert (easier <= harder + 1e-12).all()


def test_at_full_length_the_error_is_zero() -> None:
    assert F.topk_error(normal(6, 4), torch.randint(4, (6,)), 4) == 0


def test_hinges_bound_the_error() -> None:
    scores, target = normal(50, 6), torch.randint(6, (50,))
    error = F.topk_error(scores, target, K, reduction="none")
    for bound in (F.topk_hinge, F.convex_topk_hinge, F.calibrated_topk_hinge):
        assert (bound(scores, target, K, reduction="none") >= error - 1e-12).all()
    convex, plain = (f(scores, target, K, reduction="none") for f in (F.convex_topk_hinge, F.topk_hinge))
    assert (convex >= plain - 1e-12).all()


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "probabilities"])
def test_noise_decides_between_large_scores_as_between_small_ones(labels: bool) -> None:
    target = torch.tensor([5]) if labels else torch.eye(6)[5:]
    noise = normal(1, 6, 500, dtype=torch.float32)
    grads = []
    for offset in (0.0, 2.0**14):
        scores = torch.full((1, 6), offset).requires_grad_()
        F.noised_topk_hinge(scores, target, 2, epsilon=1e-3, noise=noise).backward()
        grads.append(scores.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_a_tie_with_the_kth_score_is_no_error() -> None:
    scores = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert F.topk_error(scores, torch.tensor([2]), 1) == 0
    assert F.topk_error(scores, torch.tensor([3]), 3) == 1


def test_a_tied_label_is_still_pushed_up() -> None:
    # All scores are equal: whichever class counts as the K-th, the label must not be compared with itself.
    for label in range(4):
        scores = torch.zeros(1, 4, requires_grad=True)
        F.topk_hinge(scores, torch.tensor([label]), 2).backward()
        assert scores.grad is not None
        assert scores.grad[0, label] == -1


def test_noised_gradient_touches_at_most_one_class_a_draw_and_the_label() -> None:
    scores, n_samples = normal(20, 50).requires_grad_(), 4
    F.noised_topk_hinge(scores, torch.randint(50, (20,)), 5, epsilon=1.0, n_samples=n_samples).backward()
    assert scores.grad is not None
    touched = (scores.grad != 0).sum(1)
    assert touched.max() <= n_samples + 1
    assert touched.max() > 2, "several draws find several classes"


def test_counts_beyond_the_half_types_survive_half_precision() -> None:
    loss = sl.LogitAdjustedLoss(torch.tensor([1.0, 1e5]))
    scores, target = torch.zeros(1, 2), torch.tensor([0])
    torch.testing.assert_close(loss.half()(scores, target), torch.tensor(math.log1p(1e5)))


# Margins

with_margins = pytest.mark.parametrize(
    "loss", [case for case in LOSSES if case.has_margins], ids=lambda case: case.name
)


@with_margins
def test_margins_of_float64_scores_are_float64(loss: LossCase) -> None:
    scores, target = normal(6, 7), torch.arange(6)
    noise = noise_for(scores)
    want = torch.stack([loss.literal(row, int(label), z) for row, label, z in zip(scores, target, noise, strict=True)])
    module = loss.module(7, reduction="none")
    for got in (
        loss(scores, target, reduction="none", **loss.given(noise)),
        module(scores, target, **loss.given(noise)),
        module.half()(scores, target, **loss.given(noise)),
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@with_margins
def test_a_module_in_half_precision_keeps_its_margins(loss: LossCase) -> None:
    scores, target = normal(6, 7, dtype=torch.float32), torch.arange(6)
    given = loss.given(noise_for(scores))
    module = loss.module(7)
    want = module(scores, target, **given)
    torch.testing.assert_close(module.half()(scores, target, **given), want, rtol=0, atol=0)


def test_ldam_keeps_the_digits_of_large_scores() -> None:
    scores = 1e4 + normal(20, 6, dtype=torch.float32)
    target = torch.arange(20) % 6
    got, want = (F.ldam(s, target, [1, 2, 3, 4, 5, 6], reduction="none") for s in (scores, scores.double()))
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
