"""The noised average-K hinge: one threshold for a whole batch."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import shortlist as sl
from shortlist.functional import noised_average_k_hinge, noised_topk_hinge
from tests.support.drawing import value_and_grad

K, CLASSES, DRAWS = 2, 6, 4


def batch(rows: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, CLASSES, generator=generator, dtype=dtype)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    return scores, labels, torch.randn(rows, CLASSES, DRAWS, generator=generator, dtype=dtype)


def literal(scores: Tensor, labels: Tensor, noise: Tensor, k: int, epsilon: float, margin: float) -> Tensor:
    """The formula, sorted out number by number."""
    thresholds = []
    for draw in range(noise.shape[-1]):
        perturbed = [
            float(scores[row, place] + epsilon * noise[row, place, draw])
            for row in range(len(scores))
            for place in range(scores.shape[1])
        ]
        thresholds.append(sorted(perturbed, reverse=True)[k * len(scores)])
    threshold = sum(thresholds) / len(thresholds)
    own = [float(scores[row, label]) for row, label in enumerate(labels.tolist())]
    return torch.tensor([max(0.0, margin + threshold - score) for score in own], dtype=scores.dtype)


@pytest.mark.parametrize("k", [1, 2, CLASSES - 1])
@pytest.mark.parametrize(("epsilon", "margin"), [(0.0, 1.0), (0.5, 1.0), (2.0, 0.3)])
def test_it_is_its_formula(k: int, epsilon: float, margin: float) -> None:
    scores, labels, noise = batch()
    settings: dict[str, Any] = {"epsilon": epsilon, "margin": margin}
    found = noised_average_k_hinge(scores, labels, k, noise=noise, reduction="none", **settings)
    torch.testing.assert_close(found, literal(scores, labels, noise, k, **settings))
    module = sl.NoisedAverageKHinge(k, n_samples=5, **settings)
    torch.testing.assert_close(module(scores, labels, noise=noise), found.mean())


def test_for_one_image_it_is_the_noised_topk_hinge() -> None:
    for seed in range(20):
        scores, labels, noise = batch(1, seed)
        ours, theirs = (
            value_and_grad(partial(loss, target=labels, k=K, noise=noise), scores)
            for loss in (noised_average_k_hinge, noised_topk_hinge)
        )
        torch.testing.assert_close(ours, theirs)


def test_the_threshold_leaves_k_classes_on_average() -> None:
    scores, labels, _ = batch(50)
    # A margin so large that no loss is zero gives the threshold away.
    loss = noised_average_k_hinge(scores, labels, K, epsilon=0.0, margin=100.0, reduction="none")
    threshold = loss - 100 + scores.gather(1, labels.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(threshold, threshold[:1].expand(50))
    assert (scores > threshold[0] + 1e-9).sum() == K * 50


def test_the_gradient_is_that_of_the_formula() -> None:
    scores, labels, noise = batch()
    scores.requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return noised_average_k_hinge(x, labels, K, epsilon=0.3, noise=noise)

    assert torch.autograd.gradcheck(loss, scores, eps=1e-6)
    (gradient,) = torch.autograd.grad(loss(scores), scores)
    assert gradient.sum().abs() < 1e-12, "a constant added to all scores changes nothing"
    assert (gradient > 0).sum() <= DRAWS


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 8.0])
def test_without_draws_the_threshold_is_where_k_classes_are_expected(epsilon: float) -> None:
    scores, labels, _ = batch(40)
    loss = noised_average_k_hinge(3 * scores, labels, K, epsilon=epsilon, margin=1e3, reduction="none")
    threshold = (loss - 1e3 + 3 * scores.gather(1, labels.unsqueeze(1)).squeeze(1))[0]
    expected = torch.special.ndtr((3 * scores - threshold) / epsilon).sum()
    torch.testing.assert_close(expected, torch.tensor(K * 40 + 0.5, dtype=torch.float64), atol=1e-6, rtol=0)


def test_many_draws_of_a_large_batch_approach_the_threshold_without_draws() -> None:
    scores, labels, _ = batch(2000)
    settings: dict[str, Any] = {"epsilon": 0.5, "margin": 5.0}
    value, gradient = value_and_grad(lambda x: noised_average_k_hinge(x, labels, K, **settings), scores)
    torch.manual_seed(0)
    drawn = noised_average_k_hinge(scores, labels, K, n_samples=100, **settings)
    assert (value - drawn).abs() < 5e-3
    assert (gradient > 0).sum() > 2000, "every score near the threshold has a gradient"


@pytest.mark.parametrize("epsilon", [0.2, 2.0])
def test_without_draws_the_gradient_is_that_of_the_threshold(epsilon: float) -> None:
    scores, labels, _ = batch()
    scores.requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return noised_average_k_hinge(x, labels, K, epsilon=epsilon, margin=2.0)

    assert torch.autograd.gradcheck(loss, scores, eps=1e-5, atol=1e-6)


def test_without_draws_ignored_rows_are_as_if_left_out() -> None:
    scores, labels, _ = batch()
    ignored = torch.where(torch.arange(5) % 2 == 0, labels, -100)
    blank = scores.clone()
    blank[1::2] = math.nan
    value, gradient = value_and_grad(lambda x: noised_average_k_hinge(x, ignored, K), blank)
    wanted, wanted_gradient = value_and_grad(lambda x: noised_average_k_hinge(x, labels[::2], K), scores[::2])
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(gradient[::2], wanted_gradient)
    assert not gradient[1::2].any()


def test_a_constant_added_to_one_image_changes_it() -> None:
    scores, labels, _ = batch()
    shifted = scores.clone()
    shifted[0] += 3
    before, after = (noised_average_k_hinge(x, labels, K, epsilon=0.0, reduction="none") for x in (scores, shifted))
    assert not torch.allclose(before[1:], after[1:])


@pytest.mark.parametrize("ignored", [[0], [1, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_ignored_rows_do_not_move_the_threshold(ignored: list[int], scale: float) -> None:
    scores, labels, noise = batch()
    kept = torch.tensor([row for row in range(len(labels)) if row not in ignored])
    blank = scores.clone()
    blank[ignored] = math.nan
    labels_ignored = labels.clone()
    labels_ignored[ignored] = -100
    settings: dict[str, Any] = {"epsilon": 0.7, "reduction": "sum"}

    def with_them(x: Tensor) -> Tensor:
        return noised_average_k_hinge(x, labels_ignored, K, noise=scale * noise, **settings)

    value, gradient = value_and_grad(with_them, blank)
    wanted, wanted_gradient = value_and_grad(
        lambda x: noised_average_k_hinge(x, labels[kept], K, noise=scale * noise[kept], **settings), scores[kept]
    )
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(gradient[kept], wanted_gradient)
    assert not gradient[ignored].any()
    # Without noise of the caller's, fresh draws must not reach the rows that do not count either.
    torch.manual_seed(0)
    fresh = noised_average_k_hinge(blank, labels_ignored, K, epsilon=1e-6, n_samples=5, reduction="sum")
    exact = noised_average_k_hinge(scores[kept], labels[kept], K, epsilon=0.0, reduction="sum")
    torch.testing.assert_close(fresh, exact, atol=1e-4, rtol=0)


def test_probabilities_weights_and_further_dimensions() -> None:
    scores, labels, noise = batch(6)
    one_hot = torch.nn.functional.one_hot(labels, CLASSES).double()
    plain = noised_average_k_hinge(scores, labels, K, noise=noise)
    torch.testing.assert_close(noised_average_k_hinge(scores, one_hot, K, noise=noise), plain)
    images = scores.view(2, 3, CLASSES).movedim(-1, 1)
    drawn = noise.view(2, 3, CLASSES, DRAWS).movedim(2, 1)
    torch.testing.assert_close(noised_average_k_hinge(images, labels.view(2, 3), K, noise=drawn), plain)
    weight = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
    each = noised_average_k_hinge(scores, labels, K, noise=noise, reduction="none")
    weighted = noised_average_k_hinge(scores, labels, K, noise=noise, weight=weight)
    torch.testing.assert_close(weighted, (weight[labels] * each).sum() / weight[labels].sum())


def test_a_prior_around_it_is_added_to_the_scores_as_they_are() -> None:
    scores, labels, noise = batch()
    counts = torch.tensor([40, 20, 10, 5, 2, 1])
    loss = sl.NoisedAverageKHinge(K)
    adjusted = sl.PriorAdjusted(loss, counts)(scores, labels, noise=noise)
    torch.testing.assert_close(adjusted, loss(scores + (counts / counts.sum()).log(), labels, noise=noise))
    mixed = sl.MixedLoss([(0.5, loss), (0.5, torch.nn.CrossEntropyLoss())])
    both = sl.PriorAdjusted(mixed, counts)(scores, labels, noise=noise)
    balanced = sl.LogitAdjustedLoss(counts)(scores, labels)
    torch.testing.assert_close(both, 0.5 * adjusted + 0.5 * balanced)


def test_a_bad_score_makes_its_row_nan() -> None:
    scores, labels, _ = batch()
    scores[1, 0] = math.nan
    loss = noised_average_k_hinge(scores, labels, K, reduction="none")
    assert loss[1].isnan()
    assert noised_average_k_hinge(scores[:0], labels[:0], K, reduction="sum") == 0


def test_large_scores_keep_their_noise() -> None:
    scores, labels, noise = batch(dtype=torch.float32)
    far = (scores.double() + 1e5).float()
    moved = noised_average_k_hinge(far, labels, K, epsilon=1.0, noise=noise, reduction="none")
    same = noised_average_k_hinge(far - 1e5, labels, K, epsilon=1.0, noise=noise, reduction="none")
    torch.testing.assert_close(moved, same, atol=1e-4, rtol=0)


def test_bad_arguments_are_named() -> None:
    scores, labels, _ = batch()
    for arguments, name in (
        ({"k": 0}, "k must"),
        ({"k": CLASSES}, "k must"),
        ({"k": 1, "epsilon": -1.0}, "epsilon"),
        ({"k": 1, "margin": -1.0}, "margin"),
        ({"k": 1, "n_samples": 0}, "n_samples"),
        ({"k": 1, "noise": torch.zeros(2, 2)}, "noise"),
    ):
        with pytest.raises(sl.ShortlistError, match=name):
            noised_average_k_hinge(scores, labels, **arguments)
    for settings, name in (({"k": 0}, "k must"), ({"k": 1, "margin": math.nan}, "margin")):
        with pytest.raises(sl.ShortlistError, match=name):
            sl.NoisedAverageKHinge(**settings)
