"""The log-sum smoothed hinge in one kernel forward and one backward, by a contour integral instead of polynomials.

As in ``ops.subset_sums``, the ratio ``e_K / e_(K-1)`` over the classes other than the label is
``P(N = K) / P(N = K - 1)`` up to a known factor. N is the number of independent events that happen, with log-odds
``x_j - threshold``. The law of N is the Fourier transform of its generating function: with M points
``w_m = exp(2 pi i m / M)`` on the unit circle,

    P(N = n) = mean over m of G(w_m) w_m^-n,        G(w) = product over j of (q_j + p_j w),

up to ``P(N = n - M) + P(N = n + M) + ...``. The threshold puts the mean of N at K - 1/2. Its variance is then below K,
so a multiple of sqrt(K) points is enough. The work is O(L sqrt(K)), independent for each class. The scores are read a
few dozen times from the cache for the threshold, and once for the law.

The gradient needs no law with a class left out. With ``t_m = cot(pi m / M)`` and ``h_j = q_j - p_j``,

    d log(P(N = K) / P(N = K - 1)) / dx_j = -2 p_j q_j mean over m of (t_m Im H_m + h_j Re H_m) / (t_m^2 + h_j^2),
    H_m = G(w_m) (w_m^-K / P(N = K) - w_m^(1-K) / P(N = K - 1)),

a rational function of ``h_j``. Forward keeps its coefficients and nothing else of a row. M is odd, and only points of
the upper half circle are computed: the others are their conjugates, and at ``w_0 = 1`` there is nothing to compute.

Shape suffixes: R rows, L classes, B a block of classes, S strands of classes, P points.
"""

# Kernels cannot be annotated: Triton would read the annotations.
import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_MAX_STRANDS = 128  # each adds a rounding error, the same one if scores are equal
_WARPS = 8

# What a count M away may add to P(N = K), relative to it: less than the rounding of float32.
_MAX_ALIAS = 1e-8


class Tiling(NamedTuple):
    """How the kernels divide a row."""

    block: int = 4096
    """Classes that are read together on the way to the threshold."""
    cells: int = 4096
    """Classes times points that are worked on together."""


_TILING = Tiling()


def log_odds_against(
    scores_RL: Tensor, label_R: Tensor, k: int, tau: float, *, kept_R: Tensor | None = None, tiling: Tiling = _TILING
) -> Tensor:
    """``(R,)`` values of ``1 / tau + log(e_k / e_(k-1)) - s_y / (k tau)``, the e over all classes but the label.

    Their softplus times ``tau`` is the smoothed hinge. A NaN gives NaN; the caller must check for infinite scores.

    Args:
        scores_RL: float16, bfloat16 or float32, of any strides. Arithmetic is in float32.
        label_R: int64, from 0 to L - 1.
        k: From 1 to L - 1.
        tau: Above 0.
        kept_R: False for rows that are ignored: their value is 0, whatever they hold.
    """
    log_odds_R: Tensor = _LogOddsAgainst.apply(scores_RL, label_R, kept_R, int(k), float(tau), tiling)
    return log_odds_R


class _LogOddsAgainst(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores_RL: Tensor, label_R: Tensor, kept_R: Tensor | None, k: int, tau: float, tiling: Tiling
    ) -> Tensor:
        (num_rows, num_classes), points = scores_RL.shape, _points_for(k)
        label_R = label_R.contiguous()
        kept_R = None if kept_R is None else kept_R.contiguous()
        empty = functools.partial(torch.empty, dtype=torch.float32, device=scores_RL.device)
        log_odds_R, pivot_R, threshold_R = empty(num_rows), empty(num_rows), empty(num_rows)
        even_RP, odd_RP = empty(num_rows, points), empty(num_rows, points)
        with torch.cuda.device_of(scores_RL):
            _forward_kernel[(num_rows,)](
                scores_RL, label_R, kept_R, log_odds_R, pivot_R, threshold_R, even_RP, odd_RP, *scores_RL.stride(),
                num_classes, k, 1 / tau, 1 / (k * tau),
                BLOCK=min(tiling.block, triton.next_power_of_2(num_classes)),
                STRANDS=min(_MAX_STRANDS, _classes_at_once(points, num_classes, tiling)), POINTS=points,
                num_warps=_WARPS,
            )  # fmt: skip
        ctx.save_for_backward(scores_RL, label_R, pivot_R, threshold_R, even_RP, odd_RP)
        ctx.log_odds_per_score, ctx.tiling = 1 / (k * tau), tiling
        return log_odds_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        scores_RL, label_R, pivot_R, threshold_R, even_RP, odd_RP = ctx.saved_tensors
        (num_rows, num_classes), points = scores_RL.shape, even_RP.shape[1]
        gradient_RL = torch.empty_like(scores_RL, memory_format=torch.contiguous_format)
        block = _classes_at_once(points, num_classes, ctx.tiling)
        with torch.cuda.device_of(scores_RL):
            _backward_kernel[(num_rows * triton.cdiv(num_classes, block),)](
                scores_RL, label_R, upstream[0].contiguous(), pivot_R, threshold_R, even_RP, odd_RP, gradient_RL,
                *scores_RL.stride(), num_classes, ctx.log_odds_per_score,
                BLOCK=block, POINTS=points, num_warps=_WARPS,
            )  # fmt: skip
        return gradient_RL, None, None, None, None, None


@functools.cache
def _points_for(k: int) -> int:
    """The number of points on the upper half circle, a power of two: no other count is mistaken for k or k - 1."""

    def log_poisson(count: int) -> float:  # the limit of the law of N for many classes: the widest of that mean
        return count * math.log(k - 0.5) - math.lgamma(count + 1) if count >= 0 else -math.inf

    points = 4
    while True:
        period = 2 * points + 1
        above = log_poisson(k - 1 + period) - log_poisson(k - 1)
        below = log_poisson(k - period) - log_poisson(k)
        if max(above, below) < math.log(_MAX_ALIAS):
            return points
        points *= 2


def _classes_at_once(points: int, num_classes: int, tiling: Tiling) -> int:
    return min(max(tiling.cells // points, 1), int(triton.next_power_of_2(num_classes)))


@triton.jit
def _forward_kernel(
    scores_ptr, label_ptr, kept_ptr, log_odds_ptr, pivot_ptr, threshold_ptr, even_ptr, odd_ptr,
    row_stride, class_stride, num_classes, k, inverse_temperature, log_odds_per_score,
    BLOCK: tl.constexpr, STRANDS: tl.constexpr, POINTS: tl.constexpr,
):  # fmt: skip
    """One row: its threshold, the generating function on the circle, and what backward needs of them."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = scores_ptr + row * row_stride
    label = tl.load(label_ptr + row)
    pivot, slack = _kth_largest(row_ptr, class_stride, num_classes, label, k, log_odds_per_score, BLOCK)
    threshold = _threshold(row_ptr, class_stride, num_classes, label, k, log_odds_per_score, pivot, slack, BLOCK)

    PERIOD: tl.constexpr = 2 * POINTS + 1
    point_P = 1 + tl.arange(0, POINTS)
    sin_P, cos_P = _half_angle(point_P, PERIOD)
    real_P, imag_P, num_likely = _generating_function(
        row_ptr, class_stride, num_classes, label, log_odds_per_score, pivot, threshold, sin_P, cos_P, STRANDS, POINTS
    )

    # The factors w, and w^-K: whole turns are dropped while they are integers.
    angle_P = ((num_likely - k) * point_P) % PERIOD * (2 * 3.141592653589793 / PERIOD)
    at_k_real_P, at_k_imag_P = _complex_product(real_P, imag_P, tl.cos(angle_P), tl.sin(angle_P))
    w_real_P, w_imag_P = 1 - 2 * sin_P * sin_P, 2 * sin_P * cos_P
    before_k_real_P, before_k_imag_P = _complex_product(at_k_real_P, at_k_imag_P, w_real_P, w_imag_P)
    # Both probabilities times PERIOD; the 1 is the point w = 1, the 2 for the conjugates.
    at_k = 1 + 2 * tl.sum(at_k_real_P)
    before_k = 1 + 2 * tl.sum(before_k_real_P)

    own = tl.load(row_ptr + label * class_stride).to(tl.float32)
    log_ratio = tl.log(at_k / before_k) + threshold
    log_odds = inverse_temperature + (log_ratio + (pivot - own) * log_odds_per_score)
    if kept_ptr is not None:
        log_odds = tl.where(tl.load(kept_ptr + row), log_odds, 0.0)
    tl.store(log_odds_ptr + row, log_odds)
    tl.store(pivot_ptr + row, pivot)
    tl.store(threshold_ptr + row, threshold)
    points_P = row * POINTS + tl.arange(0, POINTS)
    # The 2 of the formula, and 2 for the conjugates again.
    tl.store(even_ptr + points_P, -4 * (cos_P / sin_P) * (at_k_imag_P / at_k - before_k_imag_P / before_k))
    tl.store(odd_ptr + points_P, -4 * (at_k_real_P / at_k - before_k_real_P / before_k))


@triton.jit
def _backward_kernel(
    scores_ptr, label_ptr, upstream_ptr, pivot_ptr, threshold_ptr, even_ptr, odd_ptr, gradient_ptr,
    row_stride, class_stride, num_classes, log_odds_per_score, BLOCK: tl.constexpr, POINTS: tl.constexpr,
):  # fmt: skip
    """One block of classes of one row: the rational function of each class's probability."""
    blocks = tl.cdiv(num_classes, BLOCK)  # along the first axis of the grid: only that one may be long
    row = (tl.program_id(0) // blocks).to(tl.int64)
    classes_B = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(label_ptr + row)
    others_B = _others(scores_ptr + row * row_stride, class_stride, num_classes, label, classes_B)
    odds_B = (others_B - tl.load(pivot_ptr + row)) * log_odds_per_score - tl.load(threshold_ptr + row)
    rarer_B = _rarer(odds_B)
    lean_B = tl.where(odds_B > 0, 2 * rarer_B - 1, 1 - 2 * rarer_B)  # q - p

    sin_P, cos_P = _half_angle(1 + tl.arange(0, POINTS), 2 * POINTS + 1)
    points_P = row * POINTS + tl.arange(0, POINTS)
    even_1P = tl.load(even_ptr + points_P)[None, :]
    odd_1P = tl.load(odd_ptr + points_P)[None, :]
    pole_1P = (cos_P * cos_P / (sin_P * sin_P))[None, :]
    sum_B = tl.sum((even_1P + odd_1P * lean_B[:, None]) / (pole_1P + (lean_B * lean_B)[:, None]), axis=1)
    share_B = tl.where(classes_B == label, -1.0, rarer_B * (1 - rarer_B) * sum_B)
    upstream = tl.load(upstream_ptr + row)
    # An ignored row has no gradient, even if it holds a NaN.
    gradient_B = tl.where(upstream == 0, 0.0, upstream * log_odds_per_score * share_B)
    tl.store(
        gradient_ptr + row * num_classes + classes_B,
        gradient_B.to(gradient_ptr.dtype.element_ty),
        mask=classes_B < num_classes,
    )


@triton.jit
def _generating_function(
    row_ptr, class_stride, num_classes, label, log_odds_per_score, pivot, threshold, sin_P, cos_P,
    STRANDS: tl.constexpr, POINTS: tl.constexpr,
):  # fmt: skip
    """The product over classes, without a factor w for each of the likely ones, and the number of these.

    Classes are divided among strands, which multiply their factors 1 + z. Where p > 1/2, the factor is w times one with
    q in place of p and the conjugate of w, so z is never large. A strand keeps its product less 1, so that the many
    small z are not lost in the rounding of 1. The strands themselves are multiplied as they are: close to w = -1 their
    product is small, and the gradient needs its digits.
    """
    real_slope_1P = (-2 * sin_P * sin_P)[None, :]  # of w - 1
    imag_slope_1P = (2 * sin_P * cos_P)[None, :]
    real_SP = tl.zeros((STRANDS, POINTS), tl.float32)
    imag_SP = tl.zeros((STRANDS, POINTS), tl.float32)
    likely_S = tl.zeros((STRANDS,), tl.int32)
    for start in range(0, num_classes, STRANDS):
        classes_S = start + tl.arange(0, STRANDS)
        others_S = _others(row_ptr, class_stride, num_classes, label, classes_S)
        odds_S = (others_S - pivot) * log_odds_per_score - threshold
        rarer_S = _rarer(odds_S)
        likely_S += (odds_S > 0).to(tl.int32)
        z_real_SP = rarer_S[:, None] * real_slope_1P
        z_imag_SP = tl.where(odds_S > 0, -rarer_S, rarer_S)[:, None] * imag_slope_1P
        real_SP, imag_SP = _product_less_1(real_SP, imag_SP, z_real_SP, z_imag_SP)
    real_P, imag_P = tl.reduce((1 + real_SP, imag_SP), 0, _complex_product)
    return real_P, imag_P, tl.sum(likely_S)


@triton.jit
def _kth_largest(row_ptr, class_stride, num_classes, label, k, log_odds_per_score, BLOCK: tl.constexpr):
    """A lower bound of the k-th largest of the others, and by how many log-odds it may be too low.

    At most by one, unless floats are further apart than that.
    """
    largest_B = tl.full((BLOCK,), -float("inf"), tl.float32)
    smallest_B = tl.full((BLOCK,), float("inf"), tl.float32)
    for start in range(0, num_classes, BLOCK):
        others_B = _others(row_ptr, class_stride, num_classes, label, start + tl.arange(0, BLOCK))
        largest_B = tl.maximum(largest_B, others_B)
        smallest_B = tl.minimum(smallest_B, tl.where(others_B > -float("inf"), others_B, float("inf")))
    low, high = tl.min(smallest_B), tl.max(largest_B)
    middle = 0.5 * low + 0.5 * high
    while ((high - low) * log_odds_per_score > 1) & (low < middle) & (middle < high):
        count_B = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, num_classes, BLOCK):
            others_B = _others(row_ptr, class_stride, num_classes, label, start + tl.arange(0, BLOCK))
            count_B += (others_B >= middle).to(tl.int32)
        enough = tl.sum(count_B) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        middle = 0.5 * low + 0.5 * high
    return low, (high - low) * log_odds_per_score


@triton.jit
def _threshold(row_ptr, class_stride, num_classes, label, k, log_odds_per_score, pivot, slack, BLOCK: tl.constexpr):
    """The threshold at which the mean of N is about k - 1/2, in log-odds above the pivot."""
    low = -tl.log(2.0 * k)  # the k largest alone reach k - 1/2
    high = slack + tl.log(2.0 * num_classes)  # all but k - 1 of the classes together stay below 1/2
    for _ in range(12):  # halvings of a bracket log(2 K) + log(2 L) + 1 wide: to a few thousandths
        middle = 0.5 * low + 0.5 * high
        happens_B = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, num_classes, BLOCK):
            others_B = _others(row_ptr, class_stride, num_classes, label, start + tl.arange(0, BLOCK))
            odds_B = (others_B - pivot) * log_odds_per_score - middle
            rarer_B = _rarer(odds_B)
            happens_B += tl.where(odds_B > 0, 1 - rarer_B, rarer_B)
        too_many = tl.sum(happens_B) > k - 0.5
        low = tl.where(too_many, middle, low)
        high = tl.where(too_many, high, middle)
    return low


@triton.jit
def _others(row_ptr, class_stride, num_classes, label, classes):
    """The scores, with -inf, an impossible event, for the label and past the end."""
    is_other = (classes < num_classes) & (classes != label)
    return tl.load(row_ptr + classes.to(tl.int64) * class_stride, mask=is_other, other=-float("inf")).to(tl.float32)


@triton.jit
def _rarer(log_odds):
    """The smaller of p and 1 - p, precise relative to its size."""
    odds = tl.exp(-tl.abs(log_odds))
    return odds / (1 + odds)


@triton.jit
def _half_angle(point, PERIOD: tl.constexpr):
    """Sine and cosine of ``pi point / PERIOD``; the cosine as a sine, to be precise close to pi / 2."""
    step: tl.constexpr = 3.141592653589793 / PERIOD
    return tl.sin(point * step), tl.sin((0.5 * PERIOD - point) * step)


@triton.jit
def _complex_product(a_real, a_imag, b_real, b_imag):
    return a_real * b_real - a_imag * b_imag, a_real * b_imag + a_imag * b_real


@triton.jit
def _product_less_1(a_real, a_imag, b_real, b_imag):
    """``(1 + a) (1 + b) - 1``, precise relative to its size where both are small."""
    product_real, product_imag = _complex_product(a_real, a_imag, b_real, b_imag)
    return a_real + b_real + product_real, a_imag + b_imag + product_imag
