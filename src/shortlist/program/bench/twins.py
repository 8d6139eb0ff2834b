"""Nothing of ours is timed before it has given the results of its twin: a plain formula, a closed form, a law.

A fast kernel that is wrong is worse than none, and a benchmark is where it would be admired. Each check runs what is
about to be timed, on the same device and in the same dtype, and raises ``ShortlistError`` where the results differ.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shortlist import functional
from shortlist.errors import ShortlistError

_SEED = 20220717
# The expectation is compared on a few rows of as many classes as it takes seconds for at most.
_LAW_ROWS, _LAW_CALLS, _LAW_COPIES = 4, 10, 20
_LAW_CLASSES = {"cuda": 20_000, "cpu": 2_000}
_STANDARD_ERRORS = 5
# The largest of 1e11 standard normals in size: a mean of draws beyond it was not drawn.
_LARGEST_NORMAL = 7.0


@contextmanager
def twin_of(entry: str) -> Iterator[None]:
    """Name the entry in whatever mismatch is found inside."""
    torch.manual_seed(_SEED)
    try:
        yield
    except AssertionError as wrong:
        reason = " ".join(str(wrong).split())
        raise ShortlistError(f"{entry} differs from its twin, so it is not timed: {reason}") from wrong


def check_noised_hinge(
    entry: str, scores: Tensor, target: Tensor, k: int, *, epsilon: float, n_samples: int, spread: float
) -> None:
    """``noised_topk_hinge`` on this very batch, and on small ones of the same kind whose result is known."""
    with twin_of(entry):
        _check_given_noise(scores, k, epsilon, n_samples, spread)
        _check_expectation(scores, k, epsilon, n_samples)
        leaf = scores.detach().requires_grad_()
        functional.noised_topk_hinge(leaf, target, k, epsilon=epsilon, n_samples=n_samples).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        _check_found_positions(scores, leaf.grad, target, n_samples)
        _check_values(scores, target, k, epsilon, n_samples)


def check_smooth_hinge(entry: str, scores: Tensor, target: Tensor, k: int) -> None:
    """``smooth_topk_hinge`` and its gradient on two rows of this batch, against float64 on the CPU."""
    with twin_of(entry):
        results = []
        for rows in (scores[:2], scores[:2].double().cpu()):
            leaf = rows.detach().requires_grad_()
            loss = functional.smooth_topk_hinge(leaf, target[:2].to(rows.device), k)
            results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
        (value, gradient), (true_value, true_gradient) = results
        _assert_close("the loss", value, true_value)
        _assert_close("the gradient", gradient, true_gradient)


def check_topk_counts(entry: str, hits: dict[int, Tensor], scores: Tensor, target: Tensor) -> None:
    """Top-K hits of each class, against counting in sorted scores."""
    with twin_of(entry):
        own = scores.gather(1, target[:, None])
        ranked = scores.sort(dim=1, descending=True).values
        for k, found in hits.items():
            correct = (own.squeeze(1) >= ranked[:, k - 1]).long()  # a tie with the K-th counts as correct
            true = torch.zeros_like(found).index_add(0, target, correct)
            assert torch.equal(found, true), f"{int(found.sum())} images are correct at K = {k}, not {int(true.sum())}"


def check_noised_head(
    entry: str,
    build: Callable[[Tensor], nn.Module],
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    k: int,
    epsilon: float,
    n_samples: int,
) -> None:
    """``NoisedTopKHead`` on this very batch, and on small ones against the layer and the loss one after the other.

    Args:
        entry: Its name, for the message.
        build: Makes a head with the weights it is given.
        features, weight, target: What is about to be timed.
        k, epsilon, n_samples: Of the head's loss.
    """
    with twin_of(entry):
        _check_head_given_noise(build, features, k, epsilon, n_samples)
        _check_head_expectation(build, features, weight, k, epsilon)
        _check_touched_classes(build(weight), features, target, n_samples)


def plain_noised_hinge(scores: Tensor, target: Tensor, k: int, epsilon: float, noise: Tensor) -> Tensor:
    """The formula, literally."""
    rival = (scores.unsqueeze(-1) + epsilon * noise).topk(k + 1, dim=1).values[:, k].mean(-1)
    return (1 + rival - scores.gather(1, target[:, None]).squeeze(1)).relu().mean()


def _check_given_noise(scores: Tensor, k: int, epsilon: float, n_samples: int, spread: float) -> None:
    """On noise that is given, value and gradient are the formula's."""
    small = (spread * torch.randn(16, 2 * k + 30)).to(scores.dtype)
    target = torch.randint(small.shape[1], (16,))
    noise = torch.randn(*small.shape, n_samples)
    exact = small.double().requires_grad_()
    true_value = plain_noised_hinge(exact, target, k, epsilon, noise.double())
    leaf = small.to(scores.device).requires_grad_()
    target, noise = target.to(scores.device), noise.to(scores.device)
    value = functional.noised_topk_hinge(leaf, target, k, epsilon=epsilon, noise=noise)
    _assert_close("the loss on given noise", value.detach(), true_value.detach())
    gradients = (torch.autograd.grad(each, at)[0] for each, at in ((value, leaf), (true_value, exact)))
    _assert_close("the gradient on given noise", *gradients)


def _check_expectation(scores: Tensor, k: int, epsilon: float, n_samples: int) -> None:
    """On noise of its own, the mean over 200 draws a row is the expectation, up to chance."""
    rows = scores[:_LAW_ROWS, : _LAW_CLASSES.get(scores.device.type, 2_000)].detach()
    target = rows.argmin(1)  # the worst class, so that the hinge is never at rest and its mean is that of its argument
    true = functional.noised_topk_hinge(rows.double(), target, k, epsilon=epsilon, n_samples=math.inf)
    many, targets = rows.repeat(_LAW_COPIES, 1), target.repeat(_LAW_COPIES)
    calls = [
        functional.noised_topk_hinge(many, targets, k, epsilon=epsilon, n_samples=n_samples, reduction="none")
        for _ in range(_LAW_CALLS)
    ]
    if scores.dtype.itemsize >= 4:  # on the grid of a half type, different losses may round to the same
        assert not torch.equal(calls[0], calls[1]), "two calls drew the same noise"
        assert not torch.equal(calls[0][: len(rows)], calls[0][-len(rows) :]), "two rows drew the same noise"
    results = torch.cat(calls).double().view(-1, len(rows)).mean(1)
    _check_mean(results, true, torch.finfo(scores.dtype).eps)


def _check_found_positions(scores: Tensor, gradient: Tensor, target: Tensor, n_samples: int) -> None:
    """A row of the gradient is 1/B at the position found in each draw and -1 at the label, over N; or zero."""
    assert gradient.shape == scores.shape, f"the gradient is shaped {tuple(gradient.shape)}"
    assert gradient.isfinite().all(), "the gradient is not finite"
    assert (gradient.ne(0).sum(1) <= n_samples + 1).all(), "a row of the gradient has more than B + 1 non-zeros"
    shares = gradient.float() * (len(scores) * n_samples)
    counts = shares.round()
    rounding = 4 * n_samples * torch.finfo(scores.dtype).eps
    assert (shares - counts).abs().max() < rounding, "an entry of the gradient is no multiple of 1 / (N B)"
    at_rest = (counts == 0).all(1)
    found = counts.scatter_add(1, target[:, None], (~at_rest).float()[:, None] * n_samples)
    assert (found >= 0).all(), "the gradient is negative elsewhere than at the label"
    assert torch.equal(found.sum(1), (~at_rest).float() * n_samples), "a row of the gradient does not sum to zero"


def _check_values(scores: Tensor, target: Tensor, k: int, epsilon: float, n_samples: int) -> None:
    """The loss of a row is what the scores at the found positions say, up to noise of a credible size."""
    leaf = scores.detach().requires_grad_()
    loss = functional.noised_topk_hinge(leaf, target, k, epsilon=epsilon, n_samples=n_samples, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    assert loss.isfinite().all(), "the loss is not finite"
    active = loss > 0
    # The gradient picks the very terms of the loss: the scores found, averaged, minus the label's.
    found = (gradient.double() * scores.double()).sum(1)
    noise = (loss.double() - 1 - found)[active].abs()
    rounding = 4 * torch.finfo(scores.dtype).eps * (1 + scores.double().abs().amax(1)[active])
    assert (noise <= epsilon * _LARGEST_NORMAL + rounding).all(), "the loss is not that of the positions found"


def _check_head_given_noise(
    build: Callable[[Tensor], nn.Module], features: Tensor, k: int, epsilon: float, n_samples: int
) -> None:
    """On noise that is given, the value and both gradients are those of the formula behind a matrix product.

    The scores are sums of four quarters: exact in every dtype, so that rounding decides nowhere which class is found.
    """
    few, num_classes, d = 8, 2 * k + 30, features.shape[1]
    small = torch.zeros(few, d).scatter(1, torch.rand(few, d).topk(4).indices, 1.0).to(features.dtype)
    weight = (torch.randint(-4, 5, (num_classes, d)) / 4).to(features.dtype)
    target, noise = torch.randint(num_classes, (few,)), torch.randn(few, num_classes, n_samples)
    exact, exact_weight = small.double().requires_grad_(), weight.double().requires_grad_()
    true_value = plain_noised_hinge(F.linear(exact, exact_weight), target, k, epsilon, noise.double())
    true = torch.autograd.grad(true_value, (exact, exact_weight))
    head, leaf = build(weight.to(features.device)), small.to(features.device).requires_grad_()
    value = head(leaf, target.to(features.device), noise=noise.to(features.device))
    value.backward()
    _assert_close("the loss on given noise", value, true_value)
    _assert_close("the gradient of the features", _gradient_of(leaf), true[0])
    _assert_close("the gradient of the weights", _gradient_of(*head.parameters()).to_dense(), true[1])


def _check_head_expectation(
    build: Callable[[Tensor], nn.Module], features: Tensor, weight: Tensor, k: int, epsilon: float
) -> None:
    """On noise of its own, the mean over the calls is the expectation at the scores of the layer, up to chance."""
    weight = weight[: _LAW_CLASSES.get(weight.device.type, 2_000)].detach()
    rows = features[:_LAW_ROWS].detach()
    scores = F.linear(rows.double(), weight.double())
    target = scores.argmin(1)
    true = functional.noised_topk_hinge(scores, target, k, epsilon=epsilon, n_samples=math.inf)
    head = build(weight)
    with torch.no_grad():
        calls = [head(rows, target) for _ in range(_LAW_CALLS * _LAW_COPIES)]
    _check_mean(torch.stack(calls).double(), true, torch.finfo(weight.dtype).eps)


def _check_touched_classes(head: nn.Module, features: Tensor, target: Tensor, n_samples: int) -> None:
    """A row of scores gets a gradient that sums to zero over at most B + 1 classes, and the weights get no other."""
    leaf = features.detach().requires_grad_()
    loss = head(leaf, target)
    loss.backward()
    assert loss.isfinite().all(), "the loss is not finite"
    assert _gradient_of(leaf).isfinite().all(), "the gradient of the features is not finite"
    gradient = _gradient_of(*head.parameters())
    touched = gradient.coalesce().values() if gradient.is_sparse else gradient[gradient.ne(0).any(1)]
    most = len(features) * (n_samples + 1)
    assert len(touched) <= most, f"the gradient touches {len(touched)} classes, more than N (B + 1) = {most}"
    assert touched.isfinite().all(), "the gradient of the weights is not finite"
    left = touched.double().sum(0).abs() / touched.double().abs().sum(0).clamp_min(1e-30)
    assert left.max() <= max(1e-4, 4 * torch.finfo(features.dtype).eps), (
        "the gradients of the classes do not cancel in their sum"
    )


def _gradient_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, "a gradient is missing"
    return leaf.grad


def _check_mean(draws: Tensor, true: Tensor, rounding: float) -> None:
    """Independent results of the same call average to their expectation, within a few standard errors."""
    error = draws.std() / math.sqrt(len(draws))
    distance = (draws.mean() - true).abs()
    # Half types round a loss to their own grid, whatever the noise.
    assert distance <= _STANDARD_ERRORS * error + rounding * true.abs(), (
        f"the mean of {len(draws)} results, {draws.mean():.6g}, is {distance / error:.1f} standard errors from the "
        f"expectation, {true:.6g}"
    )


def _assert_close(what: str, found: Tensor, true: Tensor) -> None:
    """Up to the rounding of the dtype, on the scale of the largest entry."""
    tolerance = max(1e-4, 4 * torch.finfo(found.dtype).eps)
    assert found.isfinite().all(), f"{what} is not finite"
    true = true.detach().cpu().double()
    distance = (found.detach().cpu().double() - true).abs().max() / true.abs().max().clamp_min(1e-30)
    assert distance <= tolerance, f"{what} is off by {distance:.2g} of its largest entry, more than {tolerance:.2g}"
