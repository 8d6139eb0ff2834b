"""Last layers."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shortlist._checks import check_at_least_one
from shortlist._precision import widened


class CosineLinear(nn.Module):
    """Scores that are cosines between the features and one direction a class.

    Both are scaled to unit length, so all scores lie in [-1, 1] and margins mean the same for every class. There is
    no bias and no scale: the losses made for cosines bring their own.

    Args:
        in_features: Size of the features.
        out_features: Number of classes.

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
        """Directions uniform on the sphere, of length about one: the gradient of a direction goes as 1 / length."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.in_features))

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(unit_rows(features), unit_rows(self.weight))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def unit_rows(x: Tensor) -> Tensor:
    """Rows of length one; the length is taken in float32, where squares of half types neither vanish nor overflow."""
    return F.normalize(widened(x), dim=-1).to(x.dtype)
