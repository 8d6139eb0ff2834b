"""Checks of our implementations before they are timed, against a plain formula, a closed form or a law.

Each check runs what is about to be timed, on the same device and in the same dtype, and raises ``ShortlistError`` if
the results differ: a fast kernel with wrong results must not get a time.
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
# The exact expectation takes at most seconds on this many rows and classes.
_LAW_ROWS, _LAW_CALLS, _LAW_COPIES = 4, 10, 20
_LAW_CLASSES = {"cuda": 20_000, "cpu": 2_000}
_STANDARD_ERRORS = 5
# About the largest of 1e11 standard normals: no mean of draws exceeds it.
_LARGEST_NORMAL = 7.0


@contextmanager
def _errors_of(entry: str) -> Iterator[None]:
    """Seed torch, and turn a failed assertion into an error that names the entry."""
    torch.manual_seed(_SEED)
    try:
        yield
    except AssertionError as error:
        reason = " ".join(str(error).split())
        raise ShortlistError(f"{entry} differs from its reference, so it is not timed: {reason}") from error


def check_noised_hinge(
    entry: str, scores: Tensor, target: Tensor, k: int, *, epsilon: float, n_samples: int, spread: float
) -> None:
    """Check ``noised_topk_hinge`` on this batch, and on small ones of the same kind with a known result."""
    with _errors_of(entry):
        _check_given_noise(scores, k, epsilon, n_samples, spread)
        _check_expectation(scores, k, epsilon, n_samples)
        leaf = scores.detach().requires_grad_()
        functional.noised_topk_hinge(leaf, target, k, epsilon=epsilon, n_samples=n_samples).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        _check_found_positions(scores, leaf.grad, target, n_samples)
        _check_values(scores, target, k, epsilon, n_samples)


def check_smooth_hinge(entry: str, scores: Tensor, target: Tensor, k: int) -> None:
    """Check ``smooth_topk_hinge`` and its gradient on two rows of this batch against float64 on the CPU."""
    with _errors_of(entry):
        results = []
        for rows in (scores[:2], scores[:2].double().cpu()):
            leaf = rows.detach().requires_grad_()
            loss = functional.smooth_topk_hinge(leaf, target[:2].to(rows.device), k)
            results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
        (value, gradient), (true_value, true_gradient) = results
        _assert_close("the loss", value, true_value)
        _assert_close("the gradient", gradient, true_gradient)


def check_topk_counts(entry: str, hits: dict[int, Tensor], scores: Tensor, target: Tensor) -> None:
    """Check the top-K hits of each class against a count in sorted scores."""
    with _errors_of(entry):
        own = scores.gather(1, target[:, None])
        ranked = scores.sort(dim=1, descending=True).values
        for k, found in hits.items():
            correct = (own.squeeze(1) >= ranked[:, k - 1]).long()  # a tie with the K-th counts as correct
            true = torch.zeros_like(found).index_add(0, target, correct)
            assert torch.equal(found, true), f"{int(found.sum())} images are correct at K = {k}, not {int(true.sum())}"


def check_sets(entry: str, found: Tensor, scores: Tensor, thresholds: Tensor, log_prior: Tensor) -> None:
    """Check sets against log-confidences in float64, but for those within rounding of their threshold."""
    with _errors_of(entry):
        lead = scores.double().log_softmax(1) - log_prior - thresholds
        is_clear = lead.abs() > 1e-4
        wrong = int(((found != (lead > 0)) & is_clear).sum())
        assert wrong == 0, f"{wrong} classes are on the wrong side of their threshold"


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
    """Check ``NoisedTopKHead`` on this batch, and on small ones against the layer followed by the loss.

    Args:
        entry: Its name, for messages.
        build: Makes a head with given weights.
        features, weight, target: What is about to be timed.
        k, epsilon, n_samples: Of the head's loss.
    """
    with _errors_of(entry):
        _check_head_given_noise(build, features, k, epsilon, n_samples)
        _check_head_expectation(build, features, weight, k, epsilon)
        _check_touched_classes(build(weight), features, target, n_samples)


def plain_noised_hinge(scores: Tensor, target: Tensor, k: int, epsilon: float, noise: Tensor) -> Tensor:
    """The formula, written out."""
    rival = (scores.unsqueeze(-1) + epsilon * noise).topk(k + 1, dim=1).values[:, k].mean(-1)
    return (1 + rival - scores.gather(1, target[:, None]).squeeze(1)).relu().mean()


def _check_given_noise(scores: Tensor, k: int, epsilon: float, n_samples: int, spread: float) -> None:
    """With given noise, value and gradient equal those of the formula."""
    small = (spread * torch.randn(16, 2 * k + 30)).to(scores.dtype)
    target = torch.randint(small.shape[1], (16,))
    noise = torch.randn(*small.shape, n_samples)
    exact = small.double().requires_grad_()
    true_value = plain_noised_hinge(exact, target, k, epsilon, noise.double())
    leaf = small.to(scores.device).requires_grad_()
    target, noise = target.to(scores.device), noise.to(scores.device)
    value = functional.noised_topk_hinge(leaf, target, k, epsilon=epsilon, noise=noise)
    _assert_close("the loss on given noise", value.detach(), true_value.detach())
    gradients = (torch.autograd.grad(loss, at)[0] for loss, at in ((value, leaf), (true_value, exact)))
    _assert_close("the gradient on given noise", *gradients)


def _check_expectation(scores: Tensor, k: int, epsilon: float, n_samples: int) -> None:
    """With its own noise, the mean over 200 draws a row is the expectation, up to chance."""
    rows = scores[:_LAW_ROWS, : _LAW_CLASSES.get(scores.device.type, 2_000)].detach()
    target = rows.argmin(1)  # the lowest score, so that the hinge is always active and its mean is that of its argument
    true = functional.noised_topk_hinge(rows.double(), target, k, epsilon=epsilon, n_samples=math.inf)
    many, targets = rows.repeat(_LAW_COPIES, 1), target.repeat(_LAW_COPIES)
    calls = [
        functional.noised_topk_hinge(many, targets, k, epsilon=epsilon, n_samples=n_samples, reduction="none")
        for _ in range(_LAW_CALLS)
    ]
    if scores.dtype.itemsize >= 4:  # in a half type, different losses may round to the same value
        assert not torch.equal(calls[0], calls[1]), "two calls drew the same noise"
        assert not torch.equal(calls[0][: len(rows)], calls[0][-len(rows) :]), "two rows drew the same noise"
    results = torch.cat(calls).double().view(-1, len(rows)).mean(1)
    _check_mean(results, true, torch.finfo(scores.dtype).eps)


def _check_found_positions(scores: Tensor, gradient: Tensor, target: Tensor, n_samples: int) -> None:
    """A row of the gradient is 1/B at the position found in each draw and -1 at the label, over N, or zero."""
    assert gradient.shape == scores.shape, f"the gradient is shaped {tuple(gradient.shape)}"
    assert gradient.isfinite().all(), "the gradient is not finite"
    assert (gradient.ne(0).sum(1) <= n_samples + 1).all(), "a row of the gradient has more than B + 1 non-zeros"
    shares = gradient.float() * (len(scores) * n_samples)
    counts = shares.round()
    rounding = 4 * n_samples * torch.finfo(scores.dtype).eps
    assert (shares - counts).abs().max() < rounding, "an entry of the gradient is not a multiple of 1 / (N B)"
    inactive = (counts == 0).all(1)
    found = counts.scatter_add(1, target[:, None], (~inactive).float()[:, None] * n_samples)
    assert (found >= 0).all(), "the gradient is negative elsewhere than at the label"
    assert torch.equal(found.sum(1), (~inactive).float() * n_samples), "a row of the gradient does not sum to zero"


def _check_values(scores: Tensor, target: Tensor, k: int, epsilon: float, n_samples: int) -> None:
    """The loss of a row follows from the scores at the found positions, up to noise of a plausible size."""
    leaf = scores.detach().requires_grad_()
    loss = functional.noised_topk_hinge(leaf, target, k, epsilon=epsilon, n_samples=n_samples, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    assert loss.isfinite().all(), "the loss is not finite"
    active = loss > 0
    # The gradient weights the scores as the loss does: the mean of those found, minus the label's.
    found = (gradient.double() * scores.double()).sum(1)
    noise = (loss.double() - 1 - found)[active].abs()
    rounding = 4 * torch.finfo(scores.dtype).eps * (1 + scores.double().abs().amax(1)[active])
    assert (noise <= epsilon * _LARGEST_NORMAL + rounding).all(), "the loss is not that of the positions found"


def _check_head_given_noise(
    build: Callable[[Tensor], nn.Module], features: Tensor, k: int, epsilon: float, n_samples: int
) -> None:
    """With given noise, the value and both gradients equal those of the formula after a matrix product.

    The scores are sums of four multiples of 1/4: exact in every dtype, so that rounding never decides which class is
    found.
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
    """With its own noise, the mean over the calls is the expectation at the scores of the layer, up to chance."""
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
    """The gradient of a row of scores sums to zero and touches at most B + 1 classes; the weights get no other."""
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
        "the gradients of the classes do not sum to zero"
    )


def _gradient_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, "a gradient is missing"
    return leaf.grad


def _check_mean(draws: Tensor, true: Tensor, rounding: float) -> None:
    """Independent results of the same call average to the expectation, within a few standard errors."""
    error = draws.std() / math.sqrt(len(draws))
    distance = (draws.mean() - true).abs()
    # Half types round the loss in any case.
    assert distance <= _STANDARD_ERRORS * error + rounding * true.abs(), (
        f"the mean of {len(draws)} results, {draws.mean():.6g}, is {distance / error:.1f} standard errors from the "
        f"expectation, {true:.6g}"
    )


def _assert_close(what: str, found: Tensor, true: Tensor) -> None:
    """Compare up to the rounding of the dtype, relative to the largest entry."""
    tolerance = max(1e-4, 4 * torch.finfo(found.dtype).eps)
    assert found.isfinite().all(), f"{what} is not finite"
    true = true.detach().cpu().double()
    distance = (found.detach().cpu().double() - true).abs().max() / true.abs().max().clamp_min(1e-30)
    assert distance <= tolerance, f"{what} is off by {distance:.2g} of its largest entry, more than {tolerance:.2g}"
