"""``glyphs``, the built-in data: printed characters of several scripts that are hard, or impossible, to tell apart.

It is synthetic. Each class is one Unicode character. Each image is drawn here with one of the fonts that matplotlib
ships, cropped to the ink, scaled to a common size, and then turned, sheared, stretched, blurred, faded and made noisy:
dark on light, 28 x 28. Cropped like this, the A of Latin, Greek and Cyrillic is the same picture, and often so are a
capital and a small letter. No classifier can do well with one suggestion, and a good one is nearly always right with
five. Use it to try things out and to see what a loss does; a result on it says nothing about photographs.

Scripts are the superclasses. There are about 50 training images for each class, 12 for validation and 12 for the test.
``imbalance`` moves training images between classes and keeps their total: at 1 every class has 50, at 50 the sizes go
from about 200 down to 3. The seed shuffles the sizes over the classes, so size says nothing about script.
"""

import json
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from shortlist.program.atomic_files import written_whole
from shortlist.program.config import DataConfig
from shortlist.program.data.alter import generator_for, size_profile, sizes_from_profile
from shortlist.program.data.augment import SmallAffine, warp
from shortlist.program.data.base import SPLITS, Preprocess, Problem
from shortlist.program.data.in_memory import Rows, refuse_settings_of_files, tensor_problem
from shortlist.program.data.sets.glyph_scripts import Character, characters, fonts_with
from shortlist.program.seeds import mix_seed

VERSION = 1
"""Raise it whenever the same settings would give other images, so that old cached files are not used."""

SIDE = 28
TRAIN_IMAGES_A_CLASS = 50
HELD_OUT_IMAGES_A_CLASS = 12

# Characters are drawn at twice the final size and shrunk after the distortion, which keeps edges smooth.
_CANVAS = 64
_LONGER_SIDE = 44
_FONT_SIZE = 96
_CHUNK = 2048

_PREPROCESS = Preprocess(channels=1, resize=SIDE, crop=SIDE, mean=(0.81,), std=(0.20,))


def load(config: DataConfig, root: Path) -> Problem:
    refuse_settings_of_files(config, SIDE)
    rows, remarks = _cached_images(config, root)
    classes = characters()
    problem = tensor_problem(
        replace(config, imbalance=1),  # the images were drawn with it
        [character.name for character in classes],
        rows,
        preprocess=_PREPROCESS,
        augmentation=SmallAffine(),
        superclasses=tuple(character.script for character in classes),
    )
    return replace(problem, facts=replace(problem.facts, remarks=remarks))


def training_sizes(config: DataConfig, num_classes: int) -> Tensor:
    """Training images of each class. ``config.imbalance`` moves them to fewer classes and keeps the total.

    Example:
        >>> training_sizes(DataConfig(), 3).tolist()
        [50, 50, 50]
        >>> sorted(training_sizes(DataConfig(imbalance=50), 300).tolist())[:: 299]
        [3, 198]
    """
    profile = size_profile(num_classes, config.imbalance, config.imbalance_kind)
    sizes = sizes_from_profile(profile, TRAIN_IMAGES_A_CLASS * num_classes / float(profile.sum()))
    return sizes[torch.randperm(num_classes, generator=generator_for(config, "glyph sizes"))]


def _cached_images(config: DataConfig, root: Path) -> tuple[dict[str, Rows], dict[str, str]]:
    """The splits, and a remark for the run if they could not be cached."""
    settings = [config.seed, float(config.imbalance), config.imbalance_kind]
    name = f"glyphs-v{VERSION}-{mix_seed(*json.dumps(settings).encode()):016x}.npz"
    path = root / "glyphs" / name
    try:
        return _read(path), {}
    except Exception:  # there is none yet, or it is damaged, which raises all kinds of errors
        rows = _draw_all(config)
    arrays: dict[str, Any] = {f"{split}_x": drawn.inputs.numpy() for split, drawn in rows.items()}
    arrays |= {f"{split}_y": drawn.labels.numpy() for split, drawn in rows.items()}
    try:
        with written_whole(path) as out:
            np.savez(out, **arrays)
    except OSError as error:
        # A read-only data folder costs a few seconds each time, not the run.
        return rows, {"glyphs_not_cached": str(error)}
    return rows, {}


def _read(path: Path) -> dict[str, Rows]:
    with zipfile.ZipFile(path) as file:
        damaged = file.testzip()  # all of it: numpy stops before the checksum if a damaged shape asks for fewer bytes
    if damaged:
        raise zipfile.BadZipFile(damaged)
    with np.load(path, allow_pickle=False) as stored:
        return {split: Rows(*(torch.from_numpy(stored[f"{split}_{name}"]) for name in "xy")) for split in SPLITS}


def _draw_all(config: DataConfig) -> dict[str, Rows]:
    num_classes = len(characters())
    held_out = torch.full((num_classes,), HELD_OUT_IMAGES_A_CLASS)
    sizes = {"train": training_sizes(config, num_classes), "val": held_out, "test": held_out}
    labels = {split: torch.arange(num_classes).repeat_interleave(size) for split, size in sizes.items()}
    return {split: Rows(draw(y, generator_for(config, f"glyphs {split}")), y) for split, y in labels.items()}


def draw(labels: Tensor, generator: torch.Generator) -> Tensor:
    """``(N, 1, 28, 28)`` uint8 pictures of the characters with these labels, each with its own distortion."""
    stencils, first, count = _stencils()
    pictures = []
    for chunk in torch.split(labels, _CHUNK):
        which_font, blur, ink, paper, grain = torch.rand((5, len(chunk)), generator=generator)
        turn, shear, size, tall, wide, down, right = torch.rand((7, len(chunk)), generator=generator) * 2 - 1
        size = 0.9 + 0.15 * size
        shape = warp(
            stencils[first[chunk] + (which_font * count[chunk]).long()].float() / 255,
            angle=0.2 * turn,
            shear=0.2 * shear,
            height=size * (1 + 0.08 * tall),
            width=size * (1 + 0.08 * wide),
            down=0.07 * down,
            right=0.07 * right,
            size=2 * SIDE,
        )
        shape = F.avg_pool2d(shape, 2)
        shape = torch.lerp(shape, F.avg_pool2d(shape, 3, stride=1, padding=1), _per_image(blur))
        picture = _per_image(1 - 0.2 * paper) * (1 - _per_image(0.55 + 0.45 * ink) * shape)
        picture += _per_image(0.08 * grain) * torch.randn(picture.shape, generator=generator)
        pictures.append((picture.clamp(0, 1) * 255).round().to(torch.uint8))
    return torch.cat(pictures)


def _per_image(values: Tensor) -> Tensor:
    """One number for each image, shaped to broadcast over its pixels."""
    return values.view(-1, 1, 1, 1)


@cache
def _stencils() -> tuple[Tensor, Tensor, Tensor]:
    """Every character in every font that has it, ``(S, 1, 64, 64)``; the first one of each class, and their number."""
    classes = characters()
    fonts = [fonts_with(character) for character in classes]
    stencils = [_stencil(character, path) for character, paths in zip(classes, fonts, strict=True) for path in paths]
    count = torch.tensor([len(paths) for paths in fonts])
    return torch.from_numpy(np.stack(stencils)).unsqueeze(1), count.cumsum(0) - count, count


def _stencil(character: Character, path: Path) -> NDArray[np.uint8]:
    """White on black and centred. The longer side has a fixed length: capitals are as large as small letters."""
    font = _font(path)
    left, top, right, bottom = font.getbbox(character.text, anchor="ls")
    drawn = Image.new("L", (round(right - left), round(bottom - top)))
    ImageDraw.Draw(drawn).text((-left, -top), character.text, font=font, fill=255, anchor="ls")
    drawn = drawn.crop(drawn.getbbox())
    shrink = _LONGER_SIDE / max(drawn.size)
    drawn = drawn.resize(
        (max(1, round(drawn.width * shrink)), max(1, round(drawn.height * shrink))), Image.Resampling.BOX
    )
    canvas = Image.new("L", (_CANVAS, _CANVAS))
    canvas.paste(drawn, ((_CANVAS - drawn.width) // 2, (_CANVAS - drawn.height) // 2))
    return np.asarray(canvas)


@cache
def _font(path: Path) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), _FONT_SIZE)
