"""Wrong training labels, within groups of classes that are easily taken for one another."""

import torch
from torch import Tensor

PAPER_GROUP_SIZE = 5


def consecutive_groups(num_classes: int) -> Tensor:
    """Blocks of five consecutive labels: the groups of the paper's released code.

    Where five does not divide the number of classes, the last block is smaller.

    Example:
        >>> consecutive_groups(7).tolist()
        [0, 0, 0, 0, 0, 1, 1]
    """
    return torch.arange(num_classes) // PAPER_GROUP_SIZE


def redraw_within_groups(labels: Tensor, group_of_class: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Each label, with probability ``p``, drawn anew from the classes of its group.

    All classes of the group are equally likely, the true one among them: with groups of five, ``p = 0.5`` makes
    0.4 of the labels wrong.

    Example:
        >>> labels = torch.tensor([0, 1, 2, 3])
        >>> noisy = redraw_within_groups(labels, torch.tensor([0, 1, 0, 1]), 1.0, torch.Generator().manual_seed(0))
        >>> (noisy % 2).tolist()
        [0, 1, 0, 1]
    """
    members = group_of_class.argsort(stable=True)
    size = torch.bincount(group_of_class)
    first = size.cumsum(0) - size
    redrawn, which = torch.rand((2, len(labels)), generator=generator, dtype=torch.float64)
    group = group_of_class[labels]
    replacement = members[first[group] + (which * size[group]).long()]
    return torch.where(redrawn < p, replacement, labels)
