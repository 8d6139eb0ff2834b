"""Laws of ``topk_value``, ``topk_sum``, ``smooth_topk`` and ``smooth_topk_sum``."""

import math
from dataclasses import dataclass
from typing import Protocol

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from shortlist import smooth_topk, smooth_topk_sum, topk_sum, topk_value
from shortlist.ops import smoothing
from tests.support.drawing import SHAPES, normal, value_and_grad

HALF_TYPES = [torch.float16, torch.bfloat16]
FLOAT_TYPES = [*HALF_TYPES, torch.float32, torch.float64]

PAPER_SCORES = torch.tensor([2.4, 2.6, 2.3, 0.5], dtype=torch.float64)
PAPER_NOISE = torch.tensor(
    [[0.2, -0.1, 0.1, 0.3], [0.1, 0.1, -0.1, 0.1], [-0.1, -0.1, 0.1, -0.1]], dtype=torch.float64
).T


class Operator(Protocol):
    """``smooth_topk`` or ``smooth_topk_sum``, which at epsilon = 0 are ``topk_value`` and ``topk_sum``."""

    def __call__(
        self,
        x: Tensor,
        k: int,
        *,
        epsilon: float,
        n_samples: int = 5,
        dim: int = -1,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor: ...


both_operators = pytest.mark.parametrize("operator", [smooth_topk, smooth_topk_sum])
# Rows, classes, draws and K: the first, one inside, the last.
Case = tuple[int, int, int, int]
CASES: list[Case] = [(*shape, k) for shape in SHAPES for k in sorted({1, min(3, shape[1]), shape[1]})]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
hard_and_smooth = pytest.mark.parametrize("epsilon", [0.0, 0.7])


def weight_of(operator: Operator, k: int) -> int:
    """How many scores the operator adds up."""
    return k if operator is smooth_topk_sum else 1


def drawn(case: Case) -> tuple[Tensor, Tensor, int]:
    """Scores, noise and K."""
    rows, num_classes, draws, k = case
    return normal(rows, num_classes), normal(rows, num_classes, draws, seed=1), k


def by_sorting(operator: Operator, x: Tensor, k: int, epsilon: float, noise: Tensor, dim: int = -1) -> Tensor:
    """The definition: sort each perturbed copy, take the k-th or the first k, average over the draws."""
    perturbed = x.unsqueeze(-1) + epsilon * noise
    ranked = perturbed.movedim(dim % x.dim(), -2).sort(-2, descending=True).values
    return ranked[..., k - weight_of(operator, k) : k, :].sum(-2).mean(-1)


def test_worked_example_of_the_paper() -> None:
    value, grad = value_and_grad(lambda x: smooth_topk(x, 2, epsilon=1.0, noise=PAPER_NOISE), PAPER_SCORES)
    assert value.item() == pytest.approx((2.5 + 2.5 + 2.4) / 3)
    assert f"{value:.2f}" == "2.47"
    assert_close(grad, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0], dtype=torch.float64))


def test_worked_example_of_the_paper_for_the_sum() -> None:
    value, grad = value_and_grad(lambda x: smooth_topk_sum(x, 2, epsilon=1.0, noise=PAPER_NOISE), PAPER_SCORES)
    assert value.item() == pytest.approx((2.6 + 2.5 + 2.7 + 2.5 + 2.5 + 2.4) / 3)
    assert_close(grad, torch.tensor([2 / 3, 1, 1 / 3, 0], dtype=torch.float64))


def test_little_noise_leaves_the_gradient_of_the_paper_example_hard() -> None:
    _, grad = value_and_grad(lambda x: smooth_topk(x, 2, epsilon=0.1, noise=PAPER_NOISE), PAPER_SCORES)
    _, hard_grad = value_and_grad(lambda x: topk_value(x, 2), PAPER_SCORES)
    assert grad.tolist() == hard_grad.tolist() == [1, 0, 0, 0]


@dataclass(frozen=True)
class Problem:
    x: Tensor
    k: int
    dim: int
    noise: Tensor
    upstream: Tensor


LAYOUTS = ["contiguous", "transposed", "strided", "expanded"]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Scores of any shape, layout and dtype, without ties along the class dimension."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    layout = draw(st.sampled_from(LAYOUTS))
    dtype = draw(st.sampled_from(FLOAT_TYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dim = draw(st.integers(0, len(shape) - 1))
    # Small whole numbers are exact in every dtype, so that distinct scores stay distinct.
    ranks = torch.rand(*shape, generator=generator).argsort(dim)
    x = (ranks + torch.randint(-3, 4, shape, generator=generator).select(dim, 0).unsqueeze(dim)).to(dtype)
    if layout == "transposed":
        x = x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1])
    elif layout == "strided":
        x = torch.stack([x, torch.full_like(x, 99)], -1).flatten(-2)[..., ::2]
    elif layout == "expanded":
        x, dim = x.expand(3, *x.shape), dim + 1
    k = draw(st.integers(1, x.shape[dim]))
    noise = torch.randn(draw(st.integers(1, 4)), *x.shape, generator=generator, dtype=torch.float64).movedim(0, -1)
    upstream = torch.randn(x.select(dim, 0).shape, generator=generator, dtype=torch.float64).to(dtype)
    return Problem(x, k, dim - draw(st.sampled_from([0, x.dim()])), noise, upstream)


@both_operators
@given(problem=problems())
def test_hard_operators_are_those_of_a_sort(operator: Operator, problem: Problem) -> None:
    hard = topk_value if operator is smooth_topk else topk_sum
    got, got_grad = value_and_grad(lambda x: hard(x, problem.k, problem.dim), problem.x, problem.upstream)
    nothing = torch.zeros(*problem.x.shape, 1, dtype=problem.x.dtype)
    want, want_grad = value_and_grad(
        lambda x: by_sorting(operator, x, problem.k, 0.0, nothing, problem.dim), problem.x, problem.upstream
    )
    assert_close(got, want, rtol=0, atol=0)
    assert_close(got_grad, want_grad, rtol=0, atol=0)


@both_operators
@given(problem=problems(), epsilon=st.sampled_from([0.1, 1.0, 10.0]))
def test_smooth_operators_are_means_over_sorted_draws(operator: Operator, problem: Problem, epsilon: float) -> None:
    got, got_grad = value_and_grad(
        lambda x: operator(x, problem.k, epsilon=epsilon, dim=problem.dim, noise=problem.noise),
        problem.x,
        problem.upstream,
    )
    want, want_grad = value_and_grad(
        lambda x: by_sorting(operator, x, problem.k, epsilon, problem.noise, problem.dim),
        problem.x.double(),
        problem.upstream.double(),
    )
    # In double: one rounding to the dtype is all that separates the two.
    assert_close(got, want.to(got.dtype))
    assert_close(got_grad, want_grad.to(got.dtype))


@both_operators
@every_case
@hard_and_smooth
def test_shift_of_all_scores_shifts_the_value(operator: Operator, case: Case, epsilon: float) -> None:
    x, noise, k = drawn(case)
    value, grad = value_and_grad(lambda x: operator(x, k, epsilon=epsilon, noise=noise), x)
    moved, moved_grad = value_and_grad(lambda x: operator(x, k, epsilon=epsilon, noise=noise), x + 3.5)
    assert_close(moved, value + weight_of(operator, k) * 3.5)
    assert_close(moved_grad, grad, rtol=0, atol=0)


@both_operators
@every_case
@hard_and_smooth
def test_permuting_classes_permutes_the_gradient(operator: Operator, case: Case, epsilon: float) -> None:
    x, noise, k = drawn(case)
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(2))
    value, grad = value_and_grad(lambda x: operator(x, k, epsilon=epsilon, noise=noise), x)
    permuted_value, permuted_grad = value_and_grad(
        lambda x: operator(x, k, epsilon=epsilon, noise=noise[:, order]), x[:, order]
    )
    assert_close(permuted_value, value)
    assert_close(permuted_grad, grad[:, order])


@both_operators
@every_case
@hard_and_smooth
def test_gradient_is_made_of_whole_draws(operator: Operator, case: Case, epsilon: float) -> None:
    x, noise, k = drawn(case)
    _, grad = value_and_grad(lambda x: operator(x, k, epsilon=epsilon, noise=noise), x)
    assert_close(grad.sum(-1), torch.full_like(grad[:, 0], weight_of(operator, k)))
    of_draws = grad * noise.shape[-1]
    assert_close(of_draws, of_draws.round())
    assert (of_draws.round() >= 0).all()
    assert (of_draws.round() <= noise.shape[-1]).all()


@pytest.mark.parametrize("case", [case for case in CASES if case[-1] > 1], ids=str)
@hard_and_smooth
def test_value_is_a_difference_of_sums_under_the_same_noise(case: Case, epsilon: float) -> None:
    x, noise, k = drawn(case)

    def difference(x: Tensor) -> Tensor:
        first_k = smooth_topk_sum(x, k, epsilon=epsilon, noise=noise)
        return first_k - smooth_topk_sum(x, k - 1, epsilon=epsilon, noise=noise)

    assert_close(
        value_and_grad(lambda x: smooth_topk(x, k, epsilon=epsilon, noise=noise), x), value_and_grad(difference, x)
    )


@both_operators
@every_case
def test_zero_epsilon_is_the_hard_operator(operator: Operator, case: Case) -> None:
    x, noise, k = drawn(case)
    hard = topk_value if operator is smooth_topk else topk_sum
    want = value_and_grad(lambda x: hard(x, k), x)
    assert_close(value_and_grad(lambda x: operator(x, k, epsilon=0.0, noise=noise), x), want, rtol=0, atol=0)
    assert_close(value_and_grad(lambda x: operator(x, k, epsilon=0.0), x), want, rtol=0, atol=0)


@both_operators
@every_case
@pytest.mark.parametrize("epsilon", [1e-6, 1e-3, 0.5, 20.0])
def test_noise_moves_the_value_by_at_most_its_largest_entry(operator: Operator, case: Case, epsilon: float) -> None:
    x, noise, k = drawn(case)
    moved = operator(x, k, epsilon=epsilon, noise=noise) - operator(x, k, epsilon=0.0)
    reach = epsilon * noise.abs().amax((1, 2))
    assert (moved.abs() <= weight_of(operator, k) * reach + 1e-12).all()


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
@every_case
def test_small_epsilon_has_the_gradient_of_the_hard_operator(operator: Operator, case: Case) -> None:
    x, noise, k = drawn(case)
    _, grad = value_and_grad(lambda x: operator(x, k, epsilon=1e-9, noise=noise), x)
    _, hard_grad = value_and_grad(lambda x: operator(x, k, epsilon=0.0), x)
    assert_close(grad, hard_grad)


@both_operators
@every_case
def test_epsilon_is_the_factor_of_the_noise(operator: Operator, case: Case) -> None:
    x, noise, k = drawn(case)
    assert_close(operator(x, k, epsilon=0.6, noise=noise), operator(x, k, epsilon=0.3, noise=2 * noise))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@hard_and_smooth
def test_first_is_the_maximum_and_last_the_minimum(shape: tuple[int, int, int], epsilon: float) -> None:
    x, noise, _ = drawn((*shape, 1))
    perturbed = x.unsqueeze(-1) + epsilon * noise
    assert_close(smooth_topk(x, 1, epsilon=epsilon, noise=noise), perturbed.amax(1).mean(-1))
    assert_close(smooth_topk(x, x.shape[1], epsilon=epsilon, noise=noise), perturbed.amin(1).mean(-1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@hard_and_smooth
def test_sum_over_all_places_is_the_sum_over_classes(shape: tuple[int, int, int], epsilon: float) -> None:
    x, noise, _ = drawn((*shape, 1))
    value, grad = value_and_grad(lambda x: smooth_topk_sum(x, x.shape[1], epsilon=epsilon, noise=noise), x)
    assert_close(value, x.sum(-1) + epsilon * noise.mean(-1).sum(-1))
    assert_close(grad, torch.ones_like(x))


@both_operators
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_tied_scores_share_one_subgradient(operator: Operator, k: int) -> None:
    x = torch.tensor([1.0, 5.0, 5.0, 5.0, 0.0])
    value, grad = value_and_grad(lambda x: operator(x, k, epsilon=0.0), x)
    ranked = torch.tensor([5.0, 5.0, 5.0, 1.0, 0.0])
    assert value == ranked[k - weight_of(operator, k) : k].sum()
    assert grad.sum() == weight_of(operator, k)
    assert set(grad.tolist()) <= {0.0, 1.0}
    # Euler's identity for a function that is positively homogeneous: the weight is on the values that were taken.
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
    # Among so many rows and equal scores, some position is found by one draw only.
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
    # Near 1024 a bfloat16 is a multiple of 8 and a float16 of 1: perturbed in its own dtype, x would not move.
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
@hard_and_smooth
@pytest.mark.parametrize("k", [1, 3, 6])
def test_gradient_is_the_derivative(operator: Operator, epsilon: float, k: int) -> None:
    x, noise = normal(2, 6), normal(2, 6, 3, seed=1)
    # The derivative exists where no two perturbed scores are within reach of the finite difference.
    gaps = (x.unsqueeze(-1) + epsilon * noise).sort(1).values.diff(dim=1)
    assert gaps.min() > 1e-4
    assert torch.autograd.gradcheck(
        lambda x: operator(x, k, epsilon=epsilon, noise=noise), x.requires_grad_(), eps=1e-6
    )


@both_operators
@every_case
@pytest.mark.parametrize("at_once", [1, 150, 1200])
def test_chunks_of_draws_make_no_difference(
    operator: Operator, case: Case, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, noise, k = drawn(case)
    whole = value_and_grad(lambda x: operator(x, k, epsilon=0.7, noise=noise), x)
    monkeypatch.setattr(smoothing, "_PERTURBED_AT_ONCE", at_once)
    chunked = value_and_grad(lambda x: operator(x, k, epsilon=0.7, noise=noise), x)
    assert_close(chunked, whole, rtol=0, atol=0)


def saved_for_backward(operator: Operator, x: Tensor, k: int, n_samples: int) -> list[Tensor]:
    """What autograd holds on to between forward and backward, but for the caller's own scores."""
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
    # Beside the positions, only whether each slice has a NaN.
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
