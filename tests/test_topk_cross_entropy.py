"""The top-K cross-entropy against draws without replacement, Gumbel noise and closed forms, at any scale of scores."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from shortlist import functional as F
from tests.support import literal_formulas as literal
from tests.support.drawing import normal, value_and_grad
from tests.torture import formulas

several_k = pytest.mark.parametrize("k", [2, 3, 5, (1, 3), (1, 2, 3, 4, 5)], ids=str)


def losses(scores: Tensor, target: Tensor, k: int | tuple[int, ...]) -> Tensor:
    return F.topk_cross_entropy(scores, target, k, reduction="none")


@several_k
@pytest.mark.parametrize("spread", [0.001, 1.0, 10.0, 100.0, 1e4])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-9)], ids=["float32", "float64"])
def test_every_digit_counts_from_safe_to_hopeless_labels(
    dtype: torch.dtype, rtol: float, spread: float, k: int | tuple[int, ...]
) -> None:
    """The formula adds logarithms of probabilities in longer floats, so that losses of 1e-30 and 1e4 have digits."""
    scores = (spread * normal(2, 7, seed=3)).to(dtype)
    for label in range(7):
        got = losses(scores, torch.full((2,), label), k)
        rows = scores.double().numpy().astype("longdouble")
        want = torch.tensor([float(formulas.topk_cross_entropy(row, label, k)) for row in rows], dtype=torch.float64)
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=0 if dtype == torch.float64 else 1e-36)
        assert (got >= 0).all()


@several_k
def test_gradient_is_that_of_draws_without_replacement(k: int | tuple[int, ...]) -> None:
    ks = k if isinstance(k, tuple) else (k,)
    scores = 3 * normal(6, 6, seed=4)
    labels = torch.arange(6)
    got = value_and_grad(lambda s: losses(s, labels, k).sum(), scores)
    want = value_and_grad(
        lambda s: torch.stack([literal.topk_cross_entropy(row, y, ks) for y, row in enumerate(s)]).sum(), scores
    )
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_k_one_is_the_cross_entropy() -> None:
    scores, target = 3 * normal(6, 9), torch.arange(6)
    ks: list[int | tuple[int, ...]] = [1, (1,)]
    for k in ks:
        got = value_and_grad(lambda s, k=k: F.topk_cross_entropy(s, target, k), scores)  # type: ignore[misc]
        torch.testing.assert_close(got, value_and_grad(lambda s: cross_entropy(s, target), scores))


def test_gumbel_noise_puts_the_label_among_the_k_best_as_often() -> None:
    scores, target, draws = 2 * normal(5, 200, seed=2), torch.tensor([0, 50, 100, 150, 199]), 4000
    gumbel = -torch.empty(draws, 5, 200, dtype=torch.float64).exponential_().log()
    noisy = scores + gumbel
    own = noisy.gather(2, target.expand(draws, 5).unsqueeze(2))
    rank = (noisy > own).sum(2)
    for k in (2, 5, 20, (1, 5, 20)):
        ks = k if isinstance(k, tuple) else (k,)
        hit = torch.stack([(rank < one).double() for one in ks]).mean(0)
        deviation = (hit.std(0) / math.sqrt(draws)).clamp(min=1 / draws)
        assert ((hit.mean(0) - (-losses(scores, target, k)).exp()).abs() < 5 * deviation).all()


@pytest.mark.parametrize(("num_classes", "k"), [(3, 2), (100, 5), (1000, 20), (10_000, 5), (300, 120)])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-9)], ids=["float32", "float64"])
def test_of_equal_classes_each_has_the_same_chance(dtype: torch.dtype, rtol: float, num_classes: int, k: int) -> None:
    scores = torch.full((1, num_classes), 3.0, dtype=dtype)
    loss, gradient = value_and_grad(lambda s: F.topk_cross_entropy(s, torch.tensor([1]), k), scores)
    rtol = max(rtol, 3e-5 if k > 100 and dtype == torch.float32 else 0)
    torch.testing.assert_close(loss.item(), math.log(num_classes / k), rtol=rtol, atol=0)
    others = torch.cat([gradient[:, :1], gradient[:, 2:]], 1)
    torch.testing.assert_close(others, (-gradient[:, 1:2] / (num_classes - 1)).expand_as(others), rtol=rtol, atol=0)


@pytest.mark.parametrize("k", [2, 5, 20, (1, 2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("ahead", [-8.0, 0.0, 6.0, 25.0])
def test_merging_the_slow_classes_of_long_rows_changes_nothing(k: int | tuple[int, ...], ahead: float) -> None:
    """Classes with scores of -1e4 never arrive. But with them the row is so long that half of the others are not
    counted one by one."""
    largest = max(k) if isinstance(k, tuple) else k
    kept = 3 * normal(3, 2 * (3 * largest + 32), seed=6)
    kept[:, 0] += ahead
    target = torch.zeros(3, dtype=torch.int64)
    want, want_grad = value_and_grad(lambda s: losses(s, target, k), kept)
    scores = torch.cat([kept, torch.full((3, 2000), -1e4, dtype=torch.float64)], 1)
    got, got_grad = value_and_grad(lambda s: losses(s, target, k), scores)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
    size = kept.shape[1]
    torch.testing.assert_close(got_grad[:, :size], want_grad, rtol=1e-8, atol=1e-9 * want_grad.abs().max().item())
    assert (got_grad[:, size:] == 0).all()
    single, single_grad = value_and_grad(lambda s: losses(s, target, k), scores.float())
    exact, exact_grad = value_and_grad(lambda s: losses(s, target, k), scores.float().double())
    torch.testing.assert_close(single.double(), exact, rtol=1e-5, atol=1e-36)
    atol = 1e-6 * exact_grad.abs().max().item() + 1e-36
    torch.testing.assert_close(single_grad.double(), exact_grad, rtol=1e-5, atol=atol)


def test_gradient_pushes_the_label_up_and_every_other_down() -> None:
    scores, target = normal(6, 300).requires_grad_(), torch.arange(6)
    F.topk_cross_entropy(scores, target, 3).backward()
    assert scores.grad is not None
    own = torch.eye(300, dtype=torch.bool)[target]
    assert (scores.grad[own] < 0).all()
    assert (scores.grad[~own] > 0).all()


def test_more_places_lower_the_loss() -> None:
    scores, target = 3 * normal(4, 12), torch.tensor([0, 3, 7, 11])
    by_k = torch.stack([losses(scores, target, k) for k in range(1, 12)])
    assert (by_k.diff(dim=0) < 0).all()
    mean_hit = (-by_k[[0, 4]]).exp().mean(0)
    torch.testing.assert_close(losses(scores, target, (1, 5)), -mean_hit.log())


def test_second_derivatives_are_refused() -> None:
    scores = normal(2, 5).requires_grad_()
    loss = F.topk_cross_entropy(scores, torch.tensor([0, 1]), 2)
    (gradient,) = torch.autograd.grad(loss, scores, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()
