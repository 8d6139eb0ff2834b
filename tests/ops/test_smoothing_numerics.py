"""The operators' draws, dtypes, memory, and scores that are tied, large or not finite."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shortlist import smooth_topk_sum
from shortlist.ops.lazy_noise import Limits
from shortlist.ops.smoothing import find_places
from tests.support.drawing import normal, value_and_grad
from tests.support.operators import (
    FLOAT_TYPES,
    HALF_TYPES,
    Case,
    Operator,
    both_operators,
    drawn,
    every_case,
    hard_and_smooth,
    weight_of,
)


@both_operators
def test_noise_decides_between_large_scores_as_between_small_ones(operator: Operator) -> None:
    x = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 1.0, -math.inf], [0.0, 1 / 64, 2 / 64, 3 / 64, 1 / 64, 0.0, -9.0]])
    noise = normal(2, 7, 500).float()
    _, grad = value_and_grad(lambda x: operator(x, 3, epsilon=1e-3, noise=noise), x)
    for offset in (2.0**14, -(2.0**14)):
        _, far_off = value_and_grad(lambda x: operator(x, 3, epsilon=1e-3, noise=noise), x + offset)
        assert_close(far_off, grad, rtol=0, atol=0)
    assert len(set(grad[0, :5].tolist())) > 1, "the noise decided"


@both_operators
def test_a_place_that_only_ruled_out_classes_are_left_for_costs_no_other_its_own(operator: Operator) -> None:
    x, noise = torch.tensor([1.0, -math.inf, -math.inf, 2.0]), normal(4, 50).float()
    value, grad = value_and_grad(lambda x: operator(x, 3, epsilon=0.5, noise=noise), x)
    assert value == -math.inf
    assert grad[[0, 3]].tolist() == pytest.approx([1.0, 1.0] if operator is smooth_topk_sum else [0.0, 0.0])


@both_operators
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_tied_scores_share_one_subgradient(operator: Operator, k: int) -> None:
    x = torch.tensor([1.0, 5.0, 5.0, 5.0, 0.0])
    value, grad = value_and_grad(lambda x: operator(x, k, epsilon=0.0), x)
    ranked = torch.tensor([5.0, 5.0, 5.0, 1.0, 0.0])
    assert value == ranked[k - weight_of(operator, k) : k].sum()
    assert grad.sum() == weight_of(operator, k)
    assert set(grad.tolist()) <= {0.0, 1.0}
    # Euler's identity for positively homogeneous functions: the gradient is on values that were selected.
    assert (grad * x).sum() == value


@both_operators
def test_all_scores_equal_is_decided_by_the_noise(operator: Operator) -> None:
    noise = normal(6, 4, seed=1)
    got = value_and_grad(lambda x: operator(x, 2, epsilon=0.5, noise=noise), torch.zeros(6, dtype=torch.float64))
    want = value_and_grad(lambda z: operator(z, 2, epsilon=0.0), 0.5 * noise.T)
    assert_close(got[0], want[0].mean())
    assert_close(got[1], want[1].mean(0))


@both_operators
@hard_and_smooth
@pytest.mark.parametrize("k", [1, 4, 7])
def test_nan_spoils_its_own_slice_alone(operator: Operator, epsilon: float, k: int) -> None:
    x, noise = normal(3, 7), normal(3, 7, 5, seed=1)
    spoilt = x.clone()
    spoilt[1, 4] = math.nan
    want, want_grad = value_and_grad(lambda x: operator(x, k, epsilon=epsilon, noise=noise), x)
    got, got_grad = value_and_grad(lambda x: operator(x, k, epsilon=epsilon, noise=noise), spoilt)
    assert got.isnan().tolist() == [False, True, False]
    assert_close(got[[0, 2]], want[[0, 2]], rtol=0, atol=0)
    assert_close(got_grad[[0, 2]], want_grad[[0, 2]], rtol=0, atol=0)


@both_operators
def test_classes_at_minus_infinity_take_no_part(operator: Operator) -> None:
    x, noise = normal(3, 7), normal(3, 7, 5, seed=1)
    absent = torch.cat([x, torch.full((3, 2), -math.inf)], 1)
    more_noise = torch.cat([noise, normal(3, 2, 5, seed=2)], 1)
    want, want_grad = value_and_grad(lambda x: operator(x, 3, epsilon=0.7, noise=noise), x)
    got, got_grad = value_and_grad(lambda x: operator(x, 3, epsilon=0.7, noise=more_noise), absent)
    assert_close(got, want)
    assert_close(got_grad, torch.nn.functional.pad(want_grad, (0, 2)))


@both_operators
def test_generator_decides_the_draws(operator: Operator) -> None:
    x = normal(3, 7)

    def value(seed: int) -> Tensor:
        return operator(x, 2, epsilon=0.7, n_samples=4, generator=torch.Generator().manual_seed(seed))

    assert_close(value(0), value(0), rtol=0, atol=0)
    assert (value(0) != value(1)).all()


@both_operators
@pytest.mark.parametrize("n_samples", [1, 4, 9])
def test_drawn_noise_has_the_asked_number_of_draws(operator: Operator, n_samples: int) -> None:
    x, generator = torch.zeros(500, 40, dtype=torch.float64), torch.Generator().manual_seed(0)
    _, grad = value_and_grad(lambda x: operator(x, 2, epsilon=0.7, n_samples=n_samples, generator=generator), x)
    # With so many rows of equal scores, some position is found in one draw only.
    assert grad[grad > 0].min().item() == pytest.approx(1 / n_samples)


@both_operators
def test_noise_sets_the_number_of_draws(operator: Operator) -> None:
    x, noise = normal(3, 7), normal(3, 7, 4, seed=1)
    assert_close(
        operator(x, 2, epsilon=0.7, n_samples=100, noise=noise), operator(x, 2, epsilon=0.7, n_samples=1, noise=noise)
    )


@both_operators
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_half_types_are_the_cast_of_the_float32_computation(operator: Operator, dtype: torch.dtype) -> None:
    # Near 1024 bfloat16 has multiples of 8 and float16 multiples of 1: noise added in that dtype would be lost.
    x = 1024 + 8 * torch.randint(0, 2, (50, 9), generator=torch.Generator().manual_seed(0)).to(dtype)
    noise, upstream = normal(50, 9, 5, seed=1, dtype=torch.float32), normal(50, seed=2, dtype=dtype)
    got, got_grad = value_and_grad(lambda x: operator(x, 3, epsilon=0.1, noise=noise), x, upstream)
    want, want_grad = value_and_grad(lambda x: operator(x, 3, epsilon=0.1, noise=noise), x.float(), upstream.float())
    assert got.dtype == got_grad.dtype == dtype
    assert_close(got, want.to(dtype), rtol=0, atol=0)
    assert_close(got_grad, want_grad.to(dtype), rtol=0, atol=0)
    # The draws, not the order of equal scores, decide where the gradient goes.
    assert ((got_grad != 0).sum(-1) > weight_of(operator, 3)).any()


@both_operators
@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@hard_and_smooth
def test_result_has_the_dtype_of_the_scores(operator: Operator, dtype: torch.dtype, epsilon: float) -> None:
    x = normal(3, 7, 2, dtype=dtype)
    value, grad = value_and_grad(lambda x: operator(x, 3, epsilon=epsilon, dim=1), x)
    assert (value.dtype, value.shape) == (dtype, (3, 2))
    assert (grad.dtype, grad.shape) == (dtype, (3, 7, 2))


@both_operators
@every_case
@pytest.mark.parametrize("at_once", [1, 150, 1200])
def test_chunks_of_draws_make_no_difference(operator: Operator, case: Case, at_once: int) -> None:
    x, noise, k = drawn(case)
    arguments = (x, k, slice(k - weight_of(operator, k), k), 0.7, noise.shape[-1], noise.movedim(-1, 0), None)
    chunked = find_places(*arguments, Limits(perturbed_at_once=at_once))
    assert_close(chunked, find_places(*arguments), rtol=0, atol=0)


def saved_for_backward(operator: Operator, x: Tensor, k: int, n_samples: int) -> list[Tensor]:
    """The tensors that autograd keeps for backward, except the scores themselves."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        operator(x, k, epsilon=0.7, n_samples=n_samples)
    return saved


@both_operators
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_backward_keeps_positions_alone(operator: Operator, dtype: torch.dtype) -> None:
    rows, num_classes, n_samples, k = 8, 1000, 5, 3
    x = normal(rows, num_classes, dtype=dtype).requires_grad_()
    saved = saved_for_backward(operator, x, k, n_samples)
    assert not any(tensor.is_floating_point() for tensor in saved)
    positions = [tensor for tensor in saved if tensor.dtype == torch.int64]
    assert sum(tensor.numel() for tensor in positions) == rows * weight_of(operator, k) * n_samples
    # Besides the positions, one flag per slice: whether it has a NaN.
    assert sum(tensor.numel() for tensor in saved) == rows * weight_of(operator, k) * n_samples + rows


@both_operators
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_backward_of_half_types_keeps_one_widened_copy_whatever_the_draws(
    operator: Operator, dtype: torch.dtype
) -> None:
    rows, num_classes, n_samples = 8, 1000, 50
    x = normal(rows, num_classes, dtype=dtype).requires_grad_()
    saved = saved_for_backward(operator, x, 3, n_samples)
    assert sum(tensor.numel() for tensor in saved if tensor.is_floating_point()) <= rows * num_classes
