"""The hinge of each row, its reduction and its gradient."""

import triton
import triton.language as tl

from shortlist.kernels.noised_hinge.counters import is_last, samples_counter


@triton.jit
def store_base(
    scores, labels, base, share_R, row, level, is_finite, num_classes, row_stride, margin, ignore_index,
):  # fmt: skip
    """Store the row's hinge without the rival, ``margin + level - s_y``, and its weight.

    The former is -inf for an ignored row.
    """
    label = tl.load(labels.target_R + row)
    is_kept = label != ignore_index
    is_known = is_kept & (label >= 0) & (label < num_classes)
    # A label out of range has no score, and its loss is NaN.
    own = tl.load(scores + row * row_stride + label, mask=is_known, other=float("nan")).to(tl.float32)
    share = tl.where(is_kept, 1.0, 0.0)
    if labels.margins_L is not None:
        margin = tl.load(labels.margins_L + label, mask=is_known, other=0.0)
    if labels.weight_L is not None:
        share = tl.load(labels.weight_L + label, mask=is_known, other=float("nan")).to(tl.float32)
        share = tl.where(is_kept, share, 0.0)
    hinge = tl.where(is_finite, margin + (level - own), float("nan"))
    tl.store(base, tl.where(is_kept, hinge, -float("inf")))
    tl.store(share_R + row, share)


@triton.jit
def finish(
    results, counters, row, num_rows, n_samples, scale,
    NUM_RANKS: tl.constexpr, REDUCTION: tl.constexpr, ROWS: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """The last sample of a row computes the row's loss, and the last row their sum or mean."""
    if is_last(samples_counter(counters, row), n_samples):
        share = tl.load(results.share_R + row, cache_modifier=".cg") * scale
        base = tl.load(results.base_RP + row * NUM_RANKS, cache_modifier=".cg")
        is_ignored = base == -float("inf")  # even if its scores are not finite
        for place in tl.static_range(NUM_RANKS):
            rival = tl.zeros([SAMPLES], tl.float32)
            for first in range(0, n_samples, SAMPLES):
                sample = first + tl.arange(0, SAMPLES)
                cell = (row * NUM_RANKS + place) * n_samples + sample
                rival += tl.load(results.values_RPB + cell, mask=sample < n_samples, other=0.0, cache_modifier=".cg")
            hinge = base + tl.sum(rival, 0) / n_samples
            loss_here = tl.where(is_ignored, 0.0, tl.where(hinge <= 0, share * 0.0, share * hinge))
            if place == 0:  # noqa: SIM108 (known when the kernel is compiled)
                loss = loss_here
            else:
                loss = loss + loss_here
            # The slopes, which backward needs, take the place of the base. They are NaN for a bad row: a gradient
            # scaler finds them.
            slope = tl.where(is_ignored | (hinge <= 0), 0.0, tl.where(hinge > 0, share, hinge))
            slope_RP = results.base_RP
            tl.store(slope_RP + row * NUM_RANKS + place, slope)
        tl.store(results.loss_R + row, loss)
        if REDUCTION > 0:  # noqa: SIM102 (known when the kernel is compiled)
            if is_last(counters, num_rows):
                _reduce_rows(results, num_rows, REDUCTION, ROWS)


@triton.jit
def _reduce_rows(results, num_rows, REDUCTION: tl.constexpr, ROWS: tl.constexpr):
    total = tl.zeros([ROWS], tl.float32)
    shares = tl.zeros([ROWS], tl.float32)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        exists = row < num_rows
        total += tl.load(results.loss_R + row, mask=exists, other=0.0, cache_modifier=".cg")
        shares += tl.load(results.share_R + row, mask=exists, other=0.0, cache_modifier=".cg")
    loss = tl.sum(total, 0)
    if REDUCTION == 1:
        total_share = tl.sum(shares, 0)
        loss = loss / total_share
        tl.store(results.total_share, total_share)
    tl.store(results.loss, loss)


@triton.jit
def backward(
    gradient, grad_loss, target_R, classes_RPB, slope_RP, total_share, num_classes, n_samples,
    NUM_RANKS: tl.constexpr, REDUCTION: tl.constexpr, CLASSES: tl.constexpr, PADDED_CHOICES: tl.constexpr,
):  # fmt: skip
    """A block of one row of the gradient: zeros, then the entries that fall into it.

    Each sample has chosen a class for each rank.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CLASSES
    classes = first + tl.arange(0, CLASSES)
    gradient_row = gradient + row * num_classes
    tl.store(gradient_row + classes, tl.zeros([CLASSES], gradient.dtype.element_ty), mask=classes < num_classes)
    choice = tl.arange(0, PADDED_CHOICES)
    if NUM_RANKS == 1:
        slope = tl.load(slope_RP + row)
    else:  # that of each choice
        place = tl.minimum(choice // n_samples, NUM_RANKS - 1)
        slope = tl.load(slope_RP + row * NUM_RANKS + place)
    scale = tl.load(grad_loss + (row if REDUCTION == 0 else 0)).to(tl.float32)
    if REDUCTION == 1:
        scale = scale / tl.load(total_share)
    slope = tl.where(slope == 0, 0.0, slope * scale)  # even if the scale is not finite
    label = tl.load(target_R + row)
    num_choices = NUM_RANKS * n_samples
    chosen = tl.load(classes_RPB + row * num_choices + choice, mask=choice < num_choices, other=-1)
    # Several may have chosen the same class: each of them writes the same whole entry.
    if NUM_RANKS == 1:
        times = tl.sum((chosen[:, None] == chosen[None, :]).to(tl.float32), 1)
        entry = slope * (times / n_samples - (chosen == label).to(tl.float32))
        times_label = tl.sum((chosen == label).to(tl.float32), 0)
        label_entry = slope * (times_label / n_samples - 1.0)
    else:
        own = tl.where(choice < num_choices, slope / n_samples, 0.0)
        total = tl.sum(own, 0)
        entry = tl.sum(tl.where(chosen[:, None] == chosen[None, :], own[None, :], 0.0), 1)
        entry = entry - tl.where(chosen == label, total, 0.0)
        label_entry = tl.sum(tl.where(chosen == label, own, 0.0), 0) - total
    tl.debug_barrier()
    is_mine = (chosen >= first) & (chosen < first + CLASSES)
    tl.store(gradient_row + chosen, entry.to(gradient.dtype.element_ty), mask=is_mine)
    has_label = (label >= first) & (label < first + CLASSES) & (label < num_classes)
    tl.store(gradient_row + label, label_entry.to(gradient.dtype.element_ty), mask=has_label)
