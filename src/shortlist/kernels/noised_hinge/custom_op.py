"""The kernels of the noised hinge as operators of torch's library: what a compiled graph can hold as one node.

``torch.compile`` cannot look into the launches. As an operator they stay what they are, whatever the graph around them
becomes. Calls that nobody compiles do without: to find an operator takes the host about ten microseconds more.
"""

from typing import Any

import torch
from torch import Tensor

from shortlist.kernels.noised_hinge import autograd as noised
from shortlist.kernels.noised_hinge.autograd import Labels, Seed, Settings
from shortlist.ops.random import rank_key


@torch.library.custom_op("shortlist::noised_hinge", mutates_args=())
def forward(
    scores_RL: Tensor,
    target_R: Tensor,
    margins_L: Tensor | None,
    weight_L: Tensor | None,
    drawn: Tensor,
    ranks_alike: bool,
    k: int,
    scale: float,
    epsilon: float,
    num_draws: int,
    ignore_index: int,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and what its gradient is made of: classes of the draws, slopes of the rows, the sum of their shares.

    Args:
        drawn: One random word of ``SEED_BITS``.
        ranks_alike: Whether the noise on all ranks shall be the same for the same word.
    """
    settings = Settings.of(k, scale, epsilon, num_draws, reduction)
    seed = Seed(drawn.repeat(noised.words_for(scores_RL.shape, settings)), 0 if ranks_alike else rank_key(None))
    rows = noised.results_of_rows(scores_RL, Labels.of(target_R, margins_L, weight_L, ignore_index), settings, seed)
    # Copies: what an operator returns must not be parts of one memory. Only a mean has its rows' shares added up.
    total_share = rows.total_share[:1].clone() if reduction == "mean" else rows.base_R.new_ones(1)
    return rows.loss, rows.classes_RB, rows.base_R.clone(), total_share


@forward.register_fake
def _(
    scores_RL: Tensor,
    target_R: Tensor,
    margins_L: Tensor | None,
    weight_L: Tensor | None,
    drawn: Tensor,
    ranks_alike: bool,
    k: int,
    scale: float,
    epsilon: float,
    num_draws: int,
    ignore_index: int,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows = scores_RL.shape[0]
    loss = scores_RL.new_empty((num_rows,) if reduction == "none" else (), dtype=torch.float32)
    classes_RB = scores_RL.new_empty((num_rows, num_draws), dtype=torch.int32)
    slope_R, total_share = (scores_RL.new_empty((size,), dtype=torch.float32) for size in (num_rows, 1))
    return loss, classes_RB, slope_R, total_share


backward = torch.library.custom_op("shortlist::noised_hinge_backward", noised.gradient, mutates_args=())


@backward.register_fake
def _(
    grad_loss: Tensor,
    target_R: Tensor,
    classes_RB: Tensor,
    slope_R: Tensor,
    total_share: Tensor,
    num_classes: int,
    dtype: torch.dtype,
    reduction: str,
) -> Tensor:
    return grad_loss.new_empty((target_R.shape[0], num_classes), dtype=dtype)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores_RL, target_R, *_, reduction = inputs
    _, classes_RB, slope_R, total_share = output
    ctx.save_for_backward(target_R, classes_RB, slope_R, total_share)
    ctx.num_classes, ctx.dtype, ctx.reduction = scores_RL.shape[1], scores_RL.dtype, reduction


def _gradients(ctx: Any, grad_loss: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
    gradient_RL = backward(grad_loss, *ctx.saved_tensors, ctx.num_classes, ctx.dtype, ctx.reduction)
    return gradient_RL, *(None,) * 11


forward.register_autograd(_gradients, setup_context=_keep_for_backward)
