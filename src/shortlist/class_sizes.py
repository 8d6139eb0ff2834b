"""Classes by their training images, as in the paper's tables: few < 20 <= medium <= 100 < many."""

from torch import Tensor

FEW_BELOW, MANY_ABOVE = 20, 100


def size_groups(class_counts: Tensor) -> dict[str, Tensor]:
    """Which of the ``(L,)`` classes are in each group, by its name.

    Example:
        >>> size_groups(torch.tensor([5, 20, 500]))["medium"]
        tensor([False,  True, False])
    """
    few, many = class_counts < FEW_BELOW, class_counts > MANY_ABOVE
    return {"few": few, "medium": ~few & ~many, "many": many}
