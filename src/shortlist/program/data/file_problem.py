"""The common end of every data set of image files: hold out what is missing, alter the training images, make splits."""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shortlist.program.config import DataConfig
from shortlist.program.data.alter import noisy, seeded, thinned
from shortlist.program.data.base import Preprocess, Problem
from shortlist.program.data.class_folders import Listing
from shortlist.program.data.image_folder import FileSplit
from shortlist.program.data.image_io import Transform, file_preprocess
from shortlist.program.data.stratify import hold_out


def file_problem(
    config: DataConfig,
    root: Path,
    classes: Sequence[str],
    given: dict[str, Listing],
    training_transform: Callable[[Preprocess], Transform],
) -> Problem:
    """A problem out of the listings of ``train`` and, where the data has them, ``val`` and ``test``.

    What is missing is taken from the training images, ``config.val_fraction`` of each class for each, and the files are
    noted in the facts; of images that may be millions, only a digest.
    """
    given = dict(given)
    facts: dict[str, Any] = {}
    missing = [part for part in ("val", "test") if part not in given]
    if missing:
        train = given["train"]
        held_out = hold_out(train.labels, classes, config.val_fraction, len(missing), seeded(config, "validation"))
        for part, indices in zip(("train", *missing), held_out, strict=True):
            given[part] = train.subset(indices)
        facts |= {f"{part}_files": list(given[part].files) for part in missing}

    kept, thinning = thinned(given["train"].labels, len(classes), config)
    train = given["train"].subset(kept)
    train_labels, noise = noisy(train.labels, len(classes), config)
    preprocess = file_preprocess(config.image_size)
    transform = training_transform(preprocess) if config.augment == "auto" else None
    val, test = given["val"], given["test"]
    facts |= {"train_digest": _digest(train), "test_digest": _digest(test)}
    return Problem(
        classes=tuple(classes),
        train=FileSplit(root, train.files, train_labels, preprocess, config, transform),
        val=FileSplit(root, val.files, val.labels, preprocess, config),
        test=FileSplit(root, test.files, test.labels, preprocess, config),
        input_shape=(3, preprocess.crop, preprocess.crop),
        preprocess=preprocess,
        facts={**facts, **thinning, **noise},
    )


def _digest(listing: Listing) -> str:
    digest = hashlib.sha256()
    for file, label in zip(listing.files, listing.labels.tolist(), strict=True):
        digest.update(os.fsencode(f"{file}\n{label}\n"))
    return digest.hexdigest()
