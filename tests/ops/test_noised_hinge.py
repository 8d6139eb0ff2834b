"""Laws of the noised hinge with several K, with other margins, and with noise relative to the spread of a row."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shortlist as sl
from shortlist import functional as F
from tests.support.drawing import normal, value_and_grad

N, L, B = 6, 24, 4
TARGET = torch.tensor([0, 23, 3, 3, 1, 11])
PROBABILITIES = normal(N, L, seed=3).softmax(-1)
NOISE = normal(N, L, B, seed=1)
COUNTS = torch.arange(1, L + 1)
KS = (1, 3, 5)

LOSSES: dict[str, Callable[..., Tensor]] = {
    "balanced": lambda s, y, k, **kw: F.noised_topk_hinge(s, y, k, margin=0.6, **kw),
    "imbalanced": lambda s, y, k, **kw: F.imbalanced_noised_topk_hinge(s, y, COUNTS, k, **kw),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
both_targets = pytest.mark.parametrize("target", [TARGET, PROBABILITIES], ids=["labels", "probabilities"])


def drawing(**settings: Any) -> dict[str, Any]:
    return settings | {"generator": torch.Generator().manual_seed(5)}


SOURCES: dict[str, Callable[[], dict[str, Any]]] = {
    "given noise": lambda: {"noise": NOISE},
    "few draws": lambda: drawing(n_samples=3),
    "many draws": lambda: drawing(n_samples=150),
    "expectation": lambda: {"n_samples": math.inf},
    "no noise": lambda: {"epsilon": 0.0},
}
every_source = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)


# Several K


@every_loss
@both_targets
@every_source
def test_several_k_are_the_mean_of_their_losses_from_the_same_draws(
    loss: Callable[..., Tensor], target: Tensor, source: Callable[[], dict[str, Any]]
) -> None:
    def mean(s: Tensor) -> Tensor:
        return torch.stack([loss(s, target, k, **{"epsilon": 0.5} | source()) for k in KS]).mean()

    got = value_and_grad(lambda s: loss(s, target, KS, **{"epsilon": 0.5} | source()), normal(N, L))
    torch.testing.assert_close(got, value_and_grad(mean, normal(N, L)))


@every_loss
@both_targets
@every_source
def test_a_tuple_of_one_k_is_that_k_bit_for_bit(
    loss: Callable[..., Tensor], target: Tensor, source: Callable[[], dict[str, Any]]
) -> None:
    number = value_and_grad(lambda s: loss(s, target, 3, **source()), normal(N, L))
    several = value_and_grad(lambda s: loss(s, target, (3,), **source()), normal(N, L))
    assert all(map(torch.equal, number, several))


@every_loss
def test_the_order_of_several_k_does_not_matter(loss: Callable[..., Tensor]) -> None:
    assert torch.equal(*(loss(normal(N, L), TARGET, k, noise=NOISE) for k in ((1, 3, 5), (5, 1, 3))))


@every_loss
def test_the_gradient_of_several_k_touches_the_label_and_one_class_a_draw_and_k(loss: Callable[..., Tensor]) -> None:
    _, gradient = value_and_grad(lambda s: loss(s, TARGET, KS, noise=5 * NOISE, reduction="sum"), normal(N, L))
    touched = (gradient != 0).sum(1)
    assert (touched <= B * len(KS) + 1).all()
    assert (touched > B + 1).any()
    torch.testing.assert_close(gradient.sum(1), torch.zeros(N, dtype=torch.float64))


def test_many_classes_and_draws_come_close_to_the_expectation() -> None:
    """Long rows draw their noise lazily on the CPU. The mean of many draws must be close to the expectation."""
    scores, target = normal(2, 5000), torch.arange(2)
    got, want = (
        F.noised_topk_hinge(scores, target, KS, epsilon=0.3, n_samples=n_samples, reduction="none", **seed)
        for n_samples, seed in ((2000, drawing()), (math.inf, {}))
    )
    torch.testing.assert_close(got, want, rtol=0, atol=0.02)


# Margins


@pytest.mark.parametrize("margin", [0.0, 0.3, 7.0])
def test_the_margin_is_the_unit_of_scores_and_noise(margin: float) -> None:
    scores = normal(N, L)
    got = F.noised_topk_hinge(scores, TARGET, KS, epsilon=0.4, margin=margin, noise=NOISE, reduction="none")
    if margin == 0:
        unit = F.noised_topk_hinge(1e9 * scores, TARGET, KS, epsilon=0.4e9, noise=NOISE, reduction="none") / 1e9
    else:
        in_units = F.noised_topk_hinge(scores / margin, TARGET, KS, epsilon=0.4 / margin, noise=NOISE, reduction="none")
        unit = margin * in_units
    torch.testing.assert_close(got, unit, rtol=1e-7, atol=1e-8)


# Relative noise


@pytest.mark.parametrize("c", [1e-12, 0.01, 7.0, 1e30])
@every_source
def test_relative_noise_scales_with_scores_and_margin(c: float, source: Callable[[], dict[str, Any]]) -> None:
    scores = normal(N, L)
    settings: dict[str, Any] = {"epsilon": 0.5, "relative": True, "reduction": "none"}
    want = F.noised_topk_hinge(scores, TARGET, KS, margin=0.6, **settings | source())
    got = F.noised_topk_hinge(c * scores, TARGET, KS, margin=c * 0.6, **settings | source())
    torch.testing.assert_close(got / c, want)


@every_source
@both_targets
def test_rows_without_a_spread_get_no_noise(source: Callable[[], dict[str, Any]], target: Tensor) -> None:
    """Their best 2K + 2 scores are equal, whatever the others are."""
    scores = normal(N, L).clamp(max=-1)
    scores[:, 4:12] = 2.0
    scores[-1] = 2.0
    settings = {"epsilon": 0.5, "relative": True} | source()
    got = value_and_grad(lambda s: F.noised_topk_hinge(s, target, (1, 3), **settings), scores)
    want = F.noised_topk_hinge(scores, target, (1, 3), epsilon=0.0)
    torch.testing.assert_close(got[0], want)
    assert got[1].isfinite().all()


@every_loss
@both_targets
@pytest.mark.parametrize("settings", [{"noise": NOISE}, {"n_samples": math.inf}], ids=["given noise", "expectation"])
def test_relative_noise_is_that_of_each_rows_spread_which_has_no_gradient(
    loss: Callable[..., Tensor], target: Tensor, settings: dict[str, Any]
) -> None:
    scores = normal(N, L) * torch.logspace(-2, 2, N, dtype=torch.float64).unsqueeze(1)
    epsilon = (0.5 * spread_of(scores, 2 * max(KS) + 2)).tolist()

    def row_by_row(s: Tensor) -> Tensor:
        losses = []
        for row in range(N):
            own = {name: value[row] if name == "noise" else value for name, value in settings.items()}
            losses.append(loss(s[row], target[row], KS, epsilon=epsilon[row], **own))
        return torch.stack(losses).mean()

    got = value_and_grad(lambda s: loss(s, target, KS, epsilon=0.5, relative=True, **settings), scores)
    torch.testing.assert_close(got, value_and_grad(row_by_row, scores))


def spread_of(scores: Tensor, best: int) -> Tensor:
    return torch.stack([row.topk(min(best, len(row))).values.std(correction=0) for row in scores])


@pytest.mark.parametrize("num_classes", [2, 3, 24])
def test_the_spread_is_that_of_the_best_scores_alone(num_classes: int) -> None:
    """Or of all, if there are no more."""
    scores, target, noise = normal(1, num_classes), torch.tensor([1]), NOISE[:1, :num_classes]
    got = F.noised_topk_hinge(scores, target, 1, epsilon=0.5, relative=True, noise=noise)
    spread = spread_of(scores, 4).item()
    torch.testing.assert_close(got, F.noised_topk_hinge(scores, target, 1, epsilon=0.5 * spread, noise=noise))


@every_source
def test_relative_noise_never_overflows_in_single_precision(source: Callable[[], dict[str, Any]]) -> None:
    scores = 1e30 * normal(N, L).float()
    scores[0] = 1e-20 * normal(L).float()
    scores[1, 4:] = -1e36
    settings = {name: value.float() if name == "noise" else value for name, value in source().items()}
    settings = {"epsilon": 0.5, "relative": True} | settings
    value, gradient = value_and_grad(lambda s: F.noised_topk_hinge(s, TARGET, 1, **settings), scores)
    assert value.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("module", [sl.NoisedTopKHinge, lambda k, **kw: sl.ImbalancedNoisedTopKHinge(COUNTS, k, **kw)])
def test_modules_take_the_new_settings(module: Callable[..., torch.nn.Module]) -> None:
    plain, other = module(3, epsilon=0.5), module(KS, epsilon=0.5, relative=True, eval_n_samples=math.inf)
    scores = normal(N, L)
    assert plain(scores, TARGET, noise=NOISE) != other(scores, TARGET, noise=NOISE)
    other.eval()
    assert torch.equal(other(scores, TARGET), other(scores, TARGET))
