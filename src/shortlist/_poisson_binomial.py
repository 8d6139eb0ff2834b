"""How many of L independent events happen: the Poisson-binomial law, for L and K in the thousands."""

import torch
from torch import Tensor
from torch.nn import functional as F


def count_probabilities(happens: Tensor, fails: Tensor, size: int) -> Tensor:
    """``P(N = 0), ..., P(N = size - 1)`` for N the number of events that happen.

    The generating function is the product over the events of ``fails + happens z``. A balanced tree of products,
    each cut at degree ``size - 1``, takes O(L size) operations in log2(L) steps, all of them sums and products of
    probabilities: nothing cancels, so the error stays at a few units in the last place of the largest term.

    Args:
        happens: ``(..., L)`` probabilities p.
        fails: ``(..., L)`` probabilities 1 - p, given apart because 1 - p rounds when p is close to 1.
        size: Number of counts wanted.

    Example:
        >>> count_probabilities(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5]), 3)
        tensor([0.2500, 0.5000, 0.2500])
    """
    factors = torch.stack([fails, happens], -2)[..., :size, :]  # (..., degree, factor)
    while factors.shape[-1] > 1:
        half = factors.shape[-1] // 2
        product = _multiply(factors[..., :half], factors[..., half : 2 * half], size)
        if factors.shape[-1] % 2:
            odd_one = factors[..., -1:]
            odd_one = F.pad(odd_one, (0, 0, 0, product.shape[-2] - odd_one.shape[-2]))
            product = torch.cat([product, odd_one], -1)
        factors = product
    return F.pad(factors[..., 0], (0, size - factors.shape[-2]))


def _multiply(left: Tensor, right: Tensor, size: int) -> Tensor:
    """Products of polynomials with coefficients along dimension -2, cut to ``size`` of them."""
    size = min(size, left.shape[-2] + right.shape[-2] - 1)
    product = None
    for degree in range(min(left.shape[-2], size)):
        term = left[..., degree : degree + 1, :] * right[..., : size - degree, :]
        term = F.pad(term, (0, 0, degree, size - degree - term.shape[-2]))
        product = term if product is None else product + term
    assert product is not None
    return product
