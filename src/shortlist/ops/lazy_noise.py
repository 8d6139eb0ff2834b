"""Noise that is almost never drawn: the k largest of ``x + epsilon Z``, in law, from few random numbers a draw.

Only perturbed scores above a threshold t are looked for. It is a function of the scores alone, a little below where the
k-th largest falls. How often a class passes it is known beforehand, hence:

- *Hot* classes, which pass easily, get a normal number each.
- For all others, think of each cell (a class in a draw) as holding a Poisson process of points over the values, of
  which the highest is its perturbed score: with ``-log Phi((v - x) / epsilon)`` points expected above v, that has the
  right law. Classes are cut into tiles; a tile's largest score bounds what its cells hold above t. One process of
  unit rate is laid over all cells of all tiles, draws and rows end to end, each cell as long as its bound. How deep in
  its cell a point lies is its value: points beyond the class's own share come out below t and are dropped. Only the
  points cost anything, not the cells.
- In the rare draw in which fewer than k classes pass, the rest of the row is drawn, conditioned on not passing.

Nothing is approximated: the choice of t and of the tiles decides the speed alone.

Shape suffixes: R rows, L classes, G tiles, T classes of a tile, B draws, D = R * B draws of all rows, H hot classes,
A points, C candidates of a draw, M tiles with a hot class, F draws that came short, S scores that stand for all,
P places.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shortlist.ops.checks import can_read

_ROOT_2 = math.sqrt(2)
# Normal quantile of the share of draws that come short of k passing classes: one in 10,000.
_RARELY_SHORT = 3.72
# In units of epsilon: a class this close below the threshold, or above it, is hot.
_HOT_WITHIN = 1.0
# For other classes, which pass with a chance p of at most P(Z > 1), -log(1 - p) is at most so many times p.
_POINTS_A_CHANCE = 1.0889
# Tiles cost less than points do: about so many to each candidate of a row save the most.
_TILES_A_CANDIDATE = 12
_LARGEST_TILE = 16
# Scores of a row that stand for all when its threshold is chosen, and how often the interval around it is halved.
_STAND_INS = 96
_HALVINGS = 7
# In units of epsilon times the square root of 2: as if no class were farther below. Its cell holds 1e-17 points.
_FARTHEST = 6.0
# The largest normal number that float64 arithmetic finds at the top of a cell, short of infinity.
_LARGEST_NORMAL = 8.2
# Drawing all of the noise is faster with fewer cells than this (measured), with fewer classes to each of the k places,
# or with more points a cell.
_FEWEST_CELLS = 2**19
_FEWEST_CLASSES_A_PLACE = 16
_MOST_POINTS_A_CELL = 0.1
# Values are measured from the threshold. The farther above it one lies the fewer digits its noise has; in units of
# epsilon, a last digit that is too coarse.
_COARSEST = 2**-7
# Candidates, and conditional draws, held at once: bounds the memory of many draws.
_CANDIDATES_AT_ONCE = 2**20
_DRAWN_AT_ONCE = 2**20
# Hot classes of all rows and draws at once, every row counted with as many as the one that has the most.
_MOST_HOT = 2**24


@dataclass(frozen=True)
class Tiles:
    """A cut of a row into ``count`` tiles of ``size`` classes.

    Tile g holds the classes g, g + count, g + 2 count, ...: maxima over a stride run at the speed of memory. So that
    whole tiles cover any number of classes, the last slot is counted from the end of the row; the first of its classes
    may then have another slot already, and ``owns`` tells.
    """

    size: int
    count: int
    starts: Tensor
    """``(T,)`` where in the row the classes of each slot start."""

    @classmethod
    def cut(cls, num_classes: int, size: int) -> "Tiles":
        """Into tiles of ``size`` classes, or a few less where that covers the row as well."""
        count = -(-num_classes // size)
        size = -(-num_classes // count)
        start_T = torch.arange(size, device="cpu") * count
        start_T[-1] = num_classes - count
        return cls(size, count, start_T)

    def maxima(self, x_RL: Tensor) -> Tensor:
        """``(R, G)`` largest score of each tile."""
        last_RG = x_RL[:, x_RL.shape[1] - self.count :]
        if self.size == 1:
            return last_RG
        others_RTG = x_RL[:, : (self.size - 1) * self.count].reshape(len(x_RL), self.size - 1, self.count)
        return torch.maximum(others_RTG.amax(1), last_RG)

    def owns(self, slot: Tensor, class_: Tensor) -> Tensor:
        """Whether the class at a slot has that slot alone."""
        return (slot < self.size - 1) | (class_ >= (self.size - 1) * self.count)


@dataclass(frozen=True)
class Candidates:
    """Classes that may be among the k largest, in each draw: every one above the threshold, and all hot ones."""

    above: Tensor
    """``(D, C)`` perturbed scores minus the threshold: a common offset of the scores costs no digits."""
    classes: Tensor
    """``(D, C)``; the number of classes, for none, in columns that a draw leaves empty, where ``above`` is -inf."""


def can_do(x_RL: Tensor, k: int, n_samples: int) -> bool:
    """Whether this is the way to draw: there is noise to leave out, and the scores can be read, whatever they are."""
    if not can_read(x_RL):  # asked first: in a graph that is made for any batch, a size compared is a limit
        return False
    return x_RL.numel() * n_samples >= _FEWEST_CELLS and x_RL.shape[-1] >= _FEWEST_CLASSES_A_PLACE * k


def largest_perturbed(
    x_RL: Tensor, k: int, places: slice, epsilon: float, n_samples: int, generator: torch.Generator
) -> tuple[Tensor, Tensor] | None:
    """Positions of the k largest of ``x + epsilon Z``, and ``epsilon Z`` there.

    Args:
        x_RL: Scores that ``can_do``.
        k: How many are ranked.
        places: Which of these are asked for: all, or the last one alone.
        epsilon, n_samples: Scale of the noise and number B of draws.
        generator: Source of the draws.

    Returns:
        Two ``(R, B, P)`` tensors; None where so many classes compete that drawing all of the noise is faster, where so
        few do that the others, far below, would have to be looked at, and where scores are not finite.
    """
    # A sum may overflow where no score is infinite: nothing but speed is lost.
    if not x_RL.sum().isfinite():
        return None
    tiles = Tiles.cut(x_RL.shape[1], tile_size(x_RL.shape[1], k, n_samples))
    tile_max_RG = tiles.maxima(x_RL)
    threshold_R1 = choose_threshold(x_RL, tile_max_RG, k, epsilon)
    positions, values = [], []
    step = max(1, _CANDIDATES_AT_ONCE // math.ceil(len(x_RL) * expected_candidates(k)))
    for start in range(0, n_samples, step):
        draws = min(step, n_samples - start)
        candidates = draw_candidates(x_RL, tiles, tile_max_RG, threshold_R1, k, epsilon, draws, generator)
        if candidates is None:
            return None
        position_DP, value_DP = _places_among(candidates, x_RL, threshold_R1, k, places, epsilon, draws, generator)
        if value_DP[:, -1].max() * torch.finfo(x_RL.dtype).eps > _COARSEST * epsilon:
            return None  # the threshold fell among classes that a very low score rules out
        positions.append(position_DP.view(len(x_RL), draws, -1))
        values.append(value_DP.view(len(x_RL), draws, -1))
    position_RBP, value_RBP = torch.cat(positions, 1), torch.cat(values, 1)
    score_RBP = x_RL.gather(1, position_RBP.flatten(1)).view_as(value_RBP)
    return position_RBP, value_RBP - (score_RBP - threshold_R1.unsqueeze(-1))


def expected_candidates(k: int) -> float:
    """Mean of a Poisson number that is rarely less than k: the approximation of Wilson and Hilferty."""
    return float(k * (1 - 1 / (9 * k) + _RARELY_SHORT / (3 * math.sqrt(k))) ** 3)


def tile_size(num_classes: int, k: int, n_samples: int) -> int:
    """Classes of a tile: fewer make closer bounds, hence fewer points in vain, but more tiles to look at."""
    fitting = num_classes / (_TILES_A_CANDIDATE * n_samples * expected_candidates(k))
    return max(1, min(_LARGEST_TILE, round(fitting)))


def choose_threshold(x_RL: Tensor, tile_max_RG: Tensor, k: int, epsilon: float) -> Tensor:
    """``(R, 1)`` threshold that a few more than k classes pass in a draw, by halving an interval.

    The expected number of passing classes is estimated from a few scores that stand for all: maxima over large parts
    of the row, each for itself, then some tile maxima and some scores, each for its likes.
    """
    num_classes, tiles = x_RL.shape[1], tile_max_RG.shape[1]
    wanted = expected_candidates(k)
    parts = Tiles.cut(tiles, max(1, tiles // max(_STAND_INS, math.ceil(4 * wanted))))
    part_max_RS = parts.maxima(tile_max_RG)
    stand_ins = [part_max_RS, _below_maxima(tile_max_RG, part_max_RS, parts.count)]
    stands_for = [1.0, tiles / parts.count - 1]
    if tiles < num_classes:
        stand_ins.append(_below_maxima(x_RL, tile_max_RG, parts.count))
        stands_for.append((num_classes - tiles) / parts.count)
    stand_in_RS = torch.cat(stand_ins, 1)
    stands_for_S = x_RL.new_tensor(stands_for).repeat_interleave(parts.count)
    # Too few pass the upper end of the interval even if all were as good as the best; half of the parts' maxima pass
    # its lower end.
    best_noise = torch.erfinv(torch.tensor(max(0.0, 1 - 2 * wanted / num_classes), device="cpu")).item()
    lowest_R1, highest_R1 = part_max_RS.amin(1, keepdim=True), part_max_RS.amax(1, keepdim=True)
    unit = epsilon * _ROOT_2
    stand_in_RS = (stand_in_RS - lowest_R1) / unit
    low_R1, high_R1 = torch.zeros_like(lowest_R1), (highest_R1 - lowest_R1) / unit + best_noise
    for _ in range(_HALVINGS):
        middle_R1 = torch.lerp(low_R1, high_R1, 0.5)
        passing_RS = (middle_R1 - stand_in_RS).clamp_(max=_FARTHEST).erfc_()
        enough_R1 = (passing_RS @ stands_for_S).unsqueeze(1) > 2 * wanted
        low_R1 = torch.where(enough_R1, middle_R1, low_R1)
        high_R1 = torch.where(enough_R1, high_R1, middle_R1)
    return torch.add(lowest_R1, low_R1, alpha=unit)


def _below_maxima(x_RL: Tensor, tile_max_RG: Tensor, number: int) -> Tensor:
    """Scores at regular places; where that is the largest of its tile, which counts by itself, the next of the tile."""
    num_classes, tiles = x_RL.shape[1], tile_max_RG.shape[1]
    class_S = torch.arange(number, device="cpu") * num_classes // number
    score_RS = x_RL.index_select(1, class_S)
    next_RS = x_RL.index_select(1, (class_S + tiles) % num_classes)
    return torch.where(score_RS < tile_max_RG.index_select(1, class_S % tiles), score_RS, next_RS)


def draw_candidates(
    x_RL: Tensor,
    tiles: Tiles,
    tile_max_RG: Tensor,
    threshold_R1: Tensor,
    k: int,
    epsilon: float,
    n_samples: int,
    generator: torch.Generator,
) -> Candidates | None:
    """Every class that passes the threshold, and all hot ones, in every draw; k columns at least."""
    rows, num_classes = x_RL.shape
    above_RG = tile_max_RG - threshold_R1
    row_H, class_H, score_above_H = _pull_out_hot(x_RL, tiles, above_RG, threshold_R1, epsilon)
    if int(torch.bincount(row_H, minlength=rows).max()) * rows * n_samples > _MOST_HOT:
        return None
    points = _draw_points(x_RL, tiles, above_RG, threshold_R1, epsilon, n_samples, generator)
    if points is None:
        return None
    draw_A, class_A, above_A = points
    hot_above_RH, hot_class_RH = _in_columns(row_H, rows, 0, (score_above_H, -math.inf), (class_H, num_classes))
    hot = hot_class_RH.shape[1]
    normal_RBH = torch.randn(rows, n_samples, hot, dtype=x_RL.dtype, generator=generator, device="cpu")
    hot_above_DH = torch.add(hot_above_RH.unsqueeze(1), normal_RBH, alpha=epsilon).flatten(0, 1)
    above_DC, class_DC = _in_columns(draw_A, rows * n_samples, k - hot, (above_A, -math.inf), (class_A, num_classes))
    if not hot:
        return Candidates(above_DC, class_DC)
    hot_class_DH = hot_class_RH.repeat_interleave(n_samples, 0)
    return Candidates(torch.cat([hot_above_DH, above_DC], 1), torch.cat([hot_class_DH, class_DC], 1))


def _places_among(
    candidates: Candidates,
    x_RL: Tensor,
    threshold_R1: Tensor,
    k: int,
    places: slice,
    epsilon: float,
    n_samples: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """``(D, P)`` positions and values above the threshold; draws that came short of candidates get the rest drawn."""
    value_DP, column_DP = _ranked(candidates.above, k, places)
    position_DP = candidates.classes.gather(1, column_DP)
    short_F = (value_DP[:, -1] <= 0).nonzero().squeeze(1)
    step = max(1, _DRAWN_AT_ONCE // x_RL.shape[1])
    for start in range(0, len(short_F), step):
        some_F = short_F[start : start + step]
        row_F = some_F // n_samples
        whole_FL = _not_passing(x_RL[row_F] - threshold_R1[row_F], epsilon, generator)
        whole_FL.scatter_(1, candidates.classes[some_F], candidates.above[some_F])
        value_DP[some_F], position_DP[some_F] = _ranked(whole_FL, k, places)
    return position_DP, value_DP


def _pull_out_hot(
    x_RL: Tensor, tiles: Tiles, above_RG: Tensor, threshold_R1: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Row, class and score above the threshold of every hot class; ``above_RG`` becomes the maxima of the others."""
    hot_tile_M = (above_RG > -_HOT_WITHIN * epsilon).flatten().nonzero().squeeze(1)
    row_M1 = (hot_tile_M // tiles.count).unsqueeze(1)
    class_MT = hot_tile_M.unsqueeze(1) - row_M1 * tiles.count + tiles.starts
    score_above_MT = x_RL.take(class_MT + row_M1 * x_RL.shape[1]) - threshold_R1.take(row_M1)
    is_hot_MT = score_above_MT > -_HOT_WITHIN * epsilon
    above_RG.view(-1)[hot_tile_M] = score_above_MT.masked_fill(is_hot_MT, -math.inf).amax(1)
    is_hot_MT &= tiles.owns(torch.arange(tiles.size, device="cpu"), class_MT)
    tile_H, slot_H = is_hot_MT.nonzero().unbind(1)
    return row_M1.squeeze(1)[tile_H], class_MT[tile_H, slot_H], score_above_MT[tile_H, slot_H]


def _draw_points(
    x_RL: Tensor,
    tiles: Tiles,
    above_RG: Tensor,
    threshold_R1: Tensor,
    epsilon: float,
    n_samples: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Draw, class and perturbed score above the threshold of every class that passes and is not hot; by draw."""
    rows, num_classes = x_RL.shape
    # Cells end to end: where each tile of a row ends, and where each draw, with all tiles of its row, does.
    bound_G = (above_RG / (-epsilon * _ROOT_2)).clamp_(max=_FARTHEST).erfc_().flatten()
    scale = _POINTS_A_CHANCE / 2
    tile_end_G = bound_G.cumsum(0, dtype=torch.float64).mul_(scale * tiles.size)
    row_end_R = tile_end_G[tiles.count - 1 :: tiles.count]
    row_length_R = row_end_R.diff(prepend=row_end_R.new_zeros(1))
    draw_end_D = row_length_R.repeat_interleave(n_samples).cumsum(0)
    if not draw_end_D[-1] < _MOST_POINTS_A_CELL * x_RL.numel() * n_samples:
        return None
    at_A, count_D = _poisson_process(draw_end_D, generator)
    # All draws of a row lie on its tiles; rounding must not move a point past the last of them.
    draw_A = torch.repeat_interleave(count_D, output_size=len(at_A))
    row_A = torch.arange(rows, device="cpu").repeat_interleave(n_samples).index_select(0, draw_A)
    at_A += (row_end_R.repeat_interleave(n_samples) - draw_end_D).index_select(0, draw_A)
    first_tile_A = row_A * tiles.count
    tile_A = torch.searchsorted(tile_end_G, at_A, right=True).clamp_(first_tile_A, first_tile_A + (tiles.count - 1))
    bound_A = bound_G.index_select(0, tile_A).double().mul_(scale)
    to_end_A = tile_end_G.index_select(0, tile_A).sub_(at_A).div_(bound_A)
    slot_A = to_end_A.long().clamp_(0, tiles.size - 1)
    depth_A = to_end_A.sub_(slot_A).neg_().add_(1).mul_(bound_A)
    class_A = tile_A - first_tile_A + tiles.starts.index_select(0, slot_A)
    place_A = torch.add(class_A, row_A, alpha=num_classes)
    score_above_A = x_RL.flatten().index_select(0, place_A) - threshold_R1.flatten().index_select(0, row_A)
    # A point at this depth has -log Phi(z) = depth. One that rounding puts above its cell has no z, and is not kept.
    normal_A = depth_A.neg_().exp_().mul_(2).sub_(1).erfinv_().mul_(_ROOT_2).clamp_(max=_LARGEST_NORMAL)
    above_A = torch.add(score_above_A, normal_A, alpha=epsilon).to(x_RL.dtype)
    keep_A = (above_A > 0) & (score_above_A <= -_HOT_WITHIN * epsilon) & tiles.owns(slot_A, class_A)
    # Of several points in a cell, which follow each other, the first is the highest.
    keep_A[1:] &= (place_A[1:] != place_A[:-1]) | (draw_A[1:] != draw_A[:-1])
    kept_A = keep_A.nonzero().squeeze(1)
    return draw_A.index_select(0, kept_A), class_A.index_select(0, kept_A), above_A.index_select(0, kept_A)


def _poisson_process(end_D: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points of a process of unit rate up to the last end, ascending, and how many lie in each of the intervals."""
    length = end_D[-1].item()
    enough = int(length + 6 * math.sqrt(length)) + 20
    at = end_D.new_zeros(1)
    while at[-1] < length:
        # 1 - u is never zero.
        gaps = torch.rand(enough, dtype=torch.float64, generator=generator, device="cpu").neg_().log1p_().neg_()
        gaps[0] += at[-1]
        at = torch.cat([at, gaps.cumsum(0)])
    last_D = torch.searchsorted(at, end_D)
    return at[1 : int(last_D[-1])], (last_D - 1).diff(prepend=last_D.new_zeros(1))


def _in_columns(group_A: Tensor, groups: int, least_width: int, *values_and_fill: tuple[Tensor, float]) -> list[Tensor]:
    """Values listed by ascending group, as matrices with a row for each group, filled up on the right."""
    count = torch.bincount(group_A, minlength=groups)
    width = max(least_width, int(count.max()))
    column_A = torch.arange(len(group_A), device="cpu") - (count.cumsum(0) - count).index_select(0, group_A)
    place_A = torch.add(column_A, group_A, alpha=width)
    matrices = []
    for values_A, fill in values_and_fill:
        matrix = values_A.new_full((groups, width), fill)
        matrix.view(-1)[place_A] = values_A
        matrices.append(matrix)
    return matrices


def _ranked(values_DC: Tensor, k: int, places: slice) -> tuple[Tensor, Tensor]:
    value_DK, column_DK = values_DC.topk(k)
    return value_DK[:, places], column_DK[:, places]


def _not_passing(score_above_FL: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
    """Perturbed scores above the threshold, all conditioned on being below it; with a column for the class of none."""
    chance_FL = torch.erfc(score_above_FL.double() / (epsilon * _ROOT_2)) / 2
    uniform_FL = torch.rand(score_above_FL.shape, dtype=torch.float64, generator=generator, device="cpu")
    normal_FL = torch.erfinv(2 * chance_FL * uniform_FL - 1) * _ROOT_2
    return F.pad(score_above_FL + epsilon * normal_FL, (0, 1), value=-math.inf).to(score_above_FL.dtype)
