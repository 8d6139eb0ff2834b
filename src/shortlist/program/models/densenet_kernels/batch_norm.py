"""Batch norm and ReLU in pieces, so that several layers can share the statistics of a channel.

Forward, ``compute_statistics`` finds mean and variance, and ``activate`` is ``relu(weight x^ + bias)`` of
``x^ = (x - mean) / deviation``. Backward, ``activate_backward`` adds a layer's gradient in ``x^`` to those of other
layers, and sums up the gradients of its weights and biases. When all layers that read a channel have done so,
``statistics_backward`` takes the sum g through the statistics:

    dx = (g - mean(g) - x^ mean(g x^)) / deviation.

The two means cost nothing: with ``g = sum over layers i of weight_i g_i`` they follow from the gradients of the
parameters, ``sum(g) = sum over i of weight_i dbias_i`` and ``sum(g x^) = sum over i of weight_i dweight_i``.

Shape suffixes: R rows, the pixels of all images; C channels, adjacent in memory; P parts of the rows.
"""

# Kernels cannot be annotated: Triton would read the annotations.
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from shortlist.kernels.launch import ceil_div, next_power_of_2

_COLUMNS_COMBINED = 16  # channels whose parts one program adds up


@dataclass(frozen=True)
class Tiling:
    """How a kernel divides its work."""

    rows: int
    """Pixels of a tile."""
    columns: int
    """Channels of a tile."""
    max_parts: int
    """Parts of the pixels. One program works on each, tile after tile."""
    warps: int
    stages: int
    """Tiles that are loaded ahead or being worked on."""

    def parts(self, rows: int) -> tuple[int, int]:
        """The rows of each part, a multiple of a tile, and the number of parts."""
        rows_a_part = ceil_div(ceil_div(rows, self.max_parts), self.rows) * self.rows
        return rows_a_part, ceil_div(rows, rows_a_part)

    def for_squares(self, side: int) -> "Tiling":
        """A tiling of as many pixels, where each row of a tile stands for a square of them."""
        squares = next_power_of_2(side**2)
        return replace(self, rows=max(self.rows // squares, 1), warps=max(self.warps // squares, 1))

    def constants(self) -> dict[str, int]:
        return {"ROWS": self.rows, "COLUMNS": self.columns, "STAGES": self.stages, "num_warps": self.warps}


@dataclass(frozen=True)
class Tilings:
    """Those of all kernels, found by a sweep on an H200 over the shapes of DenseNet 40-40 with batches of 64."""

    statistics: Tiling = Tiling(rows=16, columns=64, max_parts=256, warps=2, stages=3)
    activate: Tiling = Tiling(rows=16, columns=128, max_parts=512, warps=4, stages=3)
    activate_backward: Tiling = Tiling(rows=16, columns=64, max_parts=256, warps=2, stages=3)
    statistics_backward: Tiling = Tiling(rows=128, columns=64, max_parts=256, warps=8, stages=2)


TILINGS = Tilings()


@dataclass(frozen=True)
class Statistics:
    """The mean and variance of the channels of a batch."""

    mean_C: Tensor
    var_C: Tensor
    """Without Bessel's correction."""

    def of(self, first: int, end: int) -> "Statistics":
        return Statistics(self.mean_C[first:end], self.var_C[first:end])


@dataclass(frozen=True)
class Norm:
    """What a layer does to normalised channels."""

    weight_C: Tensor
    bias_C: Tensor
    eps: float
    """Added to the variances; the same for all layers that share them."""


@dataclass(frozen=True)
class NormalizedGradient:
    """The gradient in the normalised channels, summed over layers."""

    gradient_RC: Tensor
    sum_C: Tensor
    dot_C: Tensor
    """The sum of its products with the normalised channels."""

    def of(self, first: int, end: int) -> "NormalizedGradient":
        return NormalizedGradient(self.gradient_RC[:, first:end], self.sum_C[first:end], self.dot_C[first:end])


def empty_statistics(x_RC: Tensor) -> Statistics:
    return Statistics(*_two_a_channel(x_RC))


def empty_gradient(gradient_RC: Tensor) -> NormalizedGradient:
    """Where the first layer stores its gradient, and the others add theirs."""
    return NormalizedGradient(gradient_RC, *_two_a_channel(gradient_RC))


def _two_a_channel(x_RC: Tensor) -> Tensor:
    return torch.empty(2, x_RC.shape[1], dtype=torch.float32, device=x_RC.device)


def compute_statistics(
    x_RC: Tensor, into: Statistics, copy_RC: Tensor | None = None, *, tiling: Tiling = TILINGS.statistics
) -> None:
    """Compute the statistics, and copy the channels to ``copy_RC`` in the same pass."""
    rows, columns = x_RC.shape
    rows_a_part, parts = tiling.parts(rows)
    unit = _unit(x_RC, copy_RC)
    means_PC, squares_PC = _partial_sums(x_RC, parts)
    with torch.cuda.device_of(x_RC):
        _statistics_kernel[parts, ceil_div(columns, tiling.columns)](
            x_RC, x_RC if copy_RC is None else copy_RC, means_PC, squares_PC, x_RC.stride(0) // unit,
            0 if copy_RC is None else copy_RC.stride(0) // unit, rows, columns // unit, rows_a_part,
            COPIES=copy_RC is not None, UNIT=unit, **tiling.constants(),
        )  # fmt: skip
        _combine_statistics_kernel[(ceil_div(columns, _COLUMNS_COMBINED),)](
            means_PC, squares_PC, into.mean_C, into.var_C, rows, columns, rows_a_part, parts,
            PARTS=next_power_of_2(parts), COLUMNS=_COLUMNS_COMBINED,
        )  # fmt: skip


def activate(
    x_RC: Tensor,
    statistics: Statistics,
    norm: Norm,
    *,
    width: int = 1,
    pool: int = 1,
    tiling: Tiling = TILINGS.activate,
) -> Tensor:
    """Normalise and activate, and average over squares of ``pool`` by ``pool`` pixels of images ``width`` wide."""
    rows, columns = x_RC.shape
    out_RC = x_RC.new_empty(rows // pool**2, columns)
    tiling = tiling.for_squares(pool)
    rows_a_part, parts = tiling.parts(len(out_RC))
    unit = _unit(x_RC)
    with torch.cuda.device_of(x_RC):
        _activate_kernel[parts, ceil_div(columns, tiling.columns)](
            x_RC, statistics.mean_C, statistics.var_C, norm.weight_C, norm.bias_C, out_RC, x_RC.stride(0) // unit,
            len(out_RC), columns // unit, rows_a_part, width, norm.eps,
            POOL=pool, UNIT=unit, **tiling.constants(),
        )  # fmt: skip
    return out_RC


def activate_backward(
    upstream_RC: Tensor,
    x_RC: Tensor,
    statistics: Statistics,
    norm: Norm,
    into: NormalizedGradient,
    *,
    adds: bool = False,
    width: int = 1,
    pool: int = 1,
    tiling: Tiling = TILINGS.activate_backward,
) -> tuple[Tensor, Tensor]:
    """From the gradient in the result of ``activate`` to that in the normalised channels.

    Args:
        upstream_RC: The gradient in the result, contiguous.
        x_RC, statistics, norm, width, pool: As given to ``activate``.
        into: Where the gradient goes. It may be ``upstream_RC`` itself unless that was pooled.
        adds: Add to what is there; otherwise overwrite it.

    Returns:
        The gradients of the norm's weight and bias.
    """
    rows, columns = x_RC.shape
    rows_a_part, parts = tiling.parts(rows)
    unit = _unit(x_RC, into.gradient_RC)
    dots_PC, sums_PC = _partial_sums(x_RC, parts)
    weight_gradient_C, bias_gradient_C = torch.empty_like(norm.weight_C), torch.empty_like(norm.bias_C)
    with torch.cuda.device_of(x_RC):
        _activate_backward_kernel[parts, ceil_div(columns, tiling.columns)](
            upstream_RC, x_RC, statistics.mean_C, statistics.var_C, norm.weight_C, norm.bias_C, into.gradient_RC,
            dots_PC, sums_PC, x_RC.stride(0) // unit, into.gradient_RC.stride(0) // unit, rows, columns // unit,
            rows_a_part, width, norm.eps,
            ADDS=adds, POOL=pool, UNIT=unit, **tiling.constants(),
        )  # fmt: skip
        _combine_sums_kernel[(ceil_div(columns, _COLUMNS_COMBINED),)](
            dots_PC, sums_PC, norm.weight_C, weight_gradient_C, bias_gradient_C, into.dot_C, into.sum_C,
            columns, parts,
            ADDS=adds, PARTS=next_power_of_2(parts), COLUMNS=_COLUMNS_COMBINED,
        )  # fmt: skip
    return weight_gradient_C, bias_gradient_C


def statistics_backward(
    of_normalized: NormalizedGradient,
    x_RC: Tensor,
    statistics: Statistics,
    eps: float,
    *,
    tiling: Tiling = TILINGS.statistics_backward,
) -> Tensor:
    """The gradient in the channels themselves, contiguous."""
    rows, columns = x_RC.shape
    rows_a_part, parts = tiling.parts(rows)
    out_RC, unit = x_RC.new_empty(rows, columns), _unit(x_RC, of_normalized.gradient_RC)
    with torch.cuda.device_of(x_RC):
        _statistics_backward_kernel[parts, ceil_div(columns, tiling.columns)](
            of_normalized.gradient_RC, x_RC, statistics.mean_C, statistics.var_C, of_normalized.dot_C,
            of_normalized.sum_C, out_RC, of_normalized.gradient_RC.stride(0) // unit, x_RC.stride(0) // unit, rows,
            columns // unit, rows_a_part, eps,
            UNIT=unit, **tiling.constants(),
        )  # fmt: skip
    return out_RC


def _unit(*tensors_RC: Tensor | None) -> int:
    """Channels that can be read together, since rows begin and end at multiples of it. Kernels count in this unit.

    So Triton knows what their numbers are multiples of. By itself it only notices multiples of 16.
    """
    sizes = [size for x_RC in tensors_RC if x_RC is not None for size in (x_RC.shape[1], x_RC.stride(0))]
    return 8 if all(size % 8 == 0 for size in sizes) else 1


def _partial_sums(x_RC: Tensor, parts: int) -> Tensor:
    return torch.empty(2, parts, x_RC.shape[1], dtype=torch.float32, device=x_RC.device)


@triton.jit
def _statistics_kernel(
    x_ptr, copy_ptr, means_ptr, squares_ptr, x_stride, copy_stride, rows, columns, rows_a_part,
    COPIES: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The mean of a part of the rows, and the sum of squares around it."""
    columns *= UNIT
    x_stride *= UNIT
    copy_stride *= UNIT
    part = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < columns
    first = part.to(tl.int64) * rows_a_part
    # Squares are summed around some value of the channel. Around zero they would cancel where the mean is large.
    pivot = tl.load(x_ptr + first * x_stride + column, mask=exists, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, rows_a_part, ROWS, num_stages=STAGES):
        row = first + start + tl.arange(0, ROWS)[:, None]
        here = (row < rows) & exists[None, :]
        x = tl.load(x_ptr + row * x_stride + column[None, :], mask=here, other=0.0)
        if COPIES:
            tl.store(copy_ptr + row * copy_stride + column[None, :], x, mask=here)
        off = tl.where(here, x.to(tl.float32) - pivot[None, :], 0.0)
        sums += off
        squares += off * off
    count = tl.minimum(rows - first, rows_a_part).to(tl.float32)
    shift = tl.sum(sums, 0) / count
    place = part * columns + column
    tl.store(means_ptr + place, pivot + shift, mask=exists)
    tl.store(squares_ptr + place, tl.sum(squares, 0) - count * shift * shift, mask=exists)


@triton.jit
def _combine_statistics_kernel(
    means_ptr, squares_ptr, mean_ptr, var_ptr, rows, columns, rows_a_part, parts,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PARTS)[:, None]
    here = (part < parts) & (column < columns)[None, :]
    means = tl.load(means_ptr + part * columns + column[None, :], mask=here, other=0.0)
    squares = tl.load(squares_ptr + part * columns + column[None, :], mask=here, other=0.0)
    share = tl.where(part < parts, tl.minimum(rows - part * rows_a_part, rows_a_part), 0).to(tl.float32) / rows
    # Around the mean of the first part: the shares add up to one except for rounding, which the mean would magnify.
    pivot = tl.load(means_ptr + column, mask=column < columns, other=0.0)
    mean = pivot + tl.sum(share * (means - pivot[None, :]), 0)
    off = means - mean[None, :]
    var = tl.sum(squares / rows + share * off * off, 0)
    tl.store(mean_ptr + column, mean, mask=column < columns)
    var = tl.maximum(var, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(var_ptr + column, var, mask=column < columns)


@triton.jit
def _inverse_deviation(var_ptr, column, exists, eps):
    return 1.0 / tl.sqrt_rn(tl.load(var_ptr + column, mask=exists, other=1.0) + eps)


@triton.jit
def _line(mean_ptr, var_ptr, weight_ptr, bias_ptr, column, exists, eps):
    """Slope and offset of a norm for each channel.

    Forward and backward use the same numbers to decide where the activation is zero.
    """
    scale = tl.load(weight_ptr + column, mask=exists, other=0.0) * _inverse_deviation(var_ptr, column, exists, eps)
    mean = tl.load(mean_ptr + column, mask=exists, other=0.0)
    return scale, tl.load(bias_ptr + column, mask=exists, other=0.0) - mean * scale


@triton.jit
def _activate_kernel(
    x_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, out_rows, columns, rows_a_part, width, eps,
    POOL: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns *= UNIT
    x_stride *= UNIT
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < columns
    scale, shift = _line(mean_ptr, var_ptr, weight_ptr, bias_ptr, column, exists, eps)
    for start in tl.range(0, rows_a_part, ROWS, num_stages=STAGES):
        row = tl.program_id(0).to(tl.int64) * rows_a_part + start + tl.arange(0, ROWS)
        here = (row < out_rows)[:, None] & exists[None, :]
        source = row
        if POOL > 1:  # the first pixel of the square
            per_row = width // POOL
            source = (row // per_row) * POOL * width + (row % per_row) * POOL
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for place in tl.static_range(POOL * POOL):
            pixel = source + (place // POOL) * width + place % POOL
            x = tl.load(x_ptr + pixel[:, None] * x_stride + column[None, :], mask=here, other=0.0).to(tl.float32)
            total += tl.maximum(x * scale[None, :] + shift[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)
        out = total / (POOL * POOL)
        tl.store(out_ptr + row[:, None] * columns + column[None, :], out.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _activate_backward_kernel(
    upstream_ptr, x_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, gradient_ptr, dots_ptr, sums_ptr, x_stride,
    gradient_stride, rows, columns, rows_a_part, width, eps,
    ADDS: tl.constexpr, POOL: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    columns *= UNIT
    x_stride *= UNIT
    gradient_stride *= UNIT
    part = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < columns
    scale, shift = _line(mean_ptr, var_ptr, weight_ptr, bias_ptr, column, exists, eps)
    mean = tl.load(mean_ptr + column, mask=exists, other=0.0)
    weight = tl.load(weight_ptr + column, mask=exists, other=0.0)
    dots = tl.zeros([ROWS, COLUMNS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, rows_a_part, ROWS, num_stages=STAGES):
        row = part.to(tl.int64) * rows_a_part + start + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & exists[None, :]
        source = row
        if POOL > 1:  # the square that the pixel lies in
            source = (row // width // POOL) * (width // POOL) + (row % width) // POOL
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=here, other=0.0).to(tl.float32)
        upstream = tl.load(upstream_ptr + source[:, None] * columns + column[None, :], mask=here, other=0.0)
        # As in torch, a NaN lets the gradient pass.
        cut = x * scale[None, :] + shift[None, :] <= 0
        gradient = tl.where(cut, 0.0, upstream.to(tl.float32) / (POOL * POOL))
        sums += gradient
        dots += gradient * (x - mean[None, :])
        place = gradient_ptr + row[:, None] * gradient_stride + column[None, :]
        gradient *= weight[None, :]
        if ADDS:
            gradient += tl.load(place, mask=here, other=0.0).to(tl.float32)
        tl.store(place, gradient.to(gradient_ptr.dtype.element_ty), mask=here)
    dot = tl.sum(dots, 0) * _inverse_deviation(var_ptr, column, exists, eps)
    tl.store(dots_ptr + part * columns + column, dot, mask=exists)
    tl.store(sums_ptr + part * columns + column, tl.sum(sums, 0), mask=exists)


@triton.jit
def _combine_sums_kernel(
    dots_ptr, sums_ptr, weight_ptr, weight_gradient_ptr, bias_gradient_ptr, dot_ptr, sum_ptr, columns, parts,
    ADDS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < columns
    part = tl.arange(0, PARTS)[:, None]
    here = (part < parts) & exists[None, :]
    dot = tl.sum(tl.load(dots_ptr + part * columns + column[None, :], mask=here, other=0.0), 0)
    total = tl.sum(tl.load(sums_ptr + part * columns + column[None, :], mask=here, other=0.0), 0)
    tl.store(weight_gradient_ptr + column, dot, mask=exists)
    tl.store(bias_gradient_ptr + column, total, mask=exists)
    weight = tl.load(weight_ptr + column, mask=exists, other=0.0)
    dot *= weight
    total *= weight
    if ADDS:
        dot += tl.load(dot_ptr + column, mask=exists, other=0.0)
        total += tl.load(sum_ptr + column, mask=exists, other=0.0)
    tl.store(dot_ptr + column, dot, mask=exists)
    tl.store(sum_ptr + column, total, mask=exists)


@triton.jit
def _statistics_backward_kernel(
    gradient_ptr, x_ptr, mean_ptr, var_ptr, dot_ptr, sum_ptr, out_ptr, gradient_stride, x_stride, rows, columns,
    rows_a_part, eps,
    UNIT: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns *= UNIT
    x_stride *= UNIT
    gradient_stride *= UNIT
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < columns
    mean = tl.load(mean_ptr + column, mask=exists, other=0.0)
    inverse = _inverse_deviation(var_ptr, column, exists, eps)
    of_sum = tl.load(sum_ptr + column, mask=exists, other=0.0) / rows
    of_dot = tl.load(dot_ptr + column, mask=exists, other=0.0) / rows * inverse
    for start in tl.range(0, rows_a_part, ROWS, num_stages=STAGES):
        row = tl.program_id(0).to(tl.int64) * rows_a_part + start + tl.arange(0, ROWS)[:, None]
        here = (row < rows) & exists[None, :]
        x = tl.load(x_ptr + row * x_stride + column[None, :], mask=here, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_ptr + row * gradient_stride + column[None, :], mask=here, other=0.0).to(tl.float32)
        out = (gradient - of_sum[None, :] - (x - mean[None, :]) * of_dot[None, :]) * inverse[None, :]
        tl.store(out_ptr + row * columns + column[None, :], out.to(out_ptr.dtype.element_ty), mask=here)
