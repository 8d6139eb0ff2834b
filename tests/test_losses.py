"""Every loss against its literal formula, and the laws that all losses obey, for every dtype, layout and batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.support.drawing import normal, value_and_grad
from tests.support.loss_cases import (
    LOSSES,
    L,
    LossCase,
    N,
    assert_same_value_and_gradient,
    every_differentiable_loss,
    every_loss,
    given_noise,
    labels_and_probabilities,
    noise_for,
)

# Scores on a coarse grid are often tied, at the K-th score and elsewhere.
grid_scores = st.integers(min_value=3, max_value=9).flatmap(
    lambda num_classes: st.lists(
        st.lists(st.integers(-4, 4), min_size=num_classes, max_size=num_classes), min_size=1, max_size=4
    )
)


def literal_losses(loss: LossCase, scores_NL: Tensor, noise_NLB: Tensor) -> Tensor:
    """The literal loss of every row, for every class as its label."""
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
    scores = normal(*shape).requires_grad_()
    noise, upstream = noise_for(scores.detach()), normal(shape[0], shape[1])
    kwargs = loss.given(noise)
    want = (upstream * literal_losses(loss, scores, noise)).sum()
    got = torch.zeros((), dtype=torch.float64)
    for label in range(shape[1]):
        target = torch.full((shape[0],), label)
        got = got + (upstream[:, label] * loss(scores, target, reduction="none", **kwargs)).sum()
    torch.testing.assert_close(torch.autograd.grad(got, scores), torch.autograd.grad(want, scores))


@every_loss
def test_probability_targets_give_the_expectation_over_classes(loss: LossCase) -> None:
    scores, probability = normal(4, 7), normal(4, 7).softmax(1)
    per_class = torch.stack([loss(scores, torch.full((4,), c), reduction="none") for c in range(7)], 1)
    torch.testing.assert_close(loss(scores, probability, reduction="none"), (probability * per_class).sum(1))


@every_differentiable_loss
def test_gradient_under_probability_targets_is_the_expected_gradient(loss: LossCase) -> None:
    scores, probability = normal(4, 7).requires_grad_(), normal(4, 7).softmax(1)
    expected = torch.zeros_like(scores)
    for c in range(7):
        losses = loss(scores, torch.full((4,), c), reduction="none")
        expected += torch.autograd.grad((probability[:, c] * losses).sum(), scores)[0]
    got = torch.autograd.grad(loss(scores, probability, reduction="sum"), scores)[0]
    torch.testing.assert_close(got, expected)


@every_loss
def test_one_hot_probabilities_are_labels(loss: LossCase) -> None:
    scores, target = normal(5, 6), torch.tensor([0, 5, 2, 2, 3])
    one_hot = torch.eye(6, dtype=torch.float64)[target]
    torch.testing.assert_close(loss(scores, one_hot), loss(scores, target))


@every_differentiable_loss
def test_gradcheck(loss: LossCase) -> None:
    scores = normal(3, 6).requires_grad_()
    # The spread that relative noise follows has no gradient: without noise it does not count.
    noise = loss.given((0.0 if loss.relative else 0.1) * noise_for(scores.detach()))
    for target in (torch.tensor([0, 3, 5]), normal(3, 6).softmax(1)):
        assert torch.autograd.gradcheck(lambda s, y=target: loss(s, y, reduction="none", **noise), scores)


@every_loss
def test_module_is_the_function(loss: LossCase) -> None:
    scores, target, weight = normal(5, 6), torch.tensor([0, 5, 1, 2, 3]), torch.rand(6, dtype=torch.float64)
    shared = {"weight": weight, "ignore_index": 1, "reduction": "sum"}
    module = loss.module(6, **shared)
    noise = loss.given(noise_for(scores))
    assert torch.equal(module(scores, target, **noise), loss(scores, target, **shared, **noise))


@every_loss
@pytest.mark.parametrize("extra", [(), (3,), (2, 3)], ids=str)
def test_further_dimensions_are_further_rows(loss: LossCase, extra: tuple[int, ...]) -> None:
    scores = normal(4, 5, *extra)
    target = torch.randint(5, (4, *extra))
    noise = noise_for(scores)
    got = loss(scores, target, reduction="none", **loss.given(noise))
    flat = loss.given(noise.movedim(1, -2).reshape(-1, 5, noise.shape[-1]))
    want = loss(scores.movedim(1, -1).reshape(-1, 5), target.flatten(), reduction="none", **flat)
    assert got.shape == target.shape
    torch.testing.assert_close(got.flatten(), want)


@every_loss
def test_a_single_row_needs_no_batch(loss: LossCase) -> None:
    scores, noise = normal(5), noise_for(normal(5))
    alone, batched = loss.given(noise), loss.given(noise[None])
    got = loss(scores, torch.tensor(3), **alone)
    assert got.shape == ()
    torch.testing.assert_close(got, loss(scores[None], torch.tensor([3]), **batched))


@every_loss
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
def test_weights_and_reductions_act_as_in_cross_entropy(loss: LossCase, kind: str) -> None:
    scores, labels = normal(6, 5), torch.tensor([0, 1, 4, 4, 2, 3])
    target = labels if kind == "labels" else normal(6, 5).softmax(1)
    weight = torch.linspace(0.5, 2, 5, dtype=torch.float64)
    plain = torch.stack([loss(scores, torch.full((6,), c), reduction="none") for c in range(5)], 1)
    if kind == "labels":
        want, total = weight[labels] * plain.gather(1, labels[:, None]).squeeze(1), weight[labels].sum()
    else:
        want, total = (weight * target * plain).sum(1), torch.tensor(6.0, dtype=torch.float64)
    torch.testing.assert_close(loss(scores, target, weight=weight, reduction="none"), want)
    torch.testing.assert_close(loss(scores, target, weight=weight, reduction="sum"), want.sum())
    torch.testing.assert_close(loss(scores, target, weight=weight, reduction="mean"), want.sum() / total)


@every_loss
def test_ignored_rows_count_for_nothing(loss: LossCase) -> None:
    scores, target = normal(6, 5), torch.tensor([0, -7, 4, -7, 2, 3])
    noise, kept = noise_for(scores), target != -7
    all_rows, kept_rows = loss.given(noise), loss.given(noise[kept])
    got = loss(scores, target, ignore_index=-7, **all_rows)
    torch.testing.assert_close(got, loss(scores[kept], target[kept], **kept_rows))
    assert loss(scores, target, ignore_index=-7, reduction="none", **all_rows)[~kept].eq(0).all()
    assert loss(scores, torch.full((6,), -7), ignore_index=-7, **all_rows).isnan()


@every_loss
def test_uint8_labels_are_labels(loss: LossCase) -> None:
    scores, target = normal(3, 5), torch.tensor([0, 4, 2])
    assert torch.equal(loss(scores, target.byte()), loss(scores, target))


@every_loss
def test_adding_a_constant_to_all_scores_changes_nothing(loss: LossCase) -> None:
    scores, target = normal(4, 7), torch.tensor([0, 6, 3, 3])
    torch.testing.assert_close(loss(scores + 5.25, target), loss(scores, target))


@every_differentiable_loss
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
def test_gradient_sums_to_zero(loss: LossCase, kind: str) -> None:
    scores = normal(5, 7).requires_grad_()
    target = torch.randint(7, (5,)) if kind == "labels" else normal(5, 7).softmax(1)
    loss(scores, target, reduction="sum").backward()
    assert scores.grad is not None
    assert scores.grad.abs().sum(1).gt(0).any()
    torch.testing.assert_close(scores.grad.sum(1), torch.zeros(5, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "loss", [case for case in LOSSES if case.has_gradient and not case.has_margins], ids=lambda case: case.name
)
def test_permuting_classes_permutes_the_gradient(loss: LossCase) -> None:
    scores, target, noise = normal(5, 7), torch.randint(7, (5,)), noise_for(normal(5, 7))
    order = torch.randperm(7)
    there = order.argsort()

    def gradient(scores: Tensor, target: Tensor, noise: Tensor) -> Tensor:
        scores = scores.detach().requires_grad_()
        value = loss(scores, target, **loss.given(noise))
        return torch.autograd.grad(value, scores)[0]

    permuted = gradient(scores[:, order], there[target], noise[:, order])
    torch.testing.assert_close(permuted, gradient(scores, target, noise)[:, order])


# Precision


@every_loss
@labels_and_probabilities
def test_under_autocast_the_loss_is_float32(loss: LossCase, target: Tensor) -> None:
    layer, features = nn.Linear(4, L), normal(N, 4, dtype=torch.float32)
    noise = given_noise(loss, torch.empty(N, L))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = layer(features)
        value = loss(scores, target, **noise)
    assert scores.dtype == torch.bfloat16
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(scores.float(), target, **noise))
    torch.testing.assert_close(value, loss(layer(features), target, **noise), rtol=0.02, atol=0.02)
    if loss.has_gradient:
        (got,) = torch.autograd.grad(value, layer.weight, retain_graph=True)
        (want,) = torch.autograd.grad(loss(scores.float(), target, **noise), layer.weight)
        assert got.abs().sum() > 0
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


@every_loss
@labels_and_probabilities
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_half_scores_give_the_float32_loss_rounded_once(
    loss: LossCase, reduction: str, dtype: torch.dtype, target: Tensor
) -> None:
    scores = normal(N, L, dtype=dtype)
    options: dict[str, Any] = {"reduction": reduction, **given_noise(loss, scores)}
    want = loss(scores.float(), target, **options)
    assert want.dtype == torch.float32
    got = loss(scores, target, **options)
    torch.testing.assert_close(got, want.to(dtype), rtol=0, atol=0)
    if loss.has_gradient:
        gradient = value_and_grad(lambda s: loss(s, target, **options), scores)[1]
        want_gradient = value_and_grad(lambda s: loss(s, target, **options), scores.float())[1]
        torch.testing.assert_close(gradient, want_gradient.to(dtype))


@every_differentiable_loss
@labels_and_probabilities
def test_float64_stays_float64(loss: LossCase, target: Tensor) -> None:
    value, gradient = value_and_grad(lambda s: loss(s, target), normal(N, L))
    assert value.dtype == gradient.dtype == torch.float64


# Shapes and modes


@every_loss
@pytest.mark.parametrize(
    "strided",
    [
        lambda scores: scores.T.contiguous().T,
        lambda scores: torch.stack([scores, -scores], -1)[..., 0],
        lambda scores: torch.cat([scores, scores], 1)[:, :L],
    ],
    ids=["transposed", "every other column", "part of wider rows"],
)
@labels_and_probabilities
def test_scores_need_not_be_contiguous(loss: LossCase, strided: Callable[[Tensor], Tensor], target: Tensor) -> None:
    scores = normal(N, L)
    assert not strided(scores).is_contiguous()
    assert_same_value_and_gradient(loss, lambda s: loss(strided(s), target), lambda s: loss(s, target), scores)


@every_loss
@pytest.mark.parametrize("shape", [(0, L), (3, L, 0), (0, L, 2)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("probabilities", [False, True], ids=["labels", "probabilities"])
def test_an_empty_batch_does_as_for_the_cross_entropy(
    loss: LossCase, probabilities: bool, reduction: str, shape: tuple[int, ...]
) -> None:
    scores = torch.zeros(shape, requires_grad=True)
    target = torch.zeros(shape) if probabilities else torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    got = loss(scores, target, reduction=reduction)
    torch.testing.assert_close(got, cross_entropy(scores, target, reduction=reduction), equal_nan=True)
    if loss.has_gradient:
        (gradient,) = torch.autograd.grad(got.sum(), scores)
        assert gradient.shape == shape


@every_loss
@labels_and_probabilities
def test_inference_mode_changes_no_value(loss: LossCase, target: Tensor) -> None:
    scores, module = normal(N, L), loss.module(L)
    noise = given_noise(loss, scores)
    with torch.inference_mode():
        got = module(scores, target, **noise)
    assert got.is_inference()
    assert torch.equal(got, module(scores, target, **noise))
