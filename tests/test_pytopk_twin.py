"""The authors' own package, pytopk 0.1.0: the same noise in, the same loss and gradient out."""

import pytest
import pytopk
import torch
from pytopk.functional import bal_noised_topk_loss, imbal_noised_topk_loss
from pytopk.noised_topk import _noised_topk
from torch import Tensor

import shortlist as sl
from tests.support.loss_cases import class_counts

SHAPES = [(2, 3, 1), (3, 7, 5), (16, 100, 5), (2, 129, 3)]


def draw(n: int, num_classes: int, n_samples: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(n, num_classes, generator=generator).requires_grad_()
    target = torch.randint(num_classes, (n,), generator=generator)
    return scores, target, torch.randn(n, num_classes, n_samples, generator=generator)


def assert_same(ours: Tensor, theirs: Tensor, scores: Tensor) -> None:
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), scores)[0], torch.autograd.grad(theirs.sum(), scores)[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("epsilon", [0.01, 1.0])
def test_balanced_loss(shape: tuple[int, int, int], k: int, epsilon: float) -> None:
    scores, target, noise = draw(*shape)
    k = min(k, shape[1] - 1)
    theirs = bal_noised_topk_loss(scores, target, k, epsilon, _noised_topk, noise)
    assert_same(sl.NoisedTopKHinge(k, epsilon=epsilon)(scores, target, noise=noise), theirs, scores)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("k", [1, 2, 6])
def test_imbalanced_loss(shape: tuple[int, int, int], k: int) -> None:
    scores, target, noise = draw(*shape)
    k, counts = min(k, shape[1] - 1), class_counts(shape[1])
    margins = pytopk.ImbalNoisedTopK(k=k, epsilon=0.1, max_m=0.3, cls_num_list=counts.numpy()).m_list
    torch.testing.assert_close(sl.class_margins(counts, 0.3), margins)
    theirs = imbal_noised_topk_loss(scores, target, k, margins, 0.1, _noised_topk, noise, 50)
    ours = sl.ImbalancedNoisedTopKHinge(counts, k, epsilon=0.1, max_margin=0.3)
    assert_same(ours(scores, target, noise=noise), theirs, scores)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dim", [-1, -2, 0, 1])
def test_operator(shape: tuple[int, int, int], dim: int) -> None:
    x, _, noise = draw(*shape)
    theirs = _noised_topk(x, noise, 2, 0.5, dim, -1 if dim < 0 else 0)
    assert_same(sl.smooth_topk(x, 2, epsilon=0.5, dim=dim, noise=noise), theirs, x)


def test_drawn_noise_has_the_same_law() -> None:
    # Means of the authors' loss and of ours, each with its own noise, within five standard errors of their difference.
    scores, target, _ = draw(1, 20, 1)
    scores, target = scores.detach().expand(4000, 20), target.expand(4000)
    theirs = torch.stack([pytopk.NoisedTopK(k=6, epsilon=0.5, n_sample=1)(scores) for _ in range(5)]).flatten()
    ours = torch.stack([sl.smooth_topk(scores, 6, epsilon=0.5, n_samples=1) for _ in range(5)]).flatten()
    error = (theirs.var() / len(theirs) + ours.var() / len(ours)).sqrt()
    assert (theirs.mean() - ours.mean()).abs() < 5 * error
    loss = [sl.NoisedTopKHinge(5, epsilon=0.5, n_samples=3)(scores, target).item() for _ in range(2)]
    assert loss[0] != loss[1]
