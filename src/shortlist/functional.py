"""Every loss as a pure function, called like ``F.cross_entropy``.

Each function checks its arguments, computes the loss of every row (in a kernel where one supports the batch, in plain
torch elsewhere), and reduces over the rows. All of them take

    scores: ``(N, L)`` scores of L classes; also ``(L,)``, or ``(N, L, d1, ...)``.
    target: ``(N,)`` int64 labels; ``()`` or ``(N, d1, ...)`` for the other shapes. Class probabilities shaped like the
        scores work too: the loss is then its expectation over the classes.
    weight: ``(L,)`` weights of the classes; a mean divides by the sum of the labels' weights.
    ignore_index: Rows with this label do not count.
    reduction: ``"mean"``, ``"sum"`` or ``"none"``.

The loss of a row with a NaN or infinite score is NaN. To exclude a class, give it a large negative score such as -1e4,
not -inf. Half-precision scores are computed in float32.

Shape suffixes: R rows, L classes, C candidate classes (the label alone, or all classes if the target holds
probabilities).
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shortlist.kernels.dispatch import Impl, supports
from shortlist.ops.average_k import lead_of_threshold
from shortlist.ops.batch import Reduction, ScoredBatch, checked_num_classes
from shortlist.ops.checks import (
    ClassCounts,
    Ks,
    check_floating,
    check_k,
    check_n_samples,
    check_noise,
    check_not_negative,
    check_per_class,
    check_positive,
    checked_class_counts,
    sorted_ks,
)
from shortlist.ops.class_counts import margins_for
from shortlist.ops.dtypes import working_dtype, zero_if_tiny
from shortlist.ops.noised_hinge import noised_hinge
from shortlist.ops.smoothing import topk_value
from shortlist.ops.subset_sums import log_subset_ratio, log_subset_ratio_without_each
from shortlist.ops.topk_cross_entropy import topk_cross_entropy as loss_of_rows

__all__ = [
    "calibrated_topk_hinge",
    "convex_topk_hinge",
    "focal",
    "imbalanced_noised_topk_hinge",
    "ldam",
    "logit_adjusted",
    "noised_average_k_hinge",
    "noised_topk_hinge",
    "smooth_topk_hinge",
    "topk_cross_entropy",
    "topk_error",
    "topk_hinge",
]


def topk_error(
    scores: Tensor,
    target: Tensor,
    k: int,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Top-K error: 1 if the ``k``-th largest score is strictly above the label's, else 0.

    A tie with the k-th largest score counts as correct. The loss is piecewise constant, so it has no gradient.

    Args:
        scores: ``(N, L)`` scores; ``(L,)`` and ``(N, L, d1, ...)`` work too.
        target: ``(N,)`` labels, or probabilities shaped like the scores.
        k: Number of suggestions, from 1 to L.
        weight, ignore_index, reduction: As in ``F.cross_entropy``.

    Example:
        >>> topk_error(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([2]), k=2)
        tensor(1.)
    """
    batch = ScoredBatch(scores, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    check_k(k, batch.num_classes, batch.num_classes)
    kth_R1 = topk_value(batch.scores_RL, k).unsqueeze(-1)
    return batch.reduce((kth_R1 > batch.scores_RC).to(kth_R1.dtype))


def topk_hinge(
    scores: Tensor,
    target: Tensor,
    k: int,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Top-K hinge: ``(1 + K-th largest of the other scores - s_y)_+``.

    Args:
        scores: ``(N, L)`` scores; ``(L,)`` and ``(N, L, d1, ...)`` work too.
        target: ``(N,)`` labels, or probabilities shaped like the scores.
        k: Number of suggestions, from 1 to L - 1.
        weight, ignore_index, reduction: As in ``F.cross_entropy``.

    Example:
        >>> topk_hinge(torch.tensor([[3.0, 2.5, 1.0]]), torch.tensor([0]), k=1)
        tensor(0.5000)

    Reference:
        Lapin, Hein and Schiele, Top-k Multiclass SVM, NeurIPS 2015. The loss is not top-K calibrated.
    """
    batch = ScoredBatch(scores, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    check_k(k, batch.num_classes - 1, batch.num_classes)
    _, kth_gap_RC = _gaps_to_others(batch, k)
    return batch.reduce((1 + kth_gap_RC).relu())


def convex_topk_hinge(
    scores: Tensor,
    target: Tensor,
    k: int,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Convex top-K hinge: ``(mean of the K largest of (1 - delta_y + s) - s_y)_+``, an upper bound on ``topk_hinge``.

    Args:
        scores: ``(N, L)`` scores; ``(L,)`` and ``(N, L, d1, ...)`` work too.
        target: ``(N,)`` labels, or probabilities shaped like the scores.
        k: Number of suggestions, from 1 to L - 1.
        weight, ignore_index, reduction: As in ``F.cross_entropy``.

    Example:
        >>> convex_topk_hinge(torch.tensor([[3.0, 2.5, 1.0]]), torch.tensor([0]), k=2)
        tensor(0.2500)

    Reference:
        Lapin, Hein and Schiele, Top-k Multiclass SVM, NeurIPS 2015.
    """
    batch = ScoredBatch(scores, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    check_k(k, batch.num_classes - 1, batch.num_classes)
    before_kth_RC, kth_gap_RC = _gaps_to_others(batch, k)
    # The K largest always include the K - 1 largest other scores. The last one is the next of those, or y itself.
    return batch.reduce(((k - 1 + before_kth_RC + (1 + kth_gap_RC).relu()) / k).relu())


def calibrated_topk_hinge(
    scores: Tensor,
    target: Tensor,
    k: int,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Calibrated top-K hinge: ``(1 + (K+1)-th largest score - s_y)_+``; ``noised_topk_hinge`` smooths it.

    If the label itself has the (K+1)-th largest score, the loss is 1 and its gradient is zero.

    Args:
        scores: ``(N, L)`` scores; ``(L,)`` and ``(N, L, d1, ...)`` work too.
        target: ``(N,)`` labels, or probabilities shaped like the scores.
        k: Number of suggestions, from 1 to L - 1.
        weight, ignore_index, reduction: As in ``F.cross_entropy``.

    Example:
        >>> calibrated_topk_hinge(torch.tensor([[3.0, 2.5, 1.0]]), torch.tensor([2]), k=1)
        tensor(2.5000)

    Reference:
        Yang and Koyejo, On the Consistency of Top-k Surrogate Losses, ICML 2020.
    """
    return noised_topk_hinge(
        scores, target, k, epsilon=0.0, weight=weight, ignore_index=ignore_index, reduction=reduction
    )


def smooth_topk_hinge(
    scores: Tensor,
    target: Tensor,
    k: int,
    *,
    tau: float = 1.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Top-K hinge, smoothed by a log-sum-exp over all subsets of K classes.

    ``tau log sum_A exp(1[y not in A] / tau + sum_A s_j / (K tau)) - tau log sum_(A with y) exp(sum_A s_j / (K tau))``,
    where A runs over the subsets of size K. Takes O(L K) operations and is stable for scores of any size. The gradient
    is of order 1/K.

    Args:
        scores: ``(N, L)`` scores; ``(L,)`` and ``(N, L, d1, ...)`` work too.
        target: ``(N,)`` labels, or probabilities shaped like the scores.
        k: Number of suggestions, from 1 to L - 1.
        tau: Temperature. Zero gives the limit ``(1 + (K-th largest of the other scores - s_y) / K)_+``; values below
            5e-32 (9e-302 in float64) count as zero.
        weight, ignore_index, reduction: As in ``F.cross_entropy``.

    Example:
        >>> smooth_topk_hinge(torch.tensor([[3.0, 2.5, 1.0]]), torch.tensor([0]), k=1, tau=1.0)
        tensor(1.1041)

    Reference:
        Berrada, Zisserman and Kumar, Smooth Loss Functions for Deep Top-k Classification, ICLR 2018.
    """
    return _smooth_topk_hinge(scores, target, k, tau, weight, ignore_index, reduction, impl="auto")


def _smooth_topk_hinge(
    scores: Tensor,
    target: Tensor,
    k: int,
    tau: float,
    weight: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    *,
    impl: Impl,
) -> Tensor:
    check_floating("scores", scores)
    check_not_negative("tau", tau, working_dtype(scores.dtype))
    tau = zero_if_tiny(tau, working_dtype(scores.dtype))
    fused = supports(impl, scores, labels=(target, weight), needs={"tau > 0": tau > 0})
    batch = ScoredBatch(
        scores, target, weight=weight, ignore_index=ignore_index, reduction=reduction, blank_ignored=not fused
    )
    check_k(k, batch.num_classes - 1, batch.num_classes)
    if tau == 0:
        _, kth_gap_RC = _gaps_to_others(batch, k)
        return batch.reduce((1 + kth_gap_RC / k).relu())
    if fused and batch.index_R is not None:
        from shortlist.kernels.smooth_hinge import log_odds_against

        log_odds_R = log_odds_against(scores, batch.index_R, k, tau, kept_R=batch.kept_R)
        return batch.reduce(tau * _softplus(log_odds_R.unsqueeze(-1)))
    return batch.reduce(tau * _softplus(_log_odds_of_subsets(batch, k, tau)))


def topk_cross_entropy(
    scores: Tensor,
    target: Tensor,
    k: Ks,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Top-K cross-entropy: ``-log P(y is among the K largest of s + G)``, G independent standard Gumbel noise.

    The noise is integrated out, so the loss is deterministic. ``k=1`` is the cross-entropy. With several K, it is minus
    the logarithm of the mean of their probabilities.

    Args:
        scores: ``(N, L)`` scores; ``(L,)`` and ``(N, L, d1, ...)`` work too.
        target: ``(N,)`` labels, or probabilities shaped like the scores; these take L times as long.
        k: Number of suggestions, from 1 to L - 1; or a tuple of several.
        weight, ignore_index, reduction: As in ``F.cross_entropy``.

    Example:
        The label has one of the two best places of three with probability 2/3:

        >>> topk_cross_entropy(torch.zeros(1, 3), torch.tensor([0]), k=2)
        tensor(0.4055)
        >>> topk_cross_entropy(torch.zeros(1, 3), torch.tensor([0]), k=(1, 2))  # -log 1/2
        tensor(0.6931)
    """
    return _topk_cross_entropy(scores, target, k, weight, ignore_index, reduction, impl="auto")


def _topk_cross_entropy(
    scores: Tensor,
    target: Tensor,
    k: Ks,
    weight: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    *,
    impl: Impl,
) -> Tensor:
    ks = sorted_ks(k, checked_num_classes(scores) - 1, checked_num_classes(scores))
    fused = supports(impl, scores, labels=(target, weight))
    if fused:
        from shortlist.kernels import topk_cross_entropy as kernels

        fused = supports(impl, needs=kernels.needs(scores.shape[0], scores.shape[1], ks))
    batch = ScoredBatch(
        scores, target, weight=weight, ignore_index=ignore_index, reduction=reduction, blank_ignored=not fused
    )
    if fused and batch.index_R is not None:
        return batch.reduce(kernels.topk_cross_entropy(scores, batch.index_R, ks).unsqueeze(-1))
    if max(ks) == 1:
        return batch.reduce(_softplus(_log_odds_against(batch, batch.scores_RL)))
    return batch.reduce(loss_of_rows(batch.others(), batch.scores_RC, ks))


def focal(
    scores: Tensor,
    target: Tensor,
    *,
    gamma: float = 2.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Focal loss: ``-(1 - p_y)^gamma log p_y``, where p is the softmax of the scores.

    Args:
        scores: ``(N, L)`` scores; ``(L,)`` and ``(N, L, d1, ...)`` work too.
        target: ``(N,)`` labels, or probabilities shaped like the scores.
        gamma: How much well-classified examples are down-weighted; 0 gives the cross-entropy.
        weight, ignore_index, reduction: As in ``F.cross_entropy``.

    Example:
        >>> focal(torch.tensor([[1.0, 1.0]]), torch.tensor([0]), gamma=1.0)
        tensor(0.3466)

    Reference:
        Lin et al., Focal Loss for Dense Object Detection, ICCV 2017.
    """
    batch = ScoredBatch(scores, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    check_not_negative("gamma", gamma, batch.scores_RL.dtype)
    against_RC = _log_odds_against(batch, batch.scores_RL)
    # p_y = sigmoid(-against).
    return batch.reduce(torch.exp(gamma * F.logsigmoid(against_RC)) * _softplus(against_RC))


def ldam(
    scores: Tensor,
    target: Tensor,
    class_counts: ClassCounts,
    *,
    max_margin: float = 0.5,
    scale: float = 30.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """LDAM loss: cross-entropy of ``scale (s - m_y delta_y)``, with a margin ``m_y`` that is larger for rarer classes.

    Designed for cosine scores: see ``CosineLinear``. The margins are those of ``class_margins``.

    Args:
        scores: ``(N, L)`` scores; ``(L,)`` and ``(N, L, d1, ...)`` work too.
        target: ``(N,)`` labels, or probabilities shaped like the scores.
        class_counts: ``(L,)`` number of training images of each class.
        max_margin: Margin of the rarest class.
        scale: Factor of the scores.
        weight, ignore_index, reduction: As in ``F.cross_entropy``.

    Example:
        >>> ldam(torch.tensor([[0.5, 0.5]]), torch.tensor([0]), [1, 16], max_margin=0.1, scale=10.0)
        tensor(1.3133)

    Reference:
        Cao et al., Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss, NeurIPS 2019.
    """
    batch = ScoredBatch(scores, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    check_positive("scale", scale, batch.scores_RL.dtype)
    check_not_negative("max_margin", max_margin, batch.scores_RL.dtype)
    margin_RC = _margins(batch, class_counts, max_margin)
    # Relative to the largest score: the scale times a large score would lose digits.
    scaled_RL = scale * (batch.scores_RL - batch.level(1))
    return batch.reduce(_softplus(_log_odds_against(batch, scaled_RL) + scale * margin_RC))


def logit_adjusted(
    scores: Tensor,
    target: Tensor,
    class_counts: ClassCounts,
    *,
    tau: float = 1.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Logit-adjusted loss: cross-entropy of ``s + tau log prior``, the prior being a class's share of the images.

    The prior is left out at test time, so the scores do not favour frequent classes, and accuracy averaged over classes
    improves. ``tau = 1`` is the balanced softmax.

    Args:
        scores: ``(N, L)`` scores; ``(L,)`` and ``(N, L, d1, ...)`` work too.
        target: ``(N,)`` labels, or probabilities shaped like the scores.
        class_counts: ``(L,)`` number of training images of each class.
        tau: Strength of the adjustment; 0 gives the cross-entropy.
        weight, ignore_index, reduction: As in ``F.cross_entropy``.

    Example:
        >>> logit_adjusted(torch.zeros(1, 2), torch.tensor([0]), [1, 3])  # -log(1/4)
        tensor(1.3863)

    Reference:
        Menon et al., Long-tail Learning via Logit Adjustment, ICLR 2021; Ren et al., Balanced Meta-Softmax for
        Long-Tailed Visual Recognition, NeurIPS 2020.
    """
    batch = ScoredBatch(scores, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    check_not_negative("tau", tau, batch.scores_RL.dtype)
    # The softmax is the same for counts and shares: their logarithms differ by a constant.
    log_counts_L = checked_class_counts(class_counts, batch.num_classes).to(batch.scores_RL).log()
    # The values may not have been checked (see ``can_read``). The sum makes every loss NaN if any count is invalid.
    adjustment_L = tau * log_counts_L + (0 * log_counts_L).sum()
    adjusted_RL = batch.scores_RL - batch.level(1) + adjustment_L
    return batch.reduce(_softplus(_log_odds_against(batch, adjusted_RL)))


def noised_topk_hinge(
    scores: Tensor,
    target: Tensor,
    k: Ks,
    *,
    epsilon: float = 0.2,
    relative: bool = False,
    n_samples: float = 5,
    margin: float = 1.0,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Noised top-K hinge: the calibrated hinge with its (K+1)-th largest score averaged over Gaussian noise.

    ``(margin + mean over B draws of the (K+1)-th largest of (s + epsilon Z) - s_y)_+``. Where the loss is positive, its
    gradient is -1 at the label plus 1/B at the class found in each draw: at most B + 1 non-zeros in a row. For several
    K it is the mean of their losses, all from the same draws, and the gradient has at most B + 1 non-zeros for each K,
    the label shared.

    Args:
        scores: ``(N, L)`` scores; ``(L,)`` and ``(N, L, d1, ...)`` work too.
        target: ``(N,)`` labels, or probabilities shaped like the scores.
        k: Number of suggestions, from 1 to L - 1; or several different ones, such as ``(1, 3, 5)``.
        epsilon: Standard deviation of the noise, in units of the scores; 0 gives ``calibrated_topk_hinge`` (if the
            margin is 1).
        relative: Measure ``epsilon`` in units of each row's spread instead: the standard deviation (of a population,
            without Bessel's correction) of its 2K + 2 largest scores, K being the largest of several; of all scores if
            there are fewer. The spread has no gradient. Scores and margin may then be in any unit: multiplied by c,
            they give c times the loss. A row whose spread is 0 gets no noise.
        n_samples: Number B of draws, up to 2^24; ``math.inf`` computes the expectation without noise (``exact_topk``).
        margin: By how much the label's score must exceed the smoothed (K+1)-th largest.
        noise: ``(N, L, B)`` draws to use instead of fresh ones: the shape of ``scores``, then B.
        generator: Source of the draws; by default that of the device. Ranks that share its seed still draw different
            noise.
        weight, ignore_index, reduction: As in ``F.cross_entropy``.

    Example:
        >>> scores, target = torch.tensor([[3.0, 2.5, 1.0]]), torch.tensor([2])
        >>> noised_topk_hinge(scores, target, k=1, epsilon=1.0, noise=torch.tensor([[[0.0], [1.0], [0.0]]]))
        tensor(3.)
        >>> noised_topk_hinge(scores, target, k=(1, 2), epsilon=1.0, noise=torch.tensor([[[0.0], [1.0], [0.0]]]))
        tensor(2.)

    Reference:
        Garcin et al., Stochastic smoothing of the top-K calibrated hinge loss for deep imbalanced classification,
        ICML 2022.
    """
    return noised_hinge(
        scores,
        target,
        k,
        margin=margin,
        margins_L=None,
        scale=1.0,
        epsilon=epsilon,
        relative=relative,
        n_samples=n_samples,
        noise=noise,
        generator=generator,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
    )


def imbalanced_noised_topk_hinge(
    scores: Tensor,
    target: Tensor,
    class_counts: ClassCounts,
    k: Ks,
    *,
    epsilon: float = 0.01,
    relative: bool = False,
    n_samples: float = 5,
    max_margin: float = 0.2,
    scale: float = 50.0,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Noised top-K hinge with a margin ``m_y`` that is larger for rarer classes.

    ``scale (m_y + mean over B draws of the (K+1)-th largest of (s + epsilon Z) - s_y)_+``. Designed for cosine scores
    (see ``CosineLinear``): noise and margins are in units of the cosines, and the scale multiplies the loss alone.

    Args:
        scores: ``(N, L)`` scores; ``(L,)`` and ``(N, L, d1, ...)`` work too.
        target: ``(N,)`` labels, or probabilities shaped like the scores.
        class_counts: ``(L,)`` number of training images of each class.
        k, epsilon, relative, n_samples, noise, generator: As in ``noised_topk_hinge``.
        max_margin: Margin of the rarest class.
        scale: Factor of the loss.
        weight, ignore_index, reduction: As in ``F.cross_entropy``.

    Example:
        >>> cosines, target = torch.tensor([[0.9, 0.7, 0.5]]), torch.tensor([0])
        >>> imbalanced_noised_topk_hinge(cosines, target, [1, 2, 3], k=1, epsilon=0.0, max_margin=0.3)
        tensor(5.0000)

    Reference:
        Garcin et al., Stochastic smoothing of the top-K calibrated hinge loss for deep imbalanced classification,
        ICML 2022.
    """
    counts_L = checked_class_counts(class_counts, checked_num_classes(scores))
    return hinge_with_margins(
        scores,
        target,
        k,
        relative_margins_L=margins_for(scores, counts_L, 1.0),
        max_margin=max_margin,
        scale=scale,
        epsilon=epsilon,
        relative=relative,
        n_samples=n_samples,
        noise=noise,
        generator=generator,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
    )


def hinge_with_margins(
    scores: Tensor,
    target: Tensor,
    k: Ks,
    *,
    relative_margins_L: Tensor,
    max_margin: float,
    **settings: Any,
) -> Tensor:
    """``imbalanced_noised_topk_hinge`` from margins that were computed before, as fractions of ``max_margin``.

    The Module keeps them: computing them from the class counts would take nine kernel launches at every step.
    """
    check_per_class("class_counts", relative_margins_L, checked_num_classes(scores))
    check_not_negative("max_margin", max_margin, working_dtype(scores.dtype))
    return noised_hinge(scores, target, k, margin=0.0, margins_L=max_margin * relative_margins_L, **settings)


def noised_average_k_hinge(
    scores: Tensor,
    target: Tensor,
    k: int,
    *,
    epsilon: float = 0.2,
    n_samples: float = math.inf,
    margin: float = 1.0,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Noised average-K hinge: the label's score must exceed a threshold that is the same for the whole batch.

    ``(margin + mean over B draws of the (K N + 1)-th largest of all N L scores (s + epsilon Z) - s_y)_+``. At that
    threshold the sets of a batch of N images have K classes on average: few for easy images, more for hard ones. Unlike
    all other losses it compares scores of different images, so a constant added to the scores of one image changes it.
    For a single image it is ``noised_topk_hinge``.

    Args:
        scores: ``(N, L)`` scores; ``(L,)`` and ``(N, L, d1, ...)`` work too.
        target: ``(N,)`` labels, or probabilities shaped like the scores.
        k: Number of classes in a set on average, from 1 to L - 1.
        epsilon: Standard deviation of the noise, in units of the scores.
        n_samples: Number B of draws, up to 2^24; the positive part of the gradient reaches at most B scores of the
            batch. ``math.inf`` draws nothing: the threshold is where the expected number of scores above it is
            K N + 1/2, which the draws approach in large batches, and all scores near it have a gradient.
        margin: By how much the label's score must exceed the threshold.
        noise, generator: As in ``noised_topk_hinge``.
        weight, ignore_index, reduction: As in ``F.cross_entropy``. Ignored rows do not move the threshold.

    Example:
        >>> scores, target = torch.tensor([[3.0, 2.5, 1.0], [0.0, 4.0, 2.0]]), torch.tensor([0, 2])
        >>> noised_average_k_hinge(scores, target, k=1, epsilon=0.0, reduction="none")  # the third largest is 2.5
        tensor([0.5000, 1.5000])

    Reference:
        Garcin et al., A two-head loss function for deep Average-K classification, arXiv 2303.18118 (the task); the
        smoothing is that of ``noised_topk_hinge``.
    """
    batch = ScoredBatch(scores, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    check_k(k, batch.num_classes - 1, batch.num_classes)
    check_not_negative("epsilon", epsilon, batch.scores_RL.dtype)
    check_not_negative("margin", margin, batch.scores_RL.dtype)
    check_n_samples(n_samples)
    check_noise(noise, scores, generator)
    if batch.scores_RC.numel() == 0:
        return batch.reduce(batch.scores_RC)
    lead_RC = lead_of_threshold(
        batch.scores_RL,
        None if batch.index_R is None else batch.kept_R,
        batch.scores_RC,
        k,
        zero_if_tiny(epsilon, batch.scores_RL.dtype),
        n_samples,
        batch.last_dim_classes(noise),
        generator,
    )
    return batch.reduce((margin + lead_RC).relu())


def _gaps_to_others(batch: ScoredBatch, k: int) -> tuple[Tensor, Tensor]:
    """``(R, C)`` sum of the K - 1 largest other scores, and the K-th largest, each minus the candidate's own score."""
    positions_RK = batch.scores_RL.detach().topk(k + 1).indices
    top_RK = batch.scores_RL.gather(-1, positions_RK)
    level_R1 = top_RK[..., k - 1 : k].detach()  # as ``ScoredBatch.level``
    top_RK, own_RC = top_RK - level_R1, batch.scores_RC - level_R1
    kth_R1, next_R1 = top_RK[..., k - 1 : k], top_RK[..., k : k + 1]
    no_class_RL = torch.zeros_like(batch.scores_RL, dtype=torch.bool)
    is_in_top_k_RC = batch.pick(no_class_RL.scatter(-1, positions_RK[..., :k], True))
    sum_before_kth_RC = top_RK[..., :k].sum(-1, keepdim=True) - torch.where(is_in_top_k_RC, own_RC, kth_R1)
    return sum_before_kth_RC - (k - 1) * own_RC, torch.where(is_in_top_k_RC, next_R1, kth_R1) - own_RC


def _log_odds_of_subsets(batch: ScoredBatch, k: int, tau: float) -> Tensor:
    """``(R, C)`` log-odds of the subsets without the candidate against those with it, margin included."""
    others_RL, level_R1 = batch.without_candidate(), batch.level(k)
    if others_RL is None:
        log_ratio_RC = log_subset_ratio_without_each((batch.scores_RL - level_R1) / (k * tau), k)
    else:
        log_ratio_RC = log_subset_ratio((others_RL - level_R1) / (k * tau), k)
    own_RC = (batch.scores_RC - level_R1) / (k * tau)
    return 1 / tau + log_ratio_RC - own_RC


def _log_odds_against(batch: ScoredBatch, scores_RL: Tensor) -> Tensor:
    """``(R, C)`` log-odds against the candidate under a softmax: log-sum-exp of the other scores, minus its own."""
    best_R1 = scores_RL.detach().argmax(-1, keepdim=True)
    # Relative to the largest score: at 1e30, a sum of exponentials would keep nothing but that score.
    scores_RL = scores_RL - scores_RL.detach().gather(-1, best_R1)
    is_best_RL = torch.zeros_like(scores_RL, dtype=torch.bool).scatter(-1, best_R1, True)
    all_R1 = scores_RL.logsumexp(-1, keepdim=True)
    all_but_best_R1 = scores_RL.masked_fill(is_best_RL, -math.inf).logsumexp(-1, keepdim=True)
    # Subtracting a class's share from the total is accurate for shares up to 1/2; only the best class can exceed that.
    share_RC = batch.pick((scores_RL - all_R1).masked_fill(is_best_RL, -math.inf)).exp()
    others_RC = torch.where(batch.pick(is_best_RL), all_but_best_R1, all_R1 + torch.log1p(-share_RC))
    return others_RC - batch.pick(scores_RL)


def _margins(batch: ScoredBatch, class_counts: ClassCounts, max_margin: float) -> Tensor:
    counts_L = checked_class_counts(class_counts, batch.num_classes)
    margins_L = margins_for(batch.scores_RL, counts_L, max_margin)
    return batch.pick_per_class(margins_L.to(batch.scores_RL.dtype))


def _softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``. F.softplus returns x itself above 20, which is too coarse for float64."""
    return -F.logsigmoid(-x)
