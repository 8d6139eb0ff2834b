"""Data small enough for memory: one tensor, copied to the GPU, where batches are cut and augmented."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.alter import hold_out_missing, thin_classes, thin_validation
from shortlist.program.data.augment import Augmentation
from shortlist.program.data.base import DataFacts, Fingerprint, Held, Preprocess, Problem, Split
from shortlist.program.seeds import uniform_for

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Rows:
    """Images ``(N, C, H, W)`` in uint8 or embeddings ``(N, d)`` in any float type, with labels ``(N,)``."""

    inputs: Tensor
    labels: Tensor

    def subset(self, indices: Tensor) -> "Rows":
        return Rows(self.inputs[indices], self.labels[indices])


class TensorSplit(Split):
    """Images ``(N, C, H, W)`` in uint8, or embeddings ``(N, d)`` in any float type, held as one tensor.

    The first batch copies the tensor to its device, where it stays. After that a batch costs a few kernels and never
    waits for the GPU.

    Example:
        >>> split = TensorSplit(torch.eye(3), torch.tensor([0, 1, 2]))
        >>> inputs, labels, indices = next(split.batches([torch.tensor([2, 0])], torch.device("cpu")))
        >>> inputs.tolist(), labels.tolist()
        ([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], [2, 0])
    """

    prepared_at_once = 2048
    """Images. Several small batches are made at once: one by one they would leave a GPU waiting for instructions."""

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

    def with_labels(self, labels: Tensor) -> Self:
        other = super().with_labels(labels)
        other._copies = {}  # these two hold the labels too
        other.__dict__.pop("_digest", None)
        return other

    def batches(
        self, plan: Sequence[Tensor], device: torch.device, augment_seed: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        if not plan:
            return
        if device not in self._copies:
            self._copies[device] = self.inputs.to(device), self.labels.to(device)
        all_inputs, all_labels = self._copies[device]
        # The whole plan is copied at once: a copy for each batch would be a wait for each batch.
        sizes = [len(batch) for batch in plan]
        together = max(1, self.prepared_at_once // (self._times_larger * max(*sizes, 1)))
        groups = [sizes[start : start + together] for start in range(0, len(sizes), together)]
        plan_on_device = torch.split(torch.cat(list(plan)).to(device), [sum(group) for group in groups])
        for indices, group in zip(plan_on_device, groups, strict=True):
            inputs = self._prepared(all_inputs[indices], indices, augment_seed)
            columns = (inputs, all_labels[indices], indices)
            yield from zip(*(torch.split(column, group) for column in columns), strict=True)

    def _prepared(self, inputs: Tensor, indices: Tensor, augment_seed: int | None) -> Tensor:
        if self.augmentation is not None and augment_seed is not None:
            inputs = self.augmentation(inputs, uniform_for(indices, augment_seed, self.augmentation.columns))
        if self.preprocess is None:
            return inputs.float()
        images, side = self.preprocess.normalise(inputs), self.preprocess.crop
        if images.shape[-1] == side:
            return images
        return F.interpolate(images, size=(side, side), mode="bilinear", align_corners=False)

    @property
    def _times_larger(self) -> int:
        """How many times the pixels of an image its network sees."""
        return max(1, (self.preprocess.crop // self.inputs.shape[-1]) ** 2) if self.preprocess is not None else 1

    def fingerprint(self) -> Fingerprint | None:
        return {"names": f"{len(self)} rows", "sizes": self._digest}

    @cached_property
    def _digest(self) -> str:
        return digest_of(self.inputs, self.labels)

    def content_digest(self) -> str:
        return digest_of(self.inputs)

    def original(self, index: int) -> "Image.Image | Tensor":
        return self.inputs[index]

    def thumbnail(self, index: int) -> Tensor | None:
        return self.inputs[index] if self.preprocess is not None else None


class HeldSplit(TensorSplit):
    """A split of images with what was made of each one, held in memory: its pixels, or its features.

    Numbers, labels, fingerprint and pictures are those of the images.
    """

    def __init__(self, images: Split, held: Held, preprocess: Preprocess | None = None) -> None:
        super().__init__(held.rows, images.labels, preprocess)
        self.skipped = held.skipped
        self._images, self._is_read = images, held.is_read

    def batches(
        self, plan: Sequence[Tensor], device: torch.device, augment_seed: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        return super().batches([batch[self._is_read[batch]] for batch in plan], device, augment_seed)

    def fingerprint(self) -> Fingerprint | None:
        return self._images.fingerprint()

    def original(self, index: int) -> "Image.Image | Tensor":
        return self._images.original(index)

    def thumbnail(self, index: int) -> Tensor | None:
        return self._images.thumbnail(index)


def tensor_problem(
    config: DataConfig,
    classes: Sequence[str],
    given: Mapping[str, Rows],
    *,
    preprocess: Preprocess | None = None,
    augmentation: Augmentation | None = None,
    superclasses: tuple[str, ...] = (),
) -> Problem:
    """A problem from the rows of ``train`` and, where the data has them, ``val`` and ``test``."""
    if preprocess is not None and config.image_size:
        preprocess = replace(preprocess, resize=config.image_size, crop=config.image_size)
    splits, held_out = hold_out_missing(given, classes, config)
    whole, test = splits["train"], splits["test"]
    train, thinning = thin_classes(whole, len(classes), config)
    val = thin_validation(splits["val"], len(classes), config)
    # Embeddings of the same images by several networks are comparable, so their labels alone identify the test rows.
    tested_on = (test.labels,) if preprocess is None else (test.inputs, test.labels)
    return Problem(
        classes=tuple(classes),
        train=TensorSplit(train.inputs, train.labels, preprocess, augmentation if config.augment == "auto" else None),
        val=TensorSplit(val.inputs, val.labels, preprocess),
        test=TensorSplit(test.inputs, test.labels, preprocess),
        input_shape=_input_shape(train.inputs, preprocess),
        preprocess=preprocess,
        facts=DataFacts(
            held_out={f"{split}_indices": tuple(indices.tolist()) for split, indices in held_out.items()},
            train_digest=digest_of(whole.inputs, whole.labels),
            test_digest=digest_of(*tested_on),
            imbalance=thinning,
        ),
        superclasses=superclasses,
    )


def _input_shape(inputs: Tensor, preprocess: Preprocess | None) -> tuple[int, ...]:
    if preprocess is None:
        return tuple(inputs.shape[1:])
    return (preprocess.channels, preprocess.crop, preprocess.crop)


def digest_of(*tensors: Tensor) -> str:
    """Of the bytes of tensors on the CPU: about a gigabyte a second."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def refuse_settings_of_files(config: DataConfig, side: int) -> None:
    """Raise an error if ``config`` asks for what only data read from files can have.

    Args:
        config: The settings of the data.
        side: Side of the images as they are, which can be enlarged; 0 for embeddings.
    """
    for name, value, allowed in (
        ("canvas", config.canvas, 0),
        ("randaugment", config.randaugment, 0),
        ("fit", config.fit, "crop"),
    ):
        if value != allowed:
            raise ShortlistError(
                f"data.{name} is for data read from files and must be {allowed} for {config.name}, got {value}"
            )
    if config.image_size and not 0 < side <= config.image_size:
        allowed = f"0 or at least {side}" if side else "0"
        raise ShortlistError(f"data.image_size must be {allowed} for {config.name}, got {config.image_size}")
