"""The cosine layers, and rows scaled to unit length."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shortlist.ops.checks import can_read, check_at_least_one, check_features, check_positive
from shortlist.ops.dtypes import widened


class CosineLinear(nn.Module):
    """A last layer whose scores are cosines: ``(..., L)`` scores from ``(..., D)`` features.

    ``s_c = <x, w_c> / (|x| |w_c|)``. All scores lie in [-1, 1], so a margin means the same for every class. There is no
    bias and no scale: the losses for cosine scores have their own. Features that are all zero have scores and gradients
    of 0.

    Args:
        in_features: Size D of the features.
        out_features: Number L of classes.

    Example:
        >>> head = CosineLinear(2, 3)
        >>> features = torch.randn(4, 2)
        >>> torch.allclose(head(features), head(10 * features))
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_at_least_one("in_features", in_features)
        check_at_least_one("out_features", out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random directions with lengths of about 1: the gradient of a direction is proportional to 1 / length."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.in_features))

    def forward(self, features: Tensor) -> Tensor:
        check_features(features, self.in_features)
        return F.linear(unit_rows(features), unit_rows(self.weight))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class ScaledCosine(CosineLinear):
    """A last layer whose scores are cosines times a scale: ``s_c = scale <x, w_c> / (|x| |w_c|)``.

    Losses without a scale of their own need it: cross-entropy of scores between -1 and 1 stays large however well the
    classes are separated.

    Args:
        in_features: Size D of the features.
        out_features: Number L of classes.
        scale: What the cosines are multiplied by.
        learn_scale: Train the scale, through its logarithm, from this value on.

    Example:
        >>> head = ScaledCosine(2, 3, scale=10.0)
        >>> bool((head(torch.randn(4, 2)).abs() <= 10).all())
        True
    """

    log_scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        scale: float = 30.0,
        learn_scale: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, device=device, dtype=dtype)
        check_positive("scale", scale)
        self.scale = scale
        learnt = nn.Parameter(torch.tensor(math.log(scale), device=device, dtype=dtype)) if learn_scale else None
        self.register_parameter("log_scale", learnt)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features) * (self.scale if self.log_scale is None else self.log_scale.exp())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale}, learn_scale={self.log_scale is not None}"


def unit_rows(x: Tensor) -> Tensor:
    """Rows scaled to length 1, however large or small they are. A row of zeros stays zero and has no gradient.

    Half precision is computed in float32.
    """
    return unit_rows_and_inverses(widened(x))[0].to(x.dtype)


def unit_rows_and_inverses(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows scaled to length 1, and ``(..., 1)`` inverses of their former lengths (0 for a row of zeros).

    Each row is first divided by its largest entry, so that no square overflows or vanishes. The result does not depend
    on this divisor, so the gradient may treat it as a constant. Rows of subnormal numbers count as zeros.
    """
    if can_read(x):  # almost all batches: a third faster on a CPU
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        if _safe_to_square(length):
            return x / length, length.reciprocal()
    largest = torch.linalg.vector_norm(x.detach(), math.inf, dim=-1, keepdim=True)
    is_zero = largest < torch.finfo(x.dtype).tiny
    largest = largest.masked_fill(is_zero, 1)
    x = x / largest
    inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).masked_fill(is_zero, 1).reciprocal()
    inverse = inverse.masked_fill(is_zero, 0)
    return x * inverse, inverse / largest


def _safe_to_square(length: Tensor) -> bool:
    info = torch.finfo(length.dtype)
    return bool(((length > math.sqrt(info.tiny / info.eps)) & (length < math.sqrt(info.max))).all())
