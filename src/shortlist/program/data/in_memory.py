"""Data small enough to live in memory as one tensor, on the GPU too, where batches are cut and augmented."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.augment import Augmentation
from shortlist.program.data.base import Preprocess, Split
from shortlist.program.seeds import uniform_for

_PREPARED_AT_ONCE = 2048


class TensorSplit(Split):
    """Images ``(N, C, H, W)`` in uint8, or embeddings ``(N, d)`` in any float type, held as one tensor.

    The tensor is copied to a device when its first batch is asked for there, and stays. After that a batch
    costs a few kernels and never waits for the GPU.

    Example:
        >>> split = TensorSplit(torch.eye(3), torch.tensor([0, 1, 2]))
        >>> inputs, labels, indices = next(split.batches([torch.tensor([2, 0])], torch.device("cpu")))
        >>> inputs.tolist(), labels.tolist()
        ([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], [2, 0])
    """

    def __init__(
        self,
        inputs: Tensor,
        labels: Tensor,
        preprocess: Preprocess | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        assert len(inputs) == len(labels)
        assert (inputs.dtype == torch.uint8) == (preprocess is not None)
        self.inputs = inputs
        self.labels = labels
        self.preprocess = preprocess
        self.augmentation = augmentation
        self._copies: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def batches(
        self, plan: Sequence[Tensor], device: torch.device, augment_seed: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        if not plan:
            return
        if device not in self._copies:
            self._copies[device] = self.inputs.to(device), self.labels.to(device)
        all_inputs, all_labels = self._copies[device]
        # The whole plan travels at once: a copy for each batch would be a wait for each batch. And several batches are
        # made at once, because small ones would keep a GPU waiting for its instructions.
        sizes = [len(batch) for batch in plan]
        together = max(1, _PREPARED_AT_ONCE // max(*sizes, 1))
        groups = [sizes[start : start + together] for start in range(0, len(sizes), together)]
        plan_on_device = torch.split(torch.cat(list(plan)).to(device), [sum(group) for group in groups])
        for indices, group in zip(plan_on_device, groups, strict=True):
            inputs = self._prepared(all_inputs[indices], indices, augment_seed)
            yield from zip(*(torch.split(each, group) for each in (inputs, all_labels[indices], indices)), strict=True)

    def _prepared(self, inputs: Tensor, indices: Tensor, augment_seed: int | None) -> Tensor:
        if self.augmentation is not None and augment_seed is not None:
            inputs = self.augmentation(inputs, uniform_for(indices, augment_seed, self.augmentation.columns))
        return self.preprocess.normalise(inputs) if self.preprocess is not None else inputs.float()

    def thumbnail(self, index: int) -> Tensor | None:
        return self.inputs[index] if self.preprocess is not None else None


def refuse_other_size(config: DataConfig, side: int) -> None:
    """Raise an error if images of a size other than their own are asked for; embeddings have side 0."""
    if config.image_size not in (0, side):
        raise ShortlistError(
            f"data.image_size is for data read from files and must be 0 for {config.name}, got {config.image_size}"
        )
