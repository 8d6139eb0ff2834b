"""The k largest of ``x + epsilon Z`` from few random numbers: most of the noise is never drawn.

Only perturbed scores above a threshold t are searched for. The threshold depends on the scores alone, and is a little
below the value that the k-th largest usually takes.

- *Hot* classes have scores close to t or above it. Each gets a normal number in each draw.
- All other classes rarely pass t. Think of each cell (a class in a draw) as a Poisson process of points on the values,
  and of its highest point as the perturbed score: with ``-log Phi((v - x) / epsilon)`` points expected above v, it has
  the right distribution. Classes are grouped into tiles, and the largest score of a tile bounds the expected number of
  points above t in each of its cells. One process of unit rate is drawn on the cells of all tiles, draws and rows laid
  end to end, each cell as long as its bound. The depth of a point in its cell gives its value. A point that is deeper
  than its class's own expected number lies below t and is dropped. The cost is that of the points, not of the cells.
- In the rare draw in which fewer than k classes pass, the rest of the row is drawn, conditioned on not passing.

The result has exactly the distribution of ``x + epsilon Z``. Threshold and tiles only affect the speed.

Shape suffixes: R rows, L classes, G tiles, T classes of a tile, B draws, D = R * B draws of all rows, H hot classes,
A points, C candidates of a draw, M tiles with a hot class, F draws with too few candidates, S sampled scores, P ranks.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shortlist.ops.checks import can_read

_ROOT_2 = math.sqrt(2)
# One draw in 10,000 has fewer than k passing classes: the normal quantile of that probability.
_RARELY_SHORT = 3.72
# In units of epsilon: a class this close below the threshold, or above it, is hot.
_HOT_WITHIN = 1.0
# Other classes pass with a probability p of at most P(Z > 1). For these, -log(1 - p) is at most this many times p.
_POINTS_PER_PROBABILITY = 1.0889
# Tiles cost less than points: about this many for each candidate of a row are fastest.
_TILES_PER_CANDIDATE = 12
_LARGEST_TILE = 16
# To choose the threshold of a row: how many scores of each kind are sampled, and the steps of the bisection.
_SAMPLED_SCORES = 96
_BISECTIONS = 7
# In units of epsilon times the square root of 2. Classes farther below count as this far: 1e-17 points in their cells.
_FARTHEST = 6.0
# The largest finite normal number that float64 arithmetic finds at the top of a cell.
_LARGEST_NORMAL = 8.2
# Values are relative to the threshold. The farther above it one lies, the coarser its last digit, and so its noise. In
# units of epsilon: a last digit that is too coarse.
_COARSEST = 2**-7


@dataclass(frozen=True)
class Limits:
    """When noise is drawn lazily, and how much is held in memory at once. The defaults of the first three are measured.

    None of them changes the distribution of a result.
    """

    min_cells: int = 2**19
    """With fewer cells (rows times classes times draws), drawing all of the noise is faster."""
    min_classes_per_rank: int = 16
    """The same, for the number of classes divided by k."""
    max_points_per_cell: float = 0.1
    """With more points than this, drawing all of the noise is faster."""
    max_hot: int = 2**24
    """Hot classes of all rows and draws. Each row counts as many as the row with the most."""
    candidates_at_once: int = 2**20
    completed_at_once: int = 2**20
    """Scores of the draws with too few candidates."""
    perturbed_at_once: int = 2**22
    """Perturbed scores, where all of the noise is drawn."""


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Tiles:
    """A division of a row into ``count`` tiles of ``size`` classes.

    Tile g holds the classes g, g + count, g + 2 count, ..., since maxima over a stride are fast. Whole tiles must cover
    any number of classes, so the classes of the last slot are counted from the end of the row. Some of them may already
    have another slot: see ``owns``.
    """

    size: int
    count: int
    starts: Tensor
    """``(T,)`` first class of each slot."""

    @classmethod
    def cut(cls, num_classes: int, size: int) -> "Tiles":
        """Tiles of ``size`` classes, or slightly fewer if as many tiles still cover the row."""
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
        """True where this is the only, or the first, slot of the class."""
        return (slot < self.size - 1) | (class_ >= (self.size - 1) * self.count)


@dataclass(frozen=True)
class Candidates:
    """The classes that may be among the k largest of each draw: all that pass the threshold, and all hot ones."""

    above: Tensor
    """``(D, C)`` perturbed scores minus the threshold, so that a common offset of the scores costs no digits."""
    classes: Tensor
    """``(D, C)`` classes. Empty columns hold the number of classes, and -inf in ``above``."""


def supports(x_RL: Tensor, k: int, n_samples: int, limits: Limits = DEFAULT_LIMITS) -> bool:
    """True if the scores can be read and there is noise to save."""
    if not can_read(x_RL):  # first: comparing a size would limit the batch of an exported graph
        return False
    has_many_cells = x_RL.numel() * n_samples >= limits.min_cells
    return has_many_cells and x_RL.shape[-1] >= limits.min_classes_per_rank * k


def largest_perturbed(
    x_RL: Tensor,
    k: int,
    ranks: slice,
    epsilon: float,
    n_samples: int,
    generator: torch.Generator,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[Tensor, Tensor] | None:
    """Positions of the k largest of ``x + epsilon Z``, and ``epsilon Z`` there.

    Args:
        x_RL: Scores, for which ``supports`` is true.
        k: How many scores are ranked.
        ranks: Which of these are returned.
        epsilon, n_samples: Standard deviation of the noise, and number B of draws.
        generator: Source of the draws.

    Returns:
        Two ``(R, B, P)`` tensors. None if another way to draw is faster, because too many classes come close to the
        k-th largest score or so few that the others, far below, matter; and None if a score is not finite.
    """
    if not x_RL.sum().isfinite():  # large finite scores may overflow too; then only speed is lost
        return None
    tiles = Tiles.cut(x_RL.shape[1], tile_size(x_RL.shape[1], k, n_samples))
    tile_max_RG = tiles.maxima(x_RL)
    threshold_R1 = choose_threshold(x_RL, tile_max_RG, k, epsilon)
    return Search(x_RL, tiles, tile_max_RG, threshold_R1, epsilon, generator, limits).largest(k, ranks, n_samples)


def expected_candidates(k: int) -> float:
    """Mean of a Poisson number that is rarely less than k, by the approximation of Wilson and Hilferty."""
    return float(k * (1 - 1 / (9 * k) + _RARELY_SHORT / (3 * math.sqrt(k))) ** 3)


def tile_size(num_classes: int, k: int, n_samples: int) -> int:
    """Smaller tiles have closer bounds, so fewer points are dropped, but there are more tiles to look at."""
    fitting = num_classes / (_TILES_PER_CANDIDATE * n_samples * expected_candidates(k))
    return max(1, min(_LARGEST_TILE, round(fitting)))


def choose_threshold(x_RL: Tensor, tile_max_RG: Tensor, k: int, epsilon: float) -> Tensor:
    """``(R, 1)`` threshold that slightly more than k classes pass in a draw, by bisection.

    The expected number of passing classes is estimated from a weighted sample of the scores: the maxima of large parts
    of the row, with weight 1; some tile maxima; and some of all scores.
    """
    num_classes, tiles = x_RL.shape[1], tile_max_RG.shape[1]
    wanted = expected_candidates(k)
    parts = Tiles.cut(tiles, max(1, tiles // max(_SAMPLED_SCORES, math.ceil(4 * wanted))))
    part_max_RS = parts.maxima(tile_max_RG)
    samples = [part_max_RS, _sample_below_maxima(tile_max_RG, part_max_RS, parts.count)]
    weights = [1.0, tiles / parts.count - 1]
    if tiles < num_classes:
        samples.append(_sample_below_maxima(x_RL, tile_max_RG, parts.count))
        weights.append((num_classes - tiles) / parts.count)
    sample_RS = torch.cat(samples, 1)
    weight_S = x_RL.new_tensor(weights).repeat_interleave(parts.count)
    # Too few would pass the upper end of the interval even if all scores were as large as the largest. Half of the
    # parts' maxima pass its lower end.
    best_noise = torch.erfinv(torch.tensor(max(0.0, 1 - 2 * wanted / num_classes), device="cpu")).item()
    lowest_R1, highest_R1 = part_max_RS.amin(1, keepdim=True), part_max_RS.amax(1, keepdim=True)
    unit = epsilon * _ROOT_2
    sample_RS = (sample_RS - lowest_R1) / unit
    low_R1, high_R1 = torch.zeros_like(lowest_R1), (highest_R1 - lowest_R1) / unit + best_noise
    for _ in range(_BISECTIONS):
        middle_R1 = torch.lerp(low_R1, high_R1, 0.5)
        passing_RS = (middle_R1 - sample_RS).clamp_(max=_FARTHEST).erfc_()
        is_enough_R1 = (passing_RS @ weight_S).unsqueeze(1) > 2 * wanted
        low_R1 = torch.where(is_enough_R1, middle_R1, low_R1)
        high_R1 = torch.where(is_enough_R1, high_R1, middle_R1)
    return torch.add(lowest_R1, low_R1, alpha=unit)


def _sample_below_maxima(x_RL: Tensor, tile_max_RG: Tensor, number: int) -> Tensor:
    """Scores at regular distances. The largest score of a tile, which is counted elsewhere, is replaced by the next."""
    num_classes, tiles = x_RL.shape[1], tile_max_RG.shape[1]
    class_S = torch.arange(number, device="cpu") * num_classes // number
    score_RS = x_RL.index_select(1, class_S)
    next_RS = x_RL.index_select(1, (class_S + tiles) % num_classes)
    return torch.where(score_RS < tile_max_RG.index_select(1, class_S % tiles), score_RS, next_RS)


@dataclass(frozen=True)
class Search:
    """The search for perturbed scores above a given threshold."""

    x_RL: Tensor
    tiles: Tiles
    tile_max_RG: Tensor
    threshold_R1: Tensor
    epsilon: float
    generator: torch.Generator
    limits: Limits = DEFAULT_LIMITS

    def largest(self, k: int, ranks: slice, n_samples: int) -> tuple[Tensor, Tensor] | None:
        """As ``largest_perturbed``."""
        rows = len(self.x_RL)
        positions, values = [], []
        step = max(1, self.limits.candidates_at_once // math.ceil(rows * expected_candidates(k)))
        for start in range(0, n_samples, step):
            block = min(step, n_samples - start)
            candidates = self.draw_candidates(k, block)
            if candidates is None:
                return None
            position_DP, value_DP = self._rank(candidates, k, ranks, block)
            if value_DP[:, -1].max() * torch.finfo(self.x_RL.dtype).eps > _COARSEST * self.epsilon:
                return None  # the threshold is far below, among classes that a very low score excludes
            positions.append(position_DP.view(rows, block, -1))
            values.append(value_DP.view(rows, block, -1))
        position_RBP, value_RBP = torch.cat(positions, 1), torch.cat(values, 1)
        score_RBP = self.x_RL.gather(1, position_RBP.flatten(1)).view_as(value_RBP)
        return position_RBP, value_RBP - (score_RBP - self.threshold_R1.unsqueeze(-1))

    def draw_candidates(self, k: int, n_samples: int) -> Candidates | None:
        """The candidates of every draw, in k columns or more; None if the limits are exceeded."""
        rows, num_classes = self.x_RL.shape
        row_H, class_H, score_above_H, rest_max_RG = self._hot_classes()
        if int(torch.bincount(row_H, minlength=rows).max()) * rows * n_samples > self.limits.max_hot:
            return None
        points = self._draw_points(rest_max_RG, n_samples)
        if points is None:
            return None
        draw_A, class_A, above_A = points
        hot_above_RH, hot_class_RH = _in_columns(row_H, rows, 0, (score_above_H, -math.inf), (class_H, num_classes))
        hot = hot_class_RH.shape[1]
        normal_RBH = torch.randn(rows, n_samples, hot, dtype=self.x_RL.dtype, generator=self.generator, device="cpu")
        hot_above_DH = torch.add(hot_above_RH.unsqueeze(1), normal_RBH, alpha=self.epsilon).flatten(0, 1)
        above_DC, class_DC = _in_columns(
            draw_A, rows * n_samples, k - hot, (above_A, -math.inf), (class_A, num_classes)
        )
        if not hot:
            return Candidates(above_DC, class_DC)
        hot_class_DH = hot_class_RH.repeat_interleave(n_samples, 0)
        return Candidates(torch.cat([hot_above_DH, above_DC], 1), torch.cat([hot_class_DH, class_DC], 1))

    def _hot_classes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row, class and score above the threshold of every hot class; and ``(R, G)`` maxima of the other classes."""
        x_RL, tiles, hot_above = self.x_RL, self.tiles, -_HOT_WITHIN * self.epsilon
        rest_max_RG = self.tile_max_RG - self.threshold_R1
        tile_M = (rest_max_RG > hot_above).flatten().nonzero().squeeze(1)
        row_M1 = (tile_M // tiles.count).unsqueeze(1)
        class_MT = tile_M.unsqueeze(1) - row_M1 * tiles.count + tiles.starts
        score_above_MT = x_RL.take(class_MT + row_M1 * x_RL.shape[1]) - self.threshold_R1.take(row_M1)
        is_hot_MT = score_above_MT > hot_above
        rest_max_RG.view(-1)[tile_M] = score_above_MT.masked_fill(is_hot_MT, -math.inf).amax(1)
        is_hot_MT &= tiles.owns(torch.arange(tiles.size, device="cpu"), class_MT)
        tile_H, slot_H = is_hot_MT.nonzero().unbind(1)
        return row_M1.squeeze(1)[tile_H], class_MT[tile_H, slot_H], score_above_MT[tile_H, slot_H], rest_max_RG

    def _draw_points(self, rest_max_RG: Tensor, n_samples: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Draw, class and value above the threshold of every class that passes and is not hot, ordered by draw."""
        x_RL, tiles, epsilon = self.x_RL, self.tiles, self.epsilon
        rows, num_classes = x_RL.shape
        # The ends of the tiles of all rows, laid end to end, and of the draws, each with all tiles of its row.
        bound_G = (rest_max_RG / (-epsilon * _ROOT_2)).clamp_(max=_FARTHEST).erfc_().flatten()
        scale = _POINTS_PER_PROBABILITY / 2
        tile_end_G = bound_G.cumsum(0, dtype=torch.float64).mul_(scale * tiles.size)
        row_end_R = tile_end_G[tiles.count - 1 :: tiles.count]
        row_length_R = row_end_R.diff(prepend=row_end_R.new_zeros(1))
        draw_end_D = row_length_R.repeat_interleave(n_samples).cumsum(0)
        if not draw_end_D[-1] < self.limits.max_points_per_cell * x_RL.numel() * n_samples:
            return None
        at_A, count_D = _poisson_process(draw_end_D, self.generator)
        # Move the points of each draw onto the tiles of its row. Rounding must not put one past the last tile.
        draw_A = torch.repeat_interleave(count_D, output_size=len(at_A))
        row_A = torch.arange(rows, device="cpu").repeat_interleave(n_samples).index_select(0, draw_A)
        at_A += (row_end_R.repeat_interleave(n_samples) - draw_end_D).index_select(0, draw_A)
        first_tile_A = row_A * tiles.count
        tile_A = torch.searchsorted(tile_end_G, at_A, right=True).clamp_(first_tile_A, first_tile_A + (tiles.count - 1))
        # The slot and the depth of each point in its cell.
        bound_A = bound_G.index_select(0, tile_A).double().mul_(scale)
        to_end_A = tile_end_G.index_select(0, tile_A).sub_(at_A).div_(bound_A)
        slot_A = to_end_A.long().clamp_(0, tiles.size - 1)
        depth_A = to_end_A.sub_(slot_A).neg_().add_(1).mul_(bound_A)
        class_A = tile_A - first_tile_A + tiles.starts.index_select(0, slot_A)
        cell_A = torch.add(class_A, row_A, alpha=num_classes)
        score_above_A = x_RL.flatten().index_select(0, cell_A) - self.threshold_R1.flatten().index_select(0, row_A)
        # Solve -log Phi(z) = depth. Rounding may put a point above its cell: it has no z, and is dropped.
        normal_A = depth_A.neg_().exp_().mul_(2).sub_(1).erfinv_().mul_(_ROOT_2).clamp_(max=_LARGEST_NORMAL)
        above_A = torch.add(score_above_A, normal_A, alpha=epsilon).to(x_RL.dtype)
        keep_A = (above_A > 0) & (score_above_A <= -_HOT_WITHIN * epsilon) & tiles.owns(slot_A, class_A)
        # The points of one cell are neighbours, highest first: keep that one.
        keep_A[1:] &= (cell_A[1:] != cell_A[:-1]) | (draw_A[1:] != draw_A[:-1])
        kept_A = keep_A.nonzero().squeeze(1)
        return draw_A.index_select(0, kept_A), class_A.index_select(0, kept_A), above_A.index_select(0, kept_A)

    def _rank(self, candidates: Candidates, k: int, ranks: slice, n_samples: int) -> tuple[Tensor, Tensor]:
        """``(D, P)`` positions, and values above the threshold. Draws with too few candidates are completed."""
        value_DP, column_DP = _topk(candidates.above, k, ranks)
        position_DP = candidates.classes.gather(1, column_DP)
        short_F = (value_DP[:, -1] <= 0).nonzero().squeeze(1)
        step = max(1, self.limits.completed_at_once // self.x_RL.shape[1])
        for start in range(0, len(short_F), step):
            some_F = short_F[start : start + step]
            row_F = some_F // n_samples
            above_FL = _draw_below(self.x_RL[row_F] - self.threshold_R1[row_F], self.epsilon, self.generator)
            above_FL.scatter_(1, candidates.classes[some_F], candidates.above[some_F])
            value_DP[some_F], position_DP[some_F] = _topk(above_FL, k, ranks)
        return position_DP, value_DP


def _poisson_process(end_D: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ascending points of a process of unit rate up to the last end, and the number of points in each interval."""
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


def _in_columns(group_A: Tensor, groups: int, min_width: int, *values_and_fill: tuple[Tensor, float]) -> list[Tensor]:
    """Matrices with one row for each group, filled up on the right, from values in ascending order of their groups."""
    count = torch.bincount(group_A, minlength=groups)
    width = max(min_width, int(count.max()))
    column_A = torch.arange(len(group_A), device="cpu") - (count.cumsum(0) - count).index_select(0, group_A)
    index_A = torch.add(column_A, group_A, alpha=width)
    matrices = []
    for values_A, fill in values_and_fill:
        matrix = values_A.new_full((groups, width), fill)
        matrix.view(-1)[index_A] = values_A
        matrices.append(matrix)
    return matrices


def _topk(values_DC: Tensor, k: int, ranks: slice) -> tuple[Tensor, Tensor]:
    value_DK, column_DK = values_DC.topk(k)
    return value_DK[:, ranks], column_DK[:, ranks]


def _draw_below(score_above_FL: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
    """Perturbed scores minus the threshold, all conditioned on being below it, and a last column of -inf."""
    probability_FL = torch.erfc(score_above_FL.double() / (epsilon * _ROOT_2)) / 2
    uniform_FL = torch.rand(score_above_FL.shape, dtype=torch.float64, generator=generator, device="cpu")
    normal_FL = torch.erfinv(2 * probability_FL * uniform_FL - 1) * _ROOT_2
    return F.pad(score_above_FL + epsilon * normal_FL, (0, 1), value=-math.inf).to(score_above_FL.dtype)
