"""Training images that are read once, held in memory, and cropped, placed and flipped on the device.

Reading and decoding files in every epoch keeps a fast network waiting. Here each training image is stretched once to a
square, its canvas, and a batch takes random parts of canvases with one kernel. What a network sees is what it would see
of the files, but for the resolution of the canvas and the interpolation.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from shortlist.program.config import DataConfig, Fit
from shortlist.program.data.base import SPLITS, Held, Preprocess, Problem, Split
from shortlist.program.data.image_folder import FileSplit
from shortlist.program.data.image_io import PADDED_SHARES, evaluation_transform
from shortlist.program.data.in_memory import HeldSplit
from shortlist.program.seeds import uniform_for

# Of torchvision's RandomResizedCrop, which files are cropped with.
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_COLUMNS = 5  # random numbers of an image


@dataclass(frozen=True)
class _Stretched:
    """An image to a square, whatever its shape."""

    side: int

    def __call__(self, image: Image.Image) -> Tensor:
        stretched: Tensor = pil_to_tensor(image.resize((self.side, self.side), Image.Resampling.BILINEAR))
        return stretched


class CanvasSplit(HeldSplit):
    """Training images on canvases. Batches without a seed, which are not augmented, are read from the files.

    Args:
        images: The files.
        held: Their canvases.
        sizes: ``(N, 2)`` widths and heights of the images.
        preprocess: How an image becomes the network's input.
    """

    prepared_at_once = 512

    def __init__(self, images: FileSplit, held: Held, sizes: Tensor, preprocess: Preprocess) -> None:
        super().__init__(images, held, preprocess)
        self._files, self._sizes = images, sizes
        self._preprocess = preprocess
        self._sizes_on: dict[torch.device, Tensor] = {}

    def batches(
        self, plan: Sequence[Tensor], device: torch.device, augment_seed: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        if augment_seed is None:
            return self._files.batches(plan, device)
        return super().batches(plan, device, augment_seed)

    def _prepared(self, inputs: Tensor, indices: Tensor, augment_seed: int | None) -> Tensor:
        assert augment_seed is not None, "other batches are read from the files"
        if inputs.device not in self._sizes_on:
            self._sizes_on[inputs.device] = self._sizes.to(inputs.device)
        sizes = self._sizes_on[inputs.device][indices]
        uniform = uniform_for(indices, augment_seed, _COLUMNS)
        middle, reach = random_view(sizes, uniform, self._preprocess.fit)
        normalised = self._preprocess.normalise(inputs)  # the mean colour, which surrounds images, is zero
        return view(normalised, middle, reach, self._preprocess)


def random_view(sizes: Tensor, uniform: Tensor, fit: Fit) -> tuple[Tensor, Tensor]:
    """Which part of its canvas each training image shows.

    ``crop``: a random area and shape, as torchvision's RandomResizedCrop; a crop that would be longer than the image is
    as long as the image. ``pad``: the image at a random place of the square, with 80 to 160 % of its evaluation size.
    Half of the images are flipped.

    Args:
        sizes: ``(N, 2)`` widths and heights of the images.
        uniform: ``(N, 5)`` numbers in [0, 1).
        fit: How images become square.

    Returns:
        ``(N, 2)`` coordinates of the middle of the view in the canvas, which reaches from -1 to 1 in x and y; and
        ``(N, 2)`` how far the view reaches from there to its right and lower edge, negative if it is flipped.
    """
    first, second, across, down, turn = uniform.unbind(1)
    aspect = sizes[:, 0] / sizes[:, 1]
    places = 2 * torch.stack((across, down), 1) - 1
    if fit == "pad":
        smallest, largest = PADDED_SHARES
        share = smallest + (largest - smallest) * first
        filled = share.unsqueeze(1) * torch.stack((aspect.clamp(max=1), (1 / aspect).clamp(max=1)), 1)
        reach = 1 / filled
        middle = -places * (1 - filled) * reach
    else:
        area = _AREA[0] + (_AREA[1] - _AREA[0]) * first
        low, high = map(math.log, _RATIO)
        ratio = torch.exp(low + (high - low) * second)
        reach = torch.stack(((area * ratio / aspect).sqrt(), (area / ratio * aspect).sqrt()), 1).clamp(max=1)
        middle = places * (1 - reach)
    side = torch.where(turn < 0.5, 1.0, -1.0)
    return middle, reach * torch.stack((side, torch.ones_like(side)), 1)


def view(images: Tensor, middle: Tensor, reach: Tensor, preprocess: Preprocess) -> Tensor:
    """``(N, C, crop, crop)`` views of normalised canvases; zero beyond the edges if images are padded."""
    steps = (torch.arange(preprocess.crop, device=images.device) * 2 + 1) / preprocess.crop - 1
    x_NW = middle[:, :1] + reach[:, :1] * steps
    y_NH = middle[:, 1:] + reach[:, 1:] * steps
    shape = len(images), preprocess.crop, preprocess.crop
    grid_NHW2 = torch.stack((x_NW.unsqueeze(1).expand(shape), y_NH.unsqueeze(2).expand(shape)), 3)
    beyond = "zeros" if preprocess.fit == "pad" else "border"
    return F.grid_sample(images, grid_NHW2, mode="bilinear", padding_mode=beyond, align_corners=False)


def with_canvases(problem: Problem, config: DataConfig, say: Callable[[str], None]) -> Problem:
    """The problem with all its images in memory: training images on canvases, the others as they are evaluated."""
    preprocess = problem.preprocess
    assert preprocess is not None, "only data read from files has canvases"
    held = [_held(problem.split(name), preprocess, config, is_training=name == "train") for name in SPLITS]
    count, size = sum(map(len, held)), sum(split.inputs.nbytes for split in held)
    say(f"{count:,} images are held in memory, {size / 2**30:.1f} GiB")
    train, val, test = held
    return replace(problem, train=train, val=val, test=test)


def _held(split: Split, preprocess: Preprocess, config: DataConfig, *, is_training: bool) -> HeldSplit:
    assert isinstance(split, FileSplit), "only data read from files has canvases"
    if is_training and config.augment == "auto":
        pixels, sizes = split.held(_Stretched(config.canvas))
        return CanvasSplit(split, pixels, sizes, preprocess)
    return HeldSplit(split, split.held(evaluation_transform(preprocess))[0], preprocess)
