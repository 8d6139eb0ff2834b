"""Your own images: ``root/<class>/<image>``, or ``root/train/<class>/<image>`` with optional ``val`` and ``test``.

A missing split is taken from the training images, ``val_fraction`` of each class, drawn by the configuration's seed
and recorded in the run. Classes are numbered in the natural order of their names.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.base import Problem
from shortlist.program.data.image_folder import (
    file_problem,
    holds_folders,
    holds_images,
    loose_images,
    natural_order,
    scan_classes,
)
from shortlist.program.data.image_io import random_resized_crop_and_flip
from shortlist.program.text import some_of

_SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}


def load(config: DataConfig, root: Path) -> Problem:
    if not config.root:
        raise ShortlistError("data.root must name the folder of your images, got ''")
    if not root.is_dir():
        raise ShortlistError(f"data.root must be a folder of images: there is no folder {root}")
    splits = split_folders(root)
    scanned = {split: scan_classes(root, folder) for split, folder in splits.items()}
    scanned["train"].require_images()
    classes = sorted(scanned["train"].images, key=natural_order)
    listings = {split: folders.listing(classes) for split, folders in scanned.items()}
    for split, listing in listings.items():
        if not listing.files:
            raise ShortlistError(f"{scanned[split].folder} must hold images in folders of classes, and holds none")
    problem = file_problem(config, root, classes, listings, random_resized_crop_and_flip, splits.values())
    ignored = [file for folders in scanned.values() for file in folders.ignored]
    if root not in splits.values():
        ignored += _beside(root, splits.values())
    if ignored:
        facts = replace(problem.facts, ignored_files=f"{len(ignored)}: {some_of(ignored)}")
        return replace(problem, facts=facts)
    return problem


def _beside(root: Path, splits: Collection[Path]) -> list[str]:
    """Images, and folders with images, beside the splits: a user may think that they are used."""
    others = [folder for folder in sorted(root.iterdir()) if folder.is_dir() and folder not in splits]
    return [f"{folder.name}/" for folder in others if holds_images(folder)] + loose_images(root)


def split_folders(root: Path) -> dict[str, Path]:
    """The folders of classes: one each for train, val and test where ``root`` has them, else ``root`` itself.

    A folder ``train`` is a split if it holds folders; if it holds only images, it is a class, of trains. A folder that
    could be either is an error: after a wrong guess the test would be on other images than the user's.
    """
    folders = [entry for entry in sorted(root.iterdir()) if entry.is_dir()]
    named = {
        split: found
        for split, names in _SPLIT_FOLDERS.items()
        if (found := [folder for folder in folders if folder.name.casefold() in names])
    }
    with_folders = [folder for found in named.values() for folder in found if holds_folders(folder)]
    for folder in with_folders:
        if strays := loose_images(folder):
            raise ShortlistError(
                f"{folder} must hold images or folders of images, and holds both: move {some_of(strays)} away, "
                "or rename the folder if it is a class"
            )
    if not with_folders:
        return {"train": root}
    if "train" not in named:
        raise ShortlistError(
            f"beside {with_folders[0]}, which holds folders, there must be a folder train; if it is a class, rename it"
        )
    for split, found in named.items():
        if len(found) > 1:
            raise ShortlistError(f"{root} must hold one folder for {split}, got {' and '.join(f.name for f in found)}")
        if found[0] not in with_folders:
            raise ShortlistError(f"{found[0]} must hold a folder for each class, as {with_folders[0]} does")
    return {split: found[0] for split, found in named.items()}
