"""What every loss shares: shapes and targets as in ``F.cross_entropy``, and the reduction.

A loss is written once, as a formula for each *candidate* class. If the target holds labels, the label is the only
candidate (C = 1). If it holds probabilities, every class is one (C = L), and the loss is the expectation over them.

Shape suffixes: R rows (the batch and any further dimensions), L classes, C candidates.
"""

import math
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.ops.checks import can_read, check_floating, check_integer, check_weight
from shortlist.ops.dtypes import result_dtype, widened

Reduction = Literal["none", "mean", "sum"]
_REDUCTIONS = get_args(Reduction)


class ScoredBatch:
    """Checked scores and targets, classes last, in working precision.

    Args:
        blank_ignored: Set the scores of ignored rows to zero. Otherwise backward would multiply their gradient, 0, by
            scores that may be NaN. Kernels that handle ignored rows themselves save this pass over the scores.
    """

    def __init__(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        weight: Tensor | None,
        ignore_index: int,
        reduction: Reduction,
        blank_ignored: bool = True,
    ) -> None:
        check_reduction(reduction)
        check_integer("ignore_index", ignore_index)
        self._reduction, self._weight_L = reduction, None
        self.scores_RL, self.index_R, self._probability_RL = with_classes_last(scores, target)
        self._result_dtype = result_dtype(scores)
        self.num_classes = self.scores_RL.shape[-1]
        if weight is not None:
            check_weight(weight, self.num_classes)
            self._weight_L = weight.to(self.scores_RL.dtype)
        if self.index_R is not None:
            check_labels_in_range(self.index_R, self.num_classes, ignore_index)
            self.kept_R = self.index_R != ignore_index
            self.index_R = torch.where(self.kept_R, self.index_R, 0)
            if blank_ignored and not (can_read(self.kept_R) and self.kept_R.all()):
                self.scores_RL = self.scores_RL.masked_fill(~self.kept_R.unsqueeze(-1), 0)
        elif ignore_index >= 0:
            raise ShortlistError(f"ignore_index must be negative if target holds probabilities, got {ignore_index}")
        self.scores_RC = self.pick(self.scores_RL)

    def pick(self, values_RL: Tensor) -> Tensor:
        """``(R, C)`` values of the candidates."""
        return values_RL if self.index_R is None else values_RL.gather(-1, self.index_R.unsqueeze(-1))

    def pick_per_class(self, values_L: Tensor) -> Tensor:
        """``(R, C)`` values of the candidates, from one value for each class."""
        return self.pick(values_L.expand_as(self.scores_RL))

    def level(self, k: int) -> Tensor:
        """``(R, 1)`` k-th largest scores, detached, to subtract from the scores.

        Noise or margins added to large scores would be lost to rounding. After this subtraction the scores close to the
        k-th largest are small, and keep their digits.
        """
        return self.scores_RL.detach().topk(k).values[..., -1:]

    def without_candidate(self) -> Tensor | None:
        """Scores with the label's set to -inf; None if every class is a candidate."""
        if self.index_R is None:
            return None
        classes_L = torch.arange(self.num_classes, device=self.scores_RL.device)
        return self.scores_RL.masked_fill(classes_L == self.index_R.unsqueeze(-1), -math.inf)

    def others(self) -> Tensor:
        """``(R, C, L - 1)`` scores of the classes other than the candidate."""
        places_J = torch.arange(self.num_classes - 1, device=self.scores_RL.device)
        if self.index_R is not None:
            candidate_RC1 = self.index_R.unsqueeze(-1).unsqueeze(-1)
        else:
            candidate_RC1 = torch.arange(self.num_classes, device=self.scores_RL.device).unsqueeze(-1)
        others_RCJ = places_J + (places_J >= candidate_RC1)
        shape = (*self.scores_RC.shape, self.num_classes - 1)
        return self.scores_RL.unsqueeze(-2).expand(*shape[:-1], -1).gather(-1, others_RCJ.expand(shape))

    def last_dim_classes(self, noise: Tensor | None) -> Tensor | None:
        """The caller's noise with its dimensions in the order of ``scores_RL``."""
        return noise if noise is None or self.scores_RL.dim() == 1 else noise.movedim(1, -2)

    def reduce(self, loss_RC: Tensor) -> Tensor:
        """Weight and average over the candidates, then reduce over the rows.

        If any score of a row is NaN or infinite, its loss and gradient are NaN.
        """
        # The formula may not depend on every class, so look for bad scores here. A NaN is both the largest and the
        # smallest score, an infinity is one of them, and 0 times either is NaN.
        scores_RL = self.scores_RL.detach()
        one_R1 = 1 + 0 * scores_RL.amax(-1, keepdim=True) + 0 * scores_RL.amin(-1, keepdim=True)
        if self.index_R is not None:
            one_R1 = torch.where(self.kept_R.unsqueeze(-1), one_R1, 1)
        loss_R, share_R = self._weighted(one_R1 * loss_RC)
        return reduce_rows(loss_R, share_R, self._reduction).to(self._result_dtype)

    def _weighted(self, loss_RC: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's loss, and its term in the denominator of a mean."""
        if self._probability_RL is not None:
            weight_RL = self._probability_RL if self._weight_L is None else self._probability_RL * self._weight_L
            loss_R = (weight_RL * loss_RC).sum(-1)
            return loss_R, torch.ones_like(loss_R)
        weight_R = None if self._weight_L is None else self.pick_per_class(self._weight_L).squeeze(-1)
        return weigh_rows(loss_RC.squeeze(-1), self.kept_R, weight_R)


def weigh_rows(loss_R: Tensor, kept_R: Tensor, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each row's weighted loss, and its term in the denominator of a mean; both are zero for ignored rows."""
    share_R = kept_R.to(loss_R.dtype) if weight_R is None else torch.where(kept_R, weight_R, 0)
    return torch.where(kept_R, share_R * loss_R, 0), share_R


def reduce_rows(loss_R: Tensor, share_R: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "mean":
        return loss_R.sum() / share_R.sum()
    return loss_R.sum() if reduction == "sum" else loss_R


def check_reduction(reduction: str) -> None:
    if not isinstance(reduction, str) or reduction not in _REDUCTIONS:
        raise ShortlistError(f"reduction must be one of {_REDUCTIONS}, got {reduction!r}")


def checked_class_dim(scores: Tensor) -> int:
    """The dimension of the classes."""
    check_floating("scores", scores)
    class_dim = min(1, scores.dim() - 1)
    if scores.dim() == 0 or scores.shape[class_dim] < 2:
        shapes = "(N, L), (L,) or (N, L, d1, ...) with L >= 2 classes"
        raise ShortlistError(f"scores must have shape {shapes}, got {tuple(scores.shape)}")
    return class_dim


def checked_num_classes(scores: Tensor) -> int:
    class_dim = checked_class_dim(scores)
    return scores.shape[class_dim]


def with_classes_last(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores with the classes last, then labels or None, then probabilities or None."""
    class_dim = checked_class_dim(scores)
    if not isinstance(target, Tensor):
        raise ShortlistError(f"target must be a tensor, got {type(target).__name__}")
    scores_RL = widened(scores.movedim(class_dim, -1))
    if target.is_floating_point():
        if target.shape != scores.shape:
            raise ShortlistError(
                f"target must be shaped like the scores, {tuple(scores.shape)}, if it holds probabilities "
                f"({target.dtype}), got {tuple(target.shape)}; labels must be int64"
            )
        return scores_RL, None, target.movedim(class_dim, -1).to(scores_RL.dtype)
    if target.dtype not in (torch.int64, torch.uint8):
        raise ShortlistError(f"target must be int64 labels or floating-point probabilities, got {target.dtype}")
    if target.shape != scores_RL.shape[:-1]:
        raise ShortlistError(
            f"target must have shape {tuple(scores_RL.shape[:-1])} for scores of shape {tuple(scores.shape)}, "
            f"got {tuple(target.shape)}"
        )
    return scores_RL, target.long(), None


def check_labels_in_range(index_R: Tensor, num_classes: int, ignore_index: int | None = None) -> None:
    """Raise an error for the first label that names no class.

    On a GPU the labels cannot be read without waiting. There, indexing by them fails on the device.
    """
    if not can_read(index_R):
        return
    invalid_R = (index_R < 0) | (index_R >= num_classes)
    if ignore_index is not None:
        invalid_R &= index_R != ignore_index
    if invalid_R.any():
        ignored = "" if ignore_index is None else f" or be ignore_index ({ignore_index})"
        raise ShortlistError(f"target must be in [0, {num_classes - 1}]{ignored}, got {int(index_R[invalid_R][0])}")


def checked_rows(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """``(N, L)`` scores and ``(N,)`` labels of a finished network, without gradients, the classes last.

    They are on the device of the scores, or on the CPU where that has no float64.
    """
    if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.uint8):
        got = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise ShortlistError(f"target must be int64 labels, got {got}")
    if target.shape != scores.shape[:-1]:
        raise ShortlistError(
            f"target must have shape {tuple(scores.shape[:-1])} for scores of shape {tuple(scores.shape)}, "
            f"got {tuple(target.shape)}"
        )
    device = torch.device("cpu") if scores.device.type == "mps" else scores.device
    target_N = target.detach().to(device).flatten().long()
    check_labels_in_range(target_N, scores.shape[-1])
    return scores.detach().to(device).reshape(-1, scores.shape[-1]), target_N


def row_chunks(scores_NL: Tensor, at_once: int) -> Iterator[slice]:
    """Slices of rows that have about ``at_once`` scores together, and at least one row."""
    rows = max(1, at_once // scores_NL.shape[1])
    for start in range(0, len(scores_NL), rows):
        yield slice(start, start + rows)
