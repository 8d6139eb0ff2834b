"""Where the draws of a row have to look: its level, the limits of its tiles, and its hot classes.

A row's "level" is a reference close to its (K+1)-th largest perturbed score, and values are measured from it: a sum of
large scores and small noise would lose the noise. A tile is T = 32 classes side by side.
"""

import triton
import triton.language as tl

from shortlist.kernels.noised_hinge.counters import is_last, parts_counter
from shortlist.kernels.noised_hinge.loss import store_base
from shortlist.kernels.noised_hinge.random import upper_tail

# Classes closer to the level than so many epsilons, or above it, are hot: the further this reaches, the fewer tiles
# have to be looked into. Where too many tiles hold a hot class, it reaches less far.
_FAR = tl.constexpr(3.0)
_NEAR = tl.constexpr(2.0)
_MOST_HOT_TILES = tl.constexpr(192)
# So many epsilons above the level, the noise of a class keeps twelve bits.
_COARSE = tl.constexpr(8192.0)


@triton.jit
def prepare(
    scores,
    target,
    margins,
    class_weights,
    maxima,
    limits,
    level_R,
    cold_R,
    hot_found_R,
    hot_classes,
    queue,
    words,
    spoil_R,
    base_R,
    share_R,
    num_classes,
    row_stride,
    num_tiles,
    epsilon,
    steepness,
    wanted,
    k,
    ignore_index,
    T: tl.constexpr,
    TILES: tl.constexpr,
    LANES: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
    CELLS: tl.constexpr,
    HOT: tl.constexpr,
    LISTS: tl.constexpr,
    SPOILS: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    HAS_MARGINS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):
    """Summarise some tiles of a row; the last program of the row sets its level and, if BLOCK has room for it, lists.

    A tile's summary is its largest score, NaN if one is not finite, and the number of classes as good as that. The
    latter is kept in ``limits`` until the limit of the tile takes its place.
    """
    # Row after row, not all rows at once: what follows the last part of one goes on beside the reading of the next.
    parts = tl.cdiv(num_tiles, TILES)
    row = (tl.program_id(0) // parts).to(tl.int64)
    num_rows = tl.num_programs(0) // parts
    scores_row = scores + row * row_stride
    maxima_row = maxima + row * num_tiles
    limits_row = limits + row * num_tiles
    tile = (tl.program_id(0) % parts) * TILES + tl.arange(0, TILES)
    place = tile[:, None] * T + tl.arange(0, T)[None, :]
    inside = place < num_classes
    score = tl.load(scores_row + place, mask=inside, other=-float("inf")).to(tl.float32)
    broken = tl.max((inside & (score - score != 0)).to(tl.int32), 1) != 0
    best = tl.max(score, 1)
    # With all classes missing, -inf less -inf is NaN, but then the tile is missing too.
    weight = tl.sum(tl.exp2((score - best[:, None]) * steepness), 1)
    tl.store(maxima_row + tile, tl.where(broken, float("nan"), best), mask=tile < num_tiles)
    tl.store(limits_row + tile, weight, mask=tile < num_tiles)
    if is_last(parts_counter(words, num_rows, row), parts):
        level, ceiling, finite = _level(maxima_row, limits_row, num_tiles, epsilon, steepness, wanted, LANES, FOLD)
        if finite & (ceiling - level > _COARSE * epsilon):
            level = _raised(scores_row, num_classes, level, ceiling, k, epsilon, CELLS)
        cold = _cold_limit(maxima_row, num_tiles, level, epsilon, BLOCK)
        tl.store(level_R + row, tl.where(finite, level, float("nan")))
        tl.store(cold_R + row, cold)
        tl.store(hot_found_R + row, 0)
        if SPOILS:
            tl.store(spoil_R + row, tl.where(finite, 0.0, float("nan")))
        if HAS_LABELS:
            store_base(
                scores, target, margins, class_weights, base_R, share_R, row, level, finite,
                num_classes, row_stride, ignore_index, HAS_MARGINS, HAS_WEIGHTS,
            )  # fmt: skip
        if LISTS:
            tl.debug_barrier()
            _list_hot_of(
                scores_row, maxima_row, limits_row, queue + row * num_tiles, hot_found_R + row, hot_classes + row * HOT,
                tl.arange(0, BLOCK), level, cold, num_classes, num_tiles, epsilon, T, CELLS, HOT,
            )  # fmt: skip


@triton.jit
def list_hot(
    scores, maxima, limits, level_R, cold_R, hot_found_R, hot_classes, queue, num_classes, row_stride, num_tiles,
    epsilon, T: tl.constexpr, TILES: tl.constexpr, CELLS: tl.constexpr, HOT: tl.constexpr,
):  # fmt: skip
    """The last step of ``prepare`` for long rows, divided among programs."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILES
    _list_hot_of(
        scores + row * row_stride, maxima + row * num_tiles, limits + row * num_tiles, queue + row * num_tiles + first,
        hot_found_R + row, hot_classes + row * HOT, first + tl.arange(0, TILES), tl.load(level_R + row),
        tl.load(cold_R + row), num_classes, num_tiles, epsilon, T, CELLS, HOT,
    )  # fmt: skip


@triton.jit
def survey(
    scores, maxima, limits, level_R, cold_R, hot_found_R, hot_classes, spoil_R, values_RBK,
    num_classes, row_stride, num_tiles, num_held, epsilon,
    T: tl.constexpr, TILES: tl.constexpr, HOT: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """``prepare`` in one read, where the level is known: the least that holds a place in the row."""
    row = tl.program_id(0).to(tl.int64)
    held = tl.arange(0, HELD)
    standing = tl.load(values_RBK + row * num_held + held, mask=held < num_held, other=float("inf"))
    level = tl.min(standing, 0)
    cold = -_NEAR * epsilon
    tl.store(level_R + row, level)
    tl.store(cold_R + row, cold)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    place = tile[:, None] * T + tl.arange(0, T)[None, :]
    inside = place < num_classes
    score = tl.load(scores + row * row_stride + place, mask=inside, other=-float("inf")).to(tl.float32)
    broken = tl.max(tl.max((inside & (score - score != 0)).to(tl.int32), 1), 0) != 0
    tl.store(spoil_R + row, float("nan"), mask=broken)
    best = tl.max(score, 1) - level
    limit = open_limit(tl.minimum(best, cold), 0.0, epsilon, T)
    tl.store(maxima + row * num_tiles + tile, best + level, mask=tile < num_tiles)
    tl.store(limits + row * num_tiles + tile, limit.to(tl.float32, bitcast=True), mask=tile < num_tiles)
    if tl.max(best, 0) > cold:
        hot = inside & (score - level > cold)
        slot = tl.atomic_add(hot_found_R + row + place * 0, 1, mask=hot, sem="relaxed")
        tl.store(hot_classes + row * HOT + slot, place, mask=hot & (slot < HOT))


@triton.jit
def hot_list(hot_found, cold, HOT: tl.constexpr):
    """How many hot classes are listed, what the others stay below, and whether there is a list.

    Rows with more hot classes than the list holds do without.
    """
    found = tl.load(hot_found)
    listed = found <= HOT
    return tl.where(listed, found, 0), tl.where(listed, tl.load(cold), float("inf")), listed


@triton.jit
def open_limit(best, threshold, epsilon, T: tl.constexpr):
    """A tile's bits up to this mean that its largest normal, at its largest cold score, may pass the threshold."""
    tail = upper_tail((threshold - best) / epsilon) * 1.001
    some = 1.0 - tl.exp(T * tl.log(1.0 - tl.minimum(tail, 0.9)))
    some = tl.where(tail < 1e-4, T * tail, some)
    # The largest float below 2^32; one that is certain to open opens all but once in 2^24.
    limit = tl.minimum(some * 4294967296.0, 4294967040.0).to(tl.uint32)
    return tl.where(tail < 0.5, limit, tl.full([], 0xFFFFFFFF, tl.uint32))


@triton.jit
def _level(maxima, weights, num_tiles, epsilon, steepness, wanted, LANES: tl.constexpr, FOLD: tl.constexpr):
    """The level that about ``wanted`` perturbed scores are expected to pass, and whether all scores are finite."""
    tile = tl.arange(0, FOLD)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    best = tl.full([LANES], -float("inf"), tl.float32)
    least = tl.full([LANES], float("inf"), tl.float32)
    weight = tl.zeros([LANES], tl.float32)
    broken = tl.zeros([LANES], tl.int32)
    # A lane stands for every LANES-th tile: their largest score, and how many classes are as good as it.
    for start in range(0, num_tiles, FOLD * LANES):
        there = start + tile < num_tiles
        top = tl.load(maxima + start + tile, mask=there, other=-float("inf"), cache_modifier=".cg")
        more = tl.load(weights + start + tile, mask=there, other=0.0, cache_modifier=".cg")
        broken |= tl.max((top != top).to(tl.int32), 0)
        least = tl.minimum(least, tl.min(tl.where(there, top, float("inf")), 0))
        higher = tl.maximum(best, tl.max(top, 0))
        kept = tl.where(weight > 0, weight * tl.exp2((best - higher) * steepness), 0.0)
        weight = kept + tl.sum(tl.where(there, more * tl.exp2((top - higher[None, :]) * steepness), 0.0), 0)
        best = higher
    finite = tl.max(broken, 0) == 0
    ceiling = tl.max(best, 0)
    floor = tl.min(least, 0) - 6 * epsilon
    high = ceiling + 6 * epsilon
    low = tl.maximum(floor, ceiling)
    expected = tl.sum(weight * upper_tail((low - best) / epsilon), 0)
    expected_high = 0.0
    step = 2 * epsilon
    while (expected < wanted) & (low > floor) & finite:
        high = low
        expected_high = expected
        low = tl.maximum(floor, low - step)
        step = step * 2
        expected = tl.sum(weight * upper_tail((low - best) / epsilon), 0)
    # The logarithm of the expected number is nearly straight; where it is not, every other step halves.
    tries = 0
    while (expected > 1.25 * wanted) & (tries < 24) & finite:
        log_low = tl.log(expected)
        log_high = tl.log(tl.maximum(expected_high, 1e-6))
        share = (log_low - tl.log(1.1 * wanted)) / (log_low - log_high)
        share = tl.where(tries % 2 == 0, tl.minimum(tl.maximum(share, 0.05), 0.95), 0.5)
        middle = low + share * (high - low)
        there_expected = tl.sum(weight * upper_tail((middle - best) / epsilon), 0)
        enough = there_expected >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        expected_high = tl.where(enough, expected_high, there_expected)
        expected = tl.where(enough, there_expected, expected)
        tries += 1
    return low, ceiling, finite


@triton.jit
def _raised(scores_row, num_classes, level, ceiling, k, epsilon, CELLS: tl.constexpr):
    """A little below the k-th largest score, if that is far above the level.

    The level then fell among classes that a very low score rules out, since few others are left or these share tiles.
    """
    low, high = level, ceiling
    step = tl.maximum(epsilon, tl.abs(ceiling) * 2.4e-7)  # or it would be lost beside the ceiling
    middle = ceiling - step
    looking = _number_above(scores_row, num_classes, level + _COARSE * epsilon, CELLS) >= k
    while looking:
        enough = _number_above(scores_row, num_classes, middle, CELLS) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        # Down from the ceiling, which is closer than the level may be, then between enough and too few.
        step = 2 * step
        middle = tl.where(low > level, 0.5 * low + 0.5 * high, ceiling - step)
        looking = (low < middle) & (middle < high) & (high - low > epsilon)
    return tl.where(low > level, low - _FAR * epsilon, level)


@triton.jit
def _number_above(scores_row, num_classes, value, CELLS: tl.constexpr):
    count = tl.zeros([CELLS], tl.int32)
    for begin in range(0, num_classes, CELLS):
        place = begin + tl.arange(0, CELLS)
        score = tl.load(scores_row + place, mask=place < num_classes, other=-float("inf")).to(tl.float32)
        count += (score > value).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _cold_limit(maxima, num_tiles, level, epsilon, BLOCK: tl.constexpr):
    """What the score of a class must exceed, measured from the level, for it to be hot."""
    within = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        best = tl.load(maxima + tile, mask=tile < num_tiles, other=-float("inf"), cache_modifier=".cg")
        within += (best - level > -_FAR * epsilon).to(tl.int32)
    few = tl.sum(within, 0) <= tl.minimum(_MOST_HOT_TILES, num_tiles // 2)
    return tl.where(few, -_FAR, -_NEAR) * epsilon


@triton.jit
def _list_hot_of(
    scores_row, maxima_row, limits_row, queue, hot_found, hot_row, tile, level, cold, num_classes, num_tiles,
    epsilon, T: tl.constexpr, CELLS: tl.constexpr, HOT: tl.constexpr,
):  # fmt: skip
    """Set the limits of these tiles, and append their hot classes to the row's list, as others may at the same time."""
    best = tl.load(maxima_row + tile, mask=tile < num_tiles, other=-float("inf"), cache_modifier=".cg") - level
    limit = open_limit(tl.minimum(best, cold), 0.0, epsilon, T)
    tl.store(limits_row + tile, limit.to(tl.float32, bitcast=True), mask=tile < num_tiles)
    hot_tile = best > cold
    tl.store(queue + tl.cumsum(hot_tile.to(tl.int32), 0) - 1, tile, mask=hot_tile)
    cells = tl.sum(hot_tile.to(tl.int32), 0) * T
    tl.debug_barrier()
    for begin in range(0, cells, CELLS):
        cell = begin + tl.arange(0, CELLS)
        place = tl.load(queue + cell // T, mask=cell < cells, other=0) * T + cell % T
        looked = (cell < cells) & (place < num_classes)
        score = tl.load(scores_row + place, mask=looked, other=-float("inf")).to(tl.float32)
        hot = score - level > cold
        slot = tl.atomic_add(hot_found + place * 0, 1, mask=hot, sem="relaxed")
        tl.store(hot_row + slot, place, mask=hot & (slot < HOT))
