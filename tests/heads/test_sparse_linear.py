"""The scores of selected classes, and their gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shortlist as sl
from shortlist.heads.sparse_linear import selected_scores
from tests.support.drawing import normal
from tests.support.heads import (
    TARGET,
    B,
    D,
    L,
    N,
    every_half_type,
    every_kind,
    followed_by,
    head_and_layer,
    loss_of,
    value_and_grads,
)


@every_kind
@pytest.mark.parametrize("sparse_grad", [False, True], ids=["dense", "sparse"])
def test_chosen_scores_have_the_gradient_of_their_values(kind: dict[str, Any], sparse_grad: bool) -> None:
    features, weight, bias = (normal(*shape, seed=3).requires_grad_() for shape in ((5, D), (L, D), (L,)))
    classes = torch.tensor([[0, 0, 3], [6, 1, 3], [3, 3, 3], [2, 5, 0], [1, 2, 6]])
    cosine = kind.get("cosine", False)
    arguments = (features, weight) if cosine or "bias" in kind else (features, weight, bias)

    def scores(features: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return selected_scores(features, weight, bias, classes, cosine=cosine, sparse_grad=sparse_grad)

    layer = scores(*arguments)
    plain = features @ (nn.functional.normalize(weight) if cosine else weight).T
    plain = plain + bias if len(arguments) == 3 else plain
    torch.testing.assert_close(layer, plain.gather(1, classes))
    if sparse_grad:  # gradcheck takes no sparse gradients of dense tensors
        got, want = (torch.autograd.grad(s.square().sum(), arguments[1:]) for s in (layer, plain.gather(1, classes)))
        torch.testing.assert_close([g.to_dense() for g in got], list(want))
    else:
        assert torch.autograd.gradcheck(scores, arguments)


@pytest.mark.parametrize("size", [0.0, 1e-160, 1e-13, 1e200])
@pytest.mark.parametrize("sparse_grad", [False, True], ids=["dense", "sparse"])
def test_a_class_of_any_size_has_the_gradient_of_the_plain_layer(size: float, sparse_grad: bool) -> None:
    head, layer = head_and_layer(loss_of(False), cosine=True, sparse_grad=sparse_grad)
    for module in (head, layer):
        module.get_parameter("weight").data[2] *= size
    features, noise = normal(N, D), normal(N, L, B, seed=1)
    features[0], features[1] = 0, 1e-200 * features[1]
    got = value_and_grads(head, partial(head, target=TARGET, noise=noise), features)
    torch.testing.assert_close(got, value_and_grads(layer, followed_by(head.loss, layer, TARGET, noise), features))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("cosine", [False, True], ids=["linear", "cosine"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_train(cosine: bool, optimizer: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    head = sl.NoisedTopKHead(8, 50, sl.NoisedTopKHinge(2, epsilon=0.05), cosine=cosine, sparse_grad=True)
    features, target = torch.randn(50, 8), torch.arange(50)
    steps = optimizer(head.parameters(), lr=0.1 if optimizer is torch.optim.SparseAdam else 2.0)  # type: ignore[call-arg]
    losses = []
    for _ in range(20):
        steps.zero_grad()
        loss = head(features, target)
        loss.backward()
        assert all(p.grad is not None and p.grad.is_sparse for p in head.parameters())
        steps.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@every_half_type
@pytest.mark.parametrize("cosine", [False, True], ids=["linear", "cosine"])
@pytest.mark.parametrize("sparse_grad", [False, True], ids=["dense", "sparse"])
def test_gradients_of_half_types_are_rounded_once(dtype: torch.dtype, cosine: bool, sparse_grad: bool) -> None:
    # Thousands of terms of one sign: a sum in half precision would stop growing.
    rows = 6000
    features = normal(rows, D, dtype=dtype).abs()
    weight, classes = normal(3, D, seed=1, dtype=dtype), torch.arange(2 * rows).view(rows, 2) % 2
    grads = []
    for kind in (dtype, torch.float64):
        leaves = [leaf.detach().to(kind).clone().requires_grad_() for leaf in (weight, weight[:, 0])]
        scores = selected_scores(
            features.to(kind), leaves[0], leaves[1], classes, cosine=cosine, sparse_grad=sparse_grad
        )
        found = torch.autograd.grad(scores, leaves, torch.full_like(scores, 0.01))
        grads.append([grad.to_dense().double() if sparse_grad else grad.double() for grad in found])
    for got, want in zip(*grads, strict=True):
        assert got[2].eq(0).all()
        scale = want.abs().max().item()
        torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps * scale)
