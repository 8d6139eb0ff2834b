"""The noised hinge with any margins: what its balanced and its imbalanced form have in common.

Shape suffixes: R rows, L classes, C candidate classes, B draws, P = B + 1 chosen classes.
"""

import math

import torch
from torch import Tensor

from shortlist import kernels
from shortlist.ops.batch import Reduction, ScoredBatch, check_reduction
from shortlist.ops.checks import (
    check_floating,
    check_k,
    check_n_samples,
    check_noise,
    check_not_negative,
    check_positive,
    check_weight,
)
from shortlist.ops.dtypes import result_dtype, working_dtype, zero_if_tiny
from shortlist.ops.exact import exact_topk
from shortlist.ops.smoothing import DRAWS_AT_ONCE, find_places, smooth_topk, topk_value


def noised_hinge(
    scores: Tensor,
    target: Tensor,
    k: int,
    *,
    margins_L: Tensor | None,
    scale: float,
    epsilon: float,
    n_samples: float,
    noise: Tensor | None,
    generator: torch.Generator | None,
    weight: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
) -> Tensor:
    """``scale (m_y + smoothed (K+1)-th largest score - s_y)_+``; without margins they are 1."""
    check_floating("scores", scores)
    check_n_samples(n_samples)
    dtype = working_dtype(scores.dtype)
    check_not_negative("epsilon", epsilon, dtype)
    check_positive("scale", scale, dtype)
    epsilon = zero_if_tiny(epsilon, dtype)
    if noise is None and epsilon > 0 and n_samples != math.inf and kernels.take_labelled_rows(scores, target, weight):
        from shortlist.kernels.noised_hinge import autograd as noised

        num_classes = scores.shape[1]
        check_k(k, num_classes - 1, num_classes)
        check_reduction(reduction)
        if weight is not None:
            check_weight(weight, num_classes)
        if noised.can_take(num_classes, k, int(n_samples)):
            loss = noised.noised_hinge(
                scores, target, k, margins_L, scale, epsilon, int(n_samples), generator, weight, ignore_index, reduction
            )
            return loss.to(result_dtype(scores))
    batch = ScoredBatch(scores, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    margin_RC = 1 if margins_L is None else batch.pick_per_class(margins_L.to(batch.scores_RL.dtype))
    lead_RC = _smooth_lead_of_rival(batch, scores, k, epsilon, n_samples, noise, generator)
    return batch.reduce(scale * (margin_RC + lead_RC).relu())


def _smooth_lead_of_rival(
    batch: ScoredBatch,
    scores: Tensor,
    k: int,
    epsilon: float,
    n_samples: float,
    noise: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """``(R, C)`` smoothed (K+1)-th largest score, the best one left out of K, less the candidate's own.

    Scores are subtracted from scores before the noise or a margin joins in, which large ones would swallow.
    """
    check_k(k, batch.num_classes - 1, batch.num_classes)
    check_noise(noise, scores, generator)
    if epsilon == 0:
        return topk_value(batch.scores_RL, k + 1).unsqueeze(-1) - batch.scores_RC
    exact = n_samples == math.inf and noise is None
    draws = 1 if exact else int(n_samples) if noise is None else noise.shape[-1]
    noise = batch.last_dim_classes(noise)
    if exact or batch.index_R is None or (noise is None and draws > DRAWS_AT_ONCE):
        level_R1 = batch.level(k + 1)
        above_RL = batch.scores_RL - level_R1
        if exact:
            rival_R = exact_topk(above_RL, k + 1, epsilon=epsilon)
        else:
            rival_R = smooth_topk(above_RL, k + 1, epsilon=epsilon, n_samples=draws, noise=noise, generator=generator)
        return rival_R.unsqueeze(-1) - (batch.scores_RC - level_R1)
    noise_BRL = None if noise is None else noise.movedim(-1, 0).to(batch.scores_RL.dtype)
    places_RB1, shift_RB1 = find_places(
        batch.scores_RL.detach(), k + 1, slice(k, k + 1), epsilon, draws, noise_BRL, generator
    )
    # One gather for them and the label: two would mean two gradients as large as the scores, and their sum.
    chosen_RP = batch.scores_RL.gather(-1, torch.cat([places_RB1.squeeze(-1), batch.index_R.unsqueeze(-1)], -1))
    return ((chosen_RP[..., :-1] - chosen_RP[..., -1:]) + shift_RB1.squeeze(-1)).mean(-1, keepdim=True)
