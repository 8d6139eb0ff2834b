"""Which losses are minimised by scores in the right order for accuracy averaged over classes.

Macro top-K weighs a label by one over its prior, so the best K suggestions are the K largest of q = p / prior. Risks
are those of a single input with label probabilities p, from the exact expectation in float64.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shortlist as sl
from tests.support.drawing import normal

Loss = Callable[[Tensor, Tensor], Tensor]


def minimiser_of(risk: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    scores = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([scores], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = risk(scores)
        value.backward()
        return value

    optimizer.step(closure)
    return scores.detach()


def drawn_distribution(seed: int, num_classes: int = 5) -> tuple[Tensor, Tensor]:
    """Label probabilities and priors whose quotients are well apart, and in another order than the probabilities."""
    for attempt in range(100):
        logits = normal(2, num_classes, seed=100 * seed + attempt)
        p, prior = logits[0].softmax(-1), (1.5 * logits[1]).softmax(-1)
        quotients = (p / prior).sort().values
        if (quotients[1:] / quotients[:-1]).min() > 1.2 and not torch.equal(p.argsort(), (p / prior).argsort()):
            return p, prior
    raise AssertionError("no such distribution was drawn")


HINGES: dict[str, Callable[..., nn.Module]] = {
    "noised": lambda **kw: sl.NoisedTopKHinge(2, epsilon=0.5, n_samples=math.inf, **kw),
    "smoothed": lambda **kw: sl.SmoothTopKHinge(2, **kw),
}


@pytest.mark.parametrize("hinge", HINGES.values(), ids=HINGES)
@pytest.mark.parametrize("seed", range(4))
def test_mixtures_with_cross_entropy_and_inverse_weights_are_in_the_order_of_macro_top_k(
    hinge: Callable[..., nn.Module], seed: int
) -> None:
    p, prior = drawn_distribution(seed)
    weight = 1 / prior
    loss = sl.MixedLoss([(0.5, nn.CrossEntropyLoss(weight)), (0.5, hinge(weight=weight))])
    scores = minimiser_of(lambda s: loss(s.unsqueeze(0), p.unsqueeze(0)), normal(len(p), seed=seed))
    assert torch.equal(scores.argsort(), (p / prior).argsort())


def test_cross_entropy_of_the_scores_with_prior_is_in_the_order_of_macro_top_k() -> None:
    p, prior = drawn_distribution(0)
    loss = sl.PriorAdjusted(nn.CrossEntropyLoss(), prior)
    scores = minimiser_of(lambda s: loss(s.unsqueeze(0), p.unsqueeze(0)), torch.zeros_like(p))
    want = (p / prior).log()
    torch.testing.assert_close(scores - scores.mean(), want - want.mean(), rtol=1e-4, atol=1e-4)


def test_a_hinge_at_k_alone_has_minimisers_in_the_wrong_order() -> None:
    q = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
    loss = sl.CalibratedTopKHinge(2)
    right, wrong = (torch.tensor([row], dtype=torch.float64) for row in ([2.0, 1.0, 0.0, 0.0], [1.0, 2.0, 0.0, 0.0]))
    least = loss(right, q)
    torch.testing.assert_close(loss(wrong, q), least)
    torch.testing.assert_close(least, q[0, 2:].sum())
    for scale in (0.1, 1.0, 5.0):  # nothing is better
        others = scale * normal(2000, 4)
        each = sl.CalibratedTopKHinge(2, reduction="none")(others, q.expand(2000, 4))
        assert (each >= least - 1e-12).all()


def test_the_prior_inside_a_hinge_can_make_the_wrong_class_win() -> None:
    p = torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64)
    prior = torch.tensor([0.8, 0.15, 0.05], dtype=torch.float64)
    assert (p / prior).argmax() == 0
    hinge = sl.NoisedTopKHinge(1, epsilon=0.3, n_samples=math.inf, reduction="none")
    loss = sl.PriorAdjusted(hinge, prior)

    def risk(adjusted: Tensor) -> Tensor:
        value: Tensor = loss(adjusted - prior.log(), p.expand_as(adjusted))
        return value

    best = torch.tensor([[1.16855, 0.0, 0.0]], dtype=torch.float64)
    assert (best - prior.log()).argmax() == 2
    # All scores at which class 0 wins, up to a shift: the adjusted score of class 2 is 0.
    first = torch.linspace(math.log(16), 12, 80, dtype=torch.float64)
    second = torch.linspace(-8, 12, 161, dtype=torch.float64)  # the best are at 0
    grid = torch.cartesian_prod(first, second)
    grid = torch.cat([grid, torch.zeros(len(grid), 1, dtype=torch.float64)], 1)
    grid = grid[(grid - prior.log()).argmax(-1) == 0]
    assert len(grid) > 1000
    lead = risk(grid).min() - risk(best)
    assert 6e-5 < lead < 9e-5
