"""Folders whose sub-folders are classes: which images are in them."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.data.image_io import SUFFIXES
from shortlist.program.wording import some_of


@dataclass(frozen=True)
class Listing:
    """Image files, relative to the data's root, and their labels."""

    files: Sequence[str]
    labels: Tensor

    def subset(self, indices: Tensor) -> "Listing":
        return Listing([self.files[index] for index in indices.tolist()], self.labels[indices])


@dataclass(frozen=True)
class ClassFolders:
    """What lies below one folder of classes."""

    folder: Path
    images: dict[str, list[str]]
    """For each class folder its images, relative to the data's root, sorted."""
    ignored: list[str] = field(default_factory=list)
    """Files that are no images by their names, and pipes, devices and the like whatever they are called."""

    def listing(self, classes: Sequence[str]) -> Listing:
        """All images, labelled by the place of their class folder among ``classes``."""
        label_of = {name: label for label, name in enumerate(classes)}
        unknown = sorted(name for name, images in self.images.items() if images and name not in label_of)
        if unknown:
            raise ShortlistError(
                f"every class of {self.folder} must have a folder of the same name with training images; "
                f"{len(unknown)} have none: {some_of(unknown)}"
            )
        pairs = [(file, label_of[name]) for name, files in self.images.items() for file in files]
        return Listing([file for file, _ in pairs], torch.tensor([label for _, label in pairs], dtype=torch.int64))

    def require_images(self) -> None:
        """Raise an error unless there are at least two classes, each with an image."""
        if len(self.images) < 2:
            raise ShortlistError(
                f"{self.folder} must hold a folder of images for each of at least two classes, got {len(self.images)}"
            )
        empty = sorted(name for name, images in self.images.items() if not images)
        if empty:
            raise ShortlistError(
                f"every class folder of {self.folder} must hold images; {len(empty)} hold none: {some_of(empty)}"
            )


def scan_classes(root: Path, folder: Path) -> ClassFolders:
    """Each folder inside ``folder`` is a class; its images may lie in folders of their own. Links are followed."""
    images: dict[str, list[str]] = {}
    ignored: list[str] = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not _is_hidden(entry.name):
            files, special = files_below(entry)
            found = [file.relative_to(root).as_posix() for file in files]
            images[entry.name] = [file for file in found if _is_image(file)]
            ignored += [file for file in found if not _is_image(file)]
            ignored += [file.relative_to(root).as_posix() for file in special]
        elif not entry.is_dir() and _is_image(entry.name) and not _is_hidden(entry.name):
            ignored.append(entry.relative_to(root).as_posix())  # an image of no class
    return ClassFolders(folder, images, ignored)


def holds_folders(folder: Path) -> bool:
    return any(entry.is_dir() and not _is_hidden(entry.name) for entry in folder.iterdir())


def holds_images(folder: Path) -> bool:
    """Somewhere below it, other than behind links; what is hidden does not count. Ends with the first that it finds."""
    if _is_hidden(folder.name):
        return False
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        if any(_is_image(name) and not _is_hidden(name) for name in files):
            return True
    return False


def loose_images(folder: Path) -> list[str]:
    """Names of the images that lie in the folder itself."""
    entries = (entry for entry in folder.iterdir() if not entry.is_dir() and not _is_hidden(entry.name))
    return sorted(entry.name for entry in entries if _is_image(entry.name))


def natural_order(name: str) -> tuple[tuple[str | int, ...], str]:
    """Key that sorts ``class2`` before ``class10``.

    Example:
        >>> sorted(["class10", "Class9", "class2"], key=natural_order)
        ['class2', 'Class9', 'class10']
    """
    parts = re.split(r"(\d+)", name.casefold())
    return tuple(int(part) if place % 2 else part for place, part in enumerate(parts)), name


def files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """All files that are not hidden, in folders that are not, in the order of their paths. Links are followed.

    Returns:
        The files, and what is no regular file: reading a pipe would wait for ever. A link that leads nowhere counts as
        a file, so that reading it tells of it.
    """
    files: list[Path] = []
    special: list[Path] = []
    visited: set[Path] = set()
    to_visit = [folder]
    while to_visit:
        here = to_visit.pop()
        if here.resolve() in visited:  # links may run in a circle
            continue
        visited.add(here.resolve())
        with os.scandir(here) as entries:
            for entry in entries:
                path = here / entry.name
                if _is_hidden(entry.name):
                    continue
                if entry.is_dir():
                    to_visit.append(path)
                else:  # of a regular file the folder says what it is; only links cost a look
                    (files if entry.is_file() or not path.exists() else special).append(path)
        to_visit.sort(reverse=True)
    return sorted(files), sorted(special)


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
