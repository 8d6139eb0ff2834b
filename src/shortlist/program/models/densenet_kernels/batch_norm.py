"""Batch norm with its activation, in pieces: so that several layers can share the statistics of one channel.

``observe`` gathers statistics, ``activate`` is ``relu(weight x^ + bias)`` of ``x^ = (x - mean) / deviation``. On the
way back ``pull`` adds a layer's gradient in ``x^`` to those of others and sums up what its weights and biases need.
When all layers that read a channel have pulled, ``settle`` takes their sum g through the statistics:

    dx = (g - mean(g) - x^ mean(g x^)) / deviation.

The two means cost nothing more: with ``g = sum over layers i of weight_i g_i`` they follow from the gradients of the
parameters, ``sum(g) = sum over i of weight_i dbias_i`` and ``sum(g x^) = sum over i of weight_i dweight_i``.

Shape suffixes: R rows, the pixels of all images; C channels, which are together in memory; P parts of the rows.
"""

# Kernels cannot be annotated: Triton would read the annotations.
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from shortlist.kernels.launch import ceil_div, next_power_of_2

_COLUMNS_COMBINED = 16  # channels whose parts are added up together


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its work."""

    rows: int
    """Pixels of a tile."""
    columns: int
    """Channels of a tile."""
    most_parts: int
    """Each part of the pixels is one program's, tile after tile."""
    warps: int
    stages: int
    """Tiles that are on their way from memory or being worked on."""

    def parts(self, rows: int) -> tuple[int, int]:
        """Rows of each part, whole tiles of them, and the number of parts."""
        rows_a_part = ceil_div(ceil_div(rows, self.most_parts), self.rows) * self.rows
        return rows_a_part, ceil_div(rows, rows_a_part)

    def for_squares(self, side: int) -> "Tiling":
        """Of as many pixels, where each row of a tile stands for a square of them."""
        squares = next_power_of_2(side**2)
        return replace(self, rows=max(self.rows // squares, 1), warps=max(self.warps // squares, 1))

    def constants(self) -> dict[str, int]:
        return {"ROWS": self.rows, "COLUMNS": self.columns, "STAGES": self.stages, "num_warps": self.warps}


# Found by a sweep on an H200, over the shapes of DenseNet 40-40 with batches of 64.
_OBSERVING = Tiling(rows=16, columns=64, most_parts=256, warps=2, stages=3)
_ACTIVATING = Tiling(rows=16, columns=128, most_parts=512, warps=4, stages=3)
_PULLING = Tiling(rows=16, columns=64, most_parts=256, warps=2, stages=3)
_SETTLING = Tiling(rows=128, columns=64, most_parts=256, warps=8, stages=2)


@dataclass(frozen=True)
class Statistics:
    """Of the channels of a batch."""

    mean_C: Tensor
    var_C: Tensor
    """Without Bessel's correction."""

    def of(self, first: int, end: int) -> "Statistics":
        return Statistics(self.mean_C[first:end], self.var_C[first:end])


@dataclass(frozen=True)
class Norm:
    """What a layer makes of normalised channels."""

    weight_C: Tensor
    bias_C: Tensor
    eps: float
    """Added to the variances; the same in all layers that share them."""


@dataclass(frozen=True)
class Pulled:
    """The gradient in normalised channels, added up over layers."""

    gradient_RC: Tensor
    sum_C: Tensor
    dot_C: Tensor
    """Its sum with the normalised channels as factors."""

    def of(self, first: int, end: int) -> "Pulled":
        return Pulled(self.gradient_RC[:, first:end], self.sum_C[first:end], self.dot_C[first:end])


def empty_statistics(x_RC: Tensor) -> Statistics:
    return Statistics(*_two_a_channel(x_RC))


def pulled_into(gradient_RC: Tensor) -> Pulled:
    """Where the first to ``pull`` leaves its gradient, and others add theirs."""
    return Pulled(gradient_RC, *_two_a_channel(gradient_RC))


def _two_a_channel(x_RC: Tensor) -> Tensor:
    return torch.empty(2, x_RC.shape[1], dtype=torch.float32, device=x_RC.device)


def observe(x_RC: Tensor, into: Statistics, copy_RC: Tensor | None = None) -> None:
    """Gather the statistics, and on the way copy what was observed to ``copy_RC``."""
    rows, columns = x_RC.shape
    rows_a_part, parts = _OBSERVING.parts(rows)
    unit = _unit(x_RC, copy_RC)
    means_PC, squares_PC = _partial_sums(x_RC, parts)
    with torch.cuda.device_of(x_RC):
        _observe_kernel[parts, ceil_div(columns, _OBSERVING.columns)](
            x_RC,
            x_RC if copy_RC is None else copy_RC,
            means_PC,
            squares_PC,
            x_RC.stride(0) // unit,
            0 if copy_RC is None else copy_RC.stride(0) // unit,
            rows,
            columns // unit,
            rows_a_part,
            COPIES=copy_RC is not None,
            UNIT=unit,
            **_OBSERVING.constants(),
        )
        _combine_statistics_kernel[(ceil_div(columns, _COLUMNS_COMBINED),)](
            means_PC,
            squares_PC,
            into.mean_C,
            into.var_C,
            rows,
            columns,
            rows_a_part,
            parts,
            PARTS=next_power_of_2(parts),
            COLUMNS=_COLUMNS_COMBINED,
        )


def activate(x_RC: Tensor, statistics: Statistics, norm: Norm, *, width: int = 1, pool: int = 1) -> Tensor:
    """Normalise and activate, and average over squares of ``pool`` by ``pool`` pixels of images ``width`` wide."""
    rows, columns = x_RC.shape
    out_RC = x_RC.new_empty(rows // pool**2, columns)
    tiling = _ACTIVATING.for_squares(pool)
    rows_a_part, parts = tiling.parts(len(out_RC))
    unit = _unit(x_RC)
    with torch.cuda.device_of(x_RC):
        _activate_kernel[parts, ceil_div(columns, tiling.columns)](
            x_RC,
            statistics.mean_C,
            statistics.var_C,
            norm.weight_C,
            norm.bias_C,
            out_RC,
            x_RC.stride(0) // unit,
            len(out_RC),
            columns // unit,
            rows_a_part,
            width,
            norm.eps,
            POOL=pool,
            UNIT=unit,
            **tiling.constants(),
        )
    return out_RC


def pull(
    upstream_RC: Tensor,
    x_RC: Tensor,
    statistics: Statistics,
    norm: Norm,
    pulled: Pulled,
    *,
    adds: bool = False,
    width: int = 1,
    pool: int = 1,
) -> tuple[Tensor, Tensor]:
    """Take the gradient of ``activate``'s result back to the normalised channels.

    Args:
        upstream_RC: In the result; its rows are in order and lie close together.
        x_RC: As given to ``activate``, like all that follows.
        pulled: Where the gradient goes. It may be ``upstream_RC`` itself unless that was pooled.
        adds: To what is there, in place of overwriting it.

    Returns:
        The gradients of the norm's weight and bias.
    """
    rows, columns = x_RC.shape
    rows_a_part, parts = _PULLING.parts(rows)
    unit = _unit(x_RC, pulled.gradient_RC)
    dots_PC, sums_PC = _partial_sums(x_RC, parts)
    weight_gradient_C, bias_gradient_C = torch.empty_like(norm.weight_C), torch.empty_like(norm.bias_C)
    with torch.cuda.device_of(x_RC):
        _pull_kernel[parts, ceil_div(columns, _PULLING.columns)](
            upstream_RC,
            x_RC,
            statistics.mean_C,
            statistics.var_C,
            norm.weight_C,
            norm.bias_C,
            pulled.gradient_RC,
            dots_PC,
            sums_PC,
            x_RC.stride(0) // unit,
            pulled.gradient_RC.stride(0) // unit,
            rows,
            columns // unit,
            rows_a_part,
            width,
            norm.eps,
            ADDS=adds,
            POOL=pool,
            UNIT=unit,
            **_PULLING.constants(),
        )
        _combine_sums_kernel[(ceil_div(columns, _COLUMNS_COMBINED),)](
            dots_PC,
            sums_PC,
            norm.weight_C,
            weight_gradient_C,
            bias_gradient_C,
            pulled.dot_C,
            pulled.sum_C,
            columns,
            parts,
            ADDS=adds,
            PARTS=next_power_of_2(parts),
            COLUMNS=_COLUMNS_COMBINED,
        )
    return weight_gradient_C, bias_gradient_C


def settle(pulled: Pulled, x_RC: Tensor, statistics: Statistics, eps: float) -> Tensor:
    """The gradient in the channels themselves, rows close together."""
    rows, columns = x_RC.shape
    rows_a_part, parts = _SETTLING.parts(rows)
    out_RC, unit = x_RC.new_empty(rows, columns), _unit(x_RC, pulled.gradient_RC)
    with torch.cuda.device_of(x_RC):
        _settle_kernel[parts, ceil_div(columns, _SETTLING.columns)](
            pulled.gradient_RC,
            x_RC,
            statistics.mean_C,
            statistics.var_C,
            pulled.dot_C,
            pulled.sum_C,
            out_RC,
            pulled.gradient_RC.stride(0) // unit,
            x_RC.stride(0) // unit,
            rows,
            columns // unit,
            rows_a_part,
            eps,
            UNIT=unit,
            **_SETTLING.constants(),
        )
    return out_RC


def _unit(*tensors_RC: Tensor | None) -> int:
    """Channels that are read together, where rows begin and end at multiples of it. Kernels count in this unit.

    So Triton knows what their numbers are multiples of; it guesses at multiples of 16 alone.
    """
    places = [place for each in tensors_RC if each is not None for place in (each.shape[1], each.stride(0))]
    return 8 if all(place % 8 == 0 for place in places) else 1


def _partial_sums(x_RC: Tensor, parts: int) -> Tensor:
    return torch.empty(2, parts, x_RC.shape[1], dtype=torch.float32, device=x_RC.device)


@triton.jit
def _observe_kernel(
    x_ptr,
    copy_ptr,
    means_ptr,
    squares_ptr,
    x_stride,
    copy_stride,
    rows,
    columns,
    rows_a_part,
    COPIES: tl.constexpr,
    UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Mean, and sum of squares around it, of a part of the rows."""
    columns *= UNIT
    x_stride *= UNIT
    copy_stride *= UNIT
    part = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < columns
    first = part.to(tl.int64) * rows_a_part
    # Squares are summed around some value of the channel: around zero they would cancel where the mean is large.
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
    means_ptr,
    squares_ptr,
    mean_ptr,
    var_ptr,
    rows,
    columns,
    rows_a_part,
    parts,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PARTS)[:, None]
    here = (part < parts) & (column < columns)[None, :]
    means = tl.load(means_ptr + part * columns + column[None, :], mask=here, other=0.0)
    squares = tl.load(squares_ptr + part * columns + column[None, :], mask=here, other=0.0)
    share = tl.where(part < parts, tl.minimum(rows - part * rows_a_part, rows_a_part), 0).to(tl.float32) / rows
    # Around the first part's: shares add up to one but for rounding, which the mean itself would magnify.
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
    """Slope and offset of what a norm makes of each channel.

    The way back decides by the same numbers as the way there what the activation cuts.
    """
    scale = tl.load(weight_ptr + column, mask=exists, other=0.0) * _inverse_deviation(var_ptr, column, exists, eps)
    mean = tl.load(mean_ptr + column, mask=exists, other=0.0)
    return scale, tl.load(bias_ptr + column, mask=exists, other=0.0) - mean * scale


@triton.jit
def _activate_kernel(
    x_ptr,
    mean_ptr,
    var_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    out_rows,
    columns,
    rows_a_part,
    width,
    eps,
    POOL: tl.constexpr,
    UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
def _pull_kernel(
    upstream_ptr,
    x_ptr,
    mean_ptr,
    var_ptr,
    weight_ptr,
    bias_ptr,
    gradient_ptr,
    dots_ptr,
    sums_ptr,
    x_stride,
    gradient_stride,
    rows,
    columns,
    rows_a_part,
    width,
    eps,
    ADDS: tl.constexpr,
    POOL: tl.constexpr,
    UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
        # As in torch a NaN lets the gradient pass.
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
    dots_ptr,
    sums_ptr,
    weight_ptr,
    weight_gradient_ptr,
    bias_gradient_ptr,
    dot_ptr,
    sum_ptr,
    columns,
    parts,
    ADDS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
def _settle_kernel(
    gradient_ptr,
    x_ptr,
    mean_ptr,
    var_ptr,
    dot_ptr,
    sum_ptr,
    out_ptr,
    gradient_stride,
    x_stride,
    rows,
    columns,
    rows_a_part,
    eps,
    UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
