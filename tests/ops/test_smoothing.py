"""Laws of ``topk_value``, ``topk_sum``, ``smooth_topk`` and ``smooth_topk_sum``."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from shortlist import smooth_topk, smooth_topk_sum, topk_sum, topk_value
from tests.support.drawing import SHAPES, normal, value_and_grad
from tests.support.operators import (
    CASES,
    FLOAT_TYPES,
    Case,
    Operator,
    both_operators,
    drawn,
    every_case,
    hard_and_smooth,
    weight_of,
)

PAPER_SCORES = torch.tensor([2.4, 2.6, 2.3, 0.5], dtype=torch.float64)
PAPER_NOISE = torch.tensor(
    [[0.2, -0.1, 0.1, 0.3], [0.1, 0.1, -0.1, 0.1], [-0.1, -0.1, 0.1, -0.1]], dtype=torch.float64
).T


def by_sorting(operator: Operator, x: Tensor, k: int, epsilon: float, noise: Tensor, dim: int = -1) -> Tensor:
    """The definition: sort every perturbed copy, take the k-th or the first k, and average over the draws."""
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
    # Small integers are exact in every dtype, so distinct scores stay distinct.
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
    # Computed in float64: the results differ only by one rounding to the dtype.
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
@hard_and_smooth
@pytest.mark.parametrize("k", [1, 3, 6])
def test_gradient_is_the_derivative(operator: Operator, epsilon: float, k: int) -> None:
    x, noise = normal(2, 6), normal(2, 6, 3, seed=1)
    # Finite differences need perturbed scores that are farther apart than their step.
    gaps = (x.unsqueeze(-1) + epsilon * noise).sort(1).values.diff(dim=1)
    assert gaps.min() > 1e-4
    assert torch.autograd.gradcheck(
        lambda x: operator(x, k, epsilon=epsilon, noise=noise), x.requires_grad_(), eps=1e-6
    )
