"""The noised hinge with any margins, which its balanced and its imbalanced form share.

Shape suffixes: R rows, L classes, C candidate classes, B samples, K values of k, P chosen classes.
"""

import math

import torch
from torch import Tensor

from shortlist.kernels.dispatch import Impl, supports
from shortlist.kernels.noised_hinge.plan import fits
from shortlist.ops.batch import Reduction, ScoredBatch, check_reduction
from shortlist.ops.checks import (
    Ks,
    check_flag,
    check_floating,
    check_n_samples,
    check_noise,
    check_not_negative,
    check_positive,
    check_weight,
    sorted_ks,
)
from shortlist.ops.dtypes import result_dtype, smallest_scale, widened, working_dtype, zero_if_tiny
from shortlist.ops.exact import exact_topk
from shortlist.ops.smoothing import DRAWS_AT_ONCE, find_places, smoothed_sums


def noised_hinge(
    scores: Tensor,
    target: Tensor,
    k: Ks,
    *,
    margin: float,
    margins_L: Tensor | None,
    scale: float,
    epsilon: float,
    relative: bool,
    n_samples: float,
    noise: Tensor | None,
    generator: torch.Generator | None,
    weight: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    impl: Impl = "auto",
) -> Tensor:
    """``scale (m_y + smoothed (K+1)-th largest score - s_y)_+``, averaged over the K if there are several.

    The margin of all classes is ``margin``, unless ``margins_L`` has one for each.
    """
    check_floating("scores", scores)
    check_n_samples(n_samples)
    check_flag("relative", relative)
    dtype = working_dtype(scores.dtype)
    check_not_negative("epsilon", epsilon, dtype)
    check_not_negative("margin", margin, dtype)
    check_positive("scale", scale, dtype)
    epsilon = zero_if_tiny(epsilon, dtype)
    needs = {"noise=None": noise is None, "epsilon > 0": epsilon > 0, "a finite n_samples": n_samples != math.inf}
    if supports(impl, scores, labels=(target, weight), traceable=True, needs=needs):
        num_classes, n_samples = scores.shape[1], int(n_samples)
        ks = sorted_ks(k, num_classes - 1, num_classes)
        check_reduction(reduction)
        if weight is not None:
            check_weight(weight, num_classes)
        has_room = fits(num_classes, ks[-1] + 1, n_samples)
        if supports(impl, needs={"fewer samples, or a smaller k": has_room}):
            if torch.compiler.is_compiling():
                from shortlist.kernels.noised_hinge.custom_op import noised_hinge as kernel
            else:
                from shortlist.kernels.noised_hinge.autograd import noised_hinge as kernel
            epsilon_R = _epsilon_of_rows(scores, ks[-1], epsilon) if relative else None
            settings = (ks, scale, margin, epsilon, n_samples, ignore_index, reduction)
            return kernel(scores, target, margins_L, weight, epsilon_R, generator, *settings).to(result_dtype(scores))
    batch = ScoredBatch(scores, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    ks = sorted_ks(k, batch.num_classes - 1, batch.num_classes)
    check_noise(noise, scores, generator)
    if margins_L is None:
        margin_R1C: Tensor | float = margin
    else:
        margin_R1C = batch.pick_per_class(margins_L.to(batch.scores_RL.dtype)).unsqueeze(-2)
    noise = batch.last_dim_classes(noise)
    lead_RKC = _smooth_leads_of_rivals(batch, ks, epsilon, relative, n_samples, noise, generator)
    return batch.reduce(scale * (margin_R1C + lead_RKC).relu().mean(-2))


def _smooth_leads_of_rivals(
    batch: ScoredBatch,
    ks: tuple[int, ...],
    epsilon: float,
    relative: bool,
    n_samples: float,
    noise: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """``(R, K, C)`` smoothed (k+1)-th largest scores, the best that are left out, less the candidate's own.

    Scores are subtracted from scores before noise or a margin is added: large scores would lose their digits.
    """
    rank, places = ks[-1] + 1, [slice(k, k + 1) for k in ks]
    own_R1C = batch.scores_RC.unsqueeze(-2)
    if epsilon == 0:
        return smoothed_sums(batch.scores_RL, rank, places, 0.0, 1, None, None).unsqueeze(-1) - own_R1C
    exact = n_samples == math.inf and noise is None
    n_samples = 1 if exact else int(n_samples) if noise is None else noise.shape[-1]
    noise_BRL = None if noise is None else noise.movedim(-1, 0).to(batch.scores_RL.dtype)
    spread_R1 = _spread(batch.scores_RL.detach(), ks[-1]) if relative else None
    if exact or batch.index_R is None or (noise is None and n_samples > DRAWS_AT_ONCE):
        level_R1 = batch.level(rank)
        above_RL = _in_units_of(spread_R1, batch.scores_RL - level_R1)
        if exact:
            rival_RK = torch.stack([exact_topk(above_RL, k + 1, epsilon=epsilon) for k in ks], -1)
        else:
            rival_RK = smoothed_sums(above_RL, rank, places, epsilon, n_samples, noise_BRL, generator)
        rival_RK = rival_RK if spread_R1 is None else spread_R1 * rival_RK
        return rival_RK.unsqueeze(-1) - (own_R1C - level_R1.unsqueeze(-1))
    x_RL = batch.scores_RL.detach()
    x_RL = x_RL if spread_R1 is None else _in_units_of(spread_R1, x_RL - batch.level(rank))
    places_RBP, shift_RBP = find_places(x_RL, rank, slice(ks[0], rank), epsilon, n_samples, noise_BRL, generator)
    if len(ks) < places_RBP.shape[-1]:
        chosen = [k - ks[0] for k in ks]
        places_RBP, shift_RBP = places_RBP[..., chosen], shift_RBP[..., chosen]
    shift_RBP = shift_RBP if spread_R1 is None else spread_R1.unsqueeze(-1) * shift_RBP
    # One gather for these and the label: two would need two gradients as large as the scores, and their sum.
    places_RP = places_RBP.movedim(-1, -2).flatten(-2)
    chosen_RP = batch.scores_RL.gather(-1, torch.cat([places_RP, batch.index_R.unsqueeze(-1)], -1))
    lead_RP = (chosen_RP[..., :-1] - chosen_RP[..., -1:]) + shift_RBP.movedim(-1, -2).flatten(-2)
    return lead_RP.reshape(*lead_RP.shape[:-1], len(ks), n_samples).mean(-1, keepdim=True)


def _spread(scores_RL: Tensor, k: int) -> Tensor:
    """``(R, 1)`` standard deviation of the 2k + 2 largest scores of each row, or of all if there are fewer.

    It is that of a population: the mean of the squares is over all of them. If they are equal it is not 0 but the
    smallest number to divide by, and noise of that size is lost beside any score.
    """
    best_RP = scores_RL.topk(min(2 * k + 2, scores_RL.shape[-1])).values
    above_RP = best_RP - best_RP[..., -1:]
    range_R1 = above_RP[..., :1].clamp(min=smallest_scale(scores_RL.dtype))
    above_RP = above_RP / range_R1  # so that the squares cannot overflow
    deviation_RP = above_RP - above_RP.mean(-1, keepdim=True)
    spread_R1 = range_R1 * deviation_RP.square().mean(-1, keepdim=True).sqrt()
    return spread_R1.clamp(min=smallest_scale(scores_RL.dtype))


def _epsilon_of_rows(scores: Tensor, k: int, epsilon: float) -> Tensor:
    """Standard deviation of each row's noise, if ``epsilon`` is relative."""
    epsilon_R = epsilon * _spread(widened(scores.detach()), k).squeeze(-1)
    return epsilon_R.clamp(min=smallest_scale(epsilon_R.dtype))


def _in_units_of(spread_R1: Tensor | None, above_RL: Tensor) -> Tensor:
    """Scores above a level in units of the spread, if there is one."""
    if spread_R1 is None:
        return above_RL
    # Those far below the best could overflow.
    return (above_RL / spread_R1).clamp(min=-1 / smallest_scale(above_RL.dtype))
