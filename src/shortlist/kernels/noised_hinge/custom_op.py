"""The kernels of the noised hinge as operators of torch, which a compiled graph can hold as one node.

``torch.compile`` cannot trace the launches. Calls that are not compiled do without the operators: looking one up takes
the host about ten microseconds.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shortlist.kernels.noised_hinge.autograd import Labels, Seed, Settings, compute_rows, counters_for, gradient
from shortlist.kernels.noised_hinge.counters import SEED_BITS
from shortlist.kernels.noised_hinge.plan import plan_for
from shortlist.ops.random import rank_key


def noised_hinge(
    scores_RL: Tensor,
    target_R: Tensor,
    margins_L: Tensor | None,
    weight_L: Tensor | None,
    epsilon_R: Tensor | None,
    generator: torch.Generator | None,
    *settings: Any,
) -> Tensor:
    """``autograd.noised_hinge`` for calls that ``torch.compile`` traces."""
    # Drawn outside the operator, which must repeat itself should the compiler call it twice.
    seed = torch.randint(1 << SEED_BITS, (1,), device=scores_RL.device, generator=generator)
    tensors = (scores_RL, target_R, margins_L, weight_L, epsilon_R, seed)
    loss: Tensor = forward(*tensors, generator is not None, *settings)[0]
    return loss


@torch.library.custom_op("shortlist::noised_hinge", mutates_args=())
def forward(
    scores_RL: Tensor,
    target_R: Tensor,
    margins_L: Tensor | None,
    weight_L: Tensor | None,
    epsilon_R: Tensor | None,
    seed: Tensor,
    same_on_all_ranks: bool,
    ks: Sequence[int],
    scale: float,
    margin: float,
    epsilon: float,
    n_samples: int,
    ignore_index: int,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and what its gradient needs: the samples' classes, the rows' slopes at each rank, their shares' sum.

    Args:
        seed: One random word of ``SEED_BITS``.
        same_on_all_ranks: The same seed gives the same noise on all ranks.
    """
    settings = Settings.of(ks, scale, margin, epsilon, n_samples, ignore_index, reduction)
    plan = plan_for(*scores_RL.shape, settings.ranks[0], n_samples)
    counters = seed.repeat(counters_for(plan, scores_RL.shape[0], n_samples))
    results, _ = compute_rows(
        scores_RL,
        Labels.of(target_R, margins_L, weight_L, epsilon_R),
        settings,
        Seed(counters, 0 if same_on_all_ranks else rank_key(None)),
        plan,
    )
    # Copies: the results of an operator must not share memory. Only a mean adds up the shares of its rows.
    total_share = results.total_share[:1].clone() if reduction == "mean" else results.slope_RP.new_ones(1)
    return results.loss, results.classes_RPB, results.slope_RP.clone(), total_share


@forward.register_fake
def _(
    scores_RL: Tensor,
    target_R: Tensor,
    margins_L: Tensor | None,
    weight_L: Tensor | None,
    epsilon_R: Tensor | None,
    seed: Tensor,
    same_on_all_ranks: bool,
    ks: Sequence[int],
    scale: float,
    margin: float,
    epsilon: float,
    n_samples: int,
    ignore_index: int,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows = scores_RL.shape[0]
    loss = scores_RL.new_empty((num_rows,) if reduction == "none" else (), dtype=torch.float32)
    classes_RPB = scores_RL.new_empty((num_rows, len(ks), n_samples), dtype=torch.int32)
    slope_RP, total_share = (scores_RL.new_empty((size,), dtype=torch.float32) for size in (num_rows * len(ks), 1))
    return loss, classes_RPB, slope_RP, total_share


backward = torch.library.custom_op("shortlist::noised_hinge_backward", gradient, mutates_args=())


@backward.register_fake
def _(
    grad_loss: Tensor,
    target_R: Tensor,
    classes_RPB: Tensor,
    slope_RP: Tensor,
    total_share: Tensor,
    num_classes: int,
    dtype: torch.dtype,
    reduction: str,
) -> Tensor:
    return grad_loss.new_empty((target_R.shape[0], num_classes), dtype=dtype)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores_RL, target_R, *_, reduction = inputs
    _, classes_RPB, slope_RP, total_share = output
    ctx.save_for_backward(target_R, classes_RPB, slope_RP, total_share)
    ctx.num_classes, ctx.dtype, ctx.reduction = scores_RL.shape[1], scores_RL.dtype, reduction


def _gradients(ctx: Any, grad_loss: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
    gradient_RL = backward(grad_loss, *ctx.saved_tensors, ctx.num_classes, ctx.dtype, ctx.reduction)
    return gradient_RL, *(None,) * 13


forward.register_autograd(_gradients, setup_context=_keep_for_backward)
