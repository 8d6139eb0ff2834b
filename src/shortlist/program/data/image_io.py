"""One image file: finding it, reading it whatever its format, and cutting it to what a network sees."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError, features
from torch import Tensor
from torchvision.transforms import v2

from shortlist.errors import ShortlistError
from shortlist.program.data.base import Preprocess

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
    | ({".avif"} if "avif" in features.get_supported() else set())  # not in every Pillow
)

# What makes an image upright, by the orientation that its camera noted.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_LARGEST_ASPECT = 20
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)

Transform = Callable[[Image.Image], Tensor]
"""An image to the ``(C, crop, crop)`` uint8 tensor that, normalised, is the network's input."""


def read_image(path: str | Path, channels: int) -> Image.Image:
    """The image upright, in grey (1 channel) or RGB (3); transparent parts become white.

    Raises ``ShortlistError`` naming the file if it cannot be read.
    """
    if not Path(path).is_file() and Path(path).exists():
        raise ShortlistError(f"{path} cannot be read as an image: it is no regular file")
    try:
        # Not by its name: Pillow maps some TIFF files into memory, and garbles those that it has to turn.
        with Path(path).open("rb") as content, Image.open(content) as file:
            file.load()
            return _eight_bit(_upright(file)).convert("L" if channels == 1 else "RGB")
    except UnidentifiedImageError:
        raise ShortlistError(f"{path} cannot be read as an image: it begins like none that is known") from None
    except Exception as error:  # decoders fail on broken files in every way there is
        raise ShortlistError(f"{path} cannot be read as an image: {error}") from error


def _upright(image: Image.Image) -> Image.Image:
    # Not ImageOps.exif_transpose: it writes all of the notes anew, and fails where any one of them is odd.
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # what is wrong with the notes is nothing to the picture
        return image
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def _eight_bit(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
        return Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.mode == "F":
        raise ShortlistError("its pixels are floating-point numbers, of which nobody knows the range")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


def file_preprocess(image_size: int) -> Preprocess:
    """As usual for photographs: 224 of 256 pixels, or the same share of another size, in ImageNet's colours.

    Example:
        >>> file_preprocess(112).resize
        128
    """
    crop = image_size or 224
    return Preprocess(channels=3, resize=round(crop * 256 / 224), crop=crop, mean=_IMAGENET_MEAN, std=_IMAGENET_STD)


def evaluation_transform(preprocess: Preprocess) -> Transform:
    """Resize the shorter side and cut out the central square."""
    return _pipeline(v2.Resize(preprocess.resize), v2.CenterCrop(preprocess.crop))


def random_crop(preprocess: Preprocess) -> Transform:
    """Resize the shorter side and cut out a square at random, with no flip: the paper's way with Pl@ntNet-300K."""
    return _pipeline(v2.Resize(preprocess.resize), v2.RandomCrop(preprocess.crop))


def random_resized_crop_and_flip(preprocess: Preprocess) -> Transform:
    """Cut out a part of random size and shape, and flip every other image: the usual for ImageNet."""
    return _pipeline(v2.RandomResizedCrop(preprocess.crop), v2.RandomHorizontalFlip())


def _pipeline(*steps: v2.Transform) -> Transform:
    transform: Transform = v2.Compose([_not_too_thin, *steps, v2.PILToTensor()])
    return transform


def _not_too_thin(image: Image.Image) -> Image.Image:
    """The middle of a very thin image: with its short side resized, the long one might not fit into memory."""
    longest = _LARGEST_ASPECT * min(image.size)
    if max(image.size) <= longest:
        return image
    width, height = (min(side, longest) for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
