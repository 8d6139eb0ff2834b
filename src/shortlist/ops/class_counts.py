"""What the number of training images of a class decides: its margin, and its group in the tables."""

import torch
from torch import Tensor

from shortlist.ops.checks import ClassCounts, check_not_negative, checked_class_counts

# The groups of the paper's tables: few < 20 <= medium <= 100 < many.
FEW_BELOW, MANY_ABOVE = 20, 100


def class_margins(class_counts: ClassCounts, max_margin: float) -> Tensor:
    """Margins that grow as a class gets rarer: ``C / n^(1/4)`` for a class with n training images.

    C is chosen so that the rarest class has the margin ``max_margin``.

    Args:
        class_counts: ``(L,)`` number of training images of each class, all positive.
        max_margin: Margin of the rarest class.

    Returns:
        ``(L,)`` margins, float32 (float64 for float64 counts).

    Example:
        >>> class_margins([1, 16, 81], max_margin=0.6)
        tensor([0.6000, 0.3000, 0.2000])

    Reference:
        Cao et al., Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss, NeurIPS 2019.
    """
    counts = checked_class_counts(class_counts)
    counts = counts if counts.dtype == torch.float64 else counts.float()
    check_not_negative("max_margin", max_margin, counts.dtype)
    margins = max_margin * (counts.min() / counts) ** 0.25
    # The values may not have been checked (see ``can_read``). The sum makes every margin NaN if any count is invalid.
    return margins + (counts.log() * 0).sum()


def margins_for(scores: Tensor, class_counts: Tensor, max_margin: float) -> Tensor:
    """``class_margins`` on the device of the scores, in float64 if the scores are."""
    dtype = scores.dtype if scores.dtype == torch.float64 else class_counts.dtype
    return class_margins(class_counts.to(scores.device, dtype), max_margin)


def size_groups(class_counts: Tensor) -> dict[str, Tensor]:
    """Masks of the classes with few, a medium number of, and many training images.

    Example:
        >>> size_groups(torch.tensor([5, 20, 500]))["medium"]
        tensor([False,  True, False])
    """
    few, many = class_counts < FEW_BELOW, class_counts > MANY_ABOVE
    return {"few": few, "medium": ~few & ~many, "many": many}
