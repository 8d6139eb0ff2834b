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
    root = _product_tree(happens, fails, size)[-1][..., 0]
    return F.pad(root, (0, size - root.shape[-1]))


def probabilities_without_each(happens: Tensor, fails: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``P(N = count)`` and ``P(N = count - 1)`` without each event in turn, ``(..., L)`` each, for 1 <= count < L.

    P(N = count) with all events is linear in the two coefficients of each one's factor ``fails + happens z``, and what
    they are multiplied by are these two probabilities. They are found from the root of the tree down: what a product's
    coefficients are multiplied by, and one of its factors, give what the other's are multiplied by.
    """
    tree = _product_tree(happens, fails, count + 1)
    multiplier = F.pad(torch.ones_like(tree[-1][..., :1, :]), (0, 0, count, 0))
    for factors in tree[-2::-1]:
        degrees, pairs = factors.shape[-2], factors.shape[-1] // 2
        left, right = factors[..., :pairs], factors[..., pairs : 2 * pairs]
        of_product = multiplier[..., :pairs]
        of_odd_one = multiplier[..., :degrees, pairs:]  # which the product was padded with
        multiplier = torch.cat([_correlate(of_product, right), _correlate(of_product, left), of_odd_one], -1)
    return multiplier[..., 0, :], multiplier[..., 1, :]


def _product_tree(happens: Tensor, fails: Tensor, size: int) -> list[Tensor]:
    """Factors, products of two, of four, ... and of all, with coefficients along dimension -2 and ``size`` at most."""
    tree = [torch.stack([fails, happens], -2)[..., :size, :]]
    while tree[-1].shape[-1] > 1:
        factors, pairs = tree[-1], tree[-1].shape[-1] // 2
        product = _multiply(factors[..., :pairs], factors[..., pairs : 2 * pairs], size)
        if factors.shape[-1] % 2:
            odd_one = F.pad(factors[..., -1:], (0, 0, 0, product.shape[-2] - factors.shape[-2]))
            product = torch.cat([product, odd_one], -1)
        tree.append(product)
    return tree


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


def _correlate(of_product: Tensor, factor: Tensor) -> Tensor:
    """What the coefficients of the other factor are multiplied by, as many as this one has."""
    size = factor.shape[-2]
    total = None
    for degree in range(size):
        term = of_product[..., degree : degree + size, :] * factor[..., degree : degree + 1, :]
        term = F.pad(term, (0, 0, 0, size - term.shape[-2]))
        total = term if total is None else total + term
    assert total is not None
    return total
