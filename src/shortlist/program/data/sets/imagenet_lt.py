"""ImageNet-LT (Liu et al. 2019): the images of ImageNet named in three lists."""

from pathlib import Path, PurePosixPath

import torch

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.base import SPLITS, Problem
from shortlist.program.data.image_folder import Listing, file_problem
from shortlist.program.data.image_io import random_resized_crop_and_flip
from shortlist.program.data.sets.imagenet import find_imagenet, with_words
from shortlist.program.text import some_of


def load(config: DataConfig, root: Path) -> Problem:
    root = find_imagenet(root)
    listings = {split: read_list(root / f"ImageNet_LT_{split}.txt") for split in SPLITS}
    num_classes = int(listings["train"].labels.max()) + 1
    for split, listing in listings.items():
        _check(root, split, listing, num_classes)
    classes = with_words(root, _identifiers(listings["train"], num_classes))
    return file_problem(config, root, classes, listings, random_resized_crop_and_flip)


def read_list(path: Path) -> Listing:
    """Lines of ``path label``."""
    if not path.is_file():
        raise ShortlistError(f"ImageNet-LT must have its list {path}, which is not there")
    files, labels = [], []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        file, _, label = line.strip().rpartition(" ")
        if not line.strip():
            continue
        if not (file and label.isdecimal()):
            raise ShortlistError(f"{path}, line {number}, must be a path and a label, got {line!r}")
        files.append(file)
        labels.append(int(label))
    if not files:
        raise ShortlistError(f"{path} must name images, and names none")
    return Listing(files, torch.tensor(labels))


def _check(root: Path, split: str, listing: Listing, num_classes: int) -> None:
    if int(listing.labels.max()) >= num_classes:
        raise ShortlistError(f"labels of {split} must be below {num_classes}, got {int(listing.labels.max())}")
    one_of_each_class = dict(zip(listing.labels.tolist(), listing.files, strict=True))
    if split == "train" and len(one_of_each_class) < num_classes:
        empty = [str(label) for label in range(num_classes) if label not in one_of_each_class]
        raise ShortlistError(f"every class must have training images; {len(empty)} have none: {some_of(empty)}")
    # One image of each class is enough to notice a wrong root. Looking for all takes minutes on a network disk.
    absent = [file for file in one_of_each_class.values() if not (root / file).is_file()]
    if absent:
        raise ShortlistError(f"the images of {split} must be in {root}; {len(absent)} are not there: {some_of(absent)}")


def _identifiers(train: Listing, num_classes: int) -> list[str]:
    """The WordNet identifier of each label: the folder of its images."""
    folder_of = {
        label: PurePosixPath(file).parent.name for file, label in zip(train.files, train.labels.tolist(), strict=True)
    }
    return [folder_of[label] for label in range(num_classes)]
