"""Random changes to a batch of images on its device: a few kernels, and nothing waits for the GPU."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Augmentation(Protocol):
    columns: ClassVar[int]
    """Uniform numbers used by one image."""

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """``(N, C, H, W)`` uint8 images and ``(N, columns)`` numbers in [0, 1) to images in the range 0 to 255."""
        ...


@dataclass(frozen=True)
class CropAndFlip:
    """Pad with black, crop back to size at random, and flip half of the images: the standard for CIFAR."""

    padding: int = 4
    columns: ClassVar[int] = 3

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """
        Example:
            >>> image = torch.arange(4, dtype=torch.uint8).view(1, 1, 1, 4)
            >>> CropAndFlip(padding=1)(image, torch.tensor([[0.5, 0.9, 0.0]])).tolist()  # one to the left
            [[[[1, 2, 3, 0]]]]
            >>> CropAndFlip(padding=1)(image, torch.tensor([[0.5, 0.4, 0.7]])).tolist()  # flipped
            [[[[3, 2, 1, 0]]]]
        """
        _, channels, height, width = images.shape
        device = images.device
        down_N, right_N = (uniform[:, :2] * (2 * self.padding + 1)).long().unbind(1)
        row_NH = torch.arange(height, device=device) + down_N.unsqueeze(1)
        column_W = torch.arange(width, device=device)
        column_NW = torch.where(uniform[:, 2:] < 0.5, column_W, column_W.flip(0)) + right_N.unsqueeze(1)
        # Where each pixel comes from in the flattened padded image: one index for all channels.
        source_NHW = row_NH.unsqueeze(2) * (width + 2 * self.padding) + column_NW.unsqueeze(1)
        padded = F.pad(images, (self.padding,) * 4).flatten(2)
        return padded.gather(2, source_NHW.flatten(1).unsqueeze(1).expand(-1, channels, -1)).view(images.shape)


@dataclass(frozen=True)
class SmallAffine:
    """Turn, shear, stretch and shift a little. No flips: a mirrored character may be another one."""

    degrees: float = 8.0
    shear: float = 0.1
    stretch: float = 0.1
    """Largest change of height and width, as a share of them."""
    shift: float = 0.06
    """Largest shift in each direction, as a share of the side."""
    background: float = 255.0
    """Brightness beyond the edges of the image."""
    columns: ClassVar[int] = 6

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        turn, shear, tall, wide, down, right = (2 * uniform - 1).unbind(1)
        moved = warp(
            self.background - images.float(),
            angle=turn * (self.degrees * torch.pi / 180),
            shear=shear * self.shear,
            height=1 + tall * self.stretch,
            width=1 + wide * self.stretch,
            down=down * self.shift,
            right=right * self.shift,
        )
        return self.background - moved


def warp(
    images: Tensor,
    *,
    angle: Tensor,
    shear: Tensor,
    height: Tensor,
    width: Tensor,
    down: Tensor,
    right: Tensor,
    size: int | None = None,
) -> Tensor:
    """Float images ``(N, C, H, W)``, each stretched, sheared, turned and shifted by its own numbers; zero beyond edges.

    Shifts are shares of the side. ``size`` is the side of the result, which shows the same scene.
    """
    cos, sin = angle.cos().view(-1, 1, 1), angle.sin().view(-1, 1, 1)
    shear, height, width, down, right = (value.view(-1, 1, 1) for value in (shear, height, width, down, right))
    rows, columns = (size, size) if size else images.shape[2:]
    # Where each pixel comes from, in coordinates from -1 to 1: undo the shift, the turn, the shear, the stretch.
    # Written out, because a matrix product may round differently in another batch.
    y = _centres(rows, images.device).view(1, -1, 1) - 2 * down
    x = _centres(columns, images.device).view(1, 1, -1) - 2 * right
    x, y = cos * x + sin * y, cos * y - sin * x
    grid_NHW2 = torch.stack(((x - shear * y) / width, y / height), 3)
    return F.grid_sample(images, grid_NHW2, mode="bilinear", padding_mode="zeros", align_corners=False)


def _centres(count: int, device: torch.device) -> Tensor:
    return (torch.arange(count, device=device) * 2 + 1) / count - 1
