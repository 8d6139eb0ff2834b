"""The (K+1)-th largest perturbed score of each row and draw."""

import triton
import triton.language as tl

from shortlist.kernels.noised_hinge.counters import is_last, seed_of, splits_counter
from shortlist.kernels.noised_hinge.loss import finish, store_base
from shortlist.kernels.noised_hinge.random import (
    OWN,
    TILE,
    at_upper_tail,
    cell_bits,
    largest_tail,
    next_bits,
    normal,
    place_bits,
    row_keys,
    uniform,
    upper_tail,
)
from shortlist.kernels.noised_hinge.threshold import hot_list, open_limit

# After so many tries at a threshold something is badly wrong, and the loss should say so.
_TRIES = tl.constexpr(100)


@triton.jit
def draw_dense(
    scores,
    target,
    margins,
    class_weights,
    words,
    base_R,
    share_R,
    values_RB,
    classes_RB,
    loss_R,
    reduced,
    total_share,
    num_rows,
    num_classes,
    row_stride,
    seed_key,
    k,
    num_draws,
    epsilon,
    scale,
    ignore_index,
    PLACES: tl.constexpr,
    HAS_MARGINS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    REDUCTION: tl.constexpr,
    ROWS: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """One draw of one row."""
    row = tl.program_id(0).to(tl.int64)
    draw = tl.program_id(1)
    seed = seed_of(words, seed_key)
    place = tl.arange(0, PLACES)
    inside = place < num_classes
    score = tl.load(scores + row * row_stride + place, mask=inside, other=-float("inf")).to(tl.float32)
    finite = tl.max((inside & (score - score != 0)).to(tl.int32), 0) == 0
    level = tl.max(score, 0)
    key_place, key_draw = row_keys(seed, row, OWN)
    bits = cell_bits(place_bits(place, key_place), draw, key_draw)
    value = tl.where(finite, (score - level) + epsilon * normal(bits), 0.0)
    kth = _kth_largest(value, inside, num_classes, k)
    at = tl.min(tl.where(inside & (value == kth), place, num_classes - 1), 0)
    store_base(
        scores, target, margins, class_weights, base_R, share_R, row, level, finite,
        num_classes, row_stride, ignore_index, HAS_MARGINS, HAS_WEIGHTS,
    )  # fmt: skip
    tl.store(values_RB + row * num_draws + draw, kth)
    tl.store(classes_RB + row * num_draws + draw, at)
    finish(
        base_R, share_R, values_RB, words, loss_R, reduced, total_share, row, num_rows, num_draws, scale,
        REDUCTION, ROWS, DRAWS,
    )  # fmt: skip


@triton.jit
def draw_lazy(
    scores,
    words,
    maxima,
    limits,
    level_R,
    cold_R,
    hot_found_R,
    hot_classes,
    counts_RBS,
    scratch,
    base_R,
    share_R,
    values_RB,
    classes_RB,
    loss_R,
    reduced,
    total_share,
    num_rows,
    num_classes,
    row_stride,
    num_tiles,
    seed_key,
    k,
    num_draws,
    epsilon,
    scale,
    T: tl.constexpr,
    LANES: tl.constexpr,
    FOLD: tl.constexpr,
    CELLS: tl.constexpr,
    HOT: tl.constexpr,
    CAPACITY: tl.constexpr,
    SPLITS: tl.constexpr,
    REDUCTION: tl.constexpr,
    ROWS: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """A part of one draw of one row, by one warp: what passes is listed. The last part selects from all their lists."""
    row = tl.program_id(0).to(tl.int64)
    draw = tl.program_id(1)
    split = tl.program_id(2)
    cell = row * num_draws + draw
    seed = seed_of(words, seed_key)
    scores_row = scores + row * row_stride
    maxima_row = maxima + row * num_tiles
    limits_row = limits + row * num_tiles
    hot_row = hot_classes + row * HOT
    level = tl.load(level_R + row)
    hot_found, cold_limit, listed_hot = hot_list(hot_found_R + row, cold_R + row, HOT)
    lists = scratch + cell * SPLITS * 2 * CAPACITY
    list_value = lists.to(tl.pointer_type(tl.float32))
    list_class = lists + SPLITS * CAPACITY
    tiles_each = tl.cdiv(num_tiles, SPLITS)
    first_tile = split * tiles_each
    filled = _list_passing(
        scores_row, maxima_row, limits_row, hot_row, list_value + split * CAPACITY, list_class + split * CAPACITY,
        CAPACITY, first_tile, tl.where(level == level, tl.minimum(first_tile + tiles_each, num_tiles), 0),
        tl.where(split == 0, hot_found, 0), num_classes, level, cold_limit, 0.0, listed_hot, epsilon, draw, seed, row,
        T, LANES, FOLD, CELLS,
    )  # fmt: skip
    last = True
    if SPLITS > 1:
        tl.store(counts_RBS + cell * SPLITS + split, filled)
        last = is_last(splits_counter(words, num_rows, cell), SPLITS)
    if last:
        entry = tl.arange(0, SPLITS * CAPACITY)
        listed = entry < filled
        overflow = filled > CAPACITY
        if SPLITS > 1:
            count = tl.load(counts_RBS + cell * SPLITS + entry // CAPACITY, cache_modifier=".cg")
            listed = entry % CAPACITY < tl.minimum(count, CAPACITY)
            overflow = tl.max(count, 0) > CAPACITY
            filled = tl.sum(listed.to(tl.int32), 0)
        # Too few passed, or more than the list holds: look again at another threshold, at the whole row.
        threshold = 0.0
        enough_at = -float("inf")
        short_at = float("inf")
        step = epsilon
        tries = 0
        while ((filled < k) | overflow) & (tries < _TRIES) & (level == level):
            threshold, enough_at, short_at, step = _another_threshold(threshold, enough_at, short_at, step, overflow)
            tries += 1
            tl.debug_barrier()
            filled = _list_passing(
                scores_row, maxima_row, limits_row, hot_row, list_value, list_class, SPLITS * CAPACITY, 0, num_tiles,
                hot_found, num_classes, level, cold_limit, threshold, False, epsilon, draw, seed, row,
                T, LANES, FOLD, CELLS,
            )  # fmt: skip
            listed = entry < filled
            overflow = filled > SPLITS * CAPACITY
        value = tl.load(list_value + entry, mask=listed, other=0.0, cache_modifier=".cg")
        place = tl.load(list_class + entry, mask=listed, other=0, cache_modifier=".cg")
        kth = _kth_largest(value, listed, filled, k)
        at = tl.min(tl.where(listed & (value == kth), place, num_classes - 1), 0)
        tl.store(values_RB + cell, tl.where((filled < k) | overflow, float("nan"), kth))
        tl.store(classes_RB + cell, at)
        finish(
            base_R, share_R, values_RB, words, loss_R, reduced, total_share, row, num_rows, num_draws, scale,
            REDUCTION, ROWS, DRAWS,
        )  # fmt: skip


@triton.jit
def challenge(
    scores,
    words,
    maxima,
    limits,
    level_R,
    cold_R,
    hot_found_R,
    hot_classes,
    scratch,
    values_RBK,
    classes_RBK,
    num_classes,
    row_stride,
    num_tiles,
    first_class,
    seed_key,
    k,
    num_draws,
    epsilon,
    T: tl.constexpr,
    LANES: tl.constexpr,
    FOLD: tl.constexpr,
    CELLS: tl.constexpr,
    HOT: tl.constexpr,
    CAPACITY: tl.constexpr,
    PLACES: tl.constexpr,
    FIRST: tl.constexpr,
):
    """One draw of one row of a chunk: the k best so far, unless it is the first chunk, and what passes them compete."""
    row = tl.program_id(0).to(tl.int64)
    draw = tl.program_id(1)
    cell = row * num_draws + draw
    seed = seed_of(words, seed_key)
    level = tl.load(level_R + row)
    hot_found, cold_limit, listed_hot = hot_list(hot_found_R + row, cold_R + row, HOT)
    mine = scratch + cell * 2 * CAPACITY
    list_value = mine.to(tl.pointer_type(tl.float32))
    list_class = mine + CAPACITY
    place = tl.arange(0, PLACES)
    # The new ones are listed behind the places of those who hold them, who join them only if there are any.
    held = 0 if FIRST else k
    threshold = 0.0
    if not FIRST:
        value_K = tl.load(values_RBK + cell * k + place, mask=place < k, other=float("inf")) - level
        threshold = tl.min(value_K, 0)
    enough_at = -float("inf")
    short_at = float("inf")
    step = epsilon
    tries = 0
    filled = held
    stored = listed_hot
    looking = level == level
    while looking:
        filled = held + _list_passing(
            scores + row * row_stride, maxima + row * num_tiles, limits + row * num_tiles, hot_classes + row * HOT,
            list_value + held, list_class + held, CAPACITY - held, 0, num_tiles, hot_found, num_classes, level,
            cold_limit, threshold, stored, epsilon, draw, seed, row, T, LANES, FOLD, CELLS,
        )  # fmt: skip
        overflow = filled > CAPACITY
        # A threshold that was raised must still let k pass, those who hold places among them.
        passing = filled - held
        if not FIRST:
            passing += tl.sum(((place < k) & (value_K >= threshold)).to(tl.int32), 0)
        looking = ((passing < k) | overflow) & (tries < _TRIES)
        threshold, enough_at, short_at, step = _another_threshold(threshold, enough_at, short_at, step, overflow)
        stored = stored & (tries < 0)  # from now on: limits are stored for the first threshold alone
        tries += 1
        tl.debug_barrier()
    if (filled > held) | (tries >= _TRIES):
        if not FIRST:
            value_K = tl.load(values_RBK + cell * k + place, mask=place < k, other=0.0) - level
            class_K = (tl.load(classes_RBK + cell * k + place, mask=place < k, other=0) - first_class).to(tl.int32)
            tl.store(list_value + place, value_K, mask=place < k)
            tl.store(list_class + place, class_K, mask=place < k)
            tl.debug_barrier()
        entry = tl.arange(0, CAPACITY)
        listed = entry < tl.minimum(filled, CAPACITY)
        value = tl.load(list_value + entry, mask=listed, other=0.0)
        at = tl.load(list_class + entry, mask=listed, other=0)
        kth = _kth_largest(value, listed, filled, k)
        # All that are larger, and of those equal to it as many as there is room for.
        above = listed & (value > kth)
        equal = listed & (value == kth)
        after = tl.sum(above.to(tl.int32), 0) + tl.cumsum(equal.to(tl.int32), 0) - 1
        slot = tl.where(above, tl.cumsum(above.to(tl.int32), 0) - 1, after)
        kept = (above | equal) & (slot < k)
        tl.debug_barrier()
        tl.store(values_RBK + cell * k + slot, tl.where(tries < _TRIES, value + level, float("nan")), mask=kept)
        tl.store(classes_RBK + cell * k + slot, at.to(tl.int64) + first_class, mask=kept)


@triton.jit
def _list_passing(
    scores_row, maxima_row, limits_row, hot_row, list_value, list_class, capacity, first_tile, end_tile, hot_found,
    num_classes, level, cold_limit, threshold, stored, epsilon, draw, seed, row,
    T: tl.constexpr, LANES: tl.constexpr, FOLD: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """List the hot classes, and those of the tiles, whose perturbed scores pass the threshold; their number."""
    place_key, draw_key = row_keys(seed, row, OWN)
    filled = _draw_hot(
        scores_row, hot_row, list_value, list_class, capacity, hot_found, level, threshold, epsilon, draw,
        place_key, draw_key, CELLS,
    )  # fmt: skip
    place_key, draw_key = row_keys(seed, row, TILE)
    for start in range(first_tile, end_tile, 32 * LANES):
        opened = _open_tiles(
            maxima_row, limits_row, start, end_tile, level, cold_limit, threshold, stored, epsilon, draw,
            place_key, draw_key, T, LANES, FOLD,
        )  # fmt: skip
        filled = _draw_cold(
            scores_row, maxima_row, limits_row, list_value, list_class, filled, capacity, opened, start, num_classes,
            level, cold_limit, threshold, stored, epsilon, draw, place_key, draw_key, T, LANES,
        )  # fmt: skip
    tl.debug_barrier()
    return filled


@triton.jit
def _draw_hot(
    scores_row, hot_row, list_value, list_class, capacity, hot_found, level, threshold, epsilon, draw,
    place_key, draw_key, CELLS: tl.constexpr,
):  # fmt: skip
    """Begin the list with the classes close to the level or above it: a normal of its own for each."""
    filled = 0
    lane = tl.arange(0, CELLS)
    for begin in range(0, hot_found, CELLS):
        real = begin + lane < hot_found
        place = tl.load(hot_row + begin + lane, mask=real, other=0)
        score = tl.load(scores_row + place, mask=real, other=-float("inf")).to(tl.float32)
        bits = cell_bits(place_bits(place, place_key), draw, draw_key)
        value = (score - level) + epsilon * normal(bits)
        filled = _append(list_value, list_class, filled, value, place, real & (value > threshold), capacity)
    return filled


@triton.jit
def _open_tiles(
    maxima_row, limits_row, start, end, level, cold_limit, threshold, stored, epsilon, draw, place_key, draw_key,
    T: tl.constexpr, LANES: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """For each lane a bit for each of its 32 tiles, LANES apart from ``start``: whether it must be looked into."""
    lane = tl.arange(0, LANES)
    opened = tl.zeros([LANES], tl.uint32)
    for first in range(0, tl.minimum(32, tl.cdiv(end - start, LANES)), FOLD):
        turn = first + tl.arange(0, FOLD)[:, None]
        tile = start + turn * LANES + lane[None, :]
        there = tile < end
        if stored:
            limit = tl.load(limits_row + tile, mask=there, other=0.0).to(tl.uint32, bitcast=True)
        else:
            best = tl.load(maxima_row + tile, mask=there, other=-float("inf")) - level
            limit = open_limit(tl.minimum(best, cold_limit), threshold, epsilon, T)
        opens = there & (cell_bits(place_bits(tile, place_key), draw, draw_key) <= limit)
        opened |= tl.sum(opens.to(tl.uint32) << turn.to(tl.uint32), 0)
    return opened


@triton.jit
def _draw_cold(
    scores_row, maxima_row, limits_row, list_value, list_class, filled, capacity, opened, start, num_classes, level,
    cold_limit, threshold, stored, epsilon, draw, place_key, draw_key, T: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The largest normals of each lane's open tiles, from the top, for as long as one could still pass."""
    lane = tl.arange(0, LANES)
    tile = tl.zeros([LANES], tl.int32)
    left = tl.zeros([LANES], tl.int32)
    bits = tl.zeros([LANES], tl.uint32)
    taken = tl.zeros([LANES], tl.uint32)
    tail = tl.zeros([LANES], tl.float32)
    limit = tl.zeros([LANES], tl.float32)
    steps = tl.zeros([LANES], tl.uint32)
    going = lane < 0
    while tl.max((going | (opened != 0)).to(tl.int32), 0) != 0:
        # A lane that is done with its tile takes its next: the lowest bit, whose number is a float's exponent.
        takes = ~going & (opened != 0)
        lowest = opened & (~opened + 1)
        turn = ((lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127
        tile = tl.where(takes, start + turn * LANES + lane, tile)
        opened = tl.where(takes, opened ^ lowest, opened)
        if stored:  # in the cache still, as the largest score is not
            some = tl.load(limits_row + tile, mask=takes, other=0.0).to(tl.uint32, bitcast=True).to(tl.float32) + 1.0
            tail_limit = largest_tail(some * 2.3283064365386963e-10, T)
        else:
            best = tl.load(maxima_row + tile, mask=takes, other=-float("inf")) - level
            tail_limit = upper_tail((threshold - tl.minimum(best, cold_limit)) / epsilon)
        limit = tl.where(takes, tail_limit * 1.001, limit)
        bits = tl.where(takes, cell_bits(place_bits(tile, place_key), draw, draw_key), bits)
        left = tl.where(takes, T, left)
        taken = tl.where(takes, 0, taken)
        steps = tl.where(takes, 0, steps) + 1
        tail = tl.where(takes, largest_tail(uniform(bits), T), tail)
        going = (going | takes) & (tail < limit)
        # The normals, from the largest down, sit at places in random order: one that is taken is passed by.
        bits = next_bits(bits, steps)
        at = (bits % T).to(tl.int32)
        flag = tl.full([LANES], 1, tl.uint32) << at.to(tl.uint32)
        fresh = going & ((taken & flag) == 0)
        taken = taken | flag
        place = tile * T + at
        real = fresh & (place < num_classes)
        score = tl.load(scores_row + place, mask=real, other=-float("inf")).to(tl.float32) - level
        value = score + epsilon * at_upper_tail(tl.minimum(tail, 0.99999994))
        passed = real & (score <= cold_limit) & (value > threshold)
        filled = _append(list_value, list_class, filled, value, place, passed, capacity)
        # The next one is the largest of those left, all of them below the last.
        left = tl.where(fresh, left - 1, left)
        bits = next_bits(bits, steps)
        following = tail + (1.0 - tail) * largest_tail(uniform(bits), tl.maximum(left, 1))
        tail = tl.where(fresh, following, tail)
        going = going & (left > 0) & (tail < limit)
    return filled


@triton.jit
def _append(list_value, list_class, filled, value, place, accepted, capacity):
    """Put the accepted into a list; what does not fit is counted all the same."""
    slot = filled + tl.cumsum(accepted.to(tl.int32), 0) - 1
    fits = accepted & (slot < capacity)
    tl.store(list_value + slot, value, mask=fits)
    tl.store(list_class + slot, place, mask=fits)
    return filled + tl.sum(accepted.to(tl.int32), 0)


@triton.jit
def _another_threshold(threshold, enough_at, short_at, step, too_many):
    """Where to look next: between what let too many pass and what let too few, or further out."""
    enough_at = tl.where(too_many, threshold, enough_at)
    short_at = tl.where(too_many, short_at, threshold)
    up = tl.where(short_at == float("inf"), threshold + step, 0.5 * (threshold + short_at))
    down = tl.where(enough_at == -float("inf"), threshold - step, 0.5 * (threshold + enough_at))
    return tl.where(too_many, up, down), enough_at, short_at, step * 2


@triton.jit
def _kth_largest(value, listed, count, k):
    """The k-th largest of the ``count`` values listed, if there are so many: narrow a range until one value is left.

    Reductions are what costs here, so each counts above three values at once, in the three parts of a long word.
    """
    high = tl.max(tl.where(listed, value, -float("inf")), 0)
    least = tl.min(tl.where(listed, value, float("inf")), 0)
    low = least - (high - least) * 1e-3 - 1e-30
    above_high = 0
    above_low = count
    middle = 0.5 * (low + high)
    while (above_low >= k) & (above_low > above_high + 1) & (middle > low) & (middle < high):
        first = 0.5 * (low + middle)
        third = 0.5 * (middle + high)
        one = listed.to(tl.int64)
        counts = tl.sum(
            tl.where(value > first, one, 0)
            + tl.where(value > middle, one << 21, 0)
            + tl.where(value > third, one << 42, 0),
            0,
        )
        at_first = (counts & 0x1FFFFF).to(tl.int32)
        at_middle = ((counts >> 21) & 0x1FFFFF).to(tl.int32)
        at_third = (counts >> 42).to(tl.int32)
        low, above_low, high, above_high = _narrow(low, above_low, high, above_high, first, at_first, k)
        low, above_low, high, above_high = _narrow(low, above_low, high, above_high, middle, at_middle, k)
        low, above_low, high, above_high = _narrow(low, above_low, high, above_high, third, at_third, k)
        middle = 0.5 * (low + high)
    return tl.max(tl.where(listed & (value <= high), value, -float("inf")), 0)


@triton.jit
def _narrow(low, above_low, high, above_high, value, above, k):
    """The range that holds the k-th largest, given how many are above a value in it."""
    raises = (above >= k) & (value > low)
    lowers = (above < k) & (value < high)
    return (
        tl.where(raises, value, low),
        tl.where(raises, above, above_low),
        tl.where(lowers, value, high),
        tl.where(lowers, above, above_high),
    )
