"""FeathersV1 (Belko and Dobratulin 2020): photographs of single feathers, one class for each bird species.

The authors' split is random, and feathers of one bird lie on both sides of it. Ours, in ``feathers_split.csv``, cuts
each class by the numbers of its files: those below ``first_val`` are for training, those from ``first_test`` on for the
test, and those between for validation. That is less leaky, not clean: compare methods by it, and do not take its level
for how well birds can be told apart.
"""

import csv
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePosixPath

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.base import SPLITS, Problem
from shortlist.program.data.image_folder import ClassFolders, file_problem, scan_classes
from shortlist.program.data.image_io import random_resized_crop_and_flip
from shortlist.program.text import some_of


@dataclass(frozen=True)
class _Cut:
    """The numbers at which a class is cut into splits."""

    first_val: int
    first_test: int

    def split_of(self, number: int) -> str:
        if number >= self.first_test:
            return "test"
        return "val" if number >= self.first_val else "train"


def load(config: DataConfig, root: Path) -> Problem:
    for where in (root, root / "feathers"):
        if all((where / split).is_dir() for split in SPLITS):
            return _load_splits(config, where)
    for where in (root, root / "feathersv1-dataset"):
        if (where / "images").is_dir():
            return _load_clone(config, where)
    raise ShortlistError(
        f"FeathersV1 must be in {root}: the authors' repository with its folder images, or the folders train, val and "
        "test. Neither is there; `shortlist datasets feathers` says where to get it"
    )


def _load_splits(config: DataConfig, root: Path) -> Problem:
    """From ``train``, ``val`` and ``test``, each with folders ``<order>__<species>``."""
    folders = {split: scan_classes(root, root / split) for split in SPLITS}
    ignored = [file for found in folders.values() for file in found.ignored]
    return _problem(config, root, folders, ignored, [root / split for split in SPLITS])


def _load_clone(config: DataConfig, root: Path) -> Problem:
    """From ``images/<order>/<species>/<order>_<species>_<number>.jpg``, cut into splits by the list."""
    images: dict[str, dict[str, list[str]]] = {split: {} for split in SPLITS}
    ignored: list[str] = []
    for order in sorted(entry for entry in (root / "images").iterdir() if entry.is_dir()):
        scanned = scan_classes(root, order)
        ignored += scanned.ignored
        for species, found in scanned.images.items():
            name = f"{order.name}__{species}"
            cut = _cuts().get(name)
            for file in found:
                number = re.search(r"_(\d+)$", PurePosixPath(file).stem)
                if cut and number:
                    images[cut.split_of(int(number[1]))].setdefault(name, []).append(file)
                else:
                    ignored.append(file)
    folders = {split: ClassFolders(root / "images", found) for split, found in images.items()}
    return _problem(config, root, folders, ignored, [root / "images"])


def _problem(
    config: DataConfig, root: Path, folders: dict[str, ClassFolders], ignored: list[str], class_folders: list[Path]
) -> Problem:
    folders["train"].require_images()
    classes = sorted(folders["train"].images)
    listings = {split: found.listing(classes) for split, found in folders.items()}
    problem = file_problem(config, root, classes, listings, random_resized_crop_and_flip, class_folders)
    if not ignored:
        return problem
    return replace(problem, facts=replace(problem.facts, ignored_files=f"{len(ignored)}: {some_of(ignored)}"))


@cache
def _cuts() -> dict[str, _Cut]:
    """By class."""
    rows = csv.DictReader((files(__package__) / "feathers_split.csv").read_text("utf-8").splitlines())
    return {f"{row['order']}__{row['species']}": _Cut(int(row["first_val"]), int(row["first_test"])) for row in rows}
