"""The hinge of each row, its reduction, and its gradient."""

import triton
import triton.language as tl

from shortlist.kernels.noised_hinge.counters import draws_counter, is_last


@triton.jit
def store_base(
    scores, target, margins, class_weights, base_R, share_R, row, level, finite,
    num_classes, row_stride, ignore_index, HAS_MARGINS: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """The hinge without its rivals, ``margin + level - s_y`` (-inf for an ignored row), and the weight of the row."""
    label = tl.load(target + row)
    kept = label != ignore_index
    known = kept & (label >= 0) & (label < num_classes)
    # A label out of range has no score, and its loss is NaN.
    own = tl.load(scores + row * row_stride + label, mask=known, other=float("nan")).to(tl.float32)
    share = tl.where(kept, 1.0, 0.0)
    margin = 1.0
    if HAS_MARGINS:
        margin = tl.load(margins + label, mask=known, other=0.0)
    if HAS_WEIGHTS:
        share = tl.load(class_weights + label, mask=known, other=float("nan")).to(tl.float32)
        share = tl.where(kept, share, 0.0)
    base = tl.where(finite, margin + (level - own), float("nan"))
    tl.store(base_R + row, tl.where(kept, base, -float("inf")))
    tl.store(share_R + row, share)


@triton.jit
def finish(
    base_R, share_R, values_RB, words, loss_R, reduced, total_share, row, num_rows, num_draws, scale,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """The loss of a row by the last of its draws, and ``reduced``, their sum or mean, by the last of the rows."""
    if is_last(draws_counter(words, row), num_draws):
        rival = tl.zeros([DRAWS], tl.float32)
        for first in range(0, num_draws, DRAWS):
            draw = first + tl.arange(0, DRAWS)
            cell = row * num_draws + draw
            rival += tl.load(values_RB + cell, mask=draw < num_draws, other=0.0, cache_modifier=".cg")
        share = tl.load(share_R + row, cache_modifier=".cg") * scale
        base = tl.load(base_R + row, cache_modifier=".cg")
        hinge = base + tl.sum(rival, 0) / num_draws
        ignored = base == -float("inf")  # even if its scores are not finite
        tl.store(loss_R + row, tl.where(ignored, 0.0, tl.where(hinge <= 0, share * 0.0, share * hinge)))
        # From here on the slope of the row: what backward needs. Of a bad row it is NaN, which a gradient scaler finds.
        tl.store(base_R + row, tl.where(ignored | (hinge <= 0), 0.0, tl.where(hinge > 0, share, hinge)))
        if REDUCTION > 0:  # noqa: SIM102 (known when the kernel is compiled)
            if is_last(words, num_rows):
                total = tl.zeros([ROWS], tl.float32)
                shares = tl.zeros([ROWS], tl.float32)
                for start in range(0, num_rows, ROWS):
                    each = start + tl.arange(0, ROWS)
                    there = each < num_rows
                    total += tl.load(loss_R + each, mask=there, other=0.0, cache_modifier=".cg")
                    shares += tl.load(share_R + each, mask=there, other=0.0, cache_modifier=".cg")
                loss = tl.sum(total, 0)
                if REDUCTION == 1:
                    denominator = tl.sum(shares, 0)
                    loss = loss / denominator
                    tl.store(total_share, denominator)
                tl.store(reduced, loss)


@triton.jit
def backward(
    gradient,
    grad_loss,
    target,
    classes_RB,
    slope_R,
    total_share,
    num_classes,
    num_draws,
    REDUCTION: tl.constexpr,
    PLACES: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """A block of one row of the gradient: zeros, then the entries that fall into it."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * PLACES
    place = first + tl.arange(0, PLACES)
    gradient_row = gradient + row * num_classes
    tl.store(gradient_row + place, tl.zeros([PLACES], gradient.dtype.element_ty), mask=place < num_classes)
    slope = tl.load(slope_R + row)
    scale = tl.load(grad_loss + (row if REDUCTION == 0 else 0)).to(tl.float32)
    if REDUCTION == 1:
        scale = scale / tl.load(total_share)
    slope = tl.where(slope == 0, 0.0, slope * scale)  # even if that is not finite
    label = tl.load(target + row)
    draw = tl.arange(0, DRAWS)
    chosen = tl.load(classes_RB + row * num_draws + draw, mask=draw < num_draws, other=-1)
    # Several draws may have chosen one class: each of them writes the same whole entry.
    times = tl.sum((chosen[:, None] == chosen[None, :]).to(tl.float32), 1)
    entry = slope * (times / num_draws - (chosen == label).to(tl.float32))
    labelled = tl.sum((chosen == label).to(tl.float32), 0)
    tl.debug_barrier()
    mine = (chosen >= first) & (chosen < first + PLACES)
    tl.store(gradient_row + chosen, entry.to(gradient.dtype.element_ty), mask=mine)
    label_entry = slope * (labelled / num_draws - 1.0)
    has_label = (label >= first) & (label < first + PLACES) & (label < num_classes)
    tl.store(gradient_row + label, label_entry.to(gradient.dtype.element_ty), mask=has_label)
