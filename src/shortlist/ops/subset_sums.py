"""Sums over all subsets of K classes, for the log-sum smoothed hinge.

The sum over subsets A of size K of ``exp(sum of x_j, j in A)`` is the K-th elementary symmetric polynomial ``e_K`` of
the weights ``exp(x_j)``. Only the ratio ``e_K / e_(K-1)`` is needed, and it is a ratio of two probabilities: for
independent events of odds ``exp(x_j + tilt)``, ``P(N = K) / P(N = K - 1) = exp(tilt) e_K / e_(K-1)`` whatever the tilt.
A tilt that makes N about K - 1/2 keeps both probabilities far from underflow at any scale of x, so no logarithms of
sums are needed on the way, and ``count_probabilities`` does the work in O(L K).

Shape suffixes: R rows (any leading dimensions), L classes.
"""

import math

import torch
from torch import Tensor

from shortlist.ops.poisson_binomial import count_probabilities, probabilities_without_each

# Halvings of a bracket log(2 K) + log(2 L) wide: leaves the mean count within a few hundredths of K from K - 1/2, where
# its standard deviation, up to sqrt(K), is what matters.
_HALVINGS = 9


def log_subset_ratio(x_RL: Tensor, k: int) -> Tensor:
    """``(R, 1)`` values of ``log e_k - log e_(k-1)``; a class at -inf takes no part."""
    tilted_RL, tilt_R1 = _tilted(x_RL, k)
    counts = count_probabilities(tilted_RL.sigmoid(), (-tilted_RL).sigmoid(), k + 1)
    return counts[..., k : k + 1].log() - counts[..., k - 1 : k].log() - tilt_R1


def log_subset_ratio_without_each(x_RL: Tensor, k: int) -> Tensor:
    """``(R, L)`` values of ``log e_k - log e_(k-1)``, each with its own class left out."""
    # Two tilts serve all classes: the mean of N without a class of the top k is k - 1/2 if it was k + 1/2 with it,
    # and without any other class it stays close to k - 1/2 if it was that before.
    inside_RL = torch.zeros_like(x_RL, dtype=torch.bool).scatter(-1, x_RL.detach().topk(k).indices, True)
    (tilted_if_in, tilt_if_in), (tilted_if_out, tilt_if_out) = _tilted(x_RL, k + 1), _tilted(x_RL, k)
    at_k_if_in, before_k_if_in = probabilities_without_each(tilted_if_in.sigmoid(), (-tilted_if_in).sigmoid(), k)
    at_k_if_out, before_k_if_out = probabilities_without_each(tilted_if_out.sigmoid(), (-tilted_if_out).sigmoid(), k)
    at_k_RL = torch.where(inside_RL, at_k_if_in, at_k_if_out)
    before_k_RL = torch.where(inside_RL, before_k_if_in, before_k_if_out)
    return at_k_RL.log() - before_k_RL.log() - torch.where(inside_RL, tilt_if_in, tilt_if_out)


def _tilted(x_RL: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """``x + tilt`` and the tilt that makes the mean of N ``rank - 1/2``, measured from the ``rank``-th largest x."""
    pivot_R1 = x_RL.detach().topk(rank).values[..., -1:]
    u_RL = x_RL - pivot_R1
    low_R1 = torch.full_like(pivot_R1, -math.log(2 * x_RL.shape[-1]))
    high_R1 = torch.full_like(pivot_R1, math.log(2 * rank))
    for _ in range(_HALVINGS):
        middle_R1 = (low_R1 + high_R1) / 2
        too_many_R1 = (u_RL.detach() + middle_R1).sigmoid().sum(-1, keepdim=True) > rank - 0.5
        low_R1 = torch.where(too_many_R1, low_R1, middle_R1)
        high_R1 = torch.where(too_many_R1, middle_R1, high_R1)
    return u_RL + high_R1, high_R1 - pivot_R1
