"""Sums over all subsets of K classes, for the smoothed hinge.

The sum of ``exp(sum of x_j, j in A)`` over the subsets A of size K is ``e_K``, the K-th elementary symmetric polynomial
of the weights ``exp(x_j)``. Only the ratio ``e_K / e_(K-1)`` is needed, and it is a ratio of two probabilities. Let N
be the number of independent events with odds ``exp(x_j + tilt)`` that happen. Then, for any tilt,
``P(N = K) / P(N = K - 1) = exp(tilt) e_K / e_(K-1)``. With a tilt that makes the mean of N about K - 1/2, neither
probability underflows, whatever the size of x. So ``count_probabilities`` can compute both, in O(L K) operations.

Shape suffixes: R rows (any leading dimensions), L classes.
"""

import math

import torch
from torch import Tensor

from shortlist.ops.poisson_binomial import count_probabilities, probabilities_without_each

# Bisection steps on an interval of width log(2 K) + log(2 L). The mean of N ends up within a few hundredths of K from
# K - 1/2, which is close compared with its standard deviation of up to sqrt(K).
_BISECTIONS = 9


def log_subset_ratio(x_RL: Tensor, k: int) -> Tensor:
    """``(R, 1)`` values of ``log e_k - log e_(k-1)``; classes at -inf are left out."""
    tilted_RL, tilt_R1 = _tilted(x_RL, k)
    counts = count_probabilities(tilted_RL.sigmoid(), (-tilted_RL).sigmoid(), k + 1)
    return counts[..., k : k + 1].log() - counts[..., k - 1 : k].log() - tilt_R1


def log_subset_ratio_without_each(x_RL: Tensor, k: int) -> Tensor:
    """``(R, L)`` values of ``log e_k - log e_(k-1)``, with each class left out in turn."""
    # Two tilts serve all classes. Leaving out a class of the top k lowers the mean of N by almost 1, so it must be
    # k + 1/2 before; leaving out any other class hardly changes it, so k - 1/2 will do.
    is_in_top_k_RL = torch.zeros_like(x_RL, dtype=torch.bool).scatter(-1, x_RL.detach().topk(k).indices, True)
    (tilted_if_in, tilt_if_in), (tilted_if_out, tilt_if_out) = _tilted(x_RL, k + 1), _tilted(x_RL, k)
    at_k_if_in, before_k_if_in = probabilities_without_each(tilted_if_in.sigmoid(), (-tilted_if_in).sigmoid(), k)
    at_k_if_out, before_k_if_out = probabilities_without_each(tilted_if_out.sigmoid(), (-tilted_if_out).sigmoid(), k)
    at_k_RL = torch.where(is_in_top_k_RL, at_k_if_in, at_k_if_out)
    before_k_RL = torch.where(is_in_top_k_RL, before_k_if_in, before_k_if_out)
    return at_k_RL.log() - before_k_RL.log() - torch.where(is_in_top_k_RL, tilt_if_in, tilt_if_out)


def _tilted(x_RL: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """``x + tilt``, and the tilt with which the mean of N is ``rank - 1/2``."""
    pivot_R1 = x_RL.detach().topk(rank).values[..., -1:]
    u_RL = x_RL - pivot_R1  # the bracket below holds for scores relative to the ``rank``-th largest
    low_R1 = torch.full_like(pivot_R1, -math.log(2 * x_RL.shape[-1]))
    high_R1 = torch.full_like(pivot_R1, math.log(2 * rank))
    for _ in range(_BISECTIONS):
        middle_R1 = (low_R1 + high_R1) / 2
        too_many_R1 = (u_RL.detach() + middle_R1).sigmoid().sum(-1, keepdim=True) > rank - 0.5
        low_R1 = torch.where(too_many_R1, low_R1, middle_R1)
        high_R1 = torch.where(too_many_R1, middle_R1, high_R1)
    return u_RL + high_R1, high_R1 - pivot_R1
