"""Pl@ntNet-300K (Garcin et al. 2021) as in its archive: folders of species in train, val and test, and names."""

import csv
import json
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.base import SPLITS, Problem
from shortlist.program.data.image_folder import file_problem, scan_classes
from shortlist.program.data.image_io import random_crop

_LAYOUTS = ("images_{}", "images/{}", "{}")
_NAMES_JSON = "plantnet300K_species_id_2_name.json"
_NAMES_CSV = "species_metadata.csv"  # version 2 of the data set


def load(config: DataConfig, root: Path) -> Problem:
    root, class_folders = _find(root)
    scanned = {split: scan_classes(root, folder) for split, folder in class_folders.items()}
    scanned["train"].require_images()
    identifiers = sorted(scanned["train"].images)  # the usual order of the labels
    listings = {split: folders.listing(identifiers) for split, folders in scanned.items()}
    names = _species_names(root)
    classes = [names.get(identifier.lstrip("0"), identifier) for identifier in identifiers]
    return file_problem(config, root, classes, listings, random_crop, class_folders.values())


def _find(where: Path) -> tuple[Path, dict[str, Path]]:
    for root in (where, where / "plantnet_300K"):
        for layout in _LAYOUTS:
            folders = {split: root / layout.format(split) for split in SPLITS}
            if all(folder.is_dir() for folder in folders.values()):
                return root, folders
    raise ShortlistError(
        f"Pl@ntNet-300K must be in {where}, with its three folders of images (images_train, images_val, images_test, "
        "or images/train, ...); they are not there. `shortlist datasets` says where to get it"
    )


def _species_names(root: Path) -> dict[str, str]:
    """Species by identifier without leading zeros; empty if there is no file of names."""
    if (root / _NAMES_JSON).is_file():
        return _read_json(root / _NAMES_JSON)
    if (root / _NAMES_CSV).is_file():
        return _read_csv(root / _NAMES_CSV)
    return {}


def _read_json(path: Path) -> dict[str, str]:
    try:
        names = json.loads(path.read_text("utf-8"))
        return {identifier.lstrip("0"): str(name) for identifier, name in names.items()}
    except (ValueError, AttributeError) as error:
        raise ShortlistError(f"{path} must map identifiers of species to names: {error}") from error


def _read_csv(path: Path) -> dict[str, str]:
    with path.open(encoding="utf-8", newline="") as file:
        header = file.readline()
        fields = next(csv.reader([header], delimiter=(delimiter := ";" if ";" in header else ",")))
        rows = csv.DictReader(file, fields, delimiter=delimiter)
        try:
            return {row["species_id"].lstrip("0"): row["full_species"] for row in rows}
        except KeyError as error:
            raise ShortlistError(f"{path} must have the columns species_id and full_species, got {fields}") from error
