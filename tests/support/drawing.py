"""Seeded draws, and values with their gradients: what the tests of the operators share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# Rows, classes, draws: smallest, odd, typical, past a power of two.
SHAPES = [(1, 2, 1), (3, 7, 5), (4, 100, 5), (2, 129, 3)]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers from a generator of their own, the same ones in every dtype."""
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def value_and_grad(
    function: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``function(x)`` and the gradient of its sum, or of its product with ``upstream``."""
    x = x.detach().requires_grad_()
    value = function(x)
    (grad,) = torch.autograd.grad(value, x, torch.ones_like(value) if upstream is None else upstream)
    return value.detach(), grad


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class RandomNumbers(TorchDispatchMode):
    """Counts the random numbers that operations return."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.__name__.startswith("rand"):
            self.count += out.numel()
        return out


def become_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process pass for one of several."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
