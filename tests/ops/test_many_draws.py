"""Thousands of draws: the mean is right, memory does not grow with their number, and too many are rejected."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import shortlist as sl
from shortlist import functional as F
from tests.support.drawing import normal, value_and_grad
from tests.support.memory import LargestTensor

ROWS, L, K = 8, 50, 3
MANY = 10_000
TARGET = torch.arange(ROWS)
COUNTS = list(range(1, L + 1))

DRAWING: dict[str, Callable[..., Tensor]] = {
    "smooth_topk": lambda x, **kw: sl.smooth_topk(x, K, epsilon=0.5, **kw),
    "smooth_topk_sum": lambda x, **kw: sl.smooth_topk_sum(x, K, epsilon=0.5, **kw),
    "noised_topk_hinge": lambda x, **kw: F.noised_topk_hinge(x, TARGET, K, epsilon=0.5, **kw),
    "of_probabilities": lambda x, **kw: F.noised_topk_hinge(x, x.detach().softmax(1), K, epsilon=0.5, **kw),
    "imbalanced": lambda x, **kw: F.imbalanced_noised_topk_hinge(x, TARGET, COUNTS, K, epsilon=0.5, **kw),
}
every_drawing = pytest.mark.parametrize("drawing", DRAWING.values(), ids=DRAWING)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def head_for(n_samples: float, *, sparse_grad: bool = False) -> sl.NoisedTopKHead:
    """A head whose scores are its features."""
    loss = sl.NoisedTopKHinge(K, epsilon=0.5, n_samples=n_samples)
    head = sl.NoisedTopKHead(L, L, loss, bias=False, sparse_grad=sparse_grad, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.eye(L))
    return head


@every_drawing
def test_memory_does_not_grow_with_the_draws(drawing: Callable[..., Tensor]) -> None:
    x = normal(ROWS, L, dtype=torch.float32).requires_grad_()
    with LargestTensor() as largest:
        drawing(x, n_samples=MANY).sum().backward()
    assert largest.nbytes < MANY * x.nbytes / 20


def test_a_head_keeps_the_choice_of_a_draw_alone() -> None:
    head = sl.NoisedTopKHead(2, L, sl.NoisedTopKHinge(K, n_samples=MANY))
    features = normal(ROWS, 2, dtype=torch.float32).requires_grad_()
    with LargestTensor() as largest:
        head(features, TARGET).backward()
    assert largest.nbytes < 1.1 * ROWS * MANY * features.shape[1] * 4, "the weights that the draws have chosen"


def expected(scores: Tensor) -> Tensor:
    return F.noised_topk_hinge(scores, TARGET, K, epsilon=0.5, n_samples=math.inf)


@pytest.mark.parametrize("n_samples", [128, 129, MANY])
def test_the_mean_of_many_draws_nears_the_expectation(n_samples: int) -> None:
    x = normal(ROWS, L)
    error = 4 / math.sqrt(n_samples)
    of_loss = partial(F.noised_topk_hinge, target=TARGET, k=K, epsilon=0.5, n_samples=n_samples, generator=generator())
    of_head = partial(head_for(n_samples), target=TARGET, generator=generator())
    for estimate in (of_loss, of_head):
        torch.testing.assert_close(value_and_grad(estimate, x), value_and_grad(expected, x), rtol=0, atol=error)
    total, grad = value_and_grad(
        lambda x: sl.smooth_topk_sum(x, K, epsilon=0.5, n_samples=n_samples, generator=generator()), x
    )
    want = value_and_grad(lambda x: torch.stack([sl.exact_topk(x, k, epsilon=0.5) for k in range(1, K + 1)]).sum(0), x)
    torch.testing.assert_close((total, grad), want, rtol=0, atol=K * error)
    torch.testing.assert_close(grad.sum(1), torch.full((ROWS,), float(K), dtype=torch.float64))


def test_the_gradient_is_the_derivative_for_the_same_draws() -> None:
    x = normal(2, 6).requires_grad_()
    operator = partial(sl.smooth_topk, k=2, epsilon=1e-9, n_samples=300)  # too little noise to change a position
    torch.autograd.gradcheck(lambda x: operator(x, generator=generator()), x)


def test_a_class_that_no_draw_finds_may_be_ruled_out_by_minus_infinity() -> None:
    x = normal(4, 6)
    ruled_out = torch.cat([x, torch.full((4, 1), -math.inf, dtype=x.dtype)], 1)
    value, grad = value_and_grad(lambda x: sl.smooth_topk(x, 2, epsilon=0.5, n_samples=300), ruled_out)
    assert value.isfinite().all()
    assert (grad[:, -1] == 0).all()
    torch.testing.assert_close(grad.sum(1), torch.ones(4, dtype=torch.float64))


def test_half_types_count_in_float32() -> None:
    x = normal(4, 6, dtype=torch.bfloat16)
    _, grad = value_and_grad(lambda x: sl.smooth_topk(x, 2, epsilon=0.5, n_samples=5000), x)
    torch.testing.assert_close(grad.sum(1), torch.ones(4, dtype=torch.bfloat16))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_graph_draws_in_blocks_too() -> None:
    x = normal(2, L, dtype=torch.float32)
    sizes: list[int] = []

    def measure(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        sizes.extend(value.numel() for value in values if isinstance(value, Tensor))
        return graph

    value = torch.compile(partial(DRAWING["smooth_topk"], n_samples=1000), fullgraph=True, backend=measure)(x)
    assert 0 < max(sizes) < 1000 * x.numel() / 4
    torch.testing.assert_close(value, sl.exact_topk(x, K, epsilon=0.5), rtol=0, atol=0.1)


@every_drawing
@pytest.mark.parametrize("n_samples", [2**24 + 1, 2**40])
def test_more_draws_than_can_be_counted_are_refused(drawing: Callable[..., Tensor], n_samples: int) -> None:
    with pytest.raises(sl.ShortlistError, match=f"n_samples must be at most 16777216,.* got {n_samples}"):
        drawing(normal(ROWS, L), n_samples=n_samples)


def test_a_head_refuses_draws_whose_choices_no_memory_holds() -> None:
    with pytest.raises(sl.ShortlistError, match="eval_n_samples must be at most 16777216"):
        sl.NoisedTopKHinge(K, eval_n_samples=2**40)
    rows = 1024
    with pytest.raises(sl.ShortlistError, match=f"n_samples must be at most 262144 for {rows} rows .*got {2**24}"):
        head_for(2**24)(torch.ones(rows, L, dtype=torch.float64), torch.zeros(rows, dtype=torch.int64))
