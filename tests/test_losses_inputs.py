"""Losses of any dtype, layout and batch size, under autocast and in inference mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.support.drawing import normal, value_and_grad
from tests.support.loss_cases import (
    L,
    LossCase,
    N,
    assert_same_value_and_gradient,
    every_differentiable_loss,
    every_loss,
    given_noise,
    labels_and_probabilities,
)

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
