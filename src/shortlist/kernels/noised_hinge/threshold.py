"""Where the samples of a row have to look: the level of the row, the limits of its tiles, and its hot classes.

A tile is 32 neighbouring classes. Five cut-offs decide what is looked at:

level
    One for each row: close to its (K+1)-th largest perturbed score. All other cut-offs and all values are measured from
    it, since the sum of a large score and small noise would lose the noise. It depends on the scores alone.
cold limit
    One for each row: classes whose scores exceed it are hot, the others are cold. It lies two or three epsilons below
    the level.
threshold
    One for each sample: what a perturbed score must exceed to be listed. It is 0, the level itself, at first, and moves
    if too few or too many classes pass.
tile limit
    One for each tile: a number of 32 bits. The tile is opened if its random bits do not exceed it, as then its largest
    noise, added to its largest cold score, may pass the threshold.
tail limit
    The same for an open tile as an upper-tail probability: noise whose upper tail is larger cannot pass.
"""

import triton
import triton.language as tl

from shortlist.kernels.noised_hinge import plan
from shortlist.kernels.noised_hinge.counters import is_last, parts_counter
from shortlist.kernels.noised_hinge.loss import store_base
from shortlist.kernels.noised_hinge.random import upper_tail

TILE = tl.constexpr(plan.TILE)
# The cold limit in epsilons below the level. The further away, the fewer tiles are opened, but the longer the list of
# hot classes: where too many tiles hold a hot class, the nearer one is taken.
_FAR = tl.constexpr(3.0)
_NEAR = tl.constexpr(2.0)
_MAX_HOT_TILES = tl.constexpr(192)
# At this many epsilons from the level, the noise of a class keeps twelve bits.
_COARSE = tl.constexpr(8192.0)


@triton.jit
def prepare(
    scores, labels, search, queue_RT, counters, spoil_R, base_RP, share_R,
    shape, epsilon, steepness, num_passing, rank, margin, ignore_index,
    TILES: tl.constexpr, LANES: tl.constexpr, LANE_TILES: tl.constexpr, HOT_TILES: tl.constexpr, CELLS: tl.constexpr,
    HOT: tl.constexpr, NUM_RANKS: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    """Summarise some tiles of a row. The last program of the row sets its level and, if LISTS, lists hot classes.

    The summary of a tile is its largest score, NaN if a score is not finite, and its weight: the number of classes that
    are as good as its best. The limit of the tile later takes the place of the weight.
    """
    # Row after row, not all rows at once: what follows the last part of one row runs beside the reading of the next.
    parts = tl.cdiv(shape.num_tiles, TILES)
    row = (tl.program_id(0) // parts).to(tl.int64)
    num_rows = tl.num_programs(0) // parts
    if search.epsilon_R is not None:
        row_epsilon = tl.load(search.epsilon_R + row)
        steepness = tl.minimum(steepness * (epsilon / row_epsilon), 1e30)
        epsilon = row_epsilon
    scores_row = scores + row * shape.row_stride
    maxima_row = search.maxima_RT + row * shape.num_tiles
    weights_row = search.limits_RT + row * shape.num_tiles
    tile = (tl.program_id(0) % parts) * TILES + tl.arange(0, TILES)
    classes = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    exists = classes < shape.num_classes
    score = tl.load(scores_row + classes, mask=exists, other=-float("inf")).to(tl.float32)
    is_broken = tl.max((exists & (score - score != 0)).to(tl.int32), 1) != 0
    best = tl.max(score, 1)
    # Where no class exists, -inf less -inf is NaN, but then the tile does not exist either.
    weight = tl.sum(tl.exp2((score - best[:, None]) * steepness), 1)
    tl.store(maxima_row + tile, tl.where(is_broken, float("nan"), best), mask=tile < shape.num_tiles)
    tl.store(weights_row + tile, weight, mask=tile < shape.num_tiles)
    if is_last(parts_counter(counters, num_rows, row), parts):
        level, row_max, is_finite = _level(
            maxima_row, weights_row, shape.num_tiles, epsilon, steepness, num_passing, LANES, LANE_TILES
        )
        if is_finite & (row_max - level > _COARSE * epsilon):
            level = _raised(scores_row, shape.num_classes, level, row_max, rank, epsilon, CELLS)
        cold_limit = _cold_limit(maxima_row, shape.num_tiles, level, epsilon, HOT_TILES)
        tl.store(search.level_R + row, tl.where(is_finite, level, float("nan")))
        tl.store(search.cold_limit_R + row, cold_limit)
        tl.store(search.num_hot_R + row, 0)
        if spoil_R is not None:
            tl.store(spoil_R + row, tl.where(is_finite, 0.0, float("nan")))
        if base_RP is not None:
            store_base(
                scores, labels, base_RP + row * NUM_RANKS, share_R, row, level, is_finite, shape.num_classes,
                shape.row_stride, margin, ignore_index,
            )  # fmt: skip
        if LISTS:
            tl.debug_barrier()
            _list_hot_of(
                scores_row, search, queue_RT + row * shape.num_tiles, row, tl.arange(0, HOT_TILES), level, cold_limit,
                shape, epsilon, CELLS, HOT,
            )  # fmt: skip


@triton.jit
def list_hot(scores, search, queue_RT, shape, epsilon, TILES: tl.constexpr, CELLS: tl.constexpr, HOT: tl.constexpr):
    """The last step of ``prepare`` for long rows, shared by several programs."""
    row = tl.program_id(0).to(tl.int64)
    if search.epsilon_R is not None:
        epsilon = tl.load(search.epsilon_R + row)
    first = tl.program_id(1) * TILES
    _list_hot_of(
        scores + row * shape.row_stride, search, queue_RT + row * shape.num_tiles + first, row,
        first + tl.arange(0, TILES), tl.load(search.level_R + row), tl.load(search.cold_limit_R + row),
        shape, epsilon, CELLS, HOT,
    )  # fmt: skip


@triton.jit
def survey(
    scores, search, spoil_R, values_RBK, shape, num_held, epsilon,
    TILES: tl.constexpr, HOT: tl.constexpr, PADDED_HELD: tl.constexpr,
):  # fmt: skip
    """``prepare`` in one read, where the level is known: the smallest of the values that the row holds so far."""
    row = tl.program_id(0).to(tl.int64)
    held = tl.arange(0, PADDED_HELD)
    value = tl.load(values_RBK + row * num_held + held, mask=held < num_held, other=float("inf"))
    level = tl.min(value, 0)
    cold_limit = -_NEAR * epsilon
    tl.store(search.level_R + row, level)
    tl.store(search.cold_limit_R + row, cold_limit)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    classes = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    exists = classes < shape.num_classes
    score = tl.load(scores + row * shape.row_stride + classes, mask=exists, other=-float("inf")).to(tl.float32)
    is_broken = tl.max(tl.max((exists & (score - score != 0)).to(tl.int32), 1), 0) != 0
    tl.store(spoil_R + row, float("nan"), mask=is_broken)
    best = tl.max(score, 1) - level
    limit = tile_limit(tl.minimum(best, cold_limit), 0.0, epsilon)
    maxima_row = search.maxima_RT + row * shape.num_tiles
    limits_row = search.limits_RT + row * shape.num_tiles
    tl.store(maxima_row + tile, best + level, mask=tile < shape.num_tiles)
    tl.store(limits_row + tile, limit.to(tl.float32, bitcast=True), mask=tile < shape.num_tiles)
    if tl.max(best, 0) > cold_limit:
        is_hot = exists & (score - level > cold_limit)
        slot = tl.atomic_add(search.num_hot_R + row + classes * 0, 1, mask=is_hot, sem="relaxed")
        tl.store(search.hot_classes_RH + row * HOT + slot, classes, mask=is_hot & (slot < HOT))


@triton.jit
def hot_list(search, row, HOT: tl.constexpr):
    """How many hot classes are listed, what the scores of the others do not exceed, and whether there is a list.

    A row with more hot classes than the list holds does without it: then all of its classes are cold.
    """
    num_hot = tl.load(search.num_hot_R + row)
    has_list = num_hot <= HOT
    cold_limit = tl.load(search.cold_limit_R + row)
    return tl.where(has_list, num_hot, 0), tl.where(has_list, cold_limit, float("inf")), has_list


@triton.jit
def tile_limit(best, threshold, epsilon):
    """The tile limit for a largest cold score."""
    tail = upper_tail((threshold - best) / epsilon) * 1.001
    chance = 1.0 - tl.exp(tl.log(1.0 - tl.minimum(tail, 0.9)) * TILE)
    chance = tl.where(tail < 1e-4, tail * TILE, chance)
    # The largest float below 2^32: a tile that is certain to open does so in all but one of 2^24 cases.
    limit = tl.minimum(chance * 4294967296.0, 4294967040.0).to(tl.uint32)
    return tl.where(tail < 0.5, limit, tl.full([], 0xFFFFFFFF, tl.uint32))


@triton.jit
def _level(
    maxima_row, weights_row, num_tiles, epsilon, steepness, num_passing,
    LANES: tl.constexpr, LANE_TILES: tl.constexpr,
):  # fmt: skip
    """The level that about ``num_passing`` perturbed scores should pass, the largest score, and if all are finite."""
    best, weight, row_min, is_finite = _lanes(maxima_row, weights_row, num_tiles, steepness, LANES, LANE_TILES)
    row_max = tl.max(best, 0)
    lowest = row_min - 6 * epsilon
    high = row_max + 6 * epsilon
    low = tl.maximum(lowest, row_max)
    passing = tl.sum(weight * upper_tail((low - best) / epsilon), 0)
    passing_high = 0.0
    step = 2 * epsilon
    while (passing < num_passing) & (low > lowest) & is_finite:
        high = low
        passing_high = passing
        low = tl.maximum(lowest, low - step)
        step = step * 2
        passing = tl.sum(weight * upper_tail((low - best) / epsilon), 0)
    # The logarithm of the expected number is nearly linear. Every other step halves, in case it is not.
    tries = 0
    while (passing > 1.25 * num_passing) & (tries < 24) & is_finite:
        log_low = tl.log(passing)
        log_high = tl.log(tl.maximum(passing_high, 1e-6))
        share = (log_low - tl.log(1.1 * num_passing)) / (log_low - log_high)
        share = tl.where(tries % 2 == 0, tl.minimum(tl.maximum(share, 0.05), 0.95), 0.5)
        middle = low + share * (high - low)
        passing_middle = tl.sum(weight * upper_tail((middle - best) / epsilon), 0)
        is_enough = passing_middle >= num_passing
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
        passing_high = tl.where(is_enough, passing_high, passing_middle)
        passing = tl.where(is_enough, passing_middle, passing)
        tries += 1
    return low, row_max, is_finite


@triton.jit
def _lanes(maxima_row, weights_row, num_tiles, steepness, LANES: tl.constexpr, LANE_TILES: tl.constexpr):
    """Every LANES-th tile in one lane: their largest score, and how many classes are as good as that.

    Also the smallest maximum of a tile, and whether all scores are finite.
    """
    tile = tl.arange(0, LANE_TILES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    best = tl.full([LANES], -float("inf"), tl.float32)
    smallest = tl.full([LANES], float("inf"), tl.float32)
    weight = tl.zeros([LANES], tl.float32)
    is_broken = tl.zeros([LANES], tl.int32)
    for start in range(0, num_tiles, LANE_TILES * LANES):
        exists = start + tile < num_tiles
        top = tl.load(maxima_row + start + tile, mask=exists, other=-float("inf"), cache_modifier=".cg")
        more = tl.load(weights_row + start + tile, mask=exists, other=0.0, cache_modifier=".cg")
        is_broken |= tl.max((top != top).to(tl.int32), 0)
        smallest = tl.minimum(smallest, tl.min(tl.where(exists, top, float("inf")), 0))
        higher = tl.maximum(best, tl.max(top, 0))
        kept = tl.where(weight > 0, weight * tl.exp2((best - higher) * steepness), 0.0)
        weight = kept + tl.sum(tl.where(exists, more * tl.exp2((top - higher[None, :]) * steepness), 0.0), 0)
        best = higher
    return best, weight, tl.min(smallest, 0), tl.max(is_broken, 0) == 0


@triton.jit
def _raised(scores_row, num_classes, level, row_max, rank, epsilon, CELLS: tl.constexpr):
    """A little below the ``rank``-th largest score, if that is far above the level.

    The level was then found among classes that a very low score rules out: few others are left, or they share tiles.
    """
    low, high = level, row_max
    step = tl.maximum(epsilon, tl.abs(row_max) * 2.4e-7)  # or it would be lost beside the largest score
    middle = row_max - step
    is_looking = _number_above(scores_row, num_classes, level + _COARSE * epsilon, CELLS) >= rank
    while is_looking:
        is_enough = _number_above(scores_row, num_classes, middle, CELLS) >= rank
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
        # Down from the largest score, which is closer than the level may be, then between enough and too few.
        step = 2 * step
        middle = tl.where(low > level, 0.5 * low + 0.5 * high, row_max - step)
        is_looking = (low < middle) & (middle < high) & (high - low > epsilon)
    return tl.where(low > level, low - _FAR * epsilon, level)


@triton.jit
def _number_above(scores_row, num_classes, value, CELLS: tl.constexpr):
    count = tl.zeros([CELLS], tl.int32)
    for begin in range(0, num_classes, CELLS):
        classes = begin + tl.arange(0, CELLS)
        score = tl.load(scores_row + classes, mask=classes < num_classes, other=-float("inf")).to(tl.float32)
        count += (score > value).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _cold_limit(maxima_row, num_tiles, level, epsilon, HOT_TILES: tl.constexpr):
    count = tl.zeros([HOT_TILES], tl.int32)
    for start in range(0, num_tiles, HOT_TILES):
        tile = start + tl.arange(0, HOT_TILES)
        best = tl.load(maxima_row + tile, mask=tile < num_tiles, other=-float("inf"), cache_modifier=".cg")
        count += (best - level > -_FAR * epsilon).to(tl.int32)
    are_few = tl.sum(count, 0) <= tl.minimum(_MAX_HOT_TILES, num_tiles // 2)
    return tl.where(are_few, -_FAR, -_NEAR) * epsilon


@triton.jit
def _list_hot_of(
    scores_row, search, queue, row, tile, level, cold_limit, shape, epsilon, CELLS: tl.constexpr, HOT: tl.constexpr
):
    """Set the limits of these tiles, and append their hot classes to the row's list, as other programs may do too."""
    exists = tile < shape.num_tiles
    maxima_row = search.maxima_RT + row * shape.num_tiles
    limits_row = search.limits_RT + row * shape.num_tiles
    best = tl.load(maxima_row + tile, mask=exists, other=-float("inf"), cache_modifier=".cg") - level
    limit = tile_limit(tl.minimum(best, cold_limit), 0.0, epsilon)
    tl.store(limits_row + tile, limit.to(tl.float32, bitcast=True), mask=exists)
    is_hot_tile = best > cold_limit
    tl.store(queue + tl.cumsum(is_hot_tile.to(tl.int32), 0) - 1, tile, mask=is_hot_tile)
    num_cells = tl.sum(is_hot_tile.to(tl.int32), 0) * TILE
    tl.debug_barrier()
    for begin in range(0, num_cells, CELLS):
        cell = begin + tl.arange(0, CELLS)
        classes = tl.load(queue + cell // TILE, mask=cell < num_cells, other=0) * TILE + cell % TILE
        is_read = (cell < num_cells) & (classes < shape.num_classes)
        score = tl.load(scores_row + classes, mask=is_read, other=-float("inf")).to(tl.float32)
        is_hot = score - level > cold_limit
        slot = tl.atomic_add(search.num_hot_R + row + classes * 0, 1, mask=is_hot, sem="relaxed")
        tl.store(search.hot_classes_RH + row * HOT + slot, classes, mask=is_hot & (slot < HOT))
