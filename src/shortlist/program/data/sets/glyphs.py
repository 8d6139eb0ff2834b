"""``glyphs``, the built-in data: printed characters of several scripts that are hard, or impossible, to tell apart.

It is synthetic. Each class is one Unicode character; each image is drawn here, from one of the fonts that matplotlib
ships, cut to the character's ink, brought to a common size, and then turned, sheared, stretched, blurred, faded and
sprinkled with noise, dark on light, 28 x 28. Cut out so, the A of Latin, Greek and Cyrillic are the same picture,
and often so are a capital and a small letter: which one it was cannot be seen. No classifier can do well with one
suggestion, and a good one is nearly always right with five. Use it to try things out and to see what a loss does;
a result on it says nothing about photographs.

Scripts are the superclasses. Every training set has about 50 images a class, 12 more a class are for validation and 12
for the test. ``imbalance`` moves training images between classes and leaves their total as it is: at 1 every class has
50, at 50 they have from about 200 down to 3. Which class gets which size is shuffled by the seed, so size says nothing
about script.
"""

import json
import zipfile
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
from shortlist.program.data.alter import noisy, seeded, size_profile, sizes_from_profile
from shortlist.program.data.augment import SmallAffine, warp
from shortlist.program.data.base import Preprocess, Problem
from shortlist.program.data.catalogue import data_root
from shortlist.program.data.in_memory import TensorSplit, refuse_other_size
from shortlist.program.data.sets.glyph_scripts import Character, characters, fonts_with
from shortlist.program.seeds import mix_seed

VERSION = 1
"""To be raised whenever the same settings would give other images, so that old cached files are not taken for them."""

SIDE = 28
TRAIN_IMAGES_A_CLASS = 50
HELD_OUT_IMAGES_A_CLASS = 12

# Characters are drawn at twice the final size and shrunk after the distortion, so that edges stay smooth.
_CANVAS = 64
_LONGER_SIDE = 44
_FONT_SIZE = 96
_CHUNK = 2048

_PARTS = tuple(f"{split}_{what}" for split in ("train", "val", "test") for what in "xy")
_PREPROCESS = Preprocess(channels=1, resize=SIDE, crop=SIDE, mean=(0.81,), std=(0.20,))


def load(config: DataConfig) -> Problem:
    refuse_other_size(config, SIDE)
    classes = characters()
    parts, facts = _cached_images(config)
    superclasses = tuple(character.script for character in classes)
    train_labels, noise_facts = noisy(parts["train_y"], len(classes), config, superclasses)
    augmentation = SmallAffine() if config.augment == "auto" else None
    return Problem(
        classes=tuple(character.name for character in classes),
        train=TensorSplit(parts["train_x"], train_labels, _PREPROCESS, augmentation),
        val=TensorSplit(parts["val_x"], parts["val_y"], _PREPROCESS),
        test=TensorSplit(parts["test_x"], parts["test_y"], _PREPROCESS),
        input_shape=(1, SIDE, SIDE),
        preprocess=_PREPROCESS,
        facts={**facts, **noise_facts},
        superclasses=superclasses,
    )


def training_sizes(config: DataConfig, num_classes: int) -> Tensor:
    """Training images of each class: the total stays, ``config.imbalance`` moves them to fewer classes.

    Example:
        >>> training_sizes(DataConfig(), 3).tolist()
        [50, 50, 50]
        >>> sorted(training_sizes(DataConfig(imbalance=50), 300).tolist())[:: 299]
        [3, 198]
    """
    profile = size_profile(num_classes, config.imbalance, config.imbalance_kind)
    sizes = sizes_from_profile(profile, TRAIN_IMAGES_A_CLASS * num_classes / float(profile.sum()))
    return sizes[torch.randperm(num_classes, generator=seeded(config, "glyph sizes"))]


def _cached_images(config: DataConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    settings = [config.seed, float(config.imbalance), config.imbalance_kind]
    name = f"glyphs-v{VERSION}-{mix_seed(*json.dumps(settings).encode()):016x}.npz"
    path = data_root(config) / "glyphs" / name
    try:
        return _read(path), {}
    except Exception:  # not there yet, or damaged, which shows in every way there is
        parts = _draw_all(config)
    try:
        arrays: dict[str, Any] = {part: tensor.numpy() for part, tensor in parts.items()}
        with written_whole(path) as out:
            np.savez(out, **arrays)
    except OSError as error:
        # A data folder that cannot be written costs a few seconds each time, not the run.
        return parts, {"glyphs_not_cached": str(error)}
    return parts, {}


def _read(path: Path) -> dict[str, Tensor]:
    with zipfile.ZipFile(path) as file:
        damaged = file.testzip()  # all of it: numpy stops before the checksum if a damaged shape asks for fewer bytes
    if damaged:
        raise zipfile.BadZipFile(damaged)
    with np.load(path, allow_pickle=False) as stored:
        return {part: torch.from_numpy(stored[part]) for part in _PARTS}


def _draw_all(config: DataConfig) -> dict[str, Tensor]:
    classes = characters()
    held_out = torch.full((len(classes),), HELD_OUT_IMAGES_A_CLASS)
    sizes = {"train": training_sizes(config, len(classes)), "val": held_out, "test": held_out}
    parts = {}
    for split, size in sizes.items():
        labels = torch.arange(len(classes)).repeat_interleave(size)
        parts[f"{split}_x"] = draw(labels, seeded(config, f"glyphs {split}"))
        parts[f"{split}_y"] = labels
    return parts


def draw(labels: Tensor, generator: torch.Generator) -> Tensor:
    """``(N, 1, 28, 28)`` uint8 pictures of the characters with these labels, each distorted in its own way."""
    stencils, first, count = _stencils()
    pictures = []
    for some in torch.split(labels, _CHUNK):
        which_font, blur, ink, paper, grain = torch.rand((5, len(some)), generator=generator)
        turn, shear, size, tall, wide, down, right = torch.rand((7, len(some)), generator=generator) * 2 - 1
        size = 0.9 + 0.15 * size
        shape = warp(
            stencils[first[some] + (which_font * count[some]).long()].float() / 255,
            angle=0.2 * turn,
            shear=0.2 * shear,
            height=size * (1 + 0.08 * tall),
            width=size * (1 + 0.08 * wide),
            down=0.07 * down,
            right=0.07 * right,
            size=2 * SIDE,
        )
        shape = F.avg_pool2d(shape, 2)
        shape = torch.lerp(shape, F.avg_pool2d(shape, 3, stride=1, padding=1), _each(blur))
        picture = _each(1 - 0.2 * paper) * (1 - _each(0.55 + 0.45 * ink) * shape)
        picture += _each(0.08 * grain) * torch.randn(picture.shape, generator=generator)
        pictures.append((picture.clamp(0, 1) * 255).round().to(torch.uint8))
    return torch.cat(pictures)


def _each(values: Tensor) -> Tensor:
    """One number an image, ready to be spread over its pixels."""
    return values.view(-1, 1, 1, 1)


@cache
def _stencils() -> tuple[Tensor, Tensor, Tensor]:
    """Every character in every font that has it, ``(S, 1, 64, 64)``; for each class its first one, and how many."""
    classes = characters()
    fonts = [fonts_with(character) for character in classes]
    stencils = [_stencil(character, path) for character, paths in zip(classes, fonts, strict=True) for path in paths]
    count = torch.tensor([len(paths) for paths in fonts])
    return torch.from_numpy(np.stack(stencils)).unsqueeze(1), count.cumsum(0) - count, count


def _stencil(character: Character, path: Path) -> NDArray[np.uint8]:
    """White ink on black, in the middle, its longer side of a fixed length: a capital is as large as a small letter."""
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
