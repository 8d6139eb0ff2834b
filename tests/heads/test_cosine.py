"""Cosine scores, of rows of any size."""

import math

import pytest
import torch
from torch import Tensor

import shortlist as sl
from tests.support.drawing import normal, value_and_grad


def test_cosine_scores_are_cosines() -> None:
    head, features = sl.CosineLinear(8, 5), torch.randn(3, 8)
    scores = head(features)
    want = torch.nn.functional.cosine_similarity(features[:, None], head.weight[None], dim=-1)
    torch.testing.assert_close(scores, want)


def test_cosine_scores_survive_half_precision() -> None:
    head = sl.CosineLinear(64, 5).half()
    for scale in (1e-4, 1e4):  # squares of such features leave the range of float16
        scores = head(torch.full((1, 64), scale, dtype=torch.float16))
        torch.testing.assert_close(scores, head(torch.ones(1, 64, dtype=torch.float16)))


# Batches of rows of usual size take a faster path, unless they cannot be read.

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


# Cosines times a scale


def test_scaled_cosines_are_cosines_times_the_scale() -> None:
    plain, scaled = sl.CosineLinear(4, 3), sl.ScaledCosine(4, 3, scale=20.0)
    scaled.load_state_dict(plain.state_dict())
    features = normal(5, 4).float()
    torch.testing.assert_close(scaled(features), 20 * plain(features))


def test_a_learnt_scale_begins_at_its_value_and_follows_its_gradient() -> None:
    layer = sl.ScaledCosine(4, 3, scale=20.0, learn_scale=True)
    features = normal(5, 4).float()
    scores = layer(features)
    torch.testing.assert_close(scores, 20 * torch.nn.functional.cosine_similarity(features[:, None], layer.weight, -1))
    scores.sum().backward()
    assert layer.log_scale is not None
    assert layer.log_scale.grad is not None
    torch.testing.assert_close(layer.log_scale.grad, scores.sum())  # d exp(t) = exp(t)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf")])
def test_a_scale_must_be_positive_and_finite(scale: float) -> None:
    with pytest.raises(sl.ShortlistError, match="scale must"):
        sl.ScaledCosine(4, 3, scale=scale)
