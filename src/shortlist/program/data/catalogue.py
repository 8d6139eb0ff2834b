"""The data sets: what each is, where it comes from, how it is loaded, and whether a user's copy is complete.

Listing them needs no torch: the file of a data set is imported when it is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shortlist.errors import ShortlistError
from shortlist.program.cache_folder import cache_folder
from shortlist.program.config import DataConfig, DataName
from shortlist.program.data.download import Download, Progress, download

if TYPE_CHECKING:
    from shortlist.program.data.base import Problem


@dataclass(frozen=True)
class Source:
    """What the file of a data set offers."""

    load: "Callable[[DataConfig, Path], Problem]"
    """Read, or make, the data in a folder."""
    download: Download | None = None
    """None if its source does not allow a plain download."""


@dataclass(frozen=True)
class Entry:
    """A data set as ``shortlist datasets`` shows it."""

    name: DataName
    what: str
    size: str
    terms: str
    fetch: str
    put: str
    source: Callable[[], Source]
    """Imports the file of the data set."""
    counts: tuple[tuple[int, int], ...] = ()
    """Classes and images of each known version of the data set; empty for the user's own data."""


def _glyphs() -> Source:
    from shortlist.program.data.sets.glyphs import load

    return Source(load)


def _cifar100() -> Source:
    from shortlist.program.data.sets.cifar100 import DOWNLOAD, load

    return Source(load, DOWNLOAD)


def _plantnet300k() -> Source:
    from shortlist.program.data.sets.plantnet300k import load

    return Source(load)


def _imagenet() -> Source:
    from shortlist.program.data.sets.imagenet import load

    return Source(load)


def _imagenet_lt() -> Source:
    from shortlist.program.data.sets.imagenet_lt import load

    return Source(load)


def _feathers() -> Source:
    from shortlist.program.data.sets.feathers import load

    return Source(load)


def _folder() -> Source:
    from shortlist.program.data.sets.folder import load

    return Source(load)


def _embeddings() -> Source:
    from shortlist.program.data.sets.embeddings import load

    return Source(load)


_ENTRIES = (
    Entry(
        name="glyphs",
        what="Built in, synthetic: printed characters of several scripts in the fonts of matplotlib, many alike.",
        size="373 classes, about 18,600 training images of 28 x 28, and 4,476 each for validation and test",
        terms="made on your machine; the fonts' licences (DejaVu, STIX) allow it",
        fetch="nothing: it is drawn on first use and cached",
        put="nothing to do",
        source=_glyphs,
    ),
    Entry(
        name="cifar100",
        what="CIFAR-100 (Krizhevsky 2009): small photographs in 20 superclasses; with data.imbalance, CIFAR-100-LT.",
        size="100 classes, 50,000 training and 10,000 test images of 32 x 32, 169 MB",
        terms="free to use, with a request to cite the technical report; the photographs belong to their owners",
        fetch="the Python version at https://www.cs.toronto.edu/~kriz/cifar.html, or --download",
        put="cifar-100-python.tar.gz, or the folder cifar-100-python from it, in data.root",
        source=_cifar100,
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
        source=_plantnet300k,
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
        source=_imagenet,
        counts=((1_000, 1_331_167),),
    ),
    Entry(
        name="imagenet_lt",
        what="ImageNet-LT (Liu et al. 2019): a long-tailed subset of ImageNet.",
        size="1,000 classes, 115,846 training, 20,000 validation and 50,000 test images",
        terms="those of ImageNet",
        fetch="ImageNet as above, and the lists of the OpenLongTailRecognition project: "
        "https://github.com/zhmiao/OpenLongTailRecognition-OLTR",
        put="ImageNet_LT_train.txt, ImageNet_LT_val.txt and ImageNet_LT_test.txt in data.root, beside train and val",
        source=_imagenet_lt,
        counts=((1_000, 185_846),),
    ),
    Entry(
        name="feathers",
        what="FeathersV1 (Belko and Dobratulin 2020): photographs of single feathers of birds, naturally long-tailed.",
        size="595 species, 28,271 images, 0.9 GB; split by us into 20,584 for training, 2,029 for validation and 5,658 "
        "for the test",
        terms="non-commercial research only, and publications must name its authors: see LICENSE in the repository; "
        "A. V. Belko, K. S. Dobratulin, FeathersV1 dataset for feathers classification, arXiv 2004.08606",
        fetch="git clone https://github.com/feathers-dataset/feathersv1-dataset (we know it at commit d1df92d)",
        put="the clone in data.root, or the clone as data.root; shrunken copies also as train, val and test, each with "
        "folders <order>__<species>, in data.root or in data.root/feathers",
        source=_feathers,
        counts=((595, 28_271),),
    ),
    Entry(
        name="folder",
        what="Your own images, in a folder for each class.",
        size="any number of classes and images, of any size, in the usual formats (not HEIC)",
        terms="yours",
        fetch="nothing",
        put="data.root/<class>/<image>, or data.root/train/<class>/<image> with val and test beside it",
        source=_folder,
    ),
    Entry(
        name="embeddings",
        what="Your own embeddings with labels, to train only a last layer.",
        size="any number of classes, rows and columns that fits into memory",
        terms="yours",
        fetch="nothing",
        put="one file, .npz or .safetensors, as data.root: train_x (N, d) floats and train_y (N,) labels from 0 "
        "(or x and y); if you have them, also val_x, val_y, test_x, test_y, and class names as classes",
        source=_embeddings,
    ),
)

CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def load_problem(config: DataConfig, run_seed: int = 0) -> "Problem":
    """Read, or make, the data that the configuration names, for a run with this seed.

    Raises:
        ShortlistError: The data is missing or not as it should be; the message says what to do.
    """
    from shortlist.program.data.alter import with_label_noise

    return with_label_noise(CATALOGUE[config.name].source().load(config, data_root(config)), config, run_seed)


def check(name: DataName, root: str = "") -> list[str]:
    """What is wrong with the data set in ``root`` (or the default place); empty if it is complete.

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
    """Download a data set to ``root`` (or the default place); the path of the file."""
    entry = CATALOGUE[name]
    offered = entry.source().download
    if offered is None:
        raise ShortlistError(f"{name} cannot be downloaded from here. What to fetch: {entry.fetch}")
    path = data_root(DataConfig(name=name, root=root)) / offered.file
    download(offered.url, path, offered.md5, progress)
    return path


def data_root(config: DataConfig) -> Path:
    """The folder (or file) that the configuration names, else the cache folder.

    Example:
        >>> data_root(DataConfig(root="/data/birds")).as_posix()
        '/data/birds'
    """
    return Path(config.root).expanduser() if config.root else cache_folder()
