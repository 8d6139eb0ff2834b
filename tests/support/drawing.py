"""Seeded draws, and values with their gradients: what the tests of the operators share."""

from collections.abc import Callable

import torch
from torch import Tensor

# Rows, classes, draws: smallest, odd, typical, past a power of two.
SHAPES = [(1, 2, 1), (3, 7, 5), (4, 100, 5), (2, 129, 3)]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normals from a generator of their own, the same ones in every dtype."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def value_and_grad(
    function: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What ``function`` makes of ``x``, and the gradient of it: of its sum, or of its product with ``upstream``."""
    x = x.detach().requires_grad_()
    value = function(x)
    (grad,) = torch.autograd.grad(value, x, torch.ones_like(value) if upstream is None else upstream)
    return value.detach(), grad
