"""The host's side: launch the kernels of the noised hinge, and its gradient.

Shape suffixes: R rows, L classes, C classes of a chunk, B samples, P ranks, S splits of a sample, K = rank best scores
so far, T tiles, H listed hot classes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shortlist.kernels.launch import Launcher, ceil_div, kind, next_power_of_2
from shortlist.kernels.noised_hinge import loss, sample, threshold
from shortlist.kernels.noised_hinge.counters import SEED_BITS, counters_needed
from shortlist.kernels.noised_hinge.plan import TILE, Plan, plan_for
from shortlist.ops.random import rank_key

_prepare = Launcher(threshold.prepare)
_list_hot = Launcher(threshold.list_hot)
_survey = Launcher(threshold.survey)
_sample_lazy = Launcher(sample.sample_lazy)
_sample_dense = Launcher(sample.sample_dense)
_merge_chunk = Launcher(sample.merge_chunk)
_backward = Launcher(loss.backward)

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
# Classes that a program looks at together for the list of hot classes, in ``prepare`` and in ``list_hot``.
_CELLS_LISTED, _CELLS_LISTED_APART = 4096, 512
# The kernel of the gradient compares the classes that all samples have chosen with each other.
_MAX_CHOICES_COMPARED = 128


class Labels(NamedTuple):
    """What the loss needs beside the scores, if it differs between rows or classes."""

    target_R: Tensor
    margins_L: Tensor | None
    weight_L: Tensor | None
    epsilon_R: Tensor | None

    @classmethod
    def of(
        cls, target_R: Tensor, margins_L: Tensor | None, weight_L: Tensor | None, epsilon_R: Tensor | None = None
    ) -> "Labels":
        return cls(
            target_R.contiguous(),
            None if margins_L is None else margins_L.float().contiguous(),
            None if weight_L is None else weight_L.contiguous(),
            None if epsilon_R is None else epsilon_R.contiguous(),
        )


class Settings(NamedTuple):
    """What is the same for all rows."""

    ranks: tuple[int, ...]
    """K + 1 for each K, the largest first: the label's score is compared with those of these ranks."""
    scale: float
    """Factor of the hinge at each rank."""
    margin: float
    """That of all classes, unless ``Labels`` has one for each."""
    epsilon: float
    """Standard deviation of the noise; if ``Labels`` has one for each row, about what these are."""
    n_samples: int
    ignore_index: int
    reduction: str

    @classmethod
    def of(
        cls,
        ks: Sequence[int],
        scale: float,
        margin: float,
        epsilon: float,
        n_samples: int,
        ignore_index: int,
        reduction: str,
    ) -> "Settings":
        """``ks`` in ascending order; ``scale`` is the factor of the loss, the mean over them."""
        ranks = tuple(int(k) + 1 for k in reversed(ks))
        # To the kernels, numbers of other types would be of another kind, but to the launchers they are the same key.
        return cls(ranks, float(scale) / len(ranks), float(margin), float(epsilon), n_samples, ignore_index, reduction)


class Seed(NamedTuple):
    """What all noise of a call follows from."""

    counters: Tensor
    """The first holds a random seed (``shortlist.kernels.noised_hinge.counters``)."""
    key: int
    """Mixed into the seed."""


class RowResults(NamedTuple):
    """What the samples leave of each row."""

    base_RP: Tensor
    """The first of each row is its hinge without the rival, until the loss is computed; from then on ``slope_RP``."""
    share_R: Tensor
    values_RPB: Tensor
    classes_RPB: Tensor
    loss_R: Tensor
    loss: Tensor
    """The reduced loss; for ``reduction="none"`` the same memory as ``loss_R``."""
    total_share: Tensor

    @property
    def slope_RP(self) -> Tensor:  # noqa: N802 (a shape suffix)
        """The derivative of a row's loss by its hinge at each rank, times its share."""
        return self.base_RP


class Search(NamedTuple):
    """What the first step of a lazy search finds, and the samples use."""

    maxima_RT: Tensor
    limits_RT: Tensor
    """Of 32 bits each, kept as float32. Until the level is known, the weights of the tiles."""
    level_R: Tensor
    cold_limit_R: Tensor
    num_hot_R: Tensor
    hot_classes_RH: Tensor
    epsilon_R: Tensor | None
    """As in ``Labels``."""


class _Shape(NamedTuple):
    num_classes: int
    row_stride: int
    num_tiles: int

    @classmethod
    def of(cls, scores_RL: Tensor) -> "_Shape":
        return cls(scores_RL.shape[1], scores_RL.stride(0), ceil_div(scores_RL.shape[1], TILE))


def noised_hinge(
    scores_RL: Tensor,
    target_R: Tensor,
    margins_L: Tensor | None,
    weight_L: Tensor | None,
    epsilon_R: Tensor | None,
    generator: torch.Generator | None,
    ks: tuple[int, ...],
    scale: float,
    margin: float,
    epsilon: float,
    n_samples: int,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """``scale (m_y + mean over samples of the (k+1)-th largest of s + epsilon Z - s_y)_+``, reduced, in float32.

    It is averaged over ``ks``, which are in ascending order.
    """
    settings = Settings.of(ks, scale, margin, epsilon, n_samples, ignore_index, reduction)
    plan = plan_for(*scores_RL.shape, settings.ranks[0], n_samples)
    num_counters = counters_for(plan, scores_RL.shape[0], n_samples)
    seed = new_seed(scores_RL.device, generator, num_counters=num_counters)
    labels = Labels.of(target_R, margins_L, weight_L, epsilon_R)
    loss: Tensor = NoisedHinge.apply(scores_RL, labels, settings, seed, plan)
    return loss


def new_seed(device: torch.device, generator: torch.Generator | None, *, num_counters: int = 1) -> Seed:
    # On the device: the host need not wait for it, and a CUDA graph draws a new one at each replay.
    counters = torch.randint(1 << SEED_BITS, (num_counters,), device=device, generator=generator)
    return Seed(counters, rank_key(generator))


def counters_for(plan: Plan, num_rows: int, n_samples: int) -> int:
    split_samples = n_samples if plan.is_lazy and plan.splits > 1 else 0
    return counters_needed(num_rows, with_parts=plan.is_lazy, split_samples=split_samples)


class NoisedHinge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_RL: Tensor, labels: Labels, settings: Settings, seed: Seed, plan: Plan) -> Tensor:
        results, _ = compute_rows(scores_RL, labels, settings, seed, plan)
        ctx.save_for_backward(labels.target_R, results.classes_RPB, results.slope_RP, results.total_share)
        ctx.num_classes, ctx.dtype, ctx.reduction = scores_RL.shape[1], scores_RL.dtype, settings.reduction
        return results.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        target_R, classes_RPB, slope_RP, total_share = ctx.saved_tensors
        gradient_RL = gradient(
            grad_loss, target_R, classes_RPB, slope_RP, total_share, ctx.num_classes, ctx.dtype, ctx.reduction
        )
        return gradient_RL, *(None,) * 4


def compute_rows(
    scores_RL: Tensor, labels: Labels, settings: Settings, seed: Seed, plan: Plan
) -> tuple[RowResults, Search | None]:
    """The loss, what its gradient needs, and what a lazy search found on the way."""
    scores_RL = scores_RL if scores_RL.stride(1) == 1 else scores_RL.contiguous()
    results = _empty_results(scores_RL, settings)
    if plan.is_lazy:
        return results, _launch_lazy(scores_RL, labels, settings, seed, plan, results)
    _launch_dense(scores_RL, labels, settings, seed, plan, results)
    return results, None


def _empty_results(scores_RL: Tensor, settings: Settings) -> RowResults:
    num_rows, n_samples, device = scores_RL.shape[0], settings.n_samples, scores_RL.device
    num_ranks = len(settings.ranks)
    sizes = [4, num_rows * num_ranks, num_rows, num_rows, num_rows * num_ranks * n_samples]
    floats = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    total_share, base_RP, share_R, loss_R, values_RPB = floats.split_with_sizes(sizes)
    classes_RPB = torch.empty(num_rows, num_ranks, n_samples, dtype=torch.int32, device=device)
    is_reduced = settings.reduction != "none"
    loss = torch.empty(() if is_reduced else num_rows, dtype=torch.float32, device=device)
    return RowResults(base_RP, share_R, values_RPB, classes_RPB, loss_R if is_reduced else loss, loss, total_share)


def _finishing_constants(num_rows: int, settings: Settings, plan: Plan) -> tuple[int, int, int, int]:
    rows = min(plan.rows_summed, next_power_of_2(num_rows))
    samples = min(plan.samples_summed, next_power_of_2(settings.n_samples))
    return len(settings.ranks), _REDUCTIONS[settings.reduction], rows, samples


def _launch_dense(
    scores_RL: Tensor, labels: Labels, settings: Settings, seed: Seed, plan: Plan, results: RowResults
) -> None:
    ranks, scale, margin, epsilon, n_samples, ignore_index, _ = settings
    num_rows, num_classes = scores_RL.shape
    padded_classes = next_power_of_2(num_classes)
    _sample_dense(
        (num_rows, n_samples, 1),
        (scores_RL, labels, seed.counters, results),
        (num_rows, num_classes, scores_RL.stride(0), seed.key, ranks, n_samples, epsilon, scale, margin, ignore_index),
        (padded_classes, *_finishing_constants(num_rows, settings, plan)),
        kinds=(kind(scores_RL), *map(kind, labels)),
        num_warps=max(1, min(16, padded_classes // 512)),
    )


def _launch_lazy(
    scores_RL: Tensor, labels: Labels, settings: Settings, seed: Seed, plan: Plan, results: RowResults
) -> Search:
    ranks, scale, _, epsilon, n_samples, _, _ = settings
    num_rows = scores_RL.shape[0]
    search, queue_RT = _empty_search(scores_RL, plan, labels.epsilon_R)
    _launch_prepare(scores_RL, search, queue_RT, seed.counters, settings, plan, labels=labels, results=results)
    cells = num_rows * n_samples * plan.splits
    scratch = torch.empty(cells * (1 + 2 * plan.capacity), dtype=torch.int32, device=scores_RL.device)
    lists, counts_RBS = scratch.split_with_sizes([cells * 2 * plan.capacity, cells])
    _sample_lazy(
        (num_rows, n_samples, plan.splits),
        (scores_RL, seed.counters, search, counts_RBS, lists, results),
        (num_rows, _Shape.of(scores_RL), seed.key, ranks, n_samples, epsilon, scale),
        (
            plan.hot_capacity,
            plan.capacity,
            plan.splits,
            plan.max_tries,
            *_finishing_constants(num_rows, settings, plan),
        ),
        kinds=(kind(scores_RL), kind(search.epsilon_R)),
        num_warps=1,
    )
    return search


def merge_chunk(
    values_RBK: Tensor,
    classes_RBK: Tensor,
    spoil_R: Tensor,
    scores_RC: Tensor,
    first_class: int,
    epsilon: float,
    seed: Seed,
    *,
    is_first: bool,
    plan: Plan | None = None,
) -> Search:
    """Merge a chunk of classes into the best so far of each row and sample, in place.

    Args:
        values_RBK, classes_RBK: The best so far; ignored if the chunk ``is_first``.
        spoil_R: Becomes NaN for rows that hold a NaN or an infinity.
    """
    num_rows, n_samples, rank = values_RBK.shape
    plan = plan or plan_for(num_rows, scores_RC.shape[1], rank, n_samples)
    search, queue_RT = _empty_search(scores_RC, plan)
    settings = Settings((rank,), 1.0, 0.0, float(epsilon), n_samples, 0, "none")
    if is_first:
        num_counters = counters_needed(num_rows, with_parts=True, split_samples=0)
        counters = torch.zeros(num_counters, dtype=torch.int64, device=scores_RC.device)
        _launch_prepare(scores_RC, search, queue_RT, counters, settings, plan, spoil_R=spoil_R)
    else:
        _launch_survey(scores_RC, search, values_RBK, spoil_R, settings, plan)
    padded_rank = next_power_of_2(rank)
    capacity = max(plan.capacity, 2 * padded_rank)
    scratch = torch.empty(num_rows * n_samples * 2 * capacity, dtype=torch.int32, device=scores_RC.device)
    _merge_chunk(
        (num_rows, n_samples, 1),
        (scores_RC, seed.counters, search, scratch, values_RBK, classes_RBK),
        (_Shape.of(scores_RC), first_class, seed.key ^ (first_class << 32), rank, n_samples, settings.epsilon),
        (plan.hot_capacity, capacity, padded_rank, plan.max_tries, is_first),
        kinds=(kind(scores_RC),),
        num_warps=1,
    )
    return search


def _empty_search(scores_RL: Tensor, plan: Plan, epsilon_R: Tensor | None = None) -> tuple[Search, Tensor]:
    """Memory for a search, and for queues of tiles."""
    num_rows, device = scores_RL.shape[0], scores_RL.device
    tiles, hot = num_rows * ceil_div(scores_RL.shape[1], TILE), num_rows * plan.hot_capacity
    floats = torch.empty(2 * tiles + 2 * num_rows, dtype=torch.float32, device=device)
    ints = torch.empty(tiles + num_rows + hot, dtype=torch.int32, device=device)
    queue_RT, num_hot_R, hot_classes_RH = ints.split_with_sizes([tiles, num_rows, hot])
    maxima_RT, limits_RT, level_R, cold_limit_R = floats.split_with_sizes([tiles, tiles, num_rows, num_rows])
    return Search(maxima_RT, limits_RT, level_R, cold_limit_R, num_hot_R, hot_classes_RH, epsilon_R), queue_RT


def _launch_prepare(
    scores_RL: Tensor,
    search: Search,
    queue_RT: Tensor,
    counters: Tensor,
    settings: Settings,
    plan: Plan,
    *,
    labels: Labels | None = None,
    results: RowResults | None = None,
    spoil_R: Tensor | None = None,
) -> None:
    """Find levels, limits and hot classes; with labels, also the first terms of each row's loss."""
    num_rows, shape = scores_RL.shape[0], _Shape.of(scores_RL)
    parts = ceil_div(shape.num_tiles, plan.tiles_read)
    base_RP, share_R = (None, None) if results is None else results[:2]
    labels = labels or Labels(counters, None, None, None)  # not read
    ranks, margin, ignore_index = settings.ranks, settings.margin, settings.ignore_index
    steepness = min(plan.steepness / settings.epsilon, 1e30)
    _prepare(
        (num_rows * parts, 1, 1),
        (scores_RL, labels, search, queue_RT, counters, spoil_R, base_RP, share_R),
        (shape, settings.epsilon, steepness, plan.num_passing, ranks[0], margin, ignore_index),
        (
            plan.tiles_read,
            plan.level_lanes,
            plan.level_tiles,
            plan.hot_tiles,
            _CELLS_LISTED,
            plan.hot_capacity,
            len(ranks),
            not plan.lists_hot_apart,
        ),
        kinds=(kind(scores_RL), *map(kind, labels), base_RP is None),
        num_warps=8,
    )
    if plan.lists_hot_apart:
        _list_hot(
            (num_rows, parts, 1),
            (scores_RL, search, queue_RT),
            (shape, settings.epsilon),
            (plan.tiles_read, _CELLS_LISTED_APART, plan.hot_capacity),
            kinds=(kind(scores_RL), kind(search.epsilon_R)),
            num_warps=1,
        )


def _launch_survey(
    scores_RL: Tensor, search: Search, values_RBK: Tensor, spoil_R: Tensor, settings: Settings, plan: Plan
) -> None:
    """As ``_launch_prepare``, where the smallest of the values so far is the level."""
    num_held, shape = values_RBK[0].numel(), _Shape.of(scores_RL)
    search.num_hot_R.zero_()  # ``prepare`` does so itself
    _survey(
        (scores_RL.shape[0], ceil_div(shape.num_tiles, plan.tiles_surveyed), 1),
        (scores_RL, search, spoil_R, values_RBK),
        (shape, num_held, settings.epsilon),
        (plan.tiles_surveyed, plan.hot_capacity, next_power_of_2(num_held)),
        kinds=(kind(scores_RL),),
        num_warps=4,
    )


def gradient(
    grad_loss: Tensor,
    target_R: Tensor,
    classes_RPB: Tensor,
    slope_RP: Tensor,
    total_share: Tensor,
    num_classes: int,
    dtype: torch.dtype,
    reduction: str,
) -> Tensor:
    """``(R, L)`` gradient of the loss in the scores."""
    num_rows, num_ranks, n_samples = classes_RPB.shape
    if num_ranks * n_samples > _MAX_CHOICES_COMPARED:
        share = total_share[0] if reduction == "mean" else 1
        return scattered_gradient(grad_loss / share, target_R, classes_RPB, slope_RP, num_classes).to(dtype)
    gradient_RL = torch.empty(num_rows, num_classes, dtype=dtype, device=grad_loss.device)
    classes = min(4096, next_power_of_2(num_classes))
    grad_loss, target_R = grad_loss.contiguous(), target_R.contiguous()
    _backward(
        (num_rows, ceil_div(num_classes, classes), 1),
        (gradient_RL, grad_loss, target_R, classes_RPB, slope_RP, total_share),
        (num_classes, n_samples),
        (num_ranks, _REDUCTIONS[reduction], classes, next_power_of_2(num_ranks * n_samples)),
        kinds=(dtype, kind(grad_loss), kind(target_R)),
        num_warps=4,
    )
    return gradient_RL


def scattered_gradient(
    grad_loss: Tensor, target_R: Tensor, classes_RPB: Tensor, slope_RP: Tensor, num_classes: int
) -> Tensor:
    """The gradient for so many samples that comparing each with each, as the kernel does, would take too long."""
    num_rows, num_ranks, n_samples = classes_RPB.shape
    slope_RP = slope_RP.view(num_rows, num_ranks)
    slope_RP = torch.where(slope_RP == 0, 0, slope_RP * grad_loss.reshape(-1, 1))
    is_known_R1 = ((target_R >= 0) & (target_R < num_classes)).unsqueeze(1)
    label_R1 = torch.where(is_known_R1, target_R.unsqueeze(1), 0)  # an ignored one may be no class
    gradient_RL = torch.zeros(len(target_R), num_classes, dtype=torch.float32, device=grad_loss.device)
    entry_RPB = (slope_RP / n_samples).unsqueeze(-1).expand(classes_RPB.shape)
    gradient_RL.scatter_add_(1, classes_RPB.flatten(1).long(), entry_RPB.flatten(1))
    return gradient_RL.scatter_add_(1, label_R1, -slope_RP.sum(1, keepdim=True))
