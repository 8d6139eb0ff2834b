"""Mixup and CutMix: batches of mixed images, with the shares of their classes as targets."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shortlist.program.config import DataConfig
from shortlist.program.seeds import seeded_globals


class Mixing:
    """timm's Mixup and CutMix, with numbers that depend on a seed alone: timm draws from NumPy's global generator.

    Image i of a batch of N is mixed with image N - 1 - i, by one share for the whole batch. With both, a batch has
    either Mixup or CutMix, with equal chances. The last image of an odd batch stays as it is.

    Args:
        config: Its ``mixup`` and ``cutmix`` are the parameters alpha; at least one is above 0.
        num_classes: Number of classes.

    Example:
        >>> images, labels = torch.zeros(3, 1, 4, 4), torch.tensor([0, 1, 1])
        >>> _, probabilities = Mixing(DataConfig(mixup=1.0), 2)(images, labels, seed=0)
        >>> probabilities.shape, probabilities.sum(1).tolist(), probabilities[2].tolist()
        (torch.Size([3, 2]), [1.0, 1.0, 1.0], [0.0, 1.0])
    """

    def __init__(self, config: DataConfig, num_classes: int) -> None:
        from timm.data.mixup import Mixup  # timm takes seconds to load, and most runs mix nothing

        self._num_classes = num_classes
        self._mix = Mixup(  # type: ignore[no-untyped-call]
            config.mixup, config.cutmix, label_smoothing=0.0, num_classes=num_classes
        )

    def __call__(self, inputs: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Mixed inputs, which may replace the given ones in memory, and ``(N, L)`` probabilities."""
        even = len(labels) // 2 * 2
        with seeded_globals(seed):
            mixed, probabilities = self._mix(inputs[:even], labels[:even])
        if even == len(labels):
            return mixed, probabilities
        last = F.one_hot(labels[even:], self._num_classes).to(probabilities.dtype)
        return torch.cat((mixed, inputs[even:])), torch.cat((probabilities, last))
