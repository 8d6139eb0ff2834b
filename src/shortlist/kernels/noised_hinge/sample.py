"""The (K+1)-th largest perturbed score of each row and sample, for every K. ``threshold`` explains the cut-offs."""

from typing import NamedTuple

import triton
import triton.language as tl

from shortlist.kernels.noised_hinge.counters import is_last, seed_of, splits_counter
from shortlist.kernels.noised_hinge.loss import finish, store_base
from shortlist.kernels.noised_hinge.random import (
    OWN_NOISE,
    TILE_NOISE,
    at_upper_tail,
    cell_bits,
    largest_tail,
    next_bits,
    normal,
    row_keys,
    uniform,
    upper_tail,
)
from shortlist.kernels.noised_hinge.threshold import TILE, hot_list, tile_limit

# What the one warp of a sample works on at once: lanes, tiles of each lane, hot classes.
_LANES = tl.constexpr(32)
_LANE_TILES = tl.constexpr(16)
_HOT_CELLS = tl.constexpr(128)


class Row(NamedTuple):
    """A row as its samples see it; the first four are pointers."""

    scores: tl.tensor
    maxima: tl.tensor
    limits: tl.tensor
    hot_classes: tl.tensor
    num_hot: tl.tensor
    cold_limit: tl.tensor
    has_hot_list: tl.tensor
    level: tl.tensor
    num_classes: tl.tensor


class Noise(NamedTuple):
    """What the noise of a sample of a row follows from."""

    seed: tl.tensor
    row: tl.tensor
    sample: tl.tensor
    epsilon: tl.tensor


class PassingList(NamedTuple):
    """Where the classes that pass are listed, with their perturbed scores."""

    scores: tl.tensor
    classes: tl.tensor
    capacity: tl.tensor


@triton.jit
def sample_dense(
    scores, labels, counters, results,
    num_rows, num_classes, row_stride, seed_key, ranks, n_samples, epsilon, scale, margin, ignore_index,
    PADDED_CLASSES: tl.constexpr, NUM_RANKS: tl.constexpr, REDUCTION: tl.constexpr, ROWS: tl.constexpr,
    SAMPLES: tl.constexpr,
):  # fmt: skip
    """One sample of one row."""
    row = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1)
    if labels.epsilon_R is not None:
        epsilon = tl.load(labels.epsilon_R + row)
    seed = seed_of(counters, seed_key)
    classes = tl.arange(0, PADDED_CLASSES)
    exists = classes < num_classes
    score = tl.load(scores + row * row_stride + classes, mask=exists, other=-float("inf")).to(tl.float32)
    is_finite = tl.max((exists & (score - score != 0)).to(tl.int32), 0) == 0
    level = tl.max(score, 0)
    bits = cell_bits(classes, sample, row_keys(seed, row, OWN_NOISE))
    value = tl.where(is_finite, (score - level) + epsilon * normal(bits), 0.0)
    _store_ranked(
        results, row, sample, n_samples, value, classes, exists, num_classes, num_classes, True, ranks, NUM_RANKS
    )
    store_base(
        scores, labels, results.base_RP + row * NUM_RANKS, results.share_R, row, level, is_finite, num_classes,
        row_stride, margin, ignore_index,
    )  # fmt: skip
    finish(results, counters, row, num_rows, n_samples, scale, NUM_RANKS, REDUCTION, ROWS, SAMPLES)


@triton.jit
def sample_lazy(
    scores, counters, search, counts_RBS, scratch, results,
    num_rows, shape, seed_key, ranks, n_samples, epsilon, scale,
    HOT: tl.constexpr, CAPACITY: tl.constexpr, SPLITS: tl.constexpr, MAX_TRIES: tl.constexpr,
    NUM_RANKS: tl.constexpr, REDUCTION: tl.constexpr, ROWS: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """A part of one sample of one row, by one warp: list what passes. The last part selects from all the lists."""
    row_number = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1)
    split = tl.program_id(2)
    cell = row_number * n_samples + sample
    if search.epsilon_R is not None:
        epsilon = tl.load(search.epsilon_R + row_number)
    noise = Noise(seed_of(counters, seed_key), row_number, sample, epsilon)
    row = _row_at(scores, search, shape, row_number, HOT)
    lists = scratch + cell * SPLITS * 2 * CAPACITY
    list_scores = lists.to(tl.pointer_type(tl.float32))
    list_classes = lists + SPLITS * CAPACITY
    split_tiles = tl.cdiv(shape.num_tiles, SPLITS)
    first_tile = split * split_tiles
    count = _list_passing(
        row, noise, PassingList(list_scores + split * CAPACITY, list_classes + split * CAPACITY, CAPACITY),
        tl.where(split == 0, row.num_hot, 0), first_tile,
        tl.where(row.level == row.level, tl.minimum(first_tile + split_tiles, shape.num_tiles), 0), 0.0,
        row.has_hot_list,
    )  # fmt: skip
    is_last_split = True
    if SPLITS > 1:
        tl.store(counts_RBS + cell * SPLITS + split, count)
        is_last_split = is_last(splits_counter(counters, num_rows, cell), SPLITS)
    if is_last_split:
        whole = PassingList(list_scores, list_classes, SPLITS * CAPACITY)
        value, classes, is_listed, count, are_enough = _listed(
            row, noise, whole, count, counts_RBS + cell * SPLITS, shape.num_tiles, ranks[0], CAPACITY, SPLITS, MAX_TRIES
        )
        _store_ranked(
            results, row_number, sample, n_samples, value, classes, is_listed, count, row.num_classes, are_enough,
            ranks, NUM_RANKS,
        )  # fmt: skip
        finish(results, counters, row_number, num_rows, n_samples, scale, NUM_RANKS, REDUCTION, ROWS, SAMPLES)


@triton.jit
def _listed(
    row, noise, passing, count, counts, num_tiles, rank,
    CAPACITY: tl.constexpr, SPLITS: tl.constexpr, MAX_TRIES: tl.constexpr,
):  # fmt: skip
    """All that is listed: values, classes, which exist, how many, and if these are enough for ``rank``."""
    entry = tl.arange(0, SPLITS * CAPACITY)
    is_listed = entry < count
    overflows = count > CAPACITY
    if SPLITS > 1:
        count = tl.load(counts + entry // CAPACITY, cache_modifier=".cg")
        is_listed = entry % CAPACITY < tl.minimum(count, CAPACITY)
        overflows = tl.max(count, 0) > CAPACITY
        count = tl.sum(is_listed.to(tl.int32), 0)
    # Too few passed, or more than the list holds: search the whole row again with another threshold.
    threshold = 0.0
    enough_at = -float("inf")
    short_at = float("inf")
    step = noise.epsilon
    tries = 0
    while ((count < rank) | overflows) & (tries < MAX_TRIES) & (row.level == row.level):
        threshold, enough_at, short_at, step = _another_threshold(threshold, enough_at, short_at, step, overflows)
        tries += 1
        tl.debug_barrier()
        count = _list_passing(row, noise, passing, row.num_hot, 0, num_tiles, threshold, False)
        is_listed = entry < count
        overflows = count > SPLITS * CAPACITY
    value = tl.load(passing.scores + entry, mask=is_listed, other=0.0, cache_modifier=".cg")
    classes = tl.load(passing.classes + entry, mask=is_listed, other=0, cache_modifier=".cg")
    return value, classes, is_listed, count, ~((count < rank) | overflows)


@triton.jit
def _store_ranked(
    results, row, sample, n_samples, value, classes, is_listed, count, num_classes, are_enough, ranks,
    NUM_RANKS: tl.constexpr,
):  # fmt: skip
    """Store the value of each rank, the largest rank first, and its class; NaN if the values are not enough."""
    for place in tl.static_range(NUM_RANKS):
        if place == 0:
            ranked, above, largest = _ranked_value(value, is_listed, count, ranks[0])
        else:
            ranked, above = _next_ranked_value(value, is_listed, ranked, above, largest, ranks[place])
        at = tl.min(tl.where(is_listed & (value == ranked), classes, num_classes - 1), 0)
        first = (row * NUM_RANKS + place) * n_samples
        tl.store(results.values_RPB + first + sample, tl.where(are_enough, ranked, float("nan")))
        tl.store(results.classes_RPB + first + sample, at)


@triton.jit
def merge_chunk(
    scores, counters, search, scratch, values_RBK, classes_RBK,
    shape, first_class, seed_key, rank, n_samples, epsilon,
    HOT: tl.constexpr, CAPACITY: tl.constexpr, PADDED_RANK: tl.constexpr, MAX_TRIES: tl.constexpr,
    IS_FIRST: tl.constexpr,
):  # fmt: skip
    """One sample of one row of a chunk: merge what passes with the ``rank`` best so far, if there are any."""
    row_number = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1)
    cell = row_number * n_samples + sample
    noise = Noise(seed_of(counters, seed_key), row_number, sample, epsilon)
    row = _row_at(scores, search, shape, row_number, HOT)
    lists = scratch + cell * 2 * CAPACITY
    list_scores = lists.to(tl.pointer_type(tl.float32))
    list_classes = lists + CAPACITY
    values_K = values_RBK + cell * rank
    classes_K = classes_RBK + cell * rank
    place = tl.arange(0, PADDED_RANK)
    # New classes are listed behind the places of the best so far, who join the list only if there are new ones.
    num_held = 0 if IS_FIRST else rank
    count, tries = _list_chunk(
        row, noise, PassingList(list_scores + num_held, list_classes + num_held, CAPACITY - num_held), values_K, place,
        shape.num_tiles, num_held, rank, CAPACITY, MAX_TRIES, IS_FIRST,
    )  # fmt: skip
    if (count > num_held) | (tries >= MAX_TRIES):
        if not IS_FIRST:
            value = tl.load(values_K + place, mask=place < rank, other=0.0) - row.level
            held_class = (tl.load(classes_K + place, mask=place < rank, other=0) - first_class).to(tl.int32)
            tl.store(list_scores + place, value, mask=place < rank)
            tl.store(list_classes + place, held_class, mask=place < rank)
            tl.debug_barrier()
        entry = tl.arange(0, CAPACITY)
        is_listed = entry < tl.minimum(count, CAPACITY)
        value = tl.load(list_scores + entry, mask=is_listed, other=0.0)
        at = tl.load(list_classes + entry, mask=is_listed, other=0)
        ranked, _, _ = _ranked_value(value, is_listed, count, rank)
        # All that are larger, and of those equal to it as many as there is room for.
        is_above = is_listed & (value > ranked)
        is_equal = is_listed & (value == ranked)
        after = tl.sum(is_above.to(tl.int32), 0) + tl.cumsum(is_equal.to(tl.int32), 0) - 1
        slot = tl.where(is_above, tl.cumsum(is_above.to(tl.int32), 0) - 1, after)
        is_kept = (is_above | is_equal) & (slot < rank)
        tl.debug_barrier()
        tl.store(values_K + slot, tl.where(tries < MAX_TRIES, value + row.level, float("nan")), mask=is_kept)
        tl.store(classes_K + slot, at.to(tl.int64) + first_class, mask=is_kept)


@triton.jit
def _list_chunk(
    row, noise, passing, values_K, place, num_tiles, num_held, rank,
    CAPACITY: tl.constexpr, MAX_TRIES: tl.constexpr, IS_FIRST: tl.constexpr,
):  # fmt: skip
    """List the classes of a chunk that pass, and count them with those held; also the number of tries."""
    threshold = 0.0
    if not IS_FIRST:
        value_K = tl.load(values_K + place, mask=place < rank, other=float("inf")) - row.level
        threshold = tl.min(value_K, 0)
    enough_at = -float("inf")
    short_at = float("inf")
    step = noise.epsilon
    tries = 0
    count = num_held
    uses_limits = row.has_hot_list
    is_looking = row.level == row.level
    while is_looking:
        count = num_held + _list_passing(row, noise, passing, row.num_hot, 0, num_tiles, threshold, uses_limits)
        overflows = count > CAPACITY
        # A raised threshold must still let ``rank`` classes pass, those held among them.
        num_passing = count - num_held
        if not IS_FIRST:
            num_passing += tl.sum(((place < rank) & (value_K >= threshold)).to(tl.int32), 0)
        is_looking = ((num_passing < rank) | overflows) & (tries < MAX_TRIES)
        threshold, enough_at, short_at, step = _another_threshold(threshold, enough_at, short_at, step, overflows)
        uses_limits = uses_limits & (tries < 0)  # False from now on: limits are stored for the first threshold alone
        tries += 1
        tl.debug_barrier()
    return count, tries


@triton.jit
def _row_at(scores, search, shape, row, HOT: tl.constexpr):
    level = tl.load(search.level_R + row)
    num_hot, cold_limit, has_hot_list = hot_list(search, row, HOT)
    return Row(
        scores + row * shape.row_stride,
        search.maxima_RT + row * shape.num_tiles,
        search.limits_RT + row * shape.num_tiles,
        search.hot_classes_RH + row * HOT,
        num_hot,
        cold_limit,
        has_hot_list,
        level,
        shape.num_classes,
    )


@triton.jit
def _list_passing(row, noise, passing, num_hot, first_tile, end_tile, threshold, uses_limits):
    """List the hot classes, and the cold ones of these tiles, whose perturbed scores pass the threshold; their number.

    ``uses_limits`` takes the stored limits of the tiles, which hold for a threshold of 0.
    """
    count = _draw_hot(row, noise, row_keys(noise.seed, noise.row, OWN_NOISE), passing, num_hot, threshold)
    keys = row_keys(noise.seed, noise.row, TILE_NOISE)
    for start in range(first_tile, end_tile, 32 * _LANES):
        is_open = _open_tiles(row, noise, keys, start, end_tile, threshold, uses_limits)
        count = _draw_cold(row, noise, keys, passing, count, is_open, start, threshold, uses_limits)
    tl.debug_barrier()
    return count


@triton.jit
def _draw_hot(row, noise, keys, passing, num_hot, threshold):
    """Begin the list with the hot classes, each with a normal of its own."""
    count = 0
    lane = tl.arange(0, _HOT_CELLS)
    for begin in range(0, num_hot, _HOT_CELLS):
        exists = begin + lane < num_hot
        classes = tl.load(row.hot_classes + begin + lane, mask=exists, other=0)
        score = tl.load(row.scores + classes, mask=exists, other=-float("inf")).to(tl.float32)
        value = (score - row.level) + noise.epsilon * normal(cell_bits(classes, noise.sample, keys))
        count = _append(passing, count, value, classes, exists & (value > threshold))
    return count


@triton.jit
def _open_tiles(row, noise, keys, start, end, threshold, uses_limits):
    """For each lane a bit for each of its 32 tiles, LANES apart from ``start``: set if the tile must be opened."""
    lane = tl.arange(0, _LANES)
    is_open = tl.zeros([_LANES], tl.uint32)
    for first in range(0, tl.minimum(32, tl.cdiv(end - start, _LANES)), _LANE_TILES):
        turn = first + tl.arange(0, _LANE_TILES)[:, None]
        tile = start + turn * _LANES + lane[None, :]
        exists = tile < end
        if uses_limits:
            limit = tl.load(row.limits + tile, mask=exists, other=0.0).to(tl.uint32, bitcast=True)
        else:
            best = tl.load(row.maxima + tile, mask=exists, other=-float("inf")) - row.level
            limit = tile_limit(tl.minimum(best, row.cold_limit), threshold, noise.epsilon)
        opens = exists & (cell_bits(tile, noise.sample, keys) <= limit)
        is_open |= tl.sum(opens.to(tl.uint32) << turn.to(tl.uint32), 0)
    return is_open


@triton.jit
def _draw_cold(row, noise, keys, passing, count, is_open, start, threshold, uses_limits):
    """Draw the largest normals of each lane's open tiles, from the top, for as long as one could still pass."""
    lane = tl.arange(0, _LANES)
    tile = tl.zeros([_LANES], tl.int32)
    left = tl.zeros([_LANES], tl.int32)
    bits = tl.zeros([_LANES], tl.uint32)
    taken = tl.zeros([_LANES], tl.uint32)
    tail = tl.zeros([_LANES], tl.float32)
    tail_limit = tl.zeros([_LANES], tl.float32)
    steps = tl.zeros([_LANES], tl.uint32)
    is_going = lane < 0
    while tl.max((is_going | (is_open != 0)).to(tl.int32), 0) != 0:
        # A lane that is done with its tile takes its next one: the lowest bit, whose number is a float's exponent.
        takes = ~is_going & (is_open != 0)
        lowest = is_open & (~is_open + 1)
        turn = ((lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127
        tile = tl.where(takes, start + turn * _LANES + lane, tile)
        is_open = tl.where(takes, is_open ^ lowest, is_open)
        tail_limit = tl.where(takes, _tail_limit(row, noise, tile, takes, threshold, uses_limits) * 1.001, tail_limit)
        bits = tl.where(takes, cell_bits(tile, noise.sample, keys), bits)
        left = tl.where(takes, TILE, left)
        taken = tl.where(takes, 0, taken)
        steps = tl.where(takes, 0, steps) + 1
        tail = tl.where(takes, largest_tail(uniform(bits), TILE), tail)
        is_going = (is_going | takes) & (tail < tail_limit)
        # The normals of a tile, from the largest down, belong to its classes in random order; taken ones are skipped.
        bits = next_bits(bits, steps)
        at = (bits % TILE).to(tl.int32)
        flag = tl.full([_LANES], 1, tl.uint32) << at.to(tl.uint32)
        is_fresh = is_going & ((taken & flag) == 0)
        taken = taken | flag
        classes = tile * TILE + at
        exists = is_fresh & (classes < row.num_classes)
        score = tl.load(row.scores + classes, mask=exists, other=-float("inf")).to(tl.float32) - row.level
        value = score + noise.epsilon * at_upper_tail(tl.minimum(tail, 0.99999994))
        passes = exists & (score <= row.cold_limit) & (value > threshold)
        count = _append(passing, count, value, classes, passes)
        # The next normal is the largest of those left, all of them below the last.
        left = tl.where(is_fresh, left - 1, left)
        bits = next_bits(bits, steps)
        following = tail + (1.0 - tail) * largest_tail(uniform(bits), tl.maximum(left, 1))
        tail = tl.where(is_fresh, following, tail)
        is_going = is_going & (left > 0) & (tail < tail_limit)
    return count


@triton.jit
def _tail_limit(row, noise, tile, is_read, threshold, uses_limits):
    if uses_limits:  # still in the cache, unlike the largest scores
        limit = tl.load(row.limits + tile, mask=is_read, other=0.0).to(tl.uint32, bitcast=True)
        tail = largest_tail((limit.to(tl.float32) + 1.0) * 2.3283064365386963e-10, TILE)
    else:
        best = tl.load(row.maxima + tile, mask=is_read, other=-float("inf")) - row.level
        tail = upper_tail((threshold - tl.minimum(best, row.cold_limit)) / noise.epsilon)
    return tail


@triton.jit
def _append(passing, count, value, classes, passes):
    """Append to the list what passes. What does not fit is counted all the same."""
    slot = count + tl.cumsum(passes.to(tl.int32), 0) - 1
    fits = passes & (slot < passing.capacity)
    tl.store(passing.scores + slot, value, mask=fits)
    tl.store(passing.classes + slot, classes, mask=fits)
    return count + tl.sum(passes.to(tl.int32), 0)


@triton.jit
def _another_threshold(threshold, enough_at, short_at, step, are_too_many):
    """The next threshold to try: between one that let too many pass and one that let too few, or further out."""
    enough_at = tl.where(are_too_many, threshold, enough_at)
    short_at = tl.where(are_too_many, short_at, threshold)
    up = tl.where(short_at == float("inf"), threshold + step, 0.5 * (threshold + short_at))
    down = tl.where(enough_at == -float("inf"), threshold - step, 0.5 * (threshold + enough_at))
    return tl.where(are_too_many, up, down), enough_at, short_at, step * 2


@triton.jit
def _ranked_value(value, is_listed, count, rank):
    """The ``rank``-th largest of the ``count`` listed values, if there are so many.

    Also how many are above it, and the largest of all.
    """
    largest = tl.max(tl.where(is_listed, value, -float("inf")), 0)
    smallest = tl.min(tl.where(is_listed, value, float("inf")), 0)
    low = smallest - (largest - smallest) * 1e-3 - 1e-30
    ranked, above = _ranked_between(value, is_listed, low, count, largest, rank)
    return ranked, above, largest


@triton.jit
def _next_ranked_value(value, is_listed, ranked, above, largest, rank):
    """The ``rank``-th largest of the listed values and how many are above it, given the same for a larger rank."""
    # If fewer than ``rank`` are above the value of the larger rank, several are equal to that.
    is_equal = above < rank
    found, above_found = _ranked_between(value, is_listed, ranked, above, largest, rank)
    return tl.where(is_equal, ranked, found), tl.where(is_equal, above, above_found)


@triton.jit
def _ranked_between(value, is_listed, low, above_low, high, rank):
    """The ``rank``-th largest of the listed values, and how many are above it, if ``rank`` are above ``low``.

    Narrows the range from there to ``high``, the largest, until one value is left. Reductions are the cost, so each
    counts the values above three points at once, in three parts of a 64-bit word.
    """
    above_high = 0
    middle = 0.5 * (low + high)
    while (above_low >= rank) & (above_low > above_high + 1) & (middle > low) & (middle < high):
        first = 0.5 * (low + middle)
        third = 0.5 * (middle + high)
        one = is_listed.to(tl.int64)
        counts = tl.sum(
            tl.where(value > first, one, 0)
            + tl.where(value > middle, one << 21, 0)
            + tl.where(value > third, one << 42, 0),
            0,
        )
        at_first = (counts & 0x1FFFFF).to(tl.int32)
        at_middle = ((counts >> 21) & 0x1FFFFF).to(tl.int32)
        at_third = (counts >> 42).to(tl.int32)
        low, above_low, high, above_high = _narrow(low, above_low, high, above_high, first, at_first, rank)
        low, above_low, high, above_high = _narrow(low, above_low, high, above_high, middle, at_middle, rank)
        low, above_low, high, above_high = _narrow(low, above_low, high, above_high, third, at_third, rank)
        middle = 0.5 * (low + high)
    return tl.max(tl.where(is_listed & (value <= high), value, -float("inf")), 0), above_high


@triton.jit
def _narrow(low, above_low, high, above_high, value, above, rank):
    """The range that holds the ``rank``-th largest, given how many are above a value in it."""
    raises = (above >= rank) & (value > low)
    lowers = (above < rank) & (value < high)
    return (
        tl.where(raises, value, low),
        tl.where(raises, above, above_low),
        tl.where(lowers, value, high),
        tl.where(lowers, above, above_high),
    )
