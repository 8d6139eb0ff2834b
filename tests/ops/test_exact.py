"""``exact_topk`` against independent formulas, its laws, and the Poisson-binomial distribution behind it."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor
from torch.testing import assert_close

from shortlist import exact_topk, smooth_topk, topk_value
from shortlist.ops.poisson_binomial import count_probabilities, probabilities_without_each
from tests.support.drawing import normal, value_and_grad

Floats = npt.NDArray[np.float64]

# Rows, classes, K: among them one class, the first, both sides of the middle, and the last.
CASES = [(2, 1, 1), (3, 2, 1), (3, 2, 2), (4, 7, 3), (4, 7, 5), (4, 8, 5), (2, 40, 1), (2, 40, 21), (2, 129, 125)]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_epsilon = pytest.mark.parametrize("epsilon", [0.05, 1.0, 7.0])


def probabilities_by_enumeration(happens: Floats) -> Floats:
    """``P(N = 0), ..., P(N = L)`` as sums over all subsets of the L events."""
    subsets = np.array(list(itertools.product([False, True], repeat=len(happens))), dtype=bool)
    of_subset = np.where(subsets, happens, 1 - happens).prod(1)
    return np.array([of_subset[subsets.sum(1) == count].sum() for count in range(len(happens) + 1)])


def integral(function: Callable[[float], float], x: Floats, epsilon: float) -> tuple[float, float]:
    """The integral over all t that matter, and where they begin."""
    low, high = x.min() - 9 * epsilon, x.max() + 9 * epsilon
    knots = sorted({float(knot) for score in x for knot in score + epsilon * np.array([-3, 0, 3])})
    value, _ = integrate.quad(function, low, high, epsabs=1e-12, epsrel=1e-12, limit=500, points=knots)
    return value, low


def topk_by_quadrature(x: Floats, k: int, epsilon: float) -> float:
    def survival(t: float) -> float:
        return float(probabilities_by_enumeration(special.ndtr((x - t) / epsilon))[k:].sum())

    value, low = integral(survival, x, epsilon)
    return low + value


def gradient_by_quadrature(x: Floats, k: int, epsilon: float) -> list[float]:
    """The probability of every class to be the k-th: it is at t, and k - 1 of the others are above."""

    def is_kth(label: int) -> float:
        others = np.delete(x, label)

        def density(t: float) -> float:
            above = probabilities_by_enumeration(special.ndtr((others - t) / epsilon))
            return float(stats.norm.pdf(t, x[label], epsilon) * above[k - 1])

        return integral(density, x, epsilon)[0]

    return [is_kth(label) for label in range(len(x))]


@pytest.mark.parametrize("num_classes", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
def test_value_is_the_integral_over_enumerated_subsets(num_classes: int, epsilon: float) -> None:
    x = normal(num_classes, seed=num_classes)
    got = [exact_topk(x, k, epsilon=epsilon).item() for k in range(1, num_classes + 1)]
    want = [topk_by_quadrature(x.numpy(), k, epsilon) for k in range(1, num_classes + 1)]
    assert got == pytest.approx(want, rel=0, abs=1e-9 * max(1, epsilon))


@pytest.mark.parametrize(("num_classes", "k"), [(1, 1), (2, 1), (3, 2), (4, 1), (4, 3), (5, 2), (5, 5)])
@pytest.mark.parametrize("epsilon", [0.3, 3.0])
def test_gradient_is_the_probability_of_being_the_kth(num_classes: int, k: int, epsilon: float) -> None:
    x = normal(num_classes, seed=num_classes)
    _, grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=epsilon), x)
    assert grad.tolist() == pytest.approx(gradient_by_quadrature(x.numpy(), k, epsilon), rel=0, abs=1e-9)


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 3.0])
@pytest.mark.parametrize("gap", [-2.0, 0.0, 0.03, 1.0])
def test_larger_of_two_classes_has_its_closed_form(gap: float, epsilon: float) -> None:
    a, b = 0.7 + gap, 0.7
    theta = epsilon * math.sqrt(2)
    d = gap / theta
    value, grad = value_and_grad(lambda x: exact_topk(x, 1, epsilon=epsilon), torch.tensor([a, b], dtype=torch.float64))
    want = a * special.ndtr(d) + b * special.ndtr(-d) + theta * stats.norm.pdf(d)
    assert value.item() == pytest.approx(want, rel=0, abs=1e-11)
    assert grad.tolist() == pytest.approx([special.ndtr(d), special.ndtr(-d)], rel=0, abs=1e-11)


@pytest.mark.parametrize(
    ("num_classes", "k"),
    # The more classes, the less the k-th varies: in the middle of 2000, by 0.03 of the noise.
    [(1000, 1), (1000, 10), (1000, 999), (1001, 501), (3000, 100), (2000, 900), (3000, 2995)],
)
def test_equal_scores_give_normal_order_statistics(num_classes: int, k: int) -> None:
    # The k-th largest of L uniforms is Beta(L + 1 - k, k), and a normal is the quantile function of a uniform.
    law = stats.beta(num_classes + 1 - k, k)
    low, high = (special.ndtri(law.ppf(tail)) for tail in (1e-14, 1 - 1e-14))
    want, _ = integrate.quad(
        lambda t: t * law.pdf(special.ndtr(t)) * stats.norm.pdf(t), low, high, epsabs=1e-12, epsrel=1e-12, limit=500
    )
    value, grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=1.0), torch.zeros(num_classes, dtype=torch.float64))
    assert value.item() == pytest.approx(want, rel=0, abs=1e-10)
    assert_close(grad, torch.full_like(grad, 1 / num_classes), rtol=1e-9, atol=0)


@pytest.mark.parametrize("case", [case for case in CASES if case[1] <= 8], ids=str)
@every_epsilon
def test_gradient_is_the_derivative(case: tuple[int, int, int], epsilon: float) -> None:
    rows, num_classes, k = case
    x = normal(rows, num_classes).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: exact_topk(x, k, epsilon=epsilon), x)


@every_case
@every_epsilon
def test_gradient_is_a_distribution_over_classes(case: tuple[int, int, int], epsilon: float) -> None:
    rows, num_classes, k = case
    _, grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=epsilon), normal(rows, num_classes))
    assert (grad >= 0).all()
    assert_close(grad.sum(-1), torch.ones(rows, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_classes", [1, 2, 7, 40])
@every_epsilon
def test_all_places_together_are_the_sum_of_the_scores(num_classes: int, epsilon: float) -> None:
    x = normal(3, num_classes)

    def over_all_places(x: Tensor) -> Tensor:
        return torch.stack([exact_topk(x, k, epsilon=epsilon) for k in range(1, num_classes + 1)]).sum(0)

    total, grad = value_and_grad(over_all_places, x)
    assert_close(total, x.sum(-1), rtol=0, atol=1e-10 * max(1, epsilon))
    assert_close(grad, torch.ones_like(x), rtol=0, atol=1e-10)


@every_case
@every_epsilon
def test_kth_largest_is_minus_the_kth_smallest_of_minus(case: tuple[int, int, int], epsilon: float) -> None:
    rows, num_classes, k = case
    x = normal(rows, num_classes)
    got = value_and_grad(lambda x: exact_topk(x, k, epsilon=epsilon), x)
    mirrored = value_and_grad(lambda x: -exact_topk(-x, num_classes + 1 - k, epsilon=epsilon), x)
    assert_close(got, mirrored, rtol=0, atol=1e-10 * max(1, epsilon))


@every_case
def test_shift_of_all_scores_shifts_the_value(case: tuple[int, int, int]) -> None:
    rows, num_classes, k = case
    x = normal(rows, num_classes)
    value, grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=0.5), x)
    moved, moved_grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=0.5), x - 3.5)
    assert_close(moved, value - 3.5, rtol=0, atol=1e-10)
    assert_close(moved_grad, grad, rtol=0, atol=1e-10)


@every_case
@pytest.mark.parametrize("scale", [1e-8, 3.0, 1e8])
def test_scores_and_noise_scale_together(case: tuple[int, int, int], scale: float) -> None:
    rows, num_classes, k = case
    x = normal(rows, num_classes)
    value, grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=0.5), x)
    scaled, scaled_grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=0.5 * scale), scale * x)
    assert_close(scaled / scale, value, rtol=0, atol=1e-10)
    assert_close(scaled_grad, grad, rtol=0, atol=1e-10)


@every_case
def test_permuting_classes_permutes_the_gradient(case: tuple[int, int, int]) -> None:
    rows, num_classes, k = case
    x = normal(rows, num_classes)
    order = torch.randperm(num_classes, generator=torch.Generator().manual_seed(2))
    value, grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=0.5), x)
    permuted, permuted_grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=0.5), x[:, order])
    assert_close(permuted, value, rtol=0, atol=1e-10)
    assert_close(permuted_grad, grad[:, order], rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_classes", [2, 7, 40])
@every_epsilon
def test_later_places_are_lower(num_classes: int, epsilon: float) -> None:
    x = normal(3, num_classes)
    by_place = torch.stack([exact_topk(x, k, epsilon=epsilon) for k in range(1, num_classes + 1)])
    assert (by_place.diff(dim=0) < 0).all()


@every_case
@pytest.mark.parametrize("epsilon", [1e-9, 1e-3, 0.3, 1.0, 7.0])
def test_distance_to_the_hard_value_is_within_the_bound(case: tuple[int, int, int], epsilon: float) -> None:
    rows, num_classes, k = case
    x = normal(rows, num_classes)
    distance = (exact_topk(x, k, epsilon=epsilon) - topk_value(x, k)).abs()
    assert (distance <= epsilon * math.sqrt(2 * math.log(2 * num_classes)) + 1e-12).all()


@every_case
def test_small_epsilon_is_the_hard_operator(case: tuple[int, int, int]) -> None:
    rows, num_classes, k = case
    x = normal(rows, num_classes)
    hard = value_and_grad(lambda x: topk_value(x, k), x)
    assert_close(value_and_grad(lambda x: exact_topk(x, k, epsilon=1e-9), x), hard, rtol=0, atol=1e-8)
    assert_close(value_and_grad(lambda x: exact_topk(x, k, epsilon=0.0), x), hard, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("num_classes", "k", "epsilon", "spread"),
    [
        (2, 1, 1.0, 1.0),
        (5, 2, 0.3, 1.0),
        (10, 10, 1.0, 0.1),
        (20, 11, 0.5, 0.0),
        (100, 6, 0.2, 1.0),
        (100, 6, 5.0, 1.0),
    ],
)
def test_monte_carlo_means_are_within_five_standard_errors(
    num_classes: int, k: int, epsilon: float, spread: float
) -> None:
    estimates, n_samples = 5_000, 4
    x = (spread * normal(num_classes)).expand(estimates, -1)
    generator = torch.Generator().manual_seed(1)
    value, grad = value_and_grad(
        lambda x: smooth_topk(x, k, epsilon=epsilon, n_samples=n_samples, generator=generator), x
    )
    exact, exact_grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=epsilon), x[0])
    assert (value.mean() - exact).abs() <= 5 * value.std() / math.sqrt(estimates)
    # Whether a class is the k-th in a draw is a Bernoulli variable. One count of tolerance, for rare classes.
    total = estimates * n_samples
    assert ((grad.mean(0) - exact_grad).abs() <= 5 * (exact_grad * (1 - exact_grad) / total).sqrt() + 1 / total).all()


@every_case
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 30.0, 1e3])
def test_float32_is_as_good_as_its_digits(case: tuple[int, int, int], offset: float, spread: float) -> None:
    rows, num_classes, k = case
    x = (offset + spread * normal(rows, num_classes)).float()
    got, got_grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=1.0), x)
    want, want_grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=1.0), x.double())
    # The accuracy of the integral, plus the rounding of the result.
    rounding = torch.finfo(torch.float32).eps * want.abs()
    assert ((got - want).abs() <= 1e-5 + rounding).all()
    assert_close(got_grad.double(), want_grad, rtol=0, atol=1e-5)


@every_case
@pytest.mark.parametrize("offset", [1e4, -1e4, 1e8])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_digits_survive_a_large_offset(case: tuple[int, int, int], offset: float, spread: float) -> None:
    rows, num_classes, k = case
    x = offset + spread * normal(rows, num_classes)
    got, got_grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=1.0), x)
    # The subtraction is exact (Sterbenz's lemma): both sides get the same scores.
    want, want_grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=1.0), x - offset)
    assert_close(got - offset, want, rtol=0, atol=1e-10 + torch.finfo(torch.float64).eps * abs(offset))
    assert_close(got_grad, want_grad, rtol=0, atol=1e-9)


def test_clusters_far_apart_are_smoothed_each_on_its_own() -> None:
    near, far = normal(5, seed=1), 1e4 + normal(4, seed=2)
    x = torch.cat([near, far, torch.full((3,), -1e4, dtype=torch.float64)])
    for k in range(1, 5):
        assert_close(exact_topk(x, k, epsilon=1.0), exact_topk(far, k, epsilon=1.0), rtol=0, atol=1e-9)
    for k in range(1, 6):
        assert_close(exact_topk(x, 4 + k, epsilon=1.0), exact_topk(near, k, epsilon=1.0), rtol=0, atol=1e-9)


@pytest.mark.parametrize("k", [1, 6, 2999, 3000])
def test_thousands_of_classes(k: int) -> None:
    x = normal(3000)
    value, grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=0.5), x)
    assert_close(grad.sum(), torch.tensor(1.0, dtype=torch.float64), rtol=0, atol=1e-10)
    # Classes eight standard deviations above only lower the rank of the others.
    near, above = (x - value).abs() <= 4, x > value + 4
    assert near.sum() < len(x)
    assert_close(exact_topk(x[near], k - int(above.sum()), epsilon=0.5), value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("k", [1, 3])
def test_any_dimension_can_hold_the_classes(dim: int, k: int) -> None:
    x = normal(4, 5, 3)
    got = value_and_grad(lambda x: exact_topk(x, k, epsilon=0.5, dim=dim), x)
    want_value, want_grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=0.5), x.movedim(dim, -1).contiguous())
    assert_close(got, (want_value, want_grad.movedim(-1, dim)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [1, 4, 7])
def test_half_types_are_the_cast_of_the_float32_computation(dtype: torch.dtype, k: int) -> None:
    x, upstream = normal(5, 7, dtype=dtype), normal(5, seed=1, dtype=dtype)
    got = value_and_grad(lambda x: exact_topk(x, k, epsilon=0.01), x, upstream)
    want = value_and_grad(lambda x: exact_topk(x, k, epsilon=0.01), x.float(), upstream.float())
    assert_close(got, tuple(tensor.to(dtype) for tensor in want), rtol=0, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("k", [1, 4, 7])
def test_non_finite_score_spoils_its_own_slice_alone(bad: float, k: int) -> None:
    x = normal(3, 7)
    spoilt = x.clone()
    spoilt[1, 4] = bad
    want, want_grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=0.5), x)
    got, got_grad = value_and_grad(lambda x: exact_topk(x, k, epsilon=0.5), spoilt)
    assert got.isnan().tolist() == [False, True, False]
    assert_close(got[[0, 2]], want[[0, 2]], rtol=0, atol=0)
    assert_close(got_grad[[0, 2]], want_grad[[0, 2]], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_same_scores_give_the_same_bits(dtype: torch.dtype) -> None:
    x = normal(4, 100, dtype=dtype)
    state = torch.get_rng_state()
    first = value_and_grad(lambda x: exact_topk(x, 5, epsilon=0.5), x)
    assert_close(value_and_grad(lambda x: exact_topk(x, 5, epsilon=0.5), x), first, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("num_classes", [1, 2, 3, 5, 6, 9])
@pytest.mark.parametrize("size", [1, 2, 4, 7, 10, 13])
def test_counts_are_sums_over_enumerated_subsets(num_classes: int, size: int) -> None:
    happens = torch.rand(4, num_classes, dtype=torch.float64, generator=torch.Generator().manual_seed(num_classes))
    got = count_probabilities(happens, 1 - happens, size)
    want = np.zeros((4, max(size, num_classes + 1)))
    for row, law in zip(want, happens.numpy(), strict=True):
        row[: num_classes + 1] = probabilities_by_enumeration(law)
    assert_close(got, torch.from_numpy(want[:, :size]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("num_classes", [1, 2, 63, 64, 1000, 1001])
@pytest.mark.parametrize("probability", [0.003, 0.5, 0.97])
@pytest.mark.parametrize("size", [1, 20, 1100])
def test_equal_events_are_binomial(num_classes: int, probability: float, size: int) -> None:
    happens = torch.full((num_classes,), probability, dtype=torch.float64)
    fails = torch.full((num_classes,), 1 - probability, dtype=torch.float64)
    got = count_probabilities(happens, fails, size)
    want = stats.binom.pmf(np.arange(size), num_classes, probability)
    assert_close(got, torch.from_numpy(want), rtol=1e-10, atol=1e-300)


def test_certain_events_count_for_certain() -> None:
    happens = torch.tensor([1.0, 0.0, 1.0, 0.5, 0.0])
    assert count_probabilities(happens, 1 - happens, 6).tolist() == [0, 0, 0.5, 0.5, 0, 0]


@pytest.mark.parametrize("num_classes", [2, 3, 5, 8, 13])
def test_without_an_event_the_counts_are_those_of_the_others(num_classes: int) -> None:
    happens = torch.rand(4, num_classes, dtype=torch.float64, generator=torch.Generator().manual_seed(num_classes))
    for count in range(1, num_classes):
        at_count, before = probabilities_without_each(happens, 1 - happens, count)
        for event in range(num_classes):
            others = torch.cat([happens[:, :event], happens[:, event + 1 :]], 1)
            want = count_probabilities(others, 1 - others, count + 1)
            assert_close(at_count[:, event], want[:, count], rtol=1e-12, atol=0)
            assert_close(before[:, event], want[:, count - 1], rtol=1e-12, atol=0)
