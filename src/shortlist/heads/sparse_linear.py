"""The scores of a few chosen classes a row, and the sparse gradient that comes with them.

Shape suffixes: R rows, D features, L classes, P classes chosen in a row, M = R * P choices, F some of the features.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shortlist.heads.cosine import unit_rows_and_inverses
from shortlist.ops.dtypes import widened, working_dtype

# Gathered numbers held at once, forward and backward: 16 MiB of them in float32.
_GATHERED_AT_ONCE = 2**22


def chosen_scores(
    features_RD: Tensor,
    weight_LD: Tensor,
    bias_L: Tensor | None,
    classes_RP: Tensor,
    *,
    cosine: bool = False,
    sparse_grad: bool = False,
    parameter_grad_scale: float = 1.0,
) -> Tensor:
    """``(R, P)`` scores of the chosen classes: ``F.linear(...).gather(1, classes_RP)`` without the other classes.

    Neither forward nor backward looks at a row of the weight that was not chosen, except to write the zeros of a
    dense gradient. A class may be chosen several times; P may be 0, and then L too.

    Args:
        features_RD: For a cosine layer, already of unit length. Their dtype is that of the product: scores are
            rounded to it as a matrix product would, and returned in working precision.
        weight_LD: Of any float dtype.
        cosine: Divide every chosen row of the weight by its length, and differentiate that too.
        sparse_grad: Return the gradients of weight and bias as uncoalesced sparse tensors.
        parameter_grad_scale: Factor of the gradients of weight and bias.

    Example:
        >>> weight = torch.eye(3, requires_grad=True)
        >>> scores = chosen_scores(torch.tensor([[1.0, 2.0, 3.0]]), weight, None, torch.tensor([[2, 0]]))
        >>> scores.sum().backward()
        >>> scores.tolist(), weight.grad.tolist()
        ([[3.0, 1.0]], [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    """
    scores_RP: Tensor = _ChosenScores.apply(
        features_RD, weight_LD, bias_L, classes_RP, cosine, sparse_grad, parameter_grad_scale
    )
    return scores_RP


class _ChosenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features_RD: Tensor,
        weight_LD: Tensor,
        bias_L: Tensor | None,
        classes_RP: Tensor,
        cosine: bool,
        sparse_grad: bool,
        parameter_grad_scale: float,
    ) -> Tensor:
        scores_RP, inverse_RP = _score(features_RD, weight_LD, bias_L, classes_RP, cosine)
        # A linear layer's gradient depends on neither.
        ctx.save_for_backward(features_RD, weight_LD, classes_RP, *((scores_RP, inverse_RP) if cosine else ()))
        ctx.bias_dtype = None if bias_L is None else bias_L.dtype
        ctx.sparse_grad, ctx.parameter_grad_scale = sparse_grad, parameter_grad_scale
        return scores_RP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RP: Tensor) -> tuple[Tensor | None, ...]:
        features_RD, weight_LD, classes_RP, *of_cosine = ctx.saved_tensors
        # Of a score in the features: ``along * weight``; in the weight: ``along * (features - score * unit weight)``.
        along_RP = grad_RP
        if of_cosine:
            _, inverse_RP = of_cosine
            along_RP = grad_RP * inverse_RP
        grad_features = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_features = _weighted_rows(weight_LD, classes_RP, along_RP).to(features_RD.dtype)
        scale = ctx.parameter_grad_scale
        if ctx.needs_input_grad[1]:
            rows = _WeightGradient(features_RD, weight_LD, classes_RP, scale * along_RP, *of_cosine)
            grad_weight = rows.sparse() if ctx.sparse_grad else rows.dense()
        if ctx.needs_input_grad[2]:
            grad_M, classes_M = scale * grad_RP.flatten(), classes_RP.flatten()
            if ctx.sparse_grad:
                grad_M = _summed_before_rounding(
                    grad_M, _meeting(classes_M, len(weight_LD), ctx.bias_dtype), ctx.bias_dtype
                )
                grad_bias = _sparse(classes_M, grad_M, weight_LD.shape[:1])
            else:
                grad_bias = grad_M.new_zeros(len(weight_LD)).index_add_(0, classes_M, grad_M).to(ctx.bias_dtype)
        return grad_features, grad_weight, grad_bias, None, None, None, None


def _score(
    features_RD: Tensor, weight_LD: Tensor, bias_L: Tensor | None, classes_RP: Tensor, cosine: bool
) -> tuple[Tensor, Tensor]:
    """Scores of the chosen classes, and the inverse lengths of their rows of the weight (ones for a linear layer)."""
    dtype = features_RD.dtype
    scores_RP = torch.zeros(classes_RP.shape, dtype=working_dtype(dtype), device=features_RD.device)
    inverse_RP = torch.ones_like(scores_RP)
    step = max(1, _GATHERED_AT_ONCE // max(1, classes_RP.shape[1] * weight_LD.shape[1]))
    for start in range(0, len(features_RD), step):
        rows = slice(start, start + step)
        weight_RPD = weight_LD[classes_RP[rows]]
        if cosine:
            unit_RPD, inverse_RP1 = unit_rows_and_inverses(widened(weight_RPD))
            inverse_RP[rows] = inverse_RP1.squeeze(-1)
            weight_RPD = unit_RPD.to(weight_RPD.dtype)
        product_RPD = widened(weight_RPD.to(dtype)) * widened(features_RD[rows]).unsqueeze(1)
        scores_RP[rows] = product_RPD.sum(-1)
    if bias_L is not None:
        scores_RP += bias_L.to(dtype)[classes_RP]
    return scores_RP.to(dtype).to(scores_RP.dtype), inverse_RP


def _weighted_rows(weight_LD: Tensor, classes_RP: Tensor, along_RP: Tensor) -> Tensor:
    """``(R, D)`` sums of the chosen rows of the weight, gathered and added in one pass."""
    if classes_RP.numel() == 0:  # which embedding_bag does not take
        return weight_LD.new_zeros(len(classes_RP), weight_LD.shape[1])
    return F.embedding_bag(classes_RP, weight_LD, per_sample_weights=along_RP.to(weight_LD.dtype), mode="sum")


class _WeightGradient:
    """Every choice (r, c) contributes ``along * features_r`` to row c; of a cosine, less its part along the row."""

    def __init__(
        self,
        features_RD: Tensor,
        weight_LD: Tensor,
        classes_RP: Tensor,
        along_RP: Tensor,
        scores_RP: Tensor | None = None,
        inverse_RP: Tensor | None = None,
    ) -> None:
        self.features_RD, self.weight_LD, self.classes_RP = features_RD, weight_LD, classes_RP
        self.along_RP, self.scores_RP, self.inverse_RP = along_RP, scores_RP, inverse_RP

    def dense(self) -> Tensor:
        """Shaped like the weight; every row is summed in working precision and rounded once."""
        grad_LD = torch.zeros_like(self.weight_LD)
        classes_M = self.classes_RP.flatten()
        meeting_M = _meeting(classes_M, len(grad_LD), grad_LD.dtype)
        # By columns: a block of features holds all choices, so that each class is complete in it.
        step = max(1, _GATHERED_AT_ONCE // max(1, len(classes_M)))
        for start in range(0, grad_LD.shape[1], step):
            columns = slice(start, start + step)
            share_MF = _summed_before_rounding(self._shares(columns), meeting_M, grad_LD.dtype)
            grad_LD[:, columns].index_add_(0, classes_M, share_MF)
        return grad_LD

    def sparse(self) -> Tensor:
        """As ``nn.Embedding(sparse=True)``: one entry a choice. In half types all but one of a class are zero."""
        dtype, classes_M = self.weight_LD.dtype, self.classes_RP.flatten()
        meeting_M = _meeting(classes_M, len(self.weight_LD), dtype)
        share_MD = _summed_before_rounding(self._shares(slice(None)), meeting_M, dtype)
        return _sparse(classes_M, share_MD, self.weight_LD.shape)

    def _shares(self, columns: slice) -> Tensor:
        share_RPF = self.along_RP.unsqueeze(-1) * widened(self.features_RD[:, columns]).unsqueeze(1)
        if self.scores_RP is not None and self.inverse_RP is not None:
            # The unit rows: the weight may be so large or small that it cannot be multiplied by anything else.
            unit_RPF = widened(self.weight_LD[:, columns][self.classes_RP]) * self.inverse_RP.unsqueeze(-1)
            inwards_RP = self.along_RP * self.scores_RP
            share_RPF = torch.addcmul(share_RPF, inwards_RP.unsqueeze(-1), unit_RPF, value=-1)
        return share_RPF.flatten(0, 1)


def _meeting(classes_M: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor | None:
    """For every choice the index of one choice that stands for all of its class.

    None where sums of this dtype need no such meeting: in a half type each of many additions would round. This needs no
    sort, and not the number of distinct classes, for which the host would have to wait.
    """
    if working_dtype(dtype) == dtype:
        return None
    choice_M = torch.arange(len(classes_M), device=classes_M.device)
    # Whichever choice of a class is written last stays. Classes that nobody chose are never read.
    choice_L = torch.empty(num_classes, dtype=choice_M.dtype, device=classes_M.device).scatter_(0, classes_M, choice_M)
    return choice_L[classes_M]


def _summed_before_rounding(share_M: Tensor, meeting_M: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum over the choices of each class where they meet, and an exact zero elsewhere."""
    if meeting_M is not None:
        share_M = torch.zeros_like(share_M).index_add_(0, meeting_M, share_M)
    return share_M.to(dtype)


def _sparse(classes_M: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    # Switched off by the context as well: some versions of torch warn of whatever was not.
    with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(classes_M.unsqueeze(0), values, shape, check_invariants=False)
