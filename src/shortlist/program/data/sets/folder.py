"""Your own images: ``root/<class>/<image>``, or ``root/train/<class>/<image>`` with ``val`` and ``test`` if you like.

What is missing of validation and test is taken from the training images, ``val_fraction`` of each class for each,
drawn by the configuration's seed and noted in the run. Classes are numbered in the natural order of their names.
"""

from collections.abc import Collection
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


def load(config: DataConfig) -> Problem:
    if not config.root:
        raise ShortlistError("data.root must name the folder of your images, got ''")
    root = Path(config.root).expanduser()
    if not root.is_dir():
        raise ShortlistError(f"data.root must be a folder of images: there is no folder {root}")
    splits = split_folders(root)
    scanned = {part: scan_classes(root, folder) for part, folder in splits.items()}
    scanned["train"].require_images()
    classes = sorted(scanned["train"].images, key=natural_order)
    listings = {part: folders.listing(classes) for part, folders in scanned.items()}
    for part, listing in listings.items():
        if not listing.files:
            raise ShortlistError(f"{scanned[part].folder} must hold images in folders of classes, and holds none")
    problem = file_problem(config, root, classes, listings, random_resized_crop_and_flip)
    ignored = [file for folders in scanned.values() for file in folders.ignored]
    if root not in splits.values():
        ignored += _beside(root, splits.values())
    if ignored:
        problem.facts["ignored_files"] = f"{len(ignored)}: {some_of(ignored)}"
    return problem


def _beside(root: Path, splits: Collection[Path]) -> list[str]:
    """Images, and folders with images, that lie beside the splits: somebody may think that they are in use."""
    others = [folder for folder in sorted(root.iterdir()) if folder.is_dir() and folder not in splits]
    return [f"{folder.name}/" for folder in others if holds_images(folder)] + loose_images(root)


def refuse_run_among_classes(run: Path, config: DataConfig) -> None:
    """Raise an error if the run's folder would be one of the classes, with its pictures for images."""
    for folder in split_folders(Path(config.root).expanduser()).values():
        if run.resolve().is_relative_to(folder.resolve()):
            raise ShortlistError(
                f"{run}, the folder of the run, must not be in {folder}, where every folder is a class: "
                "choose another by --out, or call the program from elsewhere"
            )


def split_folders(root: Path) -> dict[str, Path]:
    """The folders of classes: one each for train, val and test where ``root`` has them, else ``root`` itself.

    A folder ``train`` counts as a split if it holds folders; with nothing but images it is a class, of trains. What
    could be either is an error: to guess wrong would be to test on other images than the user's own.
    """
    folders = [entry for entry in sorted(root.iterdir()) if entry.is_dir()]
    named = {
        part: here
        for part, names in _SPLIT_FOLDERS.items()
        if (here := [folder for folder in folders if folder.name.casefold() in names])
    }
    with_folders = [folder for here in named.values() for folder in here if holds_folders(folder)]
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
    for part, here in named.items():
        if len(here) > 1:
            raise ShortlistError(f"{root} must hold one folder for {part}, got {' and '.join(f.name for f in here)}")
        if here[0] not in with_folders:
            raise ShortlistError(f"{here[0]} must hold a folder for each class, as {with_folders[0]} does")
    return {part: here[0] for part, here in named.items()}
