"""The noised hinge with any margins, which its balanced and its imbalanced form share.

Shape suffixes: R rows, L classes, C candidate classes, B samples, P = B + 1 chosen classes.
"""

import math

import torch
from torch import Tensor

from shortlist.kernels.dispatch import Impl, supports
from shortlist.kernels.noised_hinge.plan import fits
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
    impl: Impl = "auto",
) -> Tensor:
    """``scale (m_y + smoothed (K+1)-th largest score - s_y)_+``, with margins of 1 if none are given."""
    check_floating("scores", scores)
    check_n_samples(n_samples)
    dtype = working_dtype(scores.dtype)
    check_not_negative("epsilon", epsilon, dtype)
    check_positive("scale", scale, dtype)
    epsilon = zero_if_tiny(epsilon, dtype)
    needs = {"noise=None": noise is None, "epsilon > 0": epsilon > 0, "a finite n_samples": n_samples != math.inf}
    if supports(impl, scores, labels=(target, weight), traceable=True, needs=needs):
        num_classes, n_samples = scores.shape[1], int(n_samples)
        check_k(k, num_classes - 1, num_classes)
        check_reduction(reduction)
        if weight is not None:
            check_weight(weight, num_classes)
        if supports(impl, needs={"fewer samples, or a smaller k": fits(num_classes, k + 1, n_samples)}):
            if torch.compiler.is_compiling():
                from shortlist.kernels.noised_hinge.custom_op import noised_hinge as kernel
            else:
                from shortlist.kernels.noised_hinge.autograd import noised_hinge as kernel
            settings = (k, scale, epsilon, n_samples, ignore_index, reduction)
            return kernel(scores, target, margins_L, weight, generator, *settings).to(result_dtype(scores))
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
    """``(R, C)`` smoothed (K+1)-th largest score, the best that is left out, less the candidate's own.

    Scores are subtracted from scores before noise or a margin is added: large scores would lose their digits.
    """
    check_k(k, batch.num_classes - 1, batch.num_classes)
    check_noise(noise, scores, generator)
    if epsilon == 0:
        return topk_value(batch.scores_RL, k + 1).unsqueeze(-1) - batch.scores_RC
    exact = n_samples == math.inf and noise is None
    n_samples = 1 if exact else int(n_samples) if noise is None else noise.shape[-1]
    noise = batch.last_dim_classes(noise)
    if exact or batch.index_R is None or (noise is None and n_samples > DRAWS_AT_ONCE):
        level_R1 = batch.level(k + 1)
        above_RL = batch.scores_RL - level_R1
        if exact:
            rival_R = exact_topk(above_RL, k + 1, epsilon=epsilon)
        else:
            rival_R = smooth_topk(
                above_RL, k + 1, epsilon=epsilon, n_samples=n_samples, noise=noise, generator=generator
            )
        return rival_R.unsqueeze(-1) - (batch.scores_RC - level_R1)
    noise_BRL = None if noise is None else noise.movedim(-1, 0).to(batch.scores_RL.dtype)
    places_RB1, shift_RB1 = find_places(
        batch.scores_RL.detach(), k + 1, slice(k, k + 1), epsilon, n_samples, noise_BRL, generator
    )
    # One gather for these and the label: two would need two gradients as large as the scores, and their sum.
    chosen_RP = batch.scores_RL.gather(-1, torch.cat([places_RB1.squeeze(-1), batch.index_R.unsqueeze(-1)], -1))
    return ((chosen_RP[..., :-1] - chosen_RP[..., -1:]) + shift_RB1.squeeze(-1)).mean(-1, keepdim=True)
