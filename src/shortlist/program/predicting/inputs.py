"""What people have suggestions made for: image files, pictures in memory, vectors."""

import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from PIL import Image
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.data.image_folder import files_below
from shortlist.program.data.image_io import SUFFIXES, converted, read_image

Picture = str | Path | Image.Image | np.ndarray[Any, Any] | Tensor
"""A file, an image of Pillow, a uint8 array ``(H, W)`` or ``(H, W, C)``, or a uint8 tensor ``(C, H, W)``."""

VECTOR_FILES = (".npy", ".npz", ".safetensors")


def image_files(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The given files and all images below the given folders, by name; and the other files in these folders."""
    found: list[Path] = []
    others: list[Path] = []
    for path in paths:
        if path.is_dir():
            before = len(found)
            files, special = files_below(path)
            others += special
            for file in files:
                (found if file.suffix.lower() in SUFFIXES else others).append(file)
            if len(found) == before:
                raise ShortlistError(f"there is no image in {path}")
        elif path.is_file():
            found.append(path)
        elif path.exists():
            raise ShortlistError(f"{path} is not an image: it is no regular file")
        else:
            raise ShortlistError(f"there is no file {path}")
    return found, others


def readable_images(
    files: Sequence[Path], channels: int, at_once: int, on_unreadable: Callable[[ShortlistError], None]
) -> Iterator[tuple[list[Path], list[Image.Image]]]:
    """The files in groups, with their images. Files that cannot be read are left out and told."""
    for start in range(0, len(files), at_once):
        found: list[Path] = []
        images: list[Image.Image] = []
        for file in files[start : start + at_once]:
            try:
                images.append(read_image(file, channels))
                found.append(file)
            except ShortlistError as error:
                on_unreadable(error)
        if found:
            yield found, images


def pictures_of(inputs: Any, channels: int) -> tuple[list[Image.Image], bool]:
    """Images of Pillow, and True if there was one and not several."""
    if isinstance(inputs, list | tuple):
        return [_picture(item, channels) for item in inputs], False
    if isinstance(inputs, np.ndarray | Tensor) and inputs.ndim == 4:
        return [_picture(item, channels) for item in inputs], False
    return [_picture(inputs, channels)], True


def _picture(item: Any, channels: int) -> Image.Image:
    if isinstance(item, str | Path):
        return read_image(item, channels)
    if isinstance(item, Image.Image):
        return converted(item, channels)
    if isinstance(item, Tensor):
        if item.dtype != torch.uint8 or item.dim() != 3 or item.shape[0] not in (1, 3):
            raise ShortlistError(
                f"an image tensor must be uint8 of shape (C, H, W) with 1 or 3 channels, got {item.dtype} of shape "
                f"{tuple(item.shape)}"
            )
        item = item.permute(1, 2, 0).cpu().numpy()
    if isinstance(item, np.ndarray):
        if item.dtype != np.uint8 or item.ndim not in (2, 3) or (item.ndim == 3 and item.shape[2] not in (1, 3, 4)):
            raise ShortlistError(
                f"an image array must be uint8 of shape (H, W) or (H, W, C) with 1, 3 or 4 channels, got {item.dtype} "
                f"of shape {item.shape}"
            )
        return converted(Image.fromarray(item[..., 0] if item.ndim == 3 and item.shape[2] == 1 else item), channels)
    raise ShortlistError(
        f"an image must be a path, an image of Pillow, or a uint8 array or tensor, got {type(item).__name__}"
    )


def vectors_of(inputs: Any, width: int) -> tuple[Tensor, bool]:
    """``(N, d)`` float32 vectors, and True if there was one and not several."""
    if isinstance(inputs, list | tuple) and inputs and isinstance(inputs[0], Tensor | np.ndarray):
        rows = [torch.as_tensor(row) for row in inputs]
        if any(row.shape != (width,) for row in rows):
            shape = next(tuple(row.shape) for row in rows if row.shape != (width,))
            raise ShortlistError(f"every vector must have {width} numbers, as in training, got one of shape {shape}")
        inputs = torch.stack(rows)
    if not isinstance(inputs, Tensor | np.ndarray):
        raise ShortlistError(
            f"this run was trained on embeddings: give vectors of {width} numbers, as an array or a tensor, "
            f"got {type(inputs).__name__}"
        )
    vectors = torch.as_tensor(inputs)
    if not vectors.is_floating_point() or vectors.dim() not in (1, 2) or vectors.shape[-1] != width:
        raise ShortlistError(
            f"vectors must be floats of shape ({width},) or (N, {width}), as in training, got {vectors.dtype} of shape "
            f"{tuple(vectors.shape)}"
        )
    return vectors.float().reshape(-1, width), vectors.dim() == 1


def read_vectors(path: Path) -> Tensor:
    """The vectors of a file: the array of an ``.npy``, and of the others the one called ``x``, or the only one."""
    if not path.is_file():
        raise ShortlistError(f"there is no file {path}")
    if path.suffix not in VECTOR_FILES:
        raise ShortlistError(f"{path} is no file of vectors: it must end in {', '.join(VECTOR_FILES)}")
    try:
        arrays = _arrays(path)
    except (OSError, ValueError, TypeError, zipfile.BadZipFile, safetensors.SafetensorError) as error:
        raise ShortlistError(f"{path} cannot be read: {error}") from error
    if "x" in arrays:
        return arrays["x"]
    if len(arrays) != 1:
        raise ShortlistError(f"{path} must hold one array, or one called x, got {', '.join(sorted(arrays)) or 'none'}")
    return next(iter(arrays.values()))


def _arrays(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    found = np.load(path, allow_pickle=False)
    if isinstance(found, np.ndarray):
        return {"x": torch.as_tensor(found)}
    with found:
        return {name: torch.as_tensor(found[name]) for name in found.files}
