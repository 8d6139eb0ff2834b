"""The propositions of the paper, as far as they hold, and the calibration of the hinge.

Garcin et al. (2022), section 3.2, with two differences: the smoothed sum is strictly convex only across the all-ones
direction, and the constants of the smoothed K-th largest are smaller.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shortlist import exact_topk, topk_value
from shortlist import functional as F
from tests.support.drawing import normal, value_and_grad

# Classes, K, epsilon. The scores are standard normal.
CASES = [(2, 1, 1.0), (3, 2, 0.3), (6, 1, 0.5), (6, 3, 2.0), (12, 5, 0.5)]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
Case = tuple[int, int, float]

PAIRS = 40


def smooth_sum(x: Tensor, k: int, epsilon: float) -> Tensor:
    """topsum_{K, eps} without noise: the sum of the smoothed 1st to K-th largest."""
    return torch.stack([exact_topk(x, place, epsilon=epsilon) for place in range(1, k + 1)]).sum(0)


def pairs_of_scores(num_classes: int) -> tuple[Tensor, Tensor]:
    """Pairs far apart and close together: either may come close to a Lipschitz constant."""
    start = normal(PAIRS, num_classes)
    step = normal(PAIRS, num_classes, seed=1) * torch.logspace(-3, 0.5, PAIRS, dtype=torch.float64).unsqueeze(-1)
    return start, start + step


def hessian_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    hessian = torch.autograd.functional.hessian(function, x)
    assert isinstance(hessian, Tensor)
    return hessian


@every_case
def test_smooth_sum_is_convex_along_segments(case: Case) -> None:
    num_classes, k, epsilon = case
    start, end = normal(PAIRS, num_classes), normal(PAIRS, num_classes, seed=1)
    on_start, on_end = smooth_sum(start, k, epsilon), smooth_sum(end, k, epsilon)
    for share in (0.1, 0.5, 0.8):
        between = smooth_sum((1 - share) * start + share * end, k, epsilon)
        assert (between <= (1 - share) * on_start + share * on_end + 1e-10).all()


@every_case
def test_smooth_sum_is_linear_with_slope_k_along_ones(case: Case) -> None:
    num_classes, k, epsilon = case
    x = normal(PAIRS, num_classes)
    value, grad = value_and_grad(lambda x: smooth_sum(x, k, epsilon), x)
    for step in (-3.0, 0.1, 20.0):
        moved, moved_grad = value_and_grad(lambda x: smooth_sum(x, k, epsilon), x + step)
        assert_close(moved, value + k * step, rtol=0, atol=1e-9)
        assert_close(moved_grad, grad, rtol=0, atol=1e-9)


@every_case
def test_smooth_sum_is_strictly_convex_across_ones(case: Case) -> None:
    num_classes, k, epsilon = case
    # Scores spread as widely as the noise: if they are farther apart, the curvature is too small to measure.
    for x in epsilon * normal(5, num_classes):
        hessian = epsilon * hessian_of(lambda x: smooth_sum(x, k, epsilon), x)
        assert_close(hessian.sum(1), torch.zeros_like(x), rtol=0, atol=1e-9)
        flat, *curved = torch.linalg.eigvalsh(hessian).tolist()
        assert abs(flat) <= 1e-9
        assert min(curved) >= 1e-5


@every_case
def test_smooth_sum_is_sqrt_k_lipschitz(case: Case) -> None:
    num_classes, k, epsilon = case
    start, end = pairs_of_scores(num_classes)
    change = (smooth_sum(end, k, epsilon) - smooth_sum(start, k, epsilon)).abs()
    assert (change <= math.sqrt(k) * (end - start).norm(dim=-1) + 1e-10).all()


def test_lipschitz_constant_of_the_smooth_sum_is_reached() -> None:
    # Two classes far ahead, moved together: nothing less than sqrt(2) will do.
    x = torch.tensor([9.0, 9.0, 0.0, 0.0], dtype=torch.float64)
    _, grad = value_and_grad(lambda x: smooth_sum(x, 2, 0.5), x)
    assert grad.norm().item() == pytest.approx(math.sqrt(2))


@every_case
def test_gradient_of_the_smooth_sum_is_lipschitz(case: Case) -> None:
    num_classes, k, epsilon = case
    start, end = pairs_of_scores(num_classes)
    _, at_start = value_and_grad(lambda x: smooth_sum(x, k, epsilon), start)
    _, at_end = value_and_grad(lambda x: smooth_sum(x, k, epsilon), end)
    bound = math.sqrt(k * num_classes) / epsilon
    assert ((at_end - at_start).norm(dim=-1) <= bound * (end - start).norm(dim=-1) + 1e-9).all()
    # All scores equal is where ranks change most easily.
    steepest = hessian_of(lambda x: smooth_sum(x, k, epsilon), torch.zeros(num_classes, dtype=torch.float64))
    assert torch.linalg.matrix_norm(steepest, 2) <= bound


@every_case
def test_gradient_of_the_smooth_sum_is_the_expected_top_k_set(case: Case) -> None:
    num_classes, k, epsilon = case
    n_samples = 40_000
    x = normal(num_classes)
    _, grad = value_and_grad(lambda x: smooth_sum(x, k, epsilon), x)
    chosen = (x + epsilon * normal(n_samples, num_classes, seed=2)).topk(k).indices
    share = torch.bincount(chosen.flatten(), minlength=num_classes) / n_samples
    # Binomial proportions, with one count of tolerance where they are almost certain.
    error = (grad * (1 - grad)).clamp(min=0).div(n_samples).sqrt()
    assert ((share - grad).abs() <= 5 * error + 1 / n_samples).all()


@every_case
@pytest.mark.parametrize("shrink", [1.0, 1e-2, 1e-4])
def test_smooth_sum_tends_to_the_hard_one(case: Case, shrink: float) -> None:
    num_classes, k, epsilon = case
    epsilon *= shrink
    x = normal(PAIRS, num_classes)
    distance = smooth_sum(x, k, epsilon) - x.topk(k).values.sum(-1)
    assert (distance.abs() <= k * epsilon * math.sqrt(2 * math.log(2 * num_classes)) + 1e-10).all()
    # Jensen: the sum of the K largest is convex, so noise can only raise its mean.
    assert (distance >= -1e-10).all()


@every_case
def test_smooth_kth_largest_is_smooth_with_half_the_printed_constant(case: Case) -> None:
    num_classes, k, epsilon = case
    start, end = pairs_of_scores(num_classes)
    _, at_start = value_and_grad(lambda x: exact_topk(x, k, epsilon=epsilon), start)
    _, at_end = value_and_grad(lambda x: exact_topk(x, k, epsilon=epsilon), end)
    bound = 2 * math.sqrt(k * num_classes) / epsilon
    assert ((at_end - at_start).norm(dim=-1) <= bound * (end - start).norm(dim=-1) + 1e-9).all()


@pytest.mark.parametrize("num_classes", [2, 10, 200])
@pytest.mark.parametrize("epsilon", [0.1, 3.0])
@pytest.mark.parametrize("spread", [0.0, 0.1, 10.0])
def test_approximation_bound_needs_no_factor_k(num_classes: int, epsilon: float, spread: float) -> None:
    x = spread * normal(3, num_classes)
    for k in {1, num_classes // 2, num_classes}:
        distance = (exact_topk(x, k, epsilon=epsilon) - topk_value(x, k)).abs()
        assert (distance <= epsilon * math.sqrt(2 * math.log(2 * num_classes))).all()


def expected_loss(scores: Tensor, target: Tensor, k: int, epsilon: float) -> Tensor:
    return F.noised_topk_hinge(scores, target, k, epsilon=epsilon, n_samples=math.inf, reduction="none")


@pytest.mark.parametrize(("num_classes", "k", "epsilon"), [(2, 1, 1.0), (5, 2, 0.3), (12, 5, 0.5), (12, 11, 0.5)])
def test_gradient_of_the_loss_is_that_of_the_rival_less_the_label(num_classes: int, k: int, epsilon: float) -> None:
    scores = 1.5 * normal(60, num_classes)
    target = torch.randint(num_classes, (60,), generator=torch.Generator().manual_seed(1))
    rival, rival_grad = value_and_grad(lambda x: exact_topk(x, k + 1, epsilon=epsilon), scores)
    own = scores.gather(1, target.unsqueeze(1)).squeeze(1)
    active = 1 + rival >= own
    assert 0 < active.sum() < len(active)
    loss, grad = value_and_grad(lambda x: expected_loss(x, target, k, epsilon), scores)
    is_label = torch.nn.functional.one_hot(target, num_classes)
    assert_close(loss, torch.where(active, 1 + rival - own, 0))
    assert_close(grad, active.unsqueeze(1) * (rival_grad - is_label))


@pytest.mark.parametrize(("num_classes", "k", "epsilon"), [(3, 1, 0.3), (6, 2, 1.0)])
def test_loss_is_continuous_and_its_gradient_too_where_active(num_classes: int, k: int, epsilon: float) -> None:
    # The label's score climbs from last place to far ahead, through every rank and across the hinge.
    climb, step = torch.linspace(-4, 8, 2401, dtype=torch.float64), 12 / 2400
    scores = normal(num_classes).repeat(len(climb), 1)
    scores[:, 0] = climb
    loss, grad = value_and_grad(
        lambda x: expected_loss(x, torch.zeros(len(climb), dtype=torch.int64), k, epsilon), scores
    )
    assert loss[0] > 1
    assert loss[-1] == 0
    # Both the rival and the label's score move by no more than the step.
    assert loss.diff().abs().max() <= 2 * step
    active = loss > 0
    assert active.long().diff().abs().sum() == 1
    smoothness = 2 * math.sqrt((k + 1) * num_classes) / epsilon
    assert (grad[active].diff(dim=0).norm(dim=-1) <= smoothness * step).all()


@pytest.mark.parametrize(("num_classes", "k"), [(3, 1), (7, 3), (7, 6), (100, 5)])
def test_label_just_outside_the_top_k_is_a_dead_zone_that_smoothing_revives(num_classes: int, k: int) -> None:
    # Distinct eighths: 1 + s - s is then exactly 1.
    scores = normal(4, num_classes).argsort(1).double() / 8
    target = scores.topk(k + 1).indices[:, k]
    hard, hard_grad = value_and_grad(lambda x: F.calibrated_topk_hinge(x, target, k, reduction="none"), scores)
    assert (hard == 1).all()
    assert (hard_grad == 0).all()
    _, grad = value_and_grad(lambda x: expected_loss(x, target, k, 0.5), scores)
    # Descent raises the label's score, and lowers the others' by as much in all.
    is_label = torch.nn.functional.one_hot(target, num_classes).bool()
    assert (grad[is_label] < -0.3).all()
    assert (grad[~is_label] >= 0).all()
    assert_close(grad.sum(1), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-10)


def is_top_k_preserving(scores: Tensor, law: Tensor, k: int) -> Tensor:
    """Definition 2.3 of Yang and Koyejo (2020): classes surely in or out by the law are so by the scores."""
    ranked_law, ranked = law.sort(descending=True).values, scores.sort(descending=True).values
    in_is_in = (law <= ranked_law[k]) | (scores > ranked[:, k : k + 1])
    out_is_out = (law >= ranked_law[k - 1]) | (scores < ranked[:, k - 1 : k])
    return (in_is_in & out_is_out).all(-1)


def conditional_risk(loss: Callable[..., Tensor], scores: Tensor, law: Tensor, k: int) -> Tensor:
    by_label = [loss(scores, torch.full([len(scores)], label), k, reduction="none") for label in range(len(law))]
    return law @ torch.stack(by_label)


# Laws close enough to uniform that the plain hinge gains by leaving ties.
laws = pytest.mark.parametrize(
    ("law", "k", "step"), [((0.4, 0.3, 0.3), 1, 0.25), ((0.35, 0.25, 0.2, 0.2), 2, 0.5)], ids=["K=1", "K=2"]
)


def grid_and_law(law: tuple[float, ...], step: float) -> tuple[Tensor, Tensor]:
    """All score vectors with entries 0, step, ..., 2: both hinges look at differences up to 1 only."""
    values = torch.arange(0, 2 + step, step, dtype=torch.float64)
    return torch.cartesian_prod(*[values] * len(law)), torch.tensor(law, dtype=torch.float64)


@laws
def test_calibrated_hinge_is_least_at_top_k_preserving_scores_alone(
    law: tuple[float, ...], k: int, step: float
) -> None:
    scores, law_L = grid_and_law(law, step)
    risk, preserving = (
        conditional_risk(F.calibrated_topk_hinge, scores, law_L, k),
        is_top_k_preserving(scores, law_L, k),
    )
    # Ranking a class outside the top K ahead of the K-th costs at least the difference of their probabilities.
    gap = (risk[~preserving].min() - risk[preserving].min()).item()
    assert gap == pytest.approx(law[k - 1] - law[k])
    assert risk.min().item() == pytest.approx(1 - sum(law[:k]))


@laws
def test_plain_hinge_prefers_scores_that_are_not_top_k_preserving(law: tuple[float, ...], k: int, step: float) -> None:
    scores, law_L = grid_and_law(law, step)
    risk, preserving = conditional_risk(F.topk_hinge, scores, law_L, k), is_top_k_preserving(scores, law_L, k)
    assert preserving.any()
    assert risk[~preserving].min() < risk[preserving].min() - 0.02
