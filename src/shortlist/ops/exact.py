"""The expectation that ``smooth_topk`` estimates, computed without noise.

Shape suffixes: R rows (any leading dimensions), L classes, T thresholds.
"""

import math

import torch
from torch import Tensor
from torch.special import ndtr

from shortlist.ops.checks import check_not_negative
from shortlist.ops.dtypes import zero_if_tiny
from shortlist.ops.poisson_binomial import count_probabilities
from shortlist.ops.smoothing import rows_of, topk_value

# The interval of the integral is narrowed three times on a coarse grid of thresholds.
_ZOOMS, _ZOOM_THRESHOLDS = 3, 16
_THRESHOLDS = 64


def exact_topk(x: Tensor, k: int, *, epsilon: float, dim: int = -1) -> Tensor:
    """``E[k-th largest of x + epsilon Z]`` along ``dim``, Z standard normal: ``smooth_topk`` for infinitely many draws.

    Let N(t) be the number of perturbed scores above t. It is a sum of independent indicators with probabilities
    ``Phi((x_i - t) / epsilon)``, and the k-th largest perturbed score exceeds t if and only if ``N(t) >= k``. So the
    expectation is an integral of ``P(N(t) >= k)`` over t, and its gradient is the probability of each class to be the
    k-th largest. The result is deterministic. Each of about a hundred thresholds takes O(L k) operations and
    O(L log k) memory per row, so this is for up to a few thousand classes.

    Args:
        x: Scores of any shape and float dtype. A slice with a NaN or, if epsilon > 0, an infinity gives NaN.
        k: Rank of the value, from 1 (the largest) to the number of classes.
        epsilon: Standard deviation of the noise. Zero gives ``topk_value``; values below 5e-32 (9e-302 in float64)
            count as zero.
        dim: Dimension of the classes.

    Returns:
        ``x`` without ``dim``, in the dtype of ``x``.

    Example:
        The mean of the larger of two standard normals is ``1 / sqrt(pi)``:

        >>> exact_topk(torch.zeros(2, dtype=torch.float64), k=1, epsilon=1.0)
        tensor(0.5642, dtype=torch.float64)
    """
    x_RL = rows_of(x, k, dim)
    check_not_negative("epsilon", epsilon, x_RL.dtype)
    epsilon = zero_if_tiny(epsilon, x_RL.dtype)
    if epsilon == 0:
        return topk_value(x, k, dim)
    if k > x_RL.shape[-1] // 2 + 1:  # the k-th largest is minus the (L + 1 - k)-th largest of minus x: fewer counts
        return -exact_topk(-x, x_RL.shape[-1] + 1 - k, epsilon=epsilon, dim=dim)
    # Relative to the hard value, in units of epsilon: the thresholds then keep their digits whatever the size of x.
    hard_R = topk_value(x_RL.detach(), k)
    expectation_R = _expectation((x_RL - hard_R.unsqueeze(-1)) / epsilon, k)
    expectation_R = hard_R + epsilon * expectation_R
    expectation_R = torch.where(x_RL.isfinite().all(-1), expectation_R, math.nan)
    return expectation_R.to(x.dtype)


def _expectation(u_RL: Tensor, k: int) -> Tensor:
    """``E[k-th largest of u + Z]`` for rows whose k-th largest is 0."""
    low_R, high_R = _transition(u_RL.detach(), k)
    thresholds_RT = _between(low_R, high_R, _THRESHOLDS)
    survival_RT = _survival(u_RL, thresholds_RT, k)
    # The integrand is constant near both ends, up to rounding, so the trapezoidal rule converges exponentially fast.
    step_R = (high_R - low_R) / (_THRESHOLDS - 1)
    return low_R + step_R * (survival_RT.sum(-1) - (survival_RT[..., 0] + survival_RT[..., -1]) / 2)


def _survival(u_RL: Tensor, t_RT: Tensor, k: int) -> Tensor:
    """``P(k-th largest of u + Z > t)``."""
    gap_RTL = u_RL.unsqueeze(-2) - t_RT.unsqueeze(-1)
    return 1 - count_probabilities(ndtr(gap_RTL), ndtr(-gap_RTL), k).sum(-1)


def _transition(u_RL: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """An interval outside which ``_survival`` is 1 or 0, up to an error far below the wanted accuracy."""
    eps = torch.finfo(u_RL.dtype).eps
    # The k-th largest moves by at most max |Z|, which exceeds this reach with probability below eps.
    reach = math.sqrt(2 * math.log(2 * u_RL.shape[-1] / eps))
    low_R = torch.full_like(u_RL[..., 0], -reach)
    high_R = torch.full_like(u_RL[..., 0], reach)
    tail = 1e4 * eps if u_RL.dtype == torch.float64 else 10 * eps
    for _ in range(_ZOOMS):
        t_RT = _between(low_R, high_R, _ZOOM_THRESHOLDS)
        survival_RT = _survival(u_RL, t_RT, k)
        low_R = torch.where(survival_RT >= 1 - tail, t_RT, low_R.unsqueeze(-1)).amax(-1)
        high_R = torch.where(survival_RT <= tail, t_RT, high_R.unsqueeze(-1)).amin(-1)
    return low_R, high_R


def _between(low_R: Tensor, high_R: Tensor, count: int) -> Tensor:
    fraction_T = torch.linspace(0, 1, count, dtype=low_R.dtype, device=low_R.device)
    return low_R.unsqueeze(-1) + (high_R - low_R).unsqueeze(-1) * fraction_T
