"""One image file: read it in any format, and crop it to what a network sees."""

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
        raise ShortlistError(f"{path} cannot be read as an image: it is not a regular file")
    try:
        # Not by its name: Pillow would map some TIFF files into memory, and garbles those that it has to turn.
        with Path(path).open("rb") as content, Image.open(content) as file:
            file.load()
            return _eight_bit(_upright(file)).convert("L" if channels == 1 else "RGB")
    except UnidentifiedImageError:
        raise ShortlistError(f"{path} cannot be read as an image: unknown format") from None
    except Exception as error:  # decoders raise all kinds of errors on broken files
        raise ShortlistError(f"{path} cannot be read as an image: {error}") from error


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


def file_preprocess(image_size: int) -> Preprocess:
    """The usual for photographs: 224 of 256 pixels, or the same ratio at another size, and ImageNet's mean and std.

    Example:
        >>> file_preprocess(112).resize
        128
    """
    crop = image_size or 224
    return Preprocess(channels=3, resize=round(crop * 256 / 224), crop=crop, mean=_IMAGENET_MEAN, std=_IMAGENET_STD)


def evaluation_transform(preprocess: Preprocess) -> Transform:
    """Resize the shorter side and crop the central square."""
    return _pipeline(v2.Resize(preprocess.resize), v2.CenterCrop(preprocess.crop))


def random_crop(preprocess: Preprocess) -> Transform:
    """Resize the shorter side and crop a random square, without flips: as in the paper for Pl@ntNet-300K."""
    return _pipeline(v2.Resize(preprocess.resize), v2.RandomCrop(preprocess.crop))


def random_resized_crop_and_flip(preprocess: Preprocess) -> Transform:
    """Crop a random size and shape, and flip half of the images: the usual for ImageNet."""
    return _pipeline(v2.RandomResizedCrop(preprocess.crop), v2.RandomHorizontalFlip())


def _pipeline(*steps: v2.Transform) -> Transform:
    transform: Transform = v2.Compose([_not_too_thin, *steps, v2.PILToTensor()])
    return transform


def _not_too_thin(image: Image.Image) -> Image.Image:
    """The middle of a very thin image: once its short side is resized, the long one might not fit into memory."""
    longest = _LARGEST_ASPECT * min(image.size)
    if max(image.size) <= longest:
        return image
    width, height = (min(side, longest) for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
