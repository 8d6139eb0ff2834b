"""The scores of a few selected classes per row, and their sparse gradient.

Shape suffixes: R rows, D features, L classes, P classes selected in a row, M = R * P selections, F a block of features.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shortlist.heads.cosine import unit_rows_and_inverses
from shortlist.ops.dtypes import widened, working_dtype

# Bounds the memory of gathered rows, forward and backward: 16 MiB in float32.
_GATHERED_AT_ONCE = 2**22


def selected_scores(
    features_RD: Tensor,
    weight_LD: Tensor,
    bias_L: Tensor | None,
    classes_RP: Tensor,
    *,
    cosine: bool = False,
    sparse_grad: bool = False,
    parameter_grad_scale: float = 1.0,
) -> Tensor:
    """``(R, P)`` scores of the selected classes: ``F.linear(...).gather(1, classes_RP)`` without the other classes.

    Neither forward nor backward reads a row of the weight that was not selected; a dense gradient has zeros there. A
    class may be selected several times; P may be 0, and then L too.

    Args:
        features_RD: For a cosine layer, already of unit length. Scores are rounded to their dtype, as in a matrix
            product, and returned in working precision.
        weight_LD: Of any float dtype.
        cosine: Divide every selected row of the weight by its length.
        sparse_grad: Return the gradients of weight and bias as uncoalesced sparse tensors.
        parameter_grad_scale: Factor of the gradients of weight and bias.

    Example:
        >>> weight = torch.eye(3, requires_grad=True)
        >>> scores = selected_scores(torch.tensor([[1.0, 2.0, 3.0]]), weight, None, torch.tensor([[2, 0]]))
        >>> scores.sum().backward()
        >>> scores.tolist(), weight.grad.tolist()
        ([[3.0, 1.0]], [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    """
    scores_RP: Tensor = _SelectedScores.apply(
        features_RD, weight_LD, bias_L, classes_RP, cosine, sparse_grad, parameter_grad_scale
    )
    return scores_RP


class _SelectedScores(torch.autograd.Function):
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
        # The gradient of a linear layer needs neither scores nor lengths.
        ctx.save_for_backward(features_RD, weight_LD, classes_RP, *((scores_RP, inverse_RP) if cosine else ()))
        ctx.bias_dtype = None if bias_L is None else bias_L.dtype
        ctx.sparse_grad, ctx.parameter_grad_scale = sparse_grad, parameter_grad_scale
        return scores_RP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RP: Tensor) -> tuple[Tensor | None, ...]:
        features_RD, weight_LD, classes_RP, *scores_and_inverses = ctx.saved_tensors
        # A score's gradient is ``factor * weight`` in the features and ``factor * features`` in the weight, of which a
        # cosine takes only the part orthogonal to the weight: ``factor * (features - score * unit weight)``.
        factor_RP = grad_RP
        if scores_and_inverses:
            _, inverse_RP = scores_and_inverses
            factor_RP = grad_RP * inverse_RP
        grad_features = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_features = _weighted_rows(weight_LD, classes_RP, factor_RP).to(features_RD.dtype)
        scale = ctx.parameter_grad_scale
        if ctx.needs_input_grad[1]:
            gradient = _WeightGradient(features_RD, weight_LD, classes_RP, scale * factor_RP, *scores_and_inverses)
            grad_weight = gradient.sparse() if ctx.sparse_grad else gradient.dense()
        if ctx.needs_input_grad[2]:
            grad_M, classes_M = scale * grad_RP.flatten(), classes_RP.flatten()
            if ctx.sparse_grad:
                first_M = _representatives(classes_M, len(weight_LD), ctx.bias_dtype)
                grad_M = _summed_before_rounding(grad_M, first_M, ctx.bias_dtype)
                grad_bias = _sparse(classes_M, grad_M, weight_LD.shape[:1])
            else:
                grad_bias = grad_M.new_zeros(len(weight_LD)).index_add_(0, classes_M, grad_M).to(ctx.bias_dtype)
        return grad_features, grad_weight, grad_bias, None, None, None, None


def _score(
    features_RD: Tensor, weight_LD: Tensor, bias_L: Tensor | None, classes_RP: Tensor, cosine: bool
) -> tuple[Tensor, Tensor]:
    """Scores of the selected classes, and the inverse lengths of their weights (ones for a linear layer)."""
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


def _weighted_rows(weight_LD: Tensor, classes_RP: Tensor, factor_RP: Tensor) -> Tensor:
    """``(R, D)`` weighted sums of the selected rows of the weight, gathered and added in one pass."""
    if classes_RP.numel() == 0:  # embedding_bag does not accept it
        return weight_LD.new_zeros(len(classes_RP), weight_LD.shape[1])
    return F.embedding_bag(classes_RP, weight_LD, per_sample_weights=factor_RP.to(weight_LD.dtype), mode="sum")


class _WeightGradient:
    """Every selected class c of row r adds a term to row c of the gradient: see ``_SelectedScores.backward``."""

    def __init__(
        self,
        features_RD: Tensor,
        weight_LD: Tensor,
        classes_RP: Tensor,
        factor_RP: Tensor,
        scores_RP: Tensor | None = None,
        inverse_RP: Tensor | None = None,
    ) -> None:
        self.features_RD, self.weight_LD, self.classes_RP = features_RD, weight_LD, classes_RP
        self.factor_RP, self.scores_RP, self.inverse_RP = factor_RP, scores_RP, inverse_RP

    def dense(self) -> Tensor:
        """Shaped like the weight; every row is summed in working precision and rounded once."""
        grad_LD = torch.zeros_like(self.weight_LD)
        classes_M = self.classes_RP.flatten()
        first_M = _representatives(classes_M, len(grad_LD), grad_LD.dtype)
        # In blocks of features, not of selections: so each block has the complete sums of its classes.
        step = max(1, _GATHERED_AT_ONCE // max(1, len(classes_M)))
        for start in range(0, grad_LD.shape[1], step):
            columns = slice(start, start + step)
            terms_MF = _summed_before_rounding(self._terms(columns), first_M, grad_LD.dtype)
            grad_LD[:, columns].index_add_(0, classes_M, terms_MF)
        return grad_LD

    def sparse(self) -> Tensor:
        """One entry per selection, as ``nn.Embedding(sparse=True)``; in half precision, one entry has a class's sum."""
        dtype, classes_M = self.weight_LD.dtype, self.classes_RP.flatten()
        first_M = _representatives(classes_M, len(self.weight_LD), dtype)
        terms_MD = _summed_before_rounding(self._terms(slice(None)), first_M, dtype)
        return _sparse(classes_M, terms_MD, self.weight_LD.shape)

    def _terms(self, columns: slice) -> Tensor:
        terms_RPF = self.factor_RP.unsqueeze(-1) * widened(self.features_RD[:, columns]).unsqueeze(1)
        if self.scores_RP is not None and self.inverse_RP is not None:
            # Normalise first: the weight may be so large or small that other products would overflow or vanish.
            unit_RPF = widened(self.weight_LD[:, columns][self.classes_RP]) * self.inverse_RP.unsqueeze(-1)
            parallel_RP = self.factor_RP * self.scores_RP
            terms_RPF = torch.addcmul(terms_RPF, parallel_RP.unsqueeze(-1), unit_RPF, value=-1)
        return terms_RPF.flatten(0, 1)


def _representatives(classes_M: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor | None:
    """For every selection, the index of one selection of the same class, in which the class's terms are summed.

    None if sums in this dtype need no such detour; in half precision, each of many additions would round. This neither
    sorts nor needs the number of distinct classes, for which the host would have to wait.
    """
    if working_dtype(dtype) == dtype:
        return None
    index_M = torch.arange(len(classes_M), device=classes_M.device)
    # One selection of each class wins the write. Entries of classes that were not selected are never read.
    index_L = torch.empty(num_classes, dtype=index_M.dtype, device=classes_M.device).scatter_(0, classes_M, index_M)
    return index_L[classes_M]


def _summed_before_rounding(terms_M: Tensor, first_M: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of each class's terms at its representative, and exact zeros elsewhere."""
    if first_M is not None:
        terms_M = torch.zeros_like(terms_M).index_add_(0, first_M, terms_M)
    return terms_M.to(dtype)


def _sparse(classes_M: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    # The argument alone is not enough: some versions of torch warn unless the context is set too.
    with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(classes_M.unsqueeze(0), values, shape, check_invariants=False)
