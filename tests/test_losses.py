"""Each loss against its obvious version, and the laws that losses of this family keep."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shortlist as sl
from shortlist import functional as F
from tests.support import literal_formulas as obvious
from tests.support.drawing import normal, value_and_grad
from tests.support.loss_cases import LOSSES, K, LossCase, every_differentiable_loss, every_loss, noise_for

# Scores on a coarse grid make ties, at the K-th score and elsewhere, an everyday event.
grid_scores = st.integers(min_value=3, max_value=9).flatmap(
    lambda num_classes: st.lists(
        st.lists(st.integers(-4, 4), min_size=num_classes, max_size=num_classes), min_size=1, max_size=4
    )
)


def draw_scores(*shape: int, dtype: torch.dtype = torch.float64, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(2))


def literal_losses(loss: LossCase, scores_NL: Tensor, noise_NLB: Tensor) -> Tensor:
    """The obvious loss of every row for every class as the label."""
    rows = zip(scores_NL, noise_NLB, strict=True)
    return torch.stack(
        [torch.stack([loss.literal(row, label, noise) for label in range(len(row))]) for row, noise in rows]
    )


@every_loss
@given(rows=grid_scores, data=st.data())
def test_value_is_the_obvious_one_ties_included(loss: LossCase, rows: list[list[int]], data: st.DataObject) -> None:
    scores = torch.tensor(rows, dtype=torch.float64) / 2
    label = st.integers(0, scores.shape[1] - 1)
    target = torch.tensor(data.draw(st.lists(label, min_size=len(rows), max_size=len(rows))))
    noise = noise_for(scores)
    want = literal_losses(loss, scores, noise).gather(1, target[:, None]).squeeze(1)
    kwargs = loss.given(noise)
    torch.testing.assert_close(loss(scores, target, reduction="none", **kwargs), want)


@every_differentiable_loss
@pytest.mark.parametrize("shape", [(1, 3), (3, 7), (2, 9)], ids=str)
def test_gradient_is_that_of_the_obvious_one(loss: LossCase, shape: tuple[int, int]) -> None:
    scores = draw_scores(*shape).requires_grad_()
    noise, upstream = noise_for(scores.detach()), draw_scores(shape[0], shape[1])
    kwargs = loss.given(noise)
    want = (upstream * literal_losses(loss, scores, noise)).sum()
    got = torch.zeros((), dtype=torch.float64)
    for label in range(shape[1]):
        target = torch.full((shape[0],), label)
        got = got + (upstream[:, label] * loss(scores, target, reduction="none", **kwargs)).sum()
    torch.testing.assert_close(torch.autograd.grad(got, scores), torch.autograd.grad(want, scores))


@every_loss
def test_probability_targets_give_the_expectation_over_classes(loss: LossCase) -> None:
    scores, probability = draw_scores(4, 7), draw_scores(4, 7).softmax(1)
    per_class = torch.stack([loss(scores, torch.full((4,), c), reduction="none") for c in range(7)], 1)
    torch.testing.assert_close(loss(scores, probability, reduction="none"), (probability * per_class).sum(1))


@every_differentiable_loss
def test_gradient_under_probability_targets_is_the_expected_gradient(loss: LossCase) -> None:
    scores, probability = draw_scores(4, 7).requires_grad_(), draw_scores(4, 7).softmax(1)
    expected = torch.zeros_like(scores)
    for c in range(7):
        each = loss(scores, torch.full((4,), c), reduction="none")
        expected += torch.autograd.grad((probability[:, c] * each).sum(), scores)[0]
    got = torch.autograd.grad(loss(scores, probability, reduction="sum"), scores)[0]
    torch.testing.assert_close(got, expected)


@every_loss
def test_one_hot_probabilities_are_labels(loss: LossCase) -> None:
    scores, target = draw_scores(5, 6), torch.tensor([0, 5, 2, 2, 3])
    one_hot = torch.eye(6, dtype=torch.float64)[target]
    torch.testing.assert_close(loss(scores, one_hot), loss(scores, target))


@every_differentiable_loss
def test_gradcheck(loss: LossCase) -> None:
    scores = draw_scores(3, 6).requires_grad_()
    noise = loss.given(0.1 * noise_for(scores.detach()))
    for target in (torch.tensor([0, 3, 5]), draw_scores(3, 6).softmax(1)):
        assert torch.autograd.gradcheck(lambda s, y=target: loss(s, y, reduction="none", **noise), scores)


@every_loss
def test_module_is_the_function(loss: LossCase) -> None:
    scores, target, weight = draw_scores(5, 6), torch.tensor([0, 5, 1, 2, 3]), torch.rand(6, dtype=torch.float64)
    shared = {"weight": weight, "ignore_index": 1, "reduction": "sum"}
    module = loss.module(6, **shared)
    noise = loss.given(noise_for(scores))
    assert torch.equal(module(scores, target, **noise), loss(scores, target, **shared, **noise))


@every_loss
@pytest.mark.parametrize("extra", [(), (3,), (2, 3)], ids=str)
def test_further_dimensions_are_further_rows(loss: LossCase, extra: tuple[int, ...]) -> None:
    scores = draw_scores(4, 5, *extra)
    target = torch.randint(5, (4, *extra))
    noise = noise_for(scores)
    got = loss(scores, target, reduction="none", **loss.given(noise))
    flat = loss.given(noise.movedim(1, -2).reshape(-1, 5, noise.shape[-1]))
    want = loss(scores.movedim(1, -1).reshape(-1, 5), target.flatten(), reduction="none", **flat)
    assert got.shape == target.shape
    torch.testing.assert_close(got.flatten(), want)


@every_loss
def test_a_single_row_needs_no_batch(loss: LossCase) -> None:
    scores, noise = draw_scores(5), noise_for(draw_scores(5))
    alone, batched = loss.given(noise), loss.given(noise[None])
    got = loss(scores, torch.tensor(3), **alone)
    assert got.shape == ()
    torch.testing.assert_close(got, loss(scores[None], torch.tensor([3]), **batched))


REDUCTIONS = ("none", "mean", "sum")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (4, 5, 3), (2, 5, 2, 3), (0, 5), (2, 5, 0)], ids=str)
@pytest.mark.parametrize("kind", ["labels", "ignored", "probabilities"])
def test_without_focus_focal_is_cross_entropy(
    reduction: str, weighted: bool, shape: tuple[int, ...], kind: str
) -> None:
    scores = draw_scores(*shape).requires_grad_()
    weight = torch.linspace(0.5, 2, 5, dtype=torch.float64) if weighted else None
    if kind == "probabilities":
        target = draw_scores(*shape).softmax(min(1, len(shape) - 1))
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


@every_loss
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
def test_weights_and_reductions_act_as_in_cross_entropy(loss: LossCase, kind: str) -> None:
    scores, labels = draw_scores(6, 5), torch.tensor([0, 1, 4, 4, 2, 3])
    target = labels if kind == "labels" else draw_scores(6, 5).softmax(1)
    weight = torch.linspace(0.5, 2, 5, dtype=torch.float64)
    plain = torch.stack([loss(scores, torch.full((6,), c), reduction="none") for c in range(5)], 1)
    if kind == "labels":
        each, share = weight[labels] * plain.gather(1, labels[:, None]).squeeze(1), weight[labels].sum()
    else:
        each, share = (weight * target * plain).sum(1), torch.tensor(6.0, dtype=torch.float64)
    torch.testing.assert_close(loss(scores, target, weight=weight, reduction="none"), each)
    torch.testing.assert_close(loss(scores, target, weight=weight, reduction="sum"), each.sum())
    torch.testing.assert_close(loss(scores, target, weight=weight, reduction="mean"), each.sum() / share)


@every_loss
def test_ignored_rows_count_for_nothing(loss: LossCase) -> None:
    scores, target = draw_scores(6, 5), torch.tensor([0, -7, 4, -7, 2, 3])
    noise, kept = noise_for(scores), target != -7
    all_rows, kept_rows = loss.given(noise), loss.given(noise[kept])
    got = loss(scores, target, ignore_index=-7, **all_rows)
    torch.testing.assert_close(got, loss(scores[kept], target[kept], **kept_rows))
    assert loss(scores, target, ignore_index=-7, reduction="none", **all_rows)[~kept].eq(0).all()
    assert loss(scores, torch.full((6,), -7), ignore_index=-7, **all_rows).isnan()


@every_loss
def test_uint8_labels_are_labels(loss: LossCase) -> None:
    scores, target = draw_scores(3, 5), torch.tensor([0, 4, 2])
    assert torch.equal(loss(scores, target.byte()), loss(scores, target))


@every_loss
def test_adding_a_constant_to_all_scores_changes_nothing(loss: LossCase) -> None:
    scores, target = draw_scores(4, 7), torch.tensor([0, 6, 3, 3])
    torch.testing.assert_close(loss(scores + 5.25, target), loss(scores, target))


@every_differentiable_loss
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
def test_gradient_sums_to_zero(loss: LossCase, kind: str) -> None:
    scores = draw_scores(5, 7).requires_grad_()
    target = torch.randint(7, (5,)) if kind == "labels" else draw_scores(5, 7).softmax(1)
    loss(scores, target, reduction="sum").backward()
    assert scores.grad is not None
    assert scores.grad.abs().sum(1).gt(0).any()
    torch.testing.assert_close(scores.grad.sum(1), torch.zeros(5, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "loss", [case for case in LOSSES if case.has_gradient and not case.has_margins], ids=lambda case: case.name
)
def test_permuting_classes_permutes_the_gradient(loss: LossCase) -> None:
    scores, target, noise = draw_scores(5, 7), torch.randint(7, (5,)), noise_for(draw_scores(5, 7))
    order = torch.randperm(7)
    there = order.argsort()

    def gradient(scores: Tensor, target: Tensor, noise: Tensor) -> Tensor:
        scores = scores.detach().requires_grad_()
        value = loss(scores, target, **loss.given(noise))
        return torch.autograd.grad(value, scores)[0]

    permuted = gradient(scores[:, order], there[target], noise[:, order])
    torch.testing.assert_close(permuted, gradient(scores, target, noise)[:, order])


def test_losses_in_float64_keep_its_digits_where_the_odds_are_long() -> None:
    """Of 20 and more, torch's own softplus returns the log-odds themselves."""
    odds = torch.arange(15.0, 35.0, dtype=torch.float64)
    scores, target = torch.stack([torch.zeros_like(odds), odds], 1), torch.zeros(20, dtype=torch.int64)
    want = odds + torch.log1p(torch.exp(-odds))
    torch.testing.assert_close(F.focal(scores, target, gamma=0.0, reduction="none"), want, rtol=1e-14, atol=0)


def test_margins_of_float64_counts_have_its_digits() -> None:
    margins = sl.class_margins(torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64), max_margin=0.3)
    assert margins.tolist() == pytest.approx([0.3, 0.3 * 3**-0.25, 0.3 * 7**-0.25], rel=1e-14)


def test_rarer_classes_have_larger_margins_and_the_rarest_the_largest() -> None:
    margins = sl.class_margins([10, 1000, 1, 10], max_margin=0.4)
    assert margins.max() == margins[2] == pytest.approx(0.4)
    torch.testing.assert_close(margins[0] / margins[1], torch.tensor(1000 / 10) ** 0.25)
    assert margins[0] == margins[3]


@pytest.mark.parametrize("assign", [False, True])
def test_margins_are_those_of_the_counts_that_were_loaded(assign: bool) -> None:
    scores, target = draw_scores(4, 3), torch.tensor([0, 1, 2, 0])
    trained, fresh = (sl.ImbalancedNoisedTopKHinge(counts, 1, epsilon=0.0) for counts in ([1, 2, 30], [9, 9, 9]))
    assert trained(scores, target) != fresh(scores, target)
    fresh.load_state_dict(trained.state_dict(), assign=assign)
    assert trained(scores, target) == fresh(scores, target)
    assert copy.deepcopy(fresh)(scores, target) == trained(scores, target)


@pytest.mark.parametrize(
    "counts", [[3, 5], [3.0, 5.0], torch.tensor([3, 5]), torch.tensor([3.0, 5.0]).double()], ids=str
)
def test_margins_take_any_kind_of_counts(counts: list[int]) -> None:
    torch.testing.assert_close(
        sl.class_margins(counts, 0.3).double(), torch.tensor([0.3, 0.3 * (3 / 5) ** 0.25]).double()
    )


def test_settings_may_be_numbers_of_numpy() -> None:
    scores, target = draw_scores(4, 6), torch.tensor([0, 5, 2, 3])
    noise = noise_for(scores)
    numpys = F.noised_topk_hinge(scores, target, np.int64(2), epsilon=np.float32(0.5), noise=noise)  # type: ignore[arg-type]
    assert numpys == F.noised_topk_hinge(scores, target, 2, epsilon=0.5, noise=noise)
    module = sl.ImbalancedNoisedTopKHinge([1, 2, 3, 4, 5, 6], np.int64(2), max_margin=np.float32(0.5))  # type: ignore[arg-type]
    assert module(scores, target, noise=noise).isfinite()


def test_equal_margins_and_unit_scale_are_the_balanced_loss() -> None:
    scores, target = draw_scores(4, 6), torch.tensor([0, 5, 2, 3])
    noise = noise_for(scores)
    balanced = F.noised_topk_hinge(scores, target, 3, epsilon=0.1, noise=noise)
    equal = F.imbalanced_noised_topk_hinge(
        scores, target, [7] * 6, 3, epsilon=0.1, max_margin=1.0, scale=1.0, noise=noise
    )
    torch.testing.assert_close(equal, balanced)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_without_noise_the_noised_loss_is_the_calibrated_hinge(k: int) -> None:
    scores, target = draw_scores(8, 6), torch.randint(6, (8,))
    calibrated = torch.stack([obvious.calibrated_topk_hinge(s, int(y), k) for s, y in zip(scores, target, strict=True)])
    noise = noise_for(scores)
    for epsilon in (0.0, 1e-6):
        noised = F.noised_topk_hinge(scores, target, k, epsilon=epsilon, noise=noise, reduction="none")
        torch.testing.assert_close(noised, calibrated, atol=epsilon * noise.abs().max().item() + 1e-15, rtol=0)


def test_infinitely_many_samples_are_the_mean_of_many() -> None:
    scores, target = draw_scores(3, 6), torch.tensor([5, 1, 0])
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
    scores, target = draw_scores(6, 4), torch.randint(4, (6,))
    noise = {"noise": noise_for(scores)} if name == "noised_topk_hinge" else {}
    values = [getattr(F, name)(scores, target, k, reduction="none", **noise) for k in range(1, largest + 1)]
    for easier, harder in zip(values[1:], values, strict=False):
        assert (easier <= harder + 1e-12).all()


def test_at_full_length_the_error_is_zero() -> None:
    assert F.topk_error(draw_scores(6, 4), torch.randint(4, (6,)), 4) == 0


def test_hinges_bound_the_error() -> None:
    scores, target = draw_scores(50, 6), torch.randint(6, (50,))
    error = F.topk_error(scores, target, K, reduction="none")
    for bound in (F.topk_hinge, F.convex_topk_hinge, F.calibrated_topk_hinge):
        assert (bound(scores, target, K, reduction="none") >= error - 1e-12).all()
    convex, plain = (f(scores, target, K, reduction="none") for f in (F.convex_topk_hinge, F.topk_hinge))
    assert (convex >= plain - 1e-12).all()


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "probabilities"])
def test_noise_decides_between_large_scores_as_between_small_ones(labels: bool) -> None:
    target = torch.tensor([5]) if labels else torch.eye(6)[5:]
    noise = draw_scores(1, 6, 500, dtype=torch.float32)
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
    # All scores equal: whichever position counts as the K-th, the label must not be compared with itself.
    for label in range(4):
        scores = torch.zeros(1, 4, requires_grad=True)
        F.topk_hinge(scores, torch.tensor([label]), 2).backward()
        assert scores.grad is not None
        assert scores.grad[0, label] == -1


def test_noised_gradient_touches_at_most_one_class_a_draw_and_the_label() -> None:
    scores, n_samples = draw_scores(20, 50).requires_grad_(), 4
    F.noised_topk_hinge(scores, torch.randint(50, (20,)), 5, epsilon=1.0, n_samples=n_samples).backward()
    assert scores.grad is not None
    touched = (scores.grad != 0).sum(1)
    assert touched.max() <= n_samples + 1
    assert touched.max() > 2, "several draws find several classes"


def test_cosine_scores_are_cosines() -> None:
    head, features = sl.CosineLinear(8, 5), torch.randn(3, 8)
    scores = head(features)
    want = torch.nn.functional.cosine_similarity(features[:, None], head.weight[None], dim=-1)
    torch.testing.assert_close(scores, want)


def test_counts_beyond_the_half_types_survive_half_precision() -> None:
    loss = sl.LogitAdjustedLoss(torch.tensor([1.0, 1e5]))
    scores, target = torch.zeros(1, 2), torch.tensor([0])
    torch.testing.assert_close(loss.half()(scores, target), torch.tensor(math.log1p(1e5)))


def test_cosine_scores_survive_half_precision() -> None:
    head = sl.CosineLinear(64, 5).half()
    for scale in (1e-4, 1e4):  # squares of such features leave the range of float16
        scores = head(torch.full((1, 64), scale, dtype=torch.float16))
        torch.testing.assert_close(scores, head(torch.ones(1, 64, dtype=torch.float16)))


# Cosines at any size. Rows of usual size take a shorter way unless they share a batch with others, or cannot be read.

SIZES = {torch.float32: [1e-36, 1e-20, 1e-12, 1.0, 1e19, 1e37], torch.float64: [1e-300, 1e-160, 1.0, 1e160, 1e300]}
dtype_and_size = pytest.mark.parametrize(("dtype", "size"), [(dtype, s) for dtype in SIZES for s in SIZES[dtype]])


@dtype_and_size
@pytest.mark.parametrize("of", ["features", "weight"])
def test_cosines_and_their_gradients_know_no_size(dtype: torch.dtype, size: float, of: str) -> None:
    head = sl.CosineLinear(8, 5, dtype=dtype)
    features, weight = normal(3, 8, dtype=dtype), normal(5, 8, seed=1, dtype=dtype)

    def scores(x: Tensor) -> Tensor:
        inputs = {"features": features, "weight": weight, of: x}
        scores: Tensor = torch.func.functional_call(head, {"weight": inputs["weight"]}, inputs["features"])
        return scores

    x, upstream = {"features": features, "weight": weight}[of], normal(3, 5, seed=2, dtype=dtype)
    want, want_grad = value_and_grad(scores, x, upstream)
    got, grad = value_and_grad(scores, size * x, upstream)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grad * size, want_grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_row_of_zeros_scores_0_and_has_no_gradient(dtype: torch.dtype) -> None:
    head = sl.CosineLinear(8, 5, dtype=dtype)
    features = normal(3, 8, dtype=dtype)
    features[1] = 0
    with torch.no_grad():
        head.weight[2] = 0
    scores, grad = value_and_grad(head, features)
    head(features).sum().backward()
    assert head.weight.grad is not None
    assert (scores[1] == 0).all()
    assert (scores[:, 2] == 0).all()
    assert (grad[1] == 0).all()
    assert (head.weight.grad[2] == 0).all()
    assert grad.isfinite().all()
    assert head.weight.grad.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_no_cosine(bad: float) -> None:
    features = normal(3, 8)
    features[1, 2] = bad
    scores = sl.CosineLinear(8, 5, dtype=torch.float64)(features)
    assert scores[1].isnan().all()
    assert scores[::2].isfinite().all()


@pytest.mark.parametrize("size", [1e-3, 1e200], ids=["usual", "one huge row"])
def test_the_gradient_of_cosines_is_their_derivative(size: float) -> None:
    features, weight = normal(3, 4), normal(5, 4, seed=1)
    features[0] *= size

    def scores(others: Tensor, weight: Tensor) -> Tensor:
        head = sl.CosineLinear(4, 5, dtype=torch.float64)
        scores: Tensor = torch.func.functional_call(head, {"weight": weight}, torch.cat([features[:1], others]))
        return scores

    inputs = (features[1:].requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(scores, inputs)
    assert torch.autograd.gradgradcheck(scores, inputs)


def test_cosines_of_rows_that_cannot_be_read_are_the_same() -> None:
    head, features = sl.CosineLinear(8, 5, dtype=torch.float64), normal(3, 8)
    torch.testing.assert_close(torch.func.vmap(head)(features), head(features))


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
