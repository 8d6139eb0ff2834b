"""ImageNet (ILSVRC 2012): ``train`` and ``val`` with a folder for each WordNet identifier.

The official validation images are the test split, as in all published results. The validation split is taken from the
training images, ``val_fraction`` of each class.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.base import Problem
from shortlist.program.data.image_folder import file_problem, holds_folders, scan_classes
from shortlist.program.data.image_io import random_resized_crop_and_flip

_NAME_LISTS = ("LOC_synset_mapping.txt", "synset_words.txt")
_NAME_INDEX = "imagenet_class_index.json"


def load(config: DataConfig, root: Path) -> Problem:
    root = find_imagenet(root)
    if not holds_folders(root / "val"):
        raise ShortlistError(
            f"{root / 'val'} must hold a folder for each WordNet identifier, as train does: sort the images first"
        )
    train, official_val = scan_classes(root, root / "train"), scan_classes(root, root / "val")
    train.require_images()
    identifiers = sorted(train.images)
    listings = {"train": train.listing(identifiers), "test": official_val.listing(identifiers)}
    class_folders = (train.folder, official_val.folder)
    classes = with_words(root, identifiers)
    return file_problem(config, root, classes, listings, random_resized_crop_and_flip, class_folders)


def find_imagenet(where: Path) -> Path:
    """The folder that holds ``train`` and ``val``: the one given, or ``imagenet`` in it."""
    for root in (where, where / "imagenet"):
        if (root / "train").is_dir() and (root / "val").is_dir():
            return root
    raise ShortlistError(
        f"ImageNet must be in {where}, with its folders train and val; they are not there. "
        "`shortlist datasets` says where to get it"
    )


def with_words(root: Path, identifiers: Sequence[str]) -> list[str]:
    """Identifiers, each with its word if one of the usual files of names is in ``root``.

    Words alone are ambiguous: there are two cranes and two maillots.
    """
    words = _words(root)
    return [f"{identifier} {words[identifier]}" if identifier in words else identifier for identifier in identifiers]


def _words(root: Path) -> dict[str, str]:
    for name in _NAME_LISTS:
        if (root / name).is_file():
            lines = (line.split(maxsplit=1) for line in (root / name).read_text("utf-8").splitlines())
            return {parts[0]: parts[1].split(",")[0].strip() for parts in lines if len(parts) == 2}
    path = root / _NAME_INDEX
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text("utf-8")).values())
    except (ValueError, AttributeError) as error:
        raise ShortlistError(f"{path} must map numbers to pairs of identifier and word: {error}") from error
