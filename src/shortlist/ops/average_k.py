"""The threshold at which a batch's sets of classes have K classes on average, smoothed by Gaussian noise.

Shape suffixes: R rows, L classes, B draws, M all scores of a batch.
"""

import math

import torch
from torch import Tensor

from shortlist.ops.checks import can_read
from shortlist.ops.smoothing import smoothed_sums

# Standard deviations that no draw reaches.
_BEYOND_ANY_DRAW = 40.0
_BISECTIONS, _NEWTON_STEPS = 20, 3


def lead_of_threshold(
    scores_RL: Tensor,
    kept_R: Tensor | None,
    own_RC: Tensor,
    k: int,
    epsilon: float,
    n_samples: float,
    noise_RLB: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """``(R, C)`` the smoothed (K R + 1)-th largest of all scores, the best that is left out, less the own scores.

    Args:
        scores_RL: All scores.
        kept_R: False for rows that do not count; None if all do.
        own_RC: What is compared with the threshold.
        k: How many classes a row has on average.
        epsilon: Standard deviation of the noise.
        n_samples: Number of draws; infinity solves for the threshold that sets of this mean size are expected at.
        noise_RLB: The draws, instead of fresh ones.
        generator: Source of fresh draws.
    """
    if epsilon > 0 and n_samples == math.inf and noise_RLB is None:
        return _expected_threshold(scores_RL, kept_R, k, epsilon) - own_RC
    scores_RL = _without_effect(scores_RL, kept_R, k, epsilon, noise_RLB)
    all_1M, rank = scores_RL.reshape(1, -1), k * scores_RL[..., 0].numel() + 1
    # Relative to the threshold without noise: large scores would lose the noise to rounding.
    level = all_1M.detach().topk(rank).values[0, -1]
    noise_B1M = None if noise_RLB is None else noise_RLB.reshape(1, all_1M.shape[1], -1).movedim(-1, 0).to(all_1M.dtype)
    draws, places = 1 if n_samples == math.inf else int(n_samples), [slice(rank - 1, rank)]
    threshold = smoothed_sums(all_1M - level, rank, places, epsilon, draws, noise_B1M, generator).squeeze()
    return threshold - (own_RC - level)


def _expected_threshold(scores_RL: Tensor, kept_R: Tensor | None, k: int, epsilon: float) -> Tensor:
    """The t at which the expected number of scores s + epsilon Z above t is K R + 1/2.

    Half of one: between the last score inside and the best outside. The number is the sum of Phi((s - t) / epsilon).
    Its variance is below its mean, so for many scores the draws of the threshold lie close together around t. The
    gradient of t is that of the equation: a score's share of the normal densities at t.
    """
    counted_R1 = torch.ones_like(scores_RL[..., :1]) if kept_R is None else kept_R.unsqueeze(-1).to(scores_RL.dtype)
    plain_RL, wanted = scores_RL.detach(), k * counted_R1.sum() + 0.5
    precise = torch.float32 if scores_RL.device.type == "mps" else torch.float64  # MPS has no float64

    def sum_of(values_RL: Tensor) -> Tensor:
        total: Tensor = (counted_R1 * values_RL).sum(dtype=precise).to(values_RL.dtype)
        return total

    # A fixed number of steps: looking whether it is close enough would make a GPU wait.
    low, high = plain_RL.amin() - _BEYOND_ANY_DRAW * epsilon, plain_RL.amax() + _BEYOND_ANY_DRAW * epsilon
    for _ in range(_BISECTIONS):
        middle = low + (high - low) / 2
        is_too_low = sum_of(torch.special.ndtr((plain_RL - middle) / epsilon)) > wanted
        low, high = torch.where(is_too_low, middle, low), torch.where(is_too_low, high, middle)
    threshold = low + (high - low) / 2
    for _ in range(_NEWTON_STEPS):
        above_RL = (plain_RL - threshold) / epsilon
        density = sum_of(torch.exp(-0.5 * above_RL.square())) / (epsilon * math.sqrt(2 * math.pi))
        step = (sum_of(torch.special.ndtr(above_RL)) - wanted) / density.clamp(min=torch.finfo(density.dtype).tiny)
        threshold = torch.minimum(torch.maximum(threshold + step, low), high)
    log_density_RL = torch.where(counted_R1 > 0, -0.5 * ((plain_RL - threshold) / epsilon).square(), -math.inf)
    share_RL = log_density_RL.flatten().softmax(0).view_as(plain_RL)
    # Zero, with the gradient of the threshold.
    return threshold + (share_RL * (scores_RL - plain_RL)).sum()


def _without_effect(
    scores_RL: Tensor, kept_R: Tensor | None, k: int, epsilon: float, noise_RLB: Tensor | None
) -> Tensor:
    """The scores, with those of rows that do not count so high or low that each such row has K classes in any draw.

    Leaving the rows out would need their number, and reading it would make a GPU wait.
    """
    if kept_R is None or (can_read(kept_R) and bool(kept_R.all())):
        return scores_RL
    plain_RL = scores_RL.detach()
    reach = _BEYOND_ANY_DRAW if noise_RLB is None else 2 * noise_RLB.detach().abs().amax().to(plain_RL.dtype)
    highest, lowest = plain_RL.amax() + 1 + epsilon * reach, plain_RL.amin() - 1 - epsilon * reach
    is_inside_L = torch.arange(scores_RL.shape[-1], device=scores_RL.device) < k
    return torch.where(kept_R.unsqueeze(-1), scores_RL, torch.where(is_inside_L, highest, lowest))
