"""The Poisson-binomial distribution: how many of L independent events happen, for L and K in the thousands."""

import torch
from torch import Tensor
from torch.nn import functional as F

_MAX_IN_TURN = 128  # events


def count_probabilities(happens: Tensor, fails: Tensor, size: int) -> Tensor:
    """``P(N = 0), ..., P(N = size - 1)``, where N is the number of events that happen.

    The generating function of N is the product of ``fails + happens z`` over the events. It is multiplied out as a
    balanced tree, with every product truncated at degree ``size - 1``: O(L size) operations in log2(L) steps. All terms
    are positive, so nothing cancels, and the error stays at a few units in the last place of the largest term.

    Args:
        happens: ``(..., L)`` probabilities p.
        fails: ``(..., L)`` probabilities 1 - p. A separate argument because 1 - p rounds if p is close to 1.
        size: Number of counts.

    Example:
        >>> count_probabilities(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5]), 3)
        tensor([0.2500, 0.5000, 0.2500])
    """
    root = _product_tree(happens, fails, size)[-1][..., 0]
    return F.pad(root, (0, size - root.shape[-1]))


def probabilities_without_each(happens: Tensor, fails: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``P(N = count)`` and ``P(N = count - 1)`` without each event in turn, ``(..., L)`` each, for 1 <= count < L.

    With all events, P(N = count) is linear in the two coefficients of each event's factor ``fails + happens z``. Their
    derivatives are the two probabilities. They are computed from the root of the tree down, as in backpropagation: the
    derivatives of a product and one of its factors give those of the other factor.
    """
    tree = _product_tree(happens, fails, count + 1)
    derivative = _derivatives(tree, F.pad(torch.ones_like(tree[-1][..., 0, :]), (count, 0)))
    return derivative[..., 0, :], derivative[..., 1, :]


def counts_and_mean_without_each(happens: Tensor, fails: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """``P(N = n)``, and the sum of ``weights[n] P(N = n)`` without each event in turn.

    ``(..., K)`` and ``(..., L)``, for weights of shape ``(K,)`` or ``(..., K)``. A common factor of ``fails`` and
    ``happens`` of an event is allowed: it multiplies all results that include the event.
    """
    size = weights.shape[-1]
    weights = weights.expand(*fails.shape[:-1], size)
    # One event after another is faster on a CPU. But it keeps a law for each event, and makes long graphs.
    is_short = fails.shape[-1] <= _MAX_IN_TURN and size <= _MAX_IN_TURN // 4
    if is_short and not fails.is_cuda and not torch.compiler.is_compiling():
        return _in_turn(happens, fails, weights)
    tree = _product_tree(happens, fails, size)
    root = tree[-1][..., 0]
    return F.pad(root, (0, size - root.shape[-1])), _derivatives(tree, weights)[..., 0, :]


def _in_turn(happens: Tensor, fails: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """``counts_and_mean_without_each``, from the first event to the last and back. Without gradient."""
    happens, fails = happens.movedim(-1, 0).contiguous(), fails.movedim(-1, 0).contiguous()
    derivatives = weights.movedim(-1, 0)
    law, before = torch.cat([torch.ones_like(fails[:1]), torch.zeros_like(derivatives[1:])]), []
    for p, q in zip(happens, fails, strict=True):
        before.append(law)
        law = law * q
        law[1:] += before[-1][:-1] * p
    without = []
    for p, q, earlier in zip(happens.flip(0), fails.flip(0), reversed(before), strict=True):
        without.append((earlier * derivatives).sum(0))
        later, derivatives = derivatives, derivatives * q
        derivatives[:-1] += later[1:] * p
    return law.movedim(0, -1), torch.stack(without[::-1], -1)


def _derivatives(tree: list[Tensor], weights: Tensor) -> Tensor:
    """Derivatives of the root's weighted coefficients in those of each factor, in dimension -2."""
    derivative = weights.unsqueeze(-1)
    for factors in tree[-2::-1]:
        degrees, pairs = factors.shape[-2], factors.shape[-1] // 2
        left, right = factors[..., :pairs], factors[..., pairs : 2 * pairs]
        of_product = derivative[..., :pairs]
        of_unpaired = derivative[..., :degrees, pairs:]  # without the padding of ``_product_tree``
        derivative = torch.cat([_correlate(of_product, right), _correlate(of_product, left), of_unpaired], -1)
    return derivative


def _product_tree(happens: Tensor, fails: Tensor, size: int) -> list[Tensor]:
    """The factors, their products by two, by four, ... and of all. At most ``size`` coefficients, in dimension -2."""
    tree = [torch.stack([fails, happens], -2)[..., :size, :]]
    while tree[-1].shape[-1] > 1:
        factors, pairs = tree[-1], tree[-1].shape[-1] // 2
        product = _multiply(factors[..., :pairs], factors[..., pairs : 2 * pairs], size)
        if factors.shape[-1] % 2:
            unpaired = F.pad(factors[..., -1:], (0, 0, 0, product.shape[-2] - factors.shape[-2]))
            product = torch.cat([product, unpaired], -1)
        tree.append(product)
    return tree


def _multiply(left: Tensor, right: Tensor, size: int) -> Tensor:
    """Products of polynomials with their coefficients in dimension -2, truncated to ``size`` coefficients."""
    size = min(size, left.shape[-2] + right.shape[-2] - 1)
    product = None
    for degree in range(min(left.shape[-2], size)):
        term = left[..., degree : degree + 1, :] * right[..., : size - degree, :]
        term = F.pad(term, (0, 0, degree, size - degree - term.shape[-2]))
        product = term if product is None else product + term
    assert product is not None
    return product


def _correlate(of_product: Tensor, factor: Tensor) -> Tensor:
    """Derivatives of the other factor's coefficients, as many as this factor has."""
    size = factor.shape[-2]
    total = None
    for degree in range(size):
        term = of_product[..., degree : degree + size, :] * factor[..., degree : degree + 1, :]
        term = F.pad(term, (0, 0, 0, size - term.shape[-2]))
        total = term if total is None else total + term
    assert total is not None
    return total
