"""A row with a NaN or an infinity has a NaN loss and affects no other row; finite scores of any size are fine."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import shortlist as sl
from shortlist import functional as F
from tests.support.drawing import normal, value_and_grad
from tests.support.loss_cases import LOSSES, K, LossCase, every_differentiable_loss, every_loss, noise_for

L = 6
BY_NAME = {case.name: case for case in LOSSES}

# The limits of the settings have their own code.
LIMITS = [
    replace(
        BY_NAME["noised_topk_hinge"],
        name="noised_topk_hinge_exact",
        function=lambda s, y, **kw: F.noised_topk_hinge(s, y, K, epsilon=0.5, n_samples=math.inf, **kw),
        noised=False,
    ),
    replace(
        BY_NAME["smooth_topk_hinge"],
        name="smooth_topk_hinge_at_tau_0",
        function=lambda s, y, **kw: F.smooth_topk_hinge(s, y, K, tau=0.0, **kw),
    ),
]
every_loss_and_limit = pytest.mark.parametrize("loss", [*LOSSES, *LIMITS], ids=lambda case: case.name)
every_differentiable_loss_and_limit = pytest.mark.parametrize(
    "loss", [case for case in [*LOSSES, *LIMITS] if case.has_gradient], ids=lambda case: case.name
)
labels_and_probabilities = pytest.mark.parametrize("probabilities", [False, True], ids=["labels", "probabilities"])
first_inner_and_last_label = pytest.mark.parametrize("label", [0, 2, L - 1])


def target_for(scores: Tensor, label: int, probabilities: bool) -> Tensor:
    """The same label for every row, or positive probabilities."""
    if probabilities:
        return normal(*scores.shape, seed=7, dtype=scores.dtype).softmax(-1)
    return torch.full((len(scores),), label)


def rows_with(value: float, dtype: torch.dtype) -> Tensor:
    """Two rows for every class: one with ``value`` at that class, then one without it."""
    scores = normal(2 * L, L, dtype=dtype)
    return scores.index_put((torch.arange(0, 2 * L, 2), torch.arange(L)), torch.tensor(value, dtype=dtype))


@every_loss_and_limit
@labels_and_probabilities
@first_inner_and_last_label
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_one_bad_score_anywhere_spoils_its_row_and_no_other(
    loss: LossCase, dtype: torch.dtype, bad: float, label: int, probabilities: bool
) -> None:
    spoilt, clean = rows_with(bad, dtype), normal(2 * L, L, dtype=dtype)
    target, noise = target_for(clean, label, probabilities), loss.given(noise_for(clean))
    got = loss(spoilt, target, reduction="none", **noise)
    assert got[::2].isnan().all()
    assert torch.equal(got[1::2], loss(clean, target, reduction="none", **noise)[1::2])


@every_loss_and_limit
@labels_and_probabilities
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_bad_score_spoils_the_mean_and_the_sum(
    loss: LossCase, reduction: str, bad: float, probabilities: bool
) -> None:
    scores = normal(4, L)
    for column in range(L):
        spoilt = scores.index_put((torch.tensor(1), torch.tensor(column)), torch.tensor(bad, dtype=torch.float64))
        assert loss(spoilt, target_for(scores, 2, probabilities), reduction=reduction).isnan()


@every_loss_and_limit
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_ignored_row_may_hold_anything(loss: LossCase, reduction: str, bad: float) -> None:
    spoilt, target = rows_with(bad, torch.float64), torch.arange(2 * L) % L
    target[::2] = -100
    noise = noise_for(spoilt)
    given, given_kept = loss.given(noise), loss.given(noise[1::2])
    want = loss(spoilt[1::2], target[1::2], reduction=reduction, **given_kept)
    torch.testing.assert_close(loss(spoilt, target, reduction=reduction, **given), want)
    assert torch.equal(loss(spoilt, target, reduction="none", **given)[::2], torch.zeros(L, dtype=torch.float64))


@every_differentiable_loss_and_limit
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_an_ignored_row_has_no_gradient_whatever_it_holds(loss: LossCase, dtype: torch.dtype, bad: float) -> None:
    target = torch.arange(2 * L) % L
    target[::2] = -100
    weight = torch.linspace(1, 2, L)
    for shared in ({}, {"weight": weight}, {"weight": weight.index_fill(0, torch.tensor([0]), math.inf)}):
        loss_of = partial(loss, target=target, **shared)
        _, gradient = value_and_grad(loss_of, rows_with(bad, dtype))
        assert (gradient[::2] == 0).all()
        assert gradient[1::2].isfinite().all()


@every_differentiable_loss_and_limit
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_row_leaves_the_gradients_of_the_others_alone(loss: LossCase, bad: float) -> None:
    target = torch.arange(2 * L) % L
    ignoring = torch.where(torch.arange(2 * L) % 2 == 0, -100, target)
    for labels in (target, ignoring):
        gradients = [
            value_and_grad(lambda s, y=labels: loss(s, y, reduction="sum"), scores)[1]  # type: ignore[misc]
            for scores in (rows_with(bad, torch.float64), normal(2 * L, L))
        ]
        torch.testing.assert_close(gradients[0][1::2], gradients[1][1::2])


@every_differentiable_loss_and_limit
@labels_and_probabilities
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_row_moves_no_score_by_a_number(loss: LossCase, bad: float, probabilities: bool) -> None:
    """Its gradient is 0 or NaN; a NaN makes a gradient scaler skip the step."""
    spoilt = rows_with(bad, torch.float64)
    _, gradient = value_and_grad(lambda s: loss(s, target_for(s, 2, probabilities), reduction="sum"), spoilt)
    assert ((gradient[::2] == 0) | gradient[::2].isnan()).all()


def huge_rows(size: float, dtype: torch.dtype) -> Tensor:
    """``size`` and ``-size`` at every class in turn, at all of them, and at some."""
    signs = torch.tensor([[1.0], [-1.0]]).expand(2, L)
    mixed = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0], [0.0, 1.0, 1.0, -1.0, 1.0, 0.0]])
    extremes = size * torch.cat([signs, mixed]).to(dtype)
    return torch.cat([rows_with(size, dtype), rows_with(-size, dtype), extremes])


# In half precision, as large as the losses can be represented.
sizes = pytest.mark.parametrize(
    ("size", "dtype"),
    [(1e3, torch.float16), (1e4, torch.bfloat16), (1e4, torch.float32), (1e4, torch.float64), (1e30, torch.float32)],
    ids=str,
)


@every_loss
@first_inner_and_last_label
@sizes
def test_the_value_at_huge_scores_is_the_obvious_one(
    loss: LossCase, size: float, dtype: torch.dtype, label: int
) -> None:
    scores = huge_rows(size, dtype)
    noise = noise_for(scores)
    got = loss(scores, target_for(scores, label, False), reduction="none", **loss.given(noise))
    rows = zip(scores.double(), noise.double(), strict=True)
    want = torch.stack([loss.literal(row, label, draws) for row, draws in rows])
    # The literal focal loss takes the logarithm of a probability that rounds to zero.
    known = want.isfinite()
    assert known.sum() > len(known) / 2
    rtol = max(2 * torch.finfo(dtype).eps, 1e-6 if dtype != torch.float64 else 1e-12)
    last_place = size * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    torch.testing.assert_close(got[known].double(), want[known], rtol=rtol, atol=8 * last_place)


@every_loss
@labels_and_probabilities
def test_what_all_scores_have_in_common_is_nothing_to_the_loss(loss: LossCase, probabilities: bool) -> None:
    shift = 2.0**12
    scores = (64 * normal(50, L)).round().float() / 64  # exact after the shift
    scores[::2, 0] = 2.0**20  # a class far above all others, exact too
    target = target_for(scores, 1, probabilities)
    want = loss(scores, target, reduction="none")
    torch.testing.assert_close(loss(scores + shift, target, reduction="none"), want, rtol=1e-6, atol=1e-5)


@first_inner_and_last_label
@sizes
def test_at_any_size_focal_and_ldam_without_their_extras_are_the_cross_entropy(
    size: float, dtype: torch.dtype, label: int
) -> None:
    scores = huge_rows(size, dtype).to(torch.promote_types(dtype, torch.float32))
    target = target_for(scores, label, False)
    want = value_and_grad(lambda s: cross_entropy(s, target, reduction="none"), scores)
    focal = value_and_grad(lambda s: F.focal(s, target, gamma=0.0, reduction="none"), scores)
    ldam = value_and_grad(lambda s: F.ldam(s, target, [1] * L, max_margin=0.0, scale=1.0, reduction="none"), scores)
    torch.testing.assert_close(focal, want)
    torch.testing.assert_close(ldam, want)


@every_differentiable_loss_and_limit
@labels_and_probabilities
@first_inner_and_last_label
@sizes
def test_value_and_gradient_stay_finite_at_huge_scores(
    loss: LossCase, size: float, dtype: torch.dtype, label: int, probabilities: bool
) -> None:
    scores = huge_rows(size, dtype)
    target = target_for(scores, label, probabilities)
    value, gradient = value_and_grad(lambda s: loss(s, target, reduction="none"), scores)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


@every_differentiable_loss
@labels_and_probabilities
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_a_large_negative_score_rules_a_class_out(loss: LossCase, dtype: torch.dtype, probabilities: bool) -> None:
    # The last classes are the frequent ones, so the margins of the others do not depend on them.
    kept, masked = normal(8, L, dtype=dtype), torch.full((8, 3), -1e4, dtype=dtype)
    scores = torch.cat([kept, masked], 1)
    target = target_for(kept, 0, probabilities) if probabilities else torch.arange(8) % L
    padded = torch.cat([target, torch.zeros_like(masked)], 1) if probabilities else target
    noise = noise_for(scores)
    given, given_kept = loss.given(noise), loss.given(noise[:, :L])
    want, want_grad = value_and_grad(lambda s: loss(s, target, reduction="none", **given_kept), kept)
    got, got_grad = value_and_grad(lambda s: loss(s, padded, reduction="none", **given), scores)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_grad, torch.cat([want_grad, torch.zeros_like(masked)], 1))


# Smoothing so small that dividing by it could overflow counts as zero.

LABELS = torch.arange(4)
SMOOTHED: dict[str, Callable[..., Tensor]] = {
    "exact_topk": lambda s, epsilon: sl.exact_topk(s, 2, epsilon=epsilon),
    "exact_topk_from_below": lambda s, epsilon: sl.exact_topk(s, L, epsilon=epsilon),
    "smooth_topk": lambda s, epsilon: sl.smooth_topk(s, 2, epsilon=epsilon),
    "smooth_topk_sum": lambda s, epsilon: sl.smooth_topk_sum(s, 2, epsilon=epsilon),
    "noised_topk_hinge": lambda s, epsilon: F.noised_topk_hinge(s, LABELS, 2, epsilon=epsilon),
    "noised_topk_hinge_exact": lambda s, epsilon: F.noised_topk_hinge(
        s, LABELS, 2, epsilon=epsilon, n_samples=math.inf
    ),
    "imbalanced": lambda s, epsilon: F.imbalanced_noised_topk_hinge(s, LABELS, [1, 2, 3, 4, 5, 6], 2, epsilon=epsilon),
    "smooth_topk_hinge": lambda s, tau: F.smooth_topk_hinge(s, LABELS, 2, tau=tau),
    "smooth_topk_hinge_of_probabilities": lambda s, tau: F.smooth_topk_hinge(
        s, target_for(s, 0, probabilities=True), 2, tau=tau
    ),
}


@pytest.mark.parametrize("smoothed", SMOOTHED.values(), ids=SMOOTHED)
@pytest.mark.parametrize(
    ("dtype", "tiny"),
    [
        *((dtype, tiny) for dtype in (torch.float16, torch.float32) for tiny in (5e-324, 1e-300, 1e-44, 1e-38, 1e-33)),
        (torch.float64, 5e-324),
        (torch.float64, 1e-308),
    ],
)
def test_tiny_smoothing_is_none(smoothed: Callable[..., Tensor], dtype: torch.dtype, tiny: float) -> None:
    scores = normal(4, L, dtype=dtype)
    got, want = (value_and_grad(lambda s, size=size: smoothed(s, size), scores) for size in (tiny, 0.0))  # type: ignore[misc]
    assert got[1].any()
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("smoothed", SMOOTHED.values(), ids=SMOOTHED)
@pytest.mark.parametrize(("dtype", "small"), [(torch.float32, 1e-31), (torch.float64, 1e-301)])
def test_the_smallest_smoothing_is_close_to_none(
    smoothed: Callable[..., Tensor], dtype: torch.dtype, small: float
) -> None:
    scores = 100 * normal(4, L, dtype=dtype)
    got, want = (value_and_grad(lambda s, size=size: smoothed(s, size), scores) for size in (small, 0.0))  # type: ignore[misc]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("cosine", [False, True], ids=["linear", "cosine"])
def test_tiny_noise_is_none_in_a_head(cosine: bool) -> None:
    features = normal(4, 3, dtype=torch.float32)
    head = sl.NoisedTopKHead(3, L, sl.NoisedTopKHinge(2), cosine=cosine)
    results = []
    for head.loss.epsilon in (1e-44, 0.0):
        results.append(value_and_grad(lambda x: head(x, LABELS), features))
    torch.testing.assert_close(*results, rtol=0, atol=0)
