"""One image file: read it in any format, and crop or pad it to what a network sees."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError, features
from torch import Tensor
from torchvision.transforms import v2

from shortlist.errors import ShortlistError
from shortlist.program.config import Fit
from shortlist.program.data.base import Preprocess
from shortlist.program.seeds import seeded_globals

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
    | ({".avif"} if "avif" in features.get_supported() else set())  # not in every Pillow
)

# What makes an image upright, by the orientation in its EXIF data.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
LARGEST_ASPECT = 20
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)

# With padding, the longer side of a training image is between these shares of the square's. Of those above 1 a part is
# seen: whole images alone are soon known by heart (docs/log.md).
PADDED_SHARES = (0.8, 1.6)

Transform = Callable[[Image.Image], Tensor]
"""An image to the ``(C, crop, crop)`` uint8 tensor that, normalised, is the network's input."""
Change = Callable[[Image.Image], Image.Image]


class MakeTransform(Protocol):
    def __call__(self, preprocess: Preprocess, *changes: Change) -> Transform:
        """A transform that makes the image square, and then changes the square in these ways."""
        ...


def read_image(path: str | Path, channels: int) -> Image.Image:
    """The image upright, in grey (1 channel) or RGB (3); transparent parts become white.

    Raises ``ShortlistError`` naming the file if it cannot be read.
    """
    if not Path(path).is_file() and Path(path).exists():
        raise ShortlistError(f"{path} cannot be read as an image: it is not a regular file")
    try:
        # Not by its name: Pillow would map some TIFF files into memory, and garbles those that it has to turn.
        with Path(path).open("rb") as content:
            return decoded_image(content, channels)
    except UnidentifiedImageError:
        raise ShortlistError(f"{path} cannot be read as an image: unknown format") from None
    except Exception as error:  # decoders raise all kinds of errors on broken files
        raise ShortlistError(f"{path} cannot be read as an image: {error}") from error


def decoded_image(
    content: BinaryIO,
    channels: int,
    formats: tuple[str, ...] | None = None,
    check_size: Callable[[int, int], None] = lambda width, height: None,
) -> Image.Image:
    """The image in an open file, as ``read_image`` gives it. Any exception means that it cannot be read.

    Args:
        content: The file.
        channels: 1 for grey, 3 for RGB.
        formats: What it may be, by Pillow's names; by default anything that Pillow knows.
        check_size: Is told width and height before any pixel is decoded, and raises an error if they are too large.
    """
    with Image.open(content, formats=formats) as file:
        check_size(*file.size)
        file.load()
        return converted(file, channels)


def converted(image: Image.Image, channels: int) -> Image.Image:
    """The image upright, in grey (1 channel) or RGB (3); transparent parts become white."""
    made = _eight_bit(_upright(image)).convert("L" if channels == 1 else "RGB")
    made.info = {}  # with the orientation, which would turn it once more wherever it is converted again
    return made


def _upright(image: Image.Image) -> Image.Image:
    # Not ImageOps.exif_transpose: it rewrites all EXIF data, and fails if any entry is invalid.
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # invalid EXIF data does not harm the picture
        return image
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def _eight_bit(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip at 255
        return Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.mode == "F":
        raise ShortlistError("its pixels are floating-point numbers of unknown range; convert it to 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


def file_preprocess(image_size: int, fit: Fit = "crop") -> Preprocess:
    """The usual for photographs: 224 of 256 pixels, or the same ratio at another size, and ImageNet's mean and std.

    Example:
        >>> file_preprocess(112).resize
        128
    """
    crop = image_size or 224
    return Preprocess(3, round(crop * 256 / 224), crop, _IMAGENET_MEAN, _IMAGENET_STD, fit)


def evaluation_transform(preprocess: Preprocess, *changes: Change) -> Transform:
    """Crop the central square, after resizing the shorter side; or resize the longer side and pad to a square.

    Small images are enlarged: a network works best with objects of the size that it was trained on.
    """
    if preprocess.fit == "pad":
        return _pipeline(_Padded(preprocess), *changes)
    return _pipeline(_not_too_thin, v2.Resize(preprocess.resize), v2.CenterCrop(preprocess.crop), *changes)


def before_crop(preprocess: Preprocess) -> Transform:
    """What ``evaluation_transform`` does before it crops. Resizing the result in the same way changes nothing."""
    if preprocess.fit == "pad":
        return evaluation_transform(preprocess)
    return _pipeline(_not_too_thin, v2.Resize(preprocess.resize))


def random_crop(preprocess: Preprocess, *changes: Change) -> Transform:
    """Resize the shorter side and crop a random square, without flips: as in the paper for Pl@ntNet-300K."""
    return _pipeline(_not_too_thin, v2.Resize(preprocess.resize), v2.RandomCrop(preprocess.crop), *changes)


def random_resized_crop_and_flip(preprocess: Preprocess, *changes: Change) -> Transform:
    """Crop a random size and shape, and flip half of the images: the usual for ImageNet."""
    return _pipeline(_not_too_thin, v2.RandomResizedCrop(preprocess.crop), v2.RandomHorizontalFlip(), *changes)


def random_place_and_flip(preprocess: Preprocess, *changes: Change) -> Transform:
    """Put the image at a random place of the padded square, smaller or larger than it, and flip half of the images.

    Of an image that is larger a part is cut off, but its shape stays, and a narrow one keeps its whole width.
    """
    return _pipeline(_RandomlyPadded(preprocess), v2.RandomHorizontalFlip(), *changes)


def _pipeline(*steps: Change) -> Transform:
    transform: Transform = v2.Compose([*steps, v2.PILToTensor()])
    return transform


@dataclass(frozen=True)
class _Padded:
    """The whole image in the middle of a square of the mean colour, whose normalised value is zero."""

    preprocess: Preprocess

    def __call__(self, image: Image.Image) -> Image.Image:
        return self._placed(image, 1.0, 0.5, 0.5)

    def _placed(self, image: Image.Image, share: float, right: float, down: float) -> Image.Image:
        """The image, its longer side a share of the square's; 0 is the left or upper end of the room, 1 the other.

        Where it is larger than the square, they are the other way round.
        """
        side = self.preprocess.crop
        width, height = (max(1, round(share * side * length / max(image.size))) for length in image.size)
        square = Image.new(image.mode, (side, side), mean_colour(self.preprocess))
        place = round(right * (side - width)), round(down * (side - height))
        square.paste(image.resize((width, height), Image.Resampling.BILINEAR), place)
        return square


class _RandomlyPadded(_Padded):
    """The same, at a random place and of a random size."""

    def __call__(self, image: Image.Image) -> Image.Image:
        size, right, down = torch.rand(3).tolist()
        smallest, largest = PADDED_SHARES
        return self._placed(image, smallest + (largest - smallest) * size, right, down)


class RandAugment:
    """timm's RandAugment with increasing severity: two random changes of colour or shape, each for half of the images.

    timm draws from the global generators of Python and NumPy. They are seeded from torch's for each image, so that an
    augmented image depends on torch's seed alone.

    Args:
        magnitude: Strength, from 1 to 10.
        preprocess: Of the squares that it gets; what comes into view is filled with its mean colour.
    """

    def __init__(self, magnitude: int, preprocess: Preprocess) -> None:
        from timm.data.auto_augment import rand_augment_transform  # timm takes a second to load

        # At a full 10, timm asks Pillow to posterise to 0 bits, which is an error.
        options: dict[str, Any] = {"img_mean": mean_colour(preprocess), "magnitude_max": 9.99}
        if preprocess.fit == "pad":
            options["translate_pct"] = 0.0  # a shift would move a narrow image out of the square; its place is random
        self._change: Change = rand_augment_transform(f"rand-m{magnitude}-mstd0.5-inc1", options)

    def __call__(self, image: Image.Image) -> Image.Image:
        with seeded_globals(int(torch.randint(2**62, ()))):
            return self._change(image)


def mean_colour(preprocess: Preprocess) -> tuple[int, ...]:
    return tuple(round(255 * value) for value in preprocess.mean)


def _not_too_thin(image: Image.Image) -> Image.Image:
    """The middle of a very thin image: once its short side is resized, the long one might not fit into memory."""
    longest = LARGEST_ASPECT * min(image.size)
    if max(image.size) <= longest:
        return image
    width, height = (min(side, longest) for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
