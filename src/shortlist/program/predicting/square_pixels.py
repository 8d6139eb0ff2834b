"""The twin of ``evaluation_transform`` for images that are tensors already, in a form that torch can trace.

The trace takes images of any size. There is no branch that depends on the size: a trace would follow one for ever.

The pixels are exactly Pillow's. torch and onnxruntime can resize too, but with less exact weights. Where a pixel is
halfway between two grey levels, they may choose the other one. That is frequent between sizes such as 160 and 128, and
moved the scores of a network for photographs by a tenth of their standard deviation.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import SymInt, Tensor

from shortlist.program.data.base import Preprocess
from shortlist.program.data.image_io import LARGEST_ASPECT, mean_colour

_ONE, _HALF = 2**22, 2**11  # the weight 1 in Pillow's integers, and half of its bits
_ROWS, _COLUMNS = 2, 3  # axes of images (N, C, H, W)


def square_pixels(images: Tensor, preprocess: Preprocess) -> Tensor:
    """``(N, C, crop, crop)`` squares of uint8 images ``(N, C, H, W)``, as ``evaluation_transform`` makes them."""
    height, width = (_side(images, axis, preprocess) for axis in (_ROWS, _COLUMNS))
    square = _resampled(_resampled(images, _COLUMNS, width, preprocess), _ROWS, height, preprocess)
    if pillow_resizes_tall_images_by_height_first():
        by_height_first = _resampled(_resampled(images, _ROWS, height, preprocess), _COLUMNS, width, preprocess)
        removed = height.length - height.resized
        is_tall = (removed > 0) & (removed > 2 * (width.length - width.resized))
        square = torch.where(is_tall, by_height_first, square)
    if preprocess.fit == "crop":
        return square
    places = torch.arange(preprocess.crop, device=images.device)
    in_row, in_column = ((side.first + places >= 0) & (side.first + places < side.resized) for side in (height, width))
    colour = torch.tensor(mean_colour(preprocess), dtype=torch.uint8, device=images.device).view(-1, 1, 1)
    return torch.where(in_row.unsqueeze(1) & in_column, square, colour)


class _Side(NamedTuple):
    """What happens to the height or the width of an image."""

    start: Tensor
    """The first pixel that is used: very thin images are cut."""
    length: Tensor
    """How many are used."""
    resized: Tensor
    """How many pixels they become."""
    first: Tensor
    """Which of these is the first of the square; below 0 with padding."""
    neighbours: int | SymInt
    """The most pixels that one of these is made of. It is the size of a tensor, and so cannot be one."""


def _side(images: Tensor, axis: int, preprocess: Preprocess) -> _Side:
    # Numbers as tensors: torch takes minutes to trace conditions on sizes, and ONNX would divide sizes in float32.
    sizes = images.shape[2:]
    height, width = (torch.full((), size, dtype=torch.int64, device=images.device) for size in sizes)
    length = height if axis == _ROWS else width
    if preprocess.fit == "pad":
        resized = rounded_quotient(preprocess.crop * length, torch.maximum(height, width)).clamp(min=1)
        first = -rounded_quotient(preprocess.crop - resized, 2)
        reach = 3 * torch.sym_max(*sizes) // (2 * preprocess.crop) + 1  # one and a half pixels may become one
        return _Side(torch.zeros_like(length), length, resized, first, 2 * reach + 1)
    shorter = torch.minimum(height, width)
    kept = torch.minimum(length, LARGEST_ASPECT * shorter)
    resized = preprocess.resize * kept // shorter
    first = rounded_quotient(resized - preprocess.crop, 2)
    reach = torch.sym_min(*sizes) // preprocess.resize + 2
    return _Side((length - kept) // 2, kept, resized, first, 2 * reach + 1)


def _resampled(images: Tensor, axis: int, side: _Side, preprocess: Preprocess) -> Tensor:
    """The square's pixels along an axis: Pillow's bilinear filter, in Pillow's arithmetic.

    A pixel is a weighted mean of its neighbours. Weights are computed in float64, and then in whole numbers of 22 bits.
    These are cut into two halves of 11 bits, because a product of matrices in float32 is exact with them, and fast.

    Shape suffixes: P places of the square, M neighbours, X pixels of the other axis and channels.
    """
    scale = side.length.double() / side.resized.double()
    reach = scale.clamp(min=1)
    places_P = side.first + torch.arange(preprocess.crop, device=images.device)
    centre_P1 = (torch.minimum(places_P.clamp(min=0), side.resized - 1).double() + 0.5).unsqueeze(1) * scale
    first_P1 = (centre_P1 - reach + 0.5).floor().clamp(min=0)
    pixel_PM = first_P1 + torch.arange(side.neighbours, device=images.device)
    weight_PM = (1 - ((pixel_PM - centre_P1 + 0.5) * (1 / reach)).abs()).clamp(min=0)
    weight_PM = torch.where(pixel_PM < side.length, weight_PM, 0)
    weight_PM = (weight_PM / weight_PM.sum(1, keepdim=True) * _ONE + 0.5).floor().long()
    halves_P2M = torch.stack((weight_PM // _HALF, weight_PM % _HALF), 1).float()
    index_PM = side.start + torch.minimum(pixel_PM.long(), side.length - 1)
    lines = images.movedim(axis, 1)
    taken = torch.unflatten(lines.index_select(1, index_PM.flatten()), 1, index_PM.shape)
    taken_NPMX = taken.flatten(3).float()
    upper_NPX, lower_NPX = (halves_P2M @ taken_NPMX).int().unbind(2)
    pixels_NPX = ((upper_NPX * _HALF + lower_NPX + _ONE // 2) // _ONE).to(torch.uint8)
    return torch.unflatten(pixels_NPX, 2, lines.shape[2:]).movedim(1, axis)


@cache
def pillow_resizes_tall_images_by_height_first() -> bool:
    """True for new versions of Pillow, if that removes more than twice as many pixels of the height as of the width.

    Older ones resize the width first, always. The order matters, because pixels are rounded in between.
    """
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 8), dtype=np.uint8))
    bilinear = Image.Resampling.BILINEAR
    by_height_first = picture.resize((8, 20), bilinear).resize((5, 20), bilinear)
    return by_height_first.tobytes() == picture.resize((5, 20), bilinear).tobytes()


def rounded_quotient(dividend: Tensor, divisor: Tensor | int) -> Tensor:
    """Rounded as Python's ``round`` does, half to even, for whole numbers >= 0.

    Example:
        >>> rounded_quotient(torch.arange(8), 2)
        tensor([0, 0, 1, 2, 2, 2, 3, 4])
    """
    is_odd = dividend // divisor % 2
    return (2 * dividend + divisor - 1 + is_odd) // (2 * divisor)
