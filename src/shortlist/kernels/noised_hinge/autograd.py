"""The noised top-K hinge in one read of the scores and one write of the gradient; its noise is almost never drawn.

Only the (K+1)-th largest of ``s + epsilon Z`` and its class matter, for each draw. Rows of up to a few thousand classes
are perturbed outright (``draw_dense``). Longer rows take two steps:

1. ``prepare`` reads the scores. Of each tile of 32 classes it keeps the largest score and how many classes that stands
   for, and finds from these a level that a little more than K + 1 perturbed scores are expected to pass. Classes close
   to it or above are "hot", and listed.
2. ``draw_lazy`` gives hot classes normals of their own. The rest of a tile draws one number: the largest of its 32
   normals, whose law has a closed form. Only if the tile's largest score and largest normal together could pass the
   level are the next largest drawn, one by one, until none could. What is found above the level holds the (K+1)-th;
   if not, it is looked for again, lower.

The noise is a function of the seed and of where it is used (``random``), so looking twice, in any order,
sees the same noise, and the law is that of independent normals, to the 32 bits of its uniforms. The level
decides which classes are hot, but it depends on the scores alone.

The last draw of a row to finish computes its loss, and the last row their reduction. Backward writes zeros and the
B + 1 entries of each row.

Where classes arrive in chunks (``challenge``), the K + 1 best so far are listed first, and the level of a later chunk
is the value that a class must pass to get among them in any draw: that hangs on what other classes have drawn, not on
this chunk's noise, so the law is the same.
"""

import functools
import math
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shortlist.kernels.launch import Launcher, divided_up, kind, power_of_2
from shortlist.kernels.noised_hinge import loss as hinge
from shortlist.kernels.noised_hinge import sample as draws
from shortlist.kernels.noised_hinge import threshold as levels
from shortlist.kernels.noised_hinge.counters import SEED_BITS, words_needed
from shortlist.ops.random import rank_key

_prepare = Launcher(levels.prepare)
_list_hot = Launcher(levels.list_hot)
_survey = Launcher(levels.survey)
_draw_lazy = Launcher(draws.draw_lazy)
_draw_dense = Launcher(draws.draw_dense)
_challenge = Launcher(draws.challenge)
_backward = Launcher(hinge.backward)

_TILE = 32
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
# Rows up to this length are perturbed outright; up to the second one where K is large too.
_DENSE, _MOST_DENSE = 2048, 16384
# What the one warp of a draw works on at once: lanes, tiles of each lane, hot classes.
_LANES, _FOLD, _CELLS = 32, 16, 128
# Tiles that a program reads: of ``prepare``, which goes on to list, and of ``list_hot``; of ``survey``.
_TILES_READ, _TILES_SURVEYED = 128, 64
# The hot classes of up to so many tiles are listed by one program; it is done before the others have read their rows.
_LISTED_AT_ONCE = 1024
# Classes that a program looks at together for its list, in ``prepare`` and in ``list_hot``.
_CELLS_LISTED, _CELLS_LISTED_APART = 4096, 512
# Draws of a long row: each has a list in memory, of about a thousand bytes.
_MOST_LISTED = 1 << 12
# Backward compares the classes of so many draws with each other.
_MOST_DRAWS = 128
# Programs that fill a large GPU.
_PROGRAMS = 4096


def noised_hinge(
    scores_RL: Tensor,
    target_R: Tensor,
    k: int,
    margins_L: Tensor | None,
    scale: float,
    epsilon: float,
    num_draws: int,
    generator: torch.Generator | None,
    weight_L: Tensor | None,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """``scale (m_y + mean over draws of the (k+1)-th largest of s + epsilon Z - s_y)_+``, reduced, in float32."""
    if torch.compiler.is_compiling():
        from shortlist.kernels.noised_hinge.custom_op import forward

        # Drawn out here: the operator has to do the same again should the compiler decide to call it twice.
        drawn = torch.randint(1 << SEED_BITS, (1,), device=scores_RL.device, generator=generator)
        given = (scores_RL, target_R, margins_L, weight_L, drawn, generator is not None)
        compiled: Tensor = forward(*given, k, scale, epsilon, num_draws, ignore_index, reduction)[0]
        return compiled
    labels = Labels.of(target_R, margins_L, weight_L, ignore_index)
    settings = Settings.of(k, scale, epsilon, num_draws, reduction)
    seed = new_seed(scores_RL.device, generator, words=words_for(scores_RL.shape, settings))
    loss: Tensor = _NoisedHinge.apply(scores_RL, labels, settings, seed)
    return loss


class Seed(NamedTuple):
    """What all noise of a call hangs on: a word on the device, drawn by a generator, and a number to mix into it."""

    words: Tensor
    """The first holds the seed; all of them can count (``shortlist.kernels.noised_hinge.counters``)."""
    key: int


def new_seed(device: torch.device, generator: torch.Generator | None, *, words: int = 1) -> Seed:
    # On the device: the host need not wait for it, and a captured graph draws anew each time.
    drawn = torch.randint(1 << SEED_BITS, (words,), device=device, generator=generator)
    return Seed(drawn, rank_key(generator))


def can_take(num_classes: int, k: int, num_draws: int) -> bool:
    """Whether a grid has room for the draws, a warp for their lists, and memory for the lists of all draws."""
    if _is_dense(num_classes, k + 1):
        return num_draws < 1 << 16
    return num_draws <= _MOST_LISTED and _is_roomy(num_classes, k + 1)


def can_challenge(scores_RC: Tensor, places: int, num_draws: int) -> bool:
    """Whether ``challenge`` takes such a chunk, and is worth it."""
    num_classes = scores_RC.shape[1]
    fits = can_take(num_classes, places - 1, num_draws) and num_draws * places <= 1 << 16
    return fits and num_classes > _DENSE and _is_roomy(num_classes, places)


def challenge(
    values_RBK: Tensor,
    classes_RBK: Tensor,
    spoil_R: Tensor,
    scores_RC: Tensor,
    first_class: int,
    epsilon: float,
    seed: Seed,
    *,
    first: bool,
) -> None:
    """Let a chunk of classes compete for the K places of each row and draw, in place; bad scores turn ``spoil_R`` NaN.

    Args:
        first: Nobody has the places yet, whatever ``values_RBK`` says.
    """
    _, num_draws, k = values_RBK.shape
    epsilon = float(epsilon)
    search = _Search(scores_RC, k, epsilon)
    if first:
        count = words_needed(scores_RC.shape[0], parts=True, split_draws=0)
        words = torch.zeros(count, dtype=torch.int64, device=scores_RC.device)
        search.prepare(None, None, spoil_R, words)
    else:
        search.survey(values_RBK, spoil_R)
    places = power_of_2(k)
    capacity = max(_capacity(search.wanted), 2 * places)
    scratch = torch.empty(scores_RC.shape[0] * num_draws * 2 * capacity, dtype=torch.int32, device=scores_RC.device)
    _challenge(
        (scores_RC.shape[0], num_draws, 1),
        (scores_RC, seed.words, *search.found(), scratch, values_RBK, classes_RBK),
        (*search.shape, first_class, seed.key ^ (first_class << 32), k, num_draws, epsilon),
        (_TILE, _LANES, _FOLD, _CELLS, search.hot, capacity, places, first),
        kinds=search.kinds,
        num_warps=1,
    )


class Labels(NamedTuple):
    """What the loss needs beside the scores; the margins are 1 where none are given."""

    target_R: Tensor
    margins_L: Tensor | None
    weight_L: Tensor | None
    ignore_index: int

    @classmethod
    def of(cls, target_R: Tensor, margins_L: Tensor | None, weight_L: Tensor | None, ignore_index: int) -> "Labels":
        return cls(
            target_R.contiguous(),
            None if margins_L is None else margins_L.float().contiguous(),
            None if weight_L is None else weight_L.contiguous(),
            ignore_index,
        )


class Settings(NamedTuple):
    """What does not differ from row to row."""

    rank: int
    """Of the score that the label is measured against: K + 1."""
    scale: float
    epsilon: float
    num_draws: int
    reduction: str

    @classmethod
    def of(cls, k: int, scale: float, epsilon: float, num_draws: int, reduction: str) -> "Settings":
        # Numbers of other types would be another kind to the kernels, and the same key to the launchers.
        return cls(int(k) + 1, float(scale), float(epsilon), num_draws, reduction)


class _Search:
    """The first steps of a lazy search, and what they leave for the draws."""

    def __init__(self, scores_RL: Tensor, rank: int, epsilon: float) -> None:
        num_rows, device = scores_RL.shape[0], scores_RL.device
        self.scores_RL, self.epsilon, self.rank, self.wanted = scores_RL, epsilon, rank, _wanted(rank)
        self.num_tiles = divided_up(scores_RL.shape[1], _TILE)
        # Room for the hot classes of a row: in flat rows about twenty times those that should pass.
        self.hot = power_of_2(min(max(256, int(24 * self.wanted)), scores_RL.shape[1]))
        tiles = num_rows * self.num_tiles
        floats = torch.empty(2 * tiles + 2 * num_rows, dtype=torch.float32, device=device)
        sizes = [tiles, tiles, num_rows, num_rows]
        self.maxima, self.limits, self.level_R, self.cold_R = floats.split_with_sizes(sizes)
        ints = torch.empty(tiles + num_rows * (1 + self.hot), dtype=torch.int32, device=device)
        self._queue, self.hot_found_R, self.hot_classes = ints.split_with_sizes([tiles, num_rows, num_rows * self.hot])
        self.shape = scores_RL.shape[1], scores_RL.stride(0), self.num_tiles
        self.kinds: tuple[object, ...] = (kind(scores_RL),)

    def prepare(
        self, labels: "Labels | None", rows: "RowResults | None", spoil_R: Tensor | None, words: Tensor
    ) -> None:
        """Levels, limits and hot classes; with labels, also what the loss of each row is made of."""
        lanes = power_of_2(min(max(int(4 * self.wanted), 128), 2048))
        fold = max(1, min(power_of_2(self.num_tiles), 1024) // lanes)
        target_R, margins_L, weight_L, ignore_index = labels or Labels(words, None, None, 0)
        base_R, share_R = (rows.base_R, rows.share_R) if rows is not None else (None, None)
        lists = self.num_tiles <= _LISTED_AT_ONCE
        block = min(1024, power_of_2(self.num_tiles))
        loss = (target_R, margins_L, weight_L)
        has = (labels is not None, margins_L is not None, weight_L is not None)
        steepness = min(_steepness(self.scores_RL.shape[1], self.wanted) / self.epsilon, 1e30)
        _prepare(
            (self.scores_RL.shape[0] * divided_up(self.num_tiles, _TILES_READ), 1, 1),
            (self.scores_RL, *loss, *self.found(), self._queue, words, spoil_R, base_R, share_R),
            (*self.shape, self.epsilon, steepness, self.wanted, self.rank, ignore_index),
            (_TILE, _TILES_READ, lanes, fold, block, _CELLS_LISTED, self.hot, lists, spoil_R is not None, *has),
            kinds=(*self.kinds, *map(kind, loss)),
            num_warps=8,
        )
        if not lists:
            _list_hot(
                (self.scores_RL.shape[0], divided_up(self.num_tiles, _TILES_READ), 1),
                (self.scores_RL, *self.found(), self._queue),
                (*self.shape, self.epsilon),
                (_TILE, _TILES_READ, _CELLS_LISTED_APART, self.hot),
                kinds=self.kinds,
                num_warps=1,
            )

    def survey(self, values_RBK: Tensor, spoil_R: Tensor) -> None:
        """As ``prepare``, with the least that holds a place as the level."""
        held = values_RBK[0].numel()
        self.hot_found_R.zero_()  # where prepare does so itself
        _survey(
            (self.scores_RL.shape[0], divided_up(self.num_tiles, _TILES_SURVEYED), 1),
            (self.scores_RL, *self.found(), spoil_R, values_RBK),
            (*self.shape, held, self.epsilon),
            (_TILE, _TILES_SURVEYED, self.hot, power_of_2(held)),
            kinds=self.kinds,
            num_warps=4,
        )

    def found(self) -> tuple[Tensor, ...]:
        return self.maxima, self.limits, self.level_R, self.cold_R, self.hot_found_R, self.hot_classes


class RowResults:
    """What the draws leave, and the loss is made of."""

    def __init__(self, num_rows: int, num_draws: int, reduction: str, device: torch.device) -> None:
        floats = torch.empty(4 + num_rows * (3 + num_draws), dtype=torch.float32, device=device)
        sizes = [4, num_rows, num_rows, num_rows, num_rows * num_draws]
        self.total_share, self.base_R, self.share_R, loss_R, self.values_RB = floats.split_with_sizes(sizes)
        self.classes_RB = torch.empty(num_rows, num_draws, dtype=torch.int32, device=device)
        self.loss = torch.empty(num_rows if reduction == "none" else (), dtype=torch.float32, device=device)
        self._loss_R = self.loss if reduction == "none" else loss_R
        self.finish = _REDUCTIONS[reduction], min(256, power_of_2(num_rows)), min(128, power_of_2(num_draws))

    def pointers(self) -> tuple[Tensor, ...]:
        return self.base_R, self.share_R, self.values_RB, self.classes_RB, self._loss_R, self.loss, self.total_share


class _NoisedHinge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_RL: Tensor, labels: Labels, settings: Settings, seed: Seed) -> Tensor:
        rows = results_of_rows(scores_RL, labels, settings, seed)
        ctx.save_for_backward(labels.target_R, rows.classes_RB, rows.base_R, rows.total_share)
        ctx.num_classes, ctx.dtype, ctx.reduction = scores_RL.shape[1], scores_RL.dtype, settings.reduction
        return rows.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        target_R, classes_RB, slope_R, total_share = ctx.saved_tensors
        gradient_RL = gradient(
            grad_loss, target_R, classes_RB, slope_R, total_share, ctx.num_classes, ctx.dtype, ctx.reduction
        )
        return gradient_RL, None, None, None


def results_of_rows(scores_RL: Tensor, labels: Labels, settings: Settings, seed: Seed) -> RowResults:
    """The loss, and what its gradient is made of."""
    scores_RL = scores_RL if scores_RL.stride(1) == 1 else scores_RL.contiguous()
    rows = RowResults(scores_RL.shape[0], settings.num_draws, settings.reduction, scores_RL.device)
    draw = _launch_dense if _is_dense(scores_RL.shape[1], settings.rank) else _launch_lazy
    draw(scores_RL, labels, settings, seed, rows)
    return rows


def gradient(
    grad_loss: Tensor,
    target_R: Tensor,
    classes_RB: Tensor,
    slope_R: Tensor,
    total_share: Tensor,
    num_classes: int,
    dtype: torch.dtype,
    reduction: str,
) -> Tensor:
    """``(R, L)`` gradient of the loss in the scores; ``slope_R`` is what the draws leave in ``RowResults.base_R``."""
    num_rows, num_draws = classes_RB.shape
    if num_draws > _MOST_DRAWS:
        share = total_share[0] if reduction == "mean" else 1
        return _added_up(grad_loss / share, target_R, classes_RB, slope_R, num_classes).to(dtype)
    gradient_RL = torch.empty(num_rows, num_classes, dtype=dtype, device=grad_loss.device)
    places = min(4096, power_of_2(num_classes))
    grad_loss, target_R = grad_loss.contiguous(), target_R.contiguous()
    _backward(
        (num_rows, divided_up(num_classes, places), 1),
        (gradient_RL, grad_loss, target_R, classes_RB, slope_R, total_share),
        (num_classes, num_draws),
        (_REDUCTIONS[reduction], places, power_of_2(num_draws)),
        kinds=(dtype, kind(grad_loss), kind(target_R)),
        num_warps=4,
    )
    return gradient_RL


def _added_up(grad_loss: Tensor, target_R: Tensor, classes_RB: Tensor, slope_R: Tensor, num_classes: int) -> Tensor:
    """The gradient for so many draws that comparing each with each, as the kernel does, would take too long."""
    slope_R1 = torch.where(slope_R == 0, 0, slope_R * grad_loss).unsqueeze(1)
    known_R1 = ((target_R >= 0) & (target_R < num_classes)).unsqueeze(1)
    label_R1 = torch.where(known_R1, target_R.unsqueeze(1), 0)  # an ignored one may be no class
    gradient_RL = torch.zeros(len(target_R), num_classes, dtype=torch.float32, device=grad_loss.device)
    gradient_RL.scatter_add_(1, classes_RB.long(), (slope_R1 / classes_RB.shape[1]).expand(classes_RB.shape))
    return gradient_RL.scatter_add_(1, label_R1, -slope_R1)


def _launch_dense(scores_RL: Tensor, labels: Labels, settings: Settings, seed: Seed, rows: RowResults) -> None:
    rank, scale, epsilon, num_draws, _ = settings
    num_rows, num_classes = scores_RL.shape
    places = power_of_2(num_classes)
    _draw_dense(
        (num_rows, num_draws, 1),
        (scores_RL, labels.target_R, labels.margins_L, labels.weight_L, seed.words, *rows.pointers()),
        (num_rows, num_classes, scores_RL.stride(0), seed.key, rank, num_draws, epsilon, scale, labels.ignore_index),
        (places, labels.margins_L is not None, labels.weight_L is not None, *rows.finish),
        kinds=(kind(scores_RL), *map(kind, labels[:3])),
        num_warps=max(1, min(16, places // 512)),
    )


def _launch_lazy(scores_RL: Tensor, labels: Labels, settings: Settings, seed: Seed, rows: RowResults) -> None:
    rank, scale, epsilon, num_draws, _ = settings
    num_rows = scores_RL.shape[0]
    search = _Search(scores_RL, rank, epsilon)
    search.prepare(labels, rows, None, seed.words)
    capacity = _capacity(search.wanted)
    splits = _splits(num_rows * num_draws, search.num_tiles, capacity)
    cells = num_rows * num_draws * splits
    scratch = torch.empty(cells * (1 + 2 * capacity), dtype=torch.int32, device=scores_RL.device)
    lists, counts_RBS = scratch.split_with_sizes([cells * 2 * capacity, cells])
    _draw_lazy(
        (num_rows, num_draws, splits),
        (scores_RL, seed.words, *search.found(), counts_RBS, lists, *rows.pointers()),
        (num_rows, *search.shape, seed.key, rank, num_draws, epsilon, scale),
        (_TILE, _LANES, _FOLD, _CELLS, search.hot, capacity, splits, *rows.finish),
        kinds=search.kinds,
        num_warps=1,
    )


def _is_dense(num_classes: int, rank: int) -> bool:
    return num_classes <= _DENSE or (num_classes <= _MOST_DENSE and not _is_roomy(num_classes, rank))


def _is_roomy(num_classes: int, rank: int) -> bool:
    """Whether a row can be searched lazily: many of its tiles hold none of the K largest, and these fit one warp."""
    wanted = _wanted(rank)
    return divided_up(num_classes, _TILE) >= 1.5 * wanted and _capacity(wanted) <= 8192


def words_for(shape: torch.Size, settings: Settings) -> int:
    (num_rows, num_classes), rank, num_draws = shape, settings.rank, settings.num_draws
    if _is_dense(num_classes, rank):
        return words_needed(num_rows, parts=False, split_draws=0)
    splits = _splits(num_rows * num_draws, divided_up(num_classes, _TILE), _capacity(_wanted(rank)))
    return words_needed(num_rows, parts=True, split_draws=num_draws if splits > 1 else 0)


def _wanted(rank: int) -> float:
    """How many classes should pass the level on average, for fewer than rank to do so about once in a million draws."""
    return rank + 6 * math.sqrt(rank) + 6


@functools.lru_cache
def _steepness(num_classes: int, wanted: float) -> float:
    """How fast the chance to pass the level falls with the score: what a tile's weaker classes count for.

    In powers of two for each epsilon. Among classes that are alike, with the level z epsilons above them, it falls by
    about exp(-z) for each.
    """
    z = -NormalDist().inv_cdf(min(wanted / num_classes, 0.1))
    return 0.95 * z / math.log(2)


def _capacity(wanted: float) -> int:
    """Room for those that pass the level in one draw; should it not do, the level is raised."""
    return power_of_2(int(2.5 * wanted))


def _splits(draws: int, num_tiles: int, capacity: int) -> int:
    """Programs that share one draw of one row: enough of them to fill a GPU, none with less than a few tiles a lane.

    All their lists together are one warp's to select from, and it takes minutes to compile for very long ones.
    """
    splits = 1
    while 2 * splits * capacity <= 2048 and 2 * splits * draws <= _PROGRAMS and num_tiles >= 2 * splits * 128:
        splits *= 2
    return splits
