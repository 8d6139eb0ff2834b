"""Heads, and the plain layers that they are compared with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shortlist as sl
from shortlist.heads.noised import NoisedLoss

N, D, L, B = 6, 4, 7, 3
TARGET = torch.tensor([0, 6, 2, 2, 5, 3])
WEIGHT = torch.linspace(0.5, 2, L, dtype=torch.float64)
every_loss = pytest.mark.parametrize("imbalanced", [False, True], ids=["balanced", "imbalanced"])
KINDS: dict[str, dict[str, Any]] = {"linear": {}, "without bias": {"bias": False}, "cosine": {"cosine": True}}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_half_type = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def loss_of(imbalanced: bool, k: int = 2, *, num_classes: int = L, **settings: Any) -> NoisedLoss:
    settings.setdefault("epsilon", 0.5)
    if imbalanced:
        counts = torch.arange(num_classes) ** 2 + 1
        return sl.ImbalancedNoisedTopKHinge(counts, k, max_margin=0.3, scale=4.0, **settings)
    return sl.NoisedTopKHinge(k, **settings)


def head_and_layer(
    loss: NoisedLoss,
    dtype: torch.dtype = torch.float64,
    *,
    num_classes: int = L,
    classes_at_once: int | None = None,
    rows: int = N,
    **kind: Any,
) -> tuple[sl.NoisedTopKHead, nn.Module]:
    """A head that scores so many classes at once for so many rows, and the plain layer with the same weights."""
    head = sl.NoisedTopKHead(D, num_classes, loss, dtype=dtype, **kind)
    if classes_at_once is not None:
        head.scores_at_once = classes_at_once * rows
    layer: nn.Module = sl.CosineLinear(D, num_classes, dtype=dtype)
    if not head.cosine:
        layer = nn.Linear(D, num_classes, bias=head.bias is not None, dtype=dtype)
    layer.load_state_dict(head.state_dict())
    return head, layer


def value_and_grads(
    model: nn.Module, loss: Callable[..., Tensor], features: Tensor, upstream: Tensor | None = None
) -> list[Tensor]:
    """The loss of the features, and its gradient in them and in all parameters, by name."""
    features = features.detach().requires_grad_()
    model.zero_grad()
    value = loss(features)
    value.backward(torch.ones_like(value) if upstream is None else upstream)
    grads = [features.grad, *(parameter.grad for _, parameter in sorted(model.named_parameters()))]
    assert all(grad is not None for grad in grads)
    return [value.detach(), *(grad.to_dense() for grad in grads if grad is not None)]


def followed_by(loss: NoisedLoss, layer: nn.Module, target: Tensor, noise: Tensor | None) -> Callable[..., Tensor]:
    """The plain way: all scores, then the loss."""
    return lambda features: loss(layer(features), target, noise=noise)
