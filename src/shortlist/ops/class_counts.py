"""What the number of training images of a class decides: its margin, its prior, and its group in the tables."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.ops.checks import ClassCounts, can_read, check_integer, check_not_negative, checked_class_counts

# The groups of the paper's tables: few < 20 <= medium <= 100 < many.
FEW_BELOW, MANY_ABOVE = 20, 100

# Instead of the logarithm of zero: low enough to keep a class out of every competition, and finite, because the loss of
# a row with an infinite score is NaN.
_LOG_OF_NONE = -1e4


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


def log_prior(class_counts: ClassCounts, leave_out: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """The counts as a tensor, and the logarithm of each class's share of the training images.

    Args:
        class_counts: ``(L,)`` number of training images of each class.
        leave_out: Labels of classes without a training image; any other class without one is an error. Their logarithm
            is -10,000.

    Example:
        >>> log_prior([1, 3, 0], leave_out=[2])[1].exp()
        tensor([0.2500, 0.7500, 0.0000], dtype=torch.float64)
    """
    counts = checked_class_counts(class_counts, allow_zero=True)
    for label in leave_out:
        check_integer("leave_out", label)
        if not 0 <= label < len(counts):
            raise ShortlistError(f"leave_out must name classes in [0, {len(counts) - 1}], got {label}")
    is_left_out = torch.zeros(len(counts), dtype=torch.bool, device=counts.device)
    is_left_out[list(leave_out)] = True
    if can_read(counts):
        if (is_missing := (counts == 0) & ~is_left_out).any():
            label = int(is_missing.nonzero()[0])
            raise ShortlistError(
                f"class_counts must be > 0, got 0 for class {label}: a class without a training image has no prior; "
                f"name it in leave_out=({label},) if it is to be left out"
            )
        if is_left_out.any() and counts[is_left_out].any():
            label = int((is_left_out & (counts > 0)).nonzero()[0])
            raise ShortlistError(f"leave_out must name classes without a training image, and class {label} has some")
        if counts.is_floating_point() and torch.equal(counts, counts.round()):
            counts = counts.long()  # so that ``half()`` does not round them
    wide = counts.to(torch.float32 if counts.device.type == "mps" else torch.float64)  # MPS has no float64
    shares = wide / wide.sum()
    logarithms = torch.where(is_left_out, _LOG_OF_NONE, shares.log())
    # The values may not have been checked (see ``can_read``). The sum makes every prior NaN if any count is invalid.
    return counts, logarithms + (0 * logarithms).sum()


def size_groups(class_counts: Tensor) -> dict[str, Tensor]:
    """Masks of the classes with few, a medium number of, and many training images.

    Example:
        >>> size_groups(torch.tensor([5, 20, 500]))["medium"]
        tensor([False,  True, False])
    """
    few, many = class_counts < FEW_BELOW, class_counts > MANY_ABOVE
    return {"few": few, "medium": ~few & ~many, "many": many}
