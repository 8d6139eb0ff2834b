"""The top-K cross-entropy in two kernels, for rows of up to a few hundred classes.

The method is that of ``ops.topk_cross_entropy``, with all classes counted one by one. One program does a row, all times
at once. It multiplies the factors of the classes, from the first to the last, and keeps each product on the way: the
law of the count of the classes before. Then it goes back from the last class to the first with the derivatives of the
result. Where both meet at a class they give the intensity of its arrival: probabilities without it, as a sum of
positive terms. Forward computes the gradient as well, up to a factor for the row.

Shape suffixes: R rows, L classes, T times, K counts from 0 to K - 1 (tuples of tensors).
"""

# Kernels cannot be annotated: Triton would read the annotations.
import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from shortlist.kernels.launch import next_power_of_2
from shortlist.ops.topk_cross_entropy import times_for

# A row's classes are multiplied one after another, and each product rounds: with more of them than this, or a larger K,
# the loss would not keep five digits on an H200. From about 1,000 classes on, plain torch is as fast, too.
_MAX_K = 10
_MAX_CLASSES = 512
_MAX_PRODUCTS = 2**28  # a gigabyte


def needs(num_rows: int, num_classes: int, ks: tuple[int, ...]) -> dict[str, bool]:
    """What the kernels need, and whether it is so. Longer rows are left to plain torch, which folds slow classes."""
    num_products = num_rows * num_classes * (max(ks) + 1) * _padded_times(max(ks))
    return {
        f"a K from 2 to {_MAX_K}": 2 <= max(ks) <= _MAX_K,
        f"at most {_MAX_CLASSES} classes": num_classes <= _MAX_CLASSES,
        "a smaller batch": num_products <= _MAX_PRODUCTS,
    }


def _padded_times(k: int) -> int:
    return next_power_of_2(times_for(k, torch.float32).number)


def topk_cross_entropy(scores_RL: Tensor, label_R: Tensor, ks: tuple[int, ...]) -> Tensor:
    """``(R,)`` losses. A NaN gives NaN; the caller must check for infinite scores.

    Args:
        scores_RL: float16, bfloat16 or float32, of any strides. Arithmetic is in float32.
        label_R: int64, from 0 to L - 1.
        ks: One or several K, the largest of them below L.
    """
    loss_R: Tensor = _FusedTopKCrossEntropy.apply(scores_RL, label_R, ks)
    return loss_R


class _FusedTopKCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_RL: Tensor, label_R: Tensor, ks: tuple[int, ...]) -> Tensor:
        (num_rows, num_classes), k = scores_RL.shape, max(ks)
        times, padded_times = times_for(k, torch.float32), _padded_times(k)
        label_R = label_R.contiguous()
        empty = functools.partial(torch.empty, dtype=torch.float32, device=scores_RL.device)
        rate_RL, gradient_RL = empty(num_rows, num_classes), empty(num_rows, num_classes)
        log_own_R, loss_R, factor_R = empty(num_rows), empty(num_rows), empty(num_rows)
        scratch = empty(num_rows, num_classes, k + 1, padded_times)
        with torch.cuda.device_of(scores_RL):
            _rates_kernel[(num_rows,)](
                scores_RL, label_R, rate_RL, log_own_R, *scores_RL.stride(), num_classes, k,
                PADDED_CLASSES=next_power_of_2(num_classes), num_warps=4,
            )  # fmt: skip
            _integrals_kernel[(num_rows,)](
                rate_RL, log_own_R, scratch, gradient_RL, loss_R, factor_R, num_classes,
                times.first, times.step, times.number, 1 / math.expm1(times.step), math.log1p(-0.5 / len(ks)),
                K=k, HIT=_hit_shares(ks), LAST=_last_shares(ks), PADDED_TIMES=padded_times,
                num_warps=padded_times // 32,
            )  # fmt: skip
        ctx.save_for_backward(label_R, gradient_RL, factor_R)
        ctx.dtype = scores_RL.dtype
        return loss_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        label_R, gradient_RL, factor_R = ctx.saved_tensors
        num_rows, num_classes = gradient_RL.shape
        scaled_RL = torch.empty_like(gradient_RL, dtype=ctx.dtype)
        with torch.cuda.device_of(gradient_RL):
            _backward_kernel[(num_rows,)](
                gradient_RL, label_R, factor_R, upstream[0].contiguous(), scaled_RL, num_classes,
                PADDED_CLASSES=next_power_of_2(num_classes), num_warps=4,
            )  # fmt: skip
        return scaled_RL, None, None


def _hit_shares(ks: tuple[int, ...]) -> tuple[float, ...]:
    """The share of the given K for which each count of others leaves a place for the label."""
    return tuple(sum(count < k for k in ks) / len(ks) for count in range(max(ks)))


def _last_shares(ks: tuple[int, ...]) -> tuple[float, ...]:
    """The share of the given K for which each count of others leaves one place."""
    return tuple(sum(count == k - 1 for k in ks) / len(ks) for count in range(max(ks)))


@triton.jit
def _rates_kernel(
    scores_ptr, label_ptr, rate_ptr, log_own_ptr, row_stride, class_stride, num_classes, k,
    PADDED_CLASSES: tl.constexpr,
):  # fmt: skip
    """One row: the rates of the other classes in units of 1 / (time at the centre of the window)."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(label_ptr + row)
    classes_L = tl.arange(0, PADDED_CLASSES)
    is_other_L = (classes_L < num_classes) & (classes_L != label)
    row_ptr = scores_ptr + row * row_stride
    scores_L = tl.load(row_ptr + classes_L.to(tl.int64) * class_stride, mask=is_other_L, other=-float("inf"))
    scores_L = scores_L.to(tl.float32)
    own = tl.load(row_ptr + label * class_stride).to(tl.float32)

    rest_L = scores_L
    for _ in range(k - 1):  # without the k - 1 fastest
        rest_L = tl.where(classes_L == tl.argmax(rest_L, 0), -float("inf"), rest_L)
    level = tl.max(rest_L)
    log_rest = tl.log(tl.sum(tl.exp(rest_L - level)))
    own, own_error = _difference(own, level)
    larger = tl.maximum(log_rest, own)
    log_centre = larger + tl.log(tl.exp(log_rest - larger) + tl.exp(own - larger))
    tl.store(log_own_ptr + row, own - log_centre + own_error)
    log_rate_L, error_L = _difference(tl.where(is_other_L, scores_L, level), level)
    log_rate_L, more_error_L = _difference(log_rate_L, log_centre)
    # Large only if the rate is 0 or clamped.
    error_L = tl.minimum(tl.maximum(error_L + more_error_L, -0.5), 0.5)
    rate_L = _precise_exp(tl.minimum(log_rate_L, 80.0)) * (1 + error_L)
    rate_L = tl.where(is_other_L, rate_L, 0.0)
    tl.store(rate_ptr + row * num_classes + classes_L, rate_L, mask=classes_L < num_classes)


@triton.jit
def _precise_exp(x):
    """The usual one multiplies x by 1 / log 2 first, and rounds."""
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    return tl.exp2(n) * tl.exp((x - n * 0.693145751953125) - n * 1.428606765330187e-06)  # log 2 in two parts


@triton.jit
def _difference(x, y):
    """The difference of two numbers, and the error of its rounding."""
    rounded = x - y
    y_rounded = x - rounded
    return rounded, (x - (rounded + y_rounded)) + (y_rounded - y)


@triton.jit
def _integrals_kernel(
    rate_ptr, log_own_ptr, scratch_ptr, gradient_ptr, loss_ptr, factor_ptr, num_classes,
    first_time, time_step, num_times, tail, log_safe,
    K: tl.constexpr, HIT: tl.constexpr, LAST: tl.constexpr, PADDED_TIMES: tl.constexpr,
):  # fmt: skip
    """One row: its loss, and its gradient up to a factor."""
    row = tl.program_id(0).to(tl.int64)
    rate_ptr += row * num_classes
    gradient_ptr += row * num_classes
    times_T = tl.arange(0, PADDED_TIMES)
    scratch_ptr += row * num_classes * (K + 1) * PADDED_TIMES + times_T
    # Time 0 beyond the last one: nothing arrives, and the weight of it is 0.
    time_T = tl.where(times_T < num_times, tl.exp(first_time + time_step * times_T), 0.0)

    # From the first class to the last: the law of the count, times exp(pending).
    counts = _extended((), tl.full((PADDED_TIMES,), 1.0, tl.float32))
    for _ in tl.static_range(1, K):
        counts = _extended(counts, tl.zeros((PADDED_TIMES,), tl.float32))
    pending_T = tl.zeros((PADDED_TIMES,), tl.float32)
    for j in range(num_classes):
        class_ptr = scratch_ptr + j * (K + 1) * PADDED_TIMES
        # Taking out the pending factors at every class would add up rounding errors; taking out none would overflow.
        scale_T = tl.where(pending_T > 16, tl.exp(-pending_T), 1.0)
        pending_T = tl.where(pending_T > 16, 0.0, pending_T)
        tl.store(class_ptr + K * PADDED_TIMES, scale_T)
        y_T, fails_T, happens_T, few_T = _factor(tl.load(rate_ptr + j), time_T)
        pending_T += few_T
        before = counts
        tl.store(class_ptr, before[0] * scale_T)
        counts = _extended((), before[0] * scale_T * fails_T)
        for m in tl.static_range(1, K):
            tl.store(class_ptr + m * PADDED_TIMES, before[m] * scale_T)
            counts = _extended(counts, (before[m] * fails_T + before[m - 1] * happens_T) * scale_T)
    scale_T = tl.exp(-pending_T)
    hit_T = HIT[0] * counts[0]
    for m in tl.static_range(1, K):
        hit_T += HIT[m] * counts[m]
    hit_T *= scale_T

    # Back from the last class: derivatives of the probability that one place is left.
    log_own = tl.load(log_own_ptr + row)
    own_T = tl.exp(log_own) * time_T
    label_later_T = tl.where(times_T < num_times, time_step * tl.exp(-own_T), 0.0)
    weight_T = time_T * label_later_T
    derivatives = _extended((), LAST[0] * scale_T)
    for m in tl.static_range(1, K):
        derivatives = _extended(derivatives, LAST[m] * scale_T)
    total_T = tl.zeros((PADDED_TIMES,), tl.float32)
    for back in range(num_classes):
        j = num_classes - 1 - back
        class_ptr = scratch_ptr + j * (K + 1) * PADDED_TIMES
        y_T, fails_T, happens_T, few_T = _factor(tl.load(rate_ptr + j), time_T)
        without_T = tl.load(class_ptr) * derivatives[0]
        for m in tl.static_range(1, K):
            without_T += tl.load(class_ptr + m * PADDED_TIMES) * derivatives[m]
        intensity_T = y_T * fails_T * without_T
        total_T += intensity_T
        tl.store(gradient_ptr + j, tl.sum(weight_T * intensity_T))
        after = derivatives
        scale_T = tl.load(class_ptr + K * PADDED_TIMES)
        derivatives = _extended((), (after[0] * fails_T + after[1] * happens_T) * scale_T)
        for m in tl.static_range(1, K - 1):
            derivatives = _extended(derivatives, (after[m] * fails_T + after[m + 1] * happens_T) * scale_T)
        derivatives = _extended(derivatives, after[K - 1] * fails_T * scale_T)

    at_once_T = weight_T * hit_T
    hit = tl.sum(at_once_T) + tail * tl.sum(tl.where(times_T == 0, at_once_T, 0.0))
    log_hit = log_own + tl.log(hit)
    by_miss = log_hit > log_safe
    miss = tl.where(by_miss, tl.sum(label_later_T * total_T), 0.0)
    tl.store(loss_ptr + row, tl.where(by_miss, _minus_log_1_minus(miss), -log_hit))
    tl.store(factor_ptr + row, tl.where(by_miss, tl.exp(log_own) / (1 - miss), 1 / hit))


@triton.jit
def _extended(entries, entry):
    return entries + (entry,)  # noqa: RUF005  (Triton cannot unpack)


@triton.jit
def _factor(rate, time_T):
    """Expected arrivals y of a class, and its factor ``fails + happens z``, times exp(few): see the reference."""
    y_T = rate * time_T
    is_few_T = y_T < 1
    few_T = tl.where(is_few_T, y_T, 0.0)
    fails_T = tl.where(is_few_T, 1.0, tl.exp(-y_T))
    happens_T = tl.where(is_few_T, _exp_minus_1(few_T), 1 - fails_T)
    return y_T, fails_T, happens_T, few_T


@triton.jit
def _exp_minus_1(x):
    """``exp(x) - 1`` for x from 0 to 1, precise relative to its size: a series where the difference would cancel."""
    series = 1 + x / 6 * (1 + x / 7 * (1 + x / 8))
    series = 1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * series)))
    return tl.where(x < 0.5, x * series, tl.exp(x) - 1)


@triton.jit
def _minus_log_1_minus(x):
    """``-log(1 - x)`` for x up to 1/2, precise relative to its size."""
    rounded = 1 - x
    subtracted = tl.where(rounded == 1, 1.0, 1 - rounded)
    # Kahan's trick: the logarithm of the rounded difference, over what was really subtracted.
    return tl.where(rounded == 1, x, -tl.log(rounded) * (x / subtracted))


@triton.jit
def _backward_kernel(
    gradient_ptr, label_ptr, factor_ptr, upstream_ptr, scaled_ptr, num_classes, PADDED_CLASSES: tl.constexpr
):
    """One row: what forward found, times its factor; and minus the sum at the label."""
    row = tl.program_id(0).to(tl.int64)
    classes_L = tl.arange(0, PADDED_CLASSES)
    gradient_L = tl.load(gradient_ptr + row * num_classes + classes_L, mask=classes_L < num_classes, other=0.0)
    gradient_L = tl.where(classes_L == tl.load(label_ptr + row), -tl.sum(gradient_L), gradient_L)
    upstream = tl.load(upstream_ptr + row)
    # An ignored row has no gradient, even if it holds a NaN.
    scaled_L = tl.where(upstream == 0, 0.0, upstream * tl.load(factor_ptr + row) * gradient_L)
    tl.store(
        scaled_ptr + row * num_classes + classes_L,
        scaled_L.to(scaled_ptr.dtype.element_ty),
        mask=classes_L < num_classes,
    )
