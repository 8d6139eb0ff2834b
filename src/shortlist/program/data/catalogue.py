"""What data there is to train on, where each comes from, and whether what a user has of it is all there."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig, DataName
from shortlist.program.data.download import Progress, download

if TYPE_CHECKING:
    from shortlist.program.data.base import Problem

CIFAR100_URL = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"


@dataclass(frozen=True)
class Entry:
    """A data set as ``shortlist datasets`` shows it."""

    name: DataName
    what: str
    size: str
    terms: str
    fetch: str
    put: str
    counts: tuple[tuple[int, int], ...] = ()
    """Classes and images of each version of the data set that is known; empty for data of the user's own."""

    @property
    def can_download(self) -> bool:
        return self.name == "cifar100"


_ENTRIES = (
    Entry(
        name="glyphs",
        what="Built in, synthetic: printed characters of several scripts in the fonts of matplotlib, many alike.",
        size="373 classes, about 18,600 training images of 28 x 28, and 4,476 each for validation and test",
        terms="made on your machine; the fonts' licences (DejaVu, STIX) allow it",
        fetch="nothing: it is drawn on first use and cached",
        put="nothing to do",
    ),
    Entry(
        name="cifar100",
        what="CIFAR-100 (Krizhevsky 2009): small photographs in 20 superclasses; with data.imbalance, CIFAR-100-LT.",
        size="100 classes, 50,000 training and 10,000 test images of 32 x 32, 169 MB",
        terms="free to use, with a request to cite the technical report; the photographs belong to their owners",
        fetch="the Python version at https://www.cs.toronto.edu/~kriz/cifar.html, or --download",
        put="cifar-100-python.tar.gz, or the folder cifar-100-python out of it, in data.root",
        counts=((100, 60_000),),
    ),
    Entry(
        name="plantnet300k",
        what="Pl@ntNet-300K (Garcin et al. 2021): photographs of plants by citizens, long-tailed and ambiguous.",
        size="1,081 species, 306,146 images, 32 GB (version 2 of 2026: 1,000 species, 306,087 images)",
        terms="Creative Commons licences that differ from image to image, listed in the data set's metadata",
        fetch="https://zenodo.org/records/5645731 (as in the paper; version 2 there gives other numbers)",
        put="the unpacked archive in data.root: images_train, images_val and images_test (or images/train, ...), and "
        "plantnet300K_species_id_2_name.json for the names",
        counts=((1_081, 306_146), (1_000, 306_087)),
    ),
    Entry(
        name="imagenet",
        what="ImageNet (ILSVRC 2012).",
        size="1,000 classes, 1,281,167 training images and 50,000 for the test, 155 GB",
        terms="non-commercial research and education; you must register and agree to the terms",
        fetch="https://image-net.org, after registration",
        put="train and val in data.root, each with a folder for every WordNet identifier; LOC_synset_mapping.txt, "
        "synset_words.txt or imagenet_class_index.json beside them for the names",
        counts=((1_000, 1_331_167),),
    ),
    Entry(
        name="imagenet_lt",
        what="ImageNet-LT (Liu et al. 2019): a long-tailed choice of ImageNet's images.",
        size="1,000 classes, 115,846 training, 20,000 validation and 50,000 test images",
        terms="those of ImageNet",
        fetch="ImageNet as above, and the lists of the OpenLongTailRecognition project: "
        "https://github.com/zhmiao/OpenLongTailRecognition-OLTR",
        put="ImageNet_LT_train.txt, ImageNet_LT_val.txt and ImageNet_LT_test.txt in data.root, beside train and val",
        counts=((1_000, 185_846),),
    ),
    Entry(
        name="folder",
        what="Your own images, in a folder for each class.",
        size="any number of classes and images, of any size, in the usual formats (not HEIC)",
        terms="yours",
        fetch="nothing",
        put="data.root/<class>/<image>, or data.root/train/<class>/<image> with val and test beside it",
    ),
    Entry(
        name="embeddings",
        what="Your own embeddings with labels, to train a last layer alone.",
        size="any number of classes, rows and columns that fits into memory",
        terms="yours",
        fetch="nothing",
        put="one file, .npz or .safetensors, as data.root: train_x (N, d) floats and train_y (N,) labels from 0 "
        "(or x and y), val_x, val_y, test_x, test_y, and classes, their names, if you have them",
    ),
)

CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def check(name: DataName, root: str = "") -> list[str]:
    """What is wrong with the data set in ``root`` (or where it is looked for by default); empty if it is all there.

    Reads the data as training would, without opening its image files.
    """
    config = DataConfig(name=name, root=root)
    try:
        problem = load_problem(config)
    except ShortlistError as error:
        return [str(error)]
    found = len(problem.classes), len(problem.train) + len(problem.val) + len(problem.test)
    known = CATALOGUE[name].counts
    if known and found not in known:
        wanted = " or ".join(f"{classes:,} classes and {images:,} images" for classes, images in known)
        return [f"{data_root(config)} must hold {wanted}, got {found[0]:,} classes and {found[1]:,} images"]
    return []


def fetch(name: DataName, root: str = "", progress: Progress = lambda done, total: None) -> Path:
    """Download a data set to ``root`` (or where it is looked for by default); the path of what came.

    Only CIFAR-100 is offered for plain download by its source.
    """
    from shortlist.program.data.sets.cifar100 import ARCHIVE, ARCHIVE_MD5

    entry = CATALOGUE[name]
    if not entry.can_download:
        raise ShortlistError(f"{name} cannot be downloaded from here. What to fetch: {entry.fetch}")
    path = data_root(DataConfig(name=name, root=root)) / ARCHIVE
    download(CIFAR100_URL, path, ARCHIVE_MD5, progress)
    return path


def load_problem(config: DataConfig) -> "Problem":
    """Read, or make, the data that the configuration names.

    Raises ``ShortlistError`` with what to do about it when the data is not there or not as it should be.
    """
    module = import_module(f"shortlist.program.data.sets.{config.name}")
    load = cast("Callable[[DataConfig], Problem]", module.load)
    return load(config)


def data_root(config: DataConfig) -> Path:
    """The folder (or file) that the configuration names, else ``$SHORTLIST_DATA``, else a cache folder of the user's.

    Example:
        >>> data_root(DataConfig(root="/data/birds")).as_posix()
        '/data/birds'
    """
    return Path(config.root or os.environ.get("SHORTLIST_DATA", "") or user_cache()).expanduser()


def user_cache() -> Path:
    """Where this operating system wants files that can be made again."""
    if sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME", "") or "~/.cache"
    return Path(base).expanduser() / "shortlist"
