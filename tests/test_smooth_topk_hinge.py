"""The smoothed hinge against the sum over all subsets, also for scores whose exponentials would overflow."""

import pytest
import torch
from torch import Tensor

from shortlist import functional as F
from tests.support import literal_formulas as literal
from tests.support.drawing import normal


def draw_scores(n: int, num_classes: int, spread: float) -> Tensor:
    return spread * normal(n, num_classes, seed=4)


def value_and_grad(loss: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.autograd.grad(loss.sum(), scores)[0]


@pytest.mark.parametrize("spread", [0.0, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_matches_the_sum_over_subsets(k: int, tau: float, spread: float) -> None:
    scores, labels = draw_scores(3, 8, spread).requires_grad_(), [0, 3, 7]
    brute = torch.stack([literal.smooth_topk_hinge(row, y, k, tau) for row, y in zip(scores, labels, strict=True)])
    got = F.smooth_topk_hinge(scores, torch.tensor(labels), k, tau=tau, reduction="none")
    torch.testing.assert_close(value_and_grad(got, scores), value_and_grad(brute, scores), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spread", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("tau", [0.01, 1.0])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_probability_targets_match_the_sum_over_subsets(k: int, tau: float, spread: float) -> None:
    scores, probability = draw_scores(2, 6, spread).requires_grad_(), draw_scores(2, 6, 1.0).softmax(1)
    per_class = [[literal.smooth_topk_hinge(row, y, k, tau) for y in range(6)] for row in scores]
    brute = (probability * torch.stack([torch.stack(row) for row in per_class])).sum(1)
    got = F.smooth_topk_hinge(scores, probability, k, tau=tau, reduction="none")
    torch.testing.assert_close(value_and_grad(got, scores), value_and_grad(brute, scores), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("k", [1, 5, 20])
@pytest.mark.parametrize("spread", [1.0, 1e4])
def test_float32_is_as_good_as_its_digits(k: int, spread: float) -> None:
    scores, target = draw_scores(16, 100, spread), torch.randint(100, (16,))
    for tau in (0.01, 1.0):
        exact = F.smooth_topk_hinge(scores.float().double(), target, k, tau=tau, reduction="none")
        single = F.smooth_topk_hinge(scores.float(), target, k, tau=tau, reduction="none")
        # A score's own rounding, over K, is the error that no arithmetic on float32 scores can avoid.
        torch.testing.assert_close(single.double(), exact, rtol=1e-5, atol=max(1e-5, 4e-7 * spread / k))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_small_temperature_is_the_limit(k: int) -> None:
    scores, target = draw_scores(10, 7, 3.0), torch.randint(7, (10,))
    limit = F.smooth_topk_hinge(scores, target, k, tau=0.0, reduction="none")
    others = scores.scatter(1, target[:, None], -torch.inf).sort(1, descending=True).values[:, k - 1]
    own = scores.gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(limit, (1 + (others - own) / k).relu())
    near = F.smooth_topk_hinge(scores, target, k, tau=1e-4, reduction="none")
    # tau log of at most C(7, 5) terms more
    torch.testing.assert_close(near, limit, atol=1e-4 * 4, rtol=0)


def test_k_one_is_a_cross_entropy_with_margin() -> None:
    scores, target, tau = draw_scores(5, 6, 2.0), torch.tensor([0, 5, 2, 3, 1]), 0.7
    raised = scores + 1 - torch.eye(6, dtype=torch.float64)[target]
    want = tau * torch.nn.functional.cross_entropy(raised / tau, target, reduction="none")
    torch.testing.assert_close(F.smooth_topk_hinge(scores, target, 1, tau=tau, reduction="none"), want)


def test_large_k_and_many_classes() -> None:
    # Flat scores have a closed form: e_K / e_(K-1) of m equal weights w is w (m - K + 1) / K.
    num_classes, k = 3000, 700
    scores = torch.full((2, num_classes), 3.0, dtype=torch.float64, requires_grad=True)
    value = F.smooth_topk_hinge(scores, torch.tensor([0, 1500]), k, tau=1.0, reduction="none")
    ratio = torch.tensor((num_classes - 1 - k + 1) / k, dtype=torch.float64)
    want = torch.log1p(torch.exp(1 + ratio.log()))
    torch.testing.assert_close(value.detach(), want.expand(2))
    value.sum().backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    torch.testing.assert_close(scores.grad.sum(1), torch.zeros(2, dtype=torch.float64), atol=1e-12, rtol=0)


def test_gradient_pushes_the_label_up_and_every_other_down() -> None:
    scores, target = draw_scores(6, 9, 1.0).requires_grad_(), torch.arange(6)
    F.smooth_topk_hinge(scores, target, 3).backward()
    assert scores.grad is not None
    own = torch.eye(9, dtype=torch.bool)[target]
    assert (scores.grad[own] < 0).all()
    assert (scores.grad[~own] > 0).all()
