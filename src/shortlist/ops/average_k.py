"""The threshold at which a batch's sets of classes have K classes on average, smoothed by Gaussian noise.

Shape suffixes: R rows, L classes, B draws.
"""

import math

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.ops.checks import can_read, check_n_samples
from shortlist.ops.smoothing import smoothed_sums

# Standard deviations that no draw reaches.
_BEYOND_ANY_DRAW = 40.0


def check_draws(n_samples: float) -> None:
    check_n_samples(n_samples)
    if n_samples == math.inf:
        raise ShortlistError(
            "n_samples must be finite here: the expectation over a whole batch is not computed, got inf"
        )


def lead_of_threshold(
    scores_RL: Tensor,
    kept_R: Tensor | None,
    own_RC: Tensor,
    k: int,
    epsilon: float,
    n_samples: int,
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
        n_samples: Number of draws.
        noise_RLB: The draws, instead of fresh ones.
        generator: Source of fresh draws.
    """
    scores_RL = _without_effect(scores_RL, kept_R, k, epsilon, noise_RLB)
    all_1M, rank = scores_RL.reshape(1, -1), k * scores_RL[..., 0].numel() + 1
    # Relative to the threshold without noise: large scores would lose the noise to rounding.
    level = all_1M.detach().topk(rank).values[0, -1]
    noise_B1M = None if noise_RLB is None else noise_RLB.reshape(1, all_1M.shape[1], -1).movedim(-1, 0).to(all_1M.dtype)
    places = [slice(rank - 1, rank)]
    threshold = smoothed_sums(all_1M - level, rank, places, epsilon, n_samples, noise_B1M, generator).squeeze()
    return threshold - (own_RC - level)


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
