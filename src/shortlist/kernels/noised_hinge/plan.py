"""What the kernels do with rows of a given shape. Decided here, carried out in ``autograd``."""

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist

from shortlist.kernels.launch import ceil_div, next_power_of_2

TILE = 32
"""Classes of a tile."""

# Rows of up to this many classes are perturbed outright; up to the second number if the rank is too high to be lazy.
_MAX_DENSE, _MAX_DENSE_AT_HIGH_RANK = 2048, 16384
# A CUDA grid has no room for more programs along the axis of the samples.
_MAX_DENSE_SAMPLES = (1 << 16) - 1
# Each sample of a long row has a list in memory, of about a thousand bytes.
_MAX_LAZY_SAMPLES = 1 << 12
# Kept scores of a row, over all its samples.
_MAX_KEPT = 1 << 16
# One warp selects from a list.
_MAX_CAPACITY = 8192
# One program lists the hot classes of up to this many tiles, and is done before the others have read their rows.
_MAX_TILES_LISTED_AT_ONCE = 1024
# Programs that fill a large GPU.
_PROGRAMS = 4096


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the kernels do with rows of one shape.

    ``plan_for`` makes it. The result of a kernel does not depend on it, except for which noise it sees.
    """

    is_lazy: bool
    """Draw noise only where it can matter. Otherwise perturb every score, and only the last two fields count."""
    num_passing: float
    """Classes that should pass the level, on average."""
    steepness: float
    """How fast the chance to pass the level falls with the score, in powers of two for each epsilon.

    This is what the weaker classes of a tile count for. Among equal classes, with the level z epsilons above them, the
    chance falls by about exp(-z) for each epsilon.
    """
    capacity: int
    """Passing classes that the list of one program holds. If more pass, the threshold is raised."""
    hot_capacity: int
    """Hot classes that the list of a row holds. A row that has more does without the list."""
    level_lanes: int
    """Groups of tiles from which the level is found. Each counts as its best score."""
    level_tiles: int
    """Tiles of each lane that are read at once on the way to the level."""
    hot_tiles: int
    """Tiles that are searched for hot classes at once, unless ``lists_hot_apart``."""
    splits: int = 1
    """Programs that share one sample of one row."""
    max_tries: int = 100
    """Thresholds to try before giving up with a NaN."""
    tiles_read: int = 128
    """Tiles that a program of ``prepare`` or ``list_hot`` reads."""
    tiles_surveyed: int = 64
    """Tiles that a program of ``survey`` reads."""
    lists_hot_apart: bool = False
    """List the hot classes in a kernel of their own."""
    rows_summed: int = 256
    """Rows whose losses are added up at once."""
    samples_summed: int = 128
    """Samples of a row that are added up at once."""


@functools.lru_cache(maxsize=4096)
def plan_for(num_rows: int, num_classes: int, rank: int, n_samples: int) -> Plan:
    """The plan for the ``rank``-th largest of ``num_classes`` perturbed scores."""
    num_passing, num_tiles = _num_passing(rank), ceil_div(num_classes, TILE)
    capacity, padded_tiles = _capacity(num_passing), min(next_power_of_2(num_tiles), 1024)
    level_lanes = next_power_of_2(min(max(int(4 * num_passing), 128), 2048))
    return Plan(
        is_lazy=not _is_dense(num_classes, rank),
        num_passing=num_passing,
        steepness=0.95 * -NormalDist().inv_cdf(min(num_passing / num_classes, 0.1)) / math.log(2),
        capacity=capacity,
        # In flat rows, about twenty times as many are hot as should pass.
        hot_capacity=next_power_of_2(min(max(256, int(24 * num_passing)), num_classes)),
        level_lanes=level_lanes,
        level_tiles=max(1, padded_tiles // level_lanes),
        hot_tiles=padded_tiles,
        splits=_splits(num_rows * n_samples, num_tiles, capacity),
        lists_hot_apart=num_tiles > _MAX_TILES_LISTED_AT_ONCE,
    )


def fits(num_classes: int, rank: int, n_samples: int, *, is_chunk: bool = False) -> bool:
    """True if the kernels have room for such rows. A chunk of classes must also be long enough to be worth it.

    Not cached: ``torch.compile`` traces it.
    """
    if _is_dense(num_classes, rank):
        return not is_chunk and n_samples <= _MAX_DENSE_SAMPLES
    if is_chunk and n_samples * rank > _MAX_KEPT:
        return False
    return n_samples <= _MAX_LAZY_SAMPLES and _can_be_lazy(num_classes, rank)


def _is_dense(num_classes: int, rank: int) -> bool:
    if num_classes <= _MAX_DENSE:
        return True
    return num_classes <= _MAX_DENSE_AT_HIGH_RANK and not _can_be_lazy(num_classes, rank)


def _can_be_lazy(num_classes: int, rank: int) -> bool:
    """True if many tiles hold none of the ``rank`` largest scores, and one warp can select from the others."""
    num_passing = _num_passing(rank)
    return ceil_div(num_classes, TILE) >= 1.5 * num_passing and _capacity(num_passing) <= _MAX_CAPACITY


def _num_passing(rank: int) -> float:
    """So many that fewer than ``rank`` pass in about one of a million samples."""
    return rank + 6 * math.sqrt(rank) + 6


def _capacity(num_passing: float) -> int:
    return next_power_of_2(int(2.5 * num_passing))


def _splits(num_samples: int, num_tiles: int, capacity: int) -> int:
    """Enough programs to fill a GPU, none with less than a few tiles for each lane.

    One warp selects from all their lists together, and takes minutes to compile for very long ones.
    """
    splits = 1
    while 2 * splits * capacity <= 2048 and 2 * splits * num_samples <= _PROGRAMS and num_tiles >= 2 * splits * 128:
        splits *= 2
    return splits
