"""Pl@ntNet-300K in the layouts of its archives."""

import json
from pathlib import Path

import pytest
import torch

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.base import Problem
from shortlist.program.data.catalogue import load_problem
from tests.support.pictures import put_classes


def load(root: Path) -> Problem:
    return load_problem(DataConfig(name="plantnet300k", root=str(root), workers=0))


def put(root: Path, layout: str, *identifiers: str) -> None:
    for part, count in {"train": 5, "val": 2, "test": 1}.items():
        put_classes(root / layout.format(part), dict.fromkeys(identifiers, count))


@pytest.mark.parametrize("layout", ["images_{}", "images/{}", "{}", "plantnet_300K/images_{}"])
def test_every_layout_is_found_and_the_splits_are_the_official_ones(tmp_path: Path, layout: str) -> None:
    put(tmp_path, layout, "1355868", "1355920")
    problem = load(tmp_path)
    assert (len(problem.train), len(problem.val), len(problem.test)) == (10, 4, 2)
    assert problem.classes == ("1355868", "1355920")
    assert problem.facts.held_out == {}


def test_names_of_the_first_version(tmp_path: Path) -> None:
    put(tmp_path, "images_{}", "1355868", "1355920")
    names = {"1355868": "Lactuca virosa L.", "1355920": "Lactuca muralis (L.) Gaertn.", "7": "Rosa"}
    (tmp_path / "plantnet300K_species_id_2_name.json").write_text(json.dumps(names))
    assert load(tmp_path).classes == ("Lactuca virosa L.", "Lactuca muralis (L.) Gaertn.")


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_names_of_the_second_version(tmp_path: Path, delimiter: str) -> None:
    put(tmp_path, "{}", "0000", "0012")
    rows = [("species_id", "full_species", "genus"), ("0", "Rosa canina L.", "Rosa"), ("12", "Acer L.", "Acer")]
    (tmp_path / "species_metadata.csv").write_text("\n".join(delimiter.join(row) for row in rows))
    assert load(tmp_path).classes == ("Rosa canina L.", "Acer L.")


def test_training_crops_without_flips(tmp_path: Path) -> None:
    put(tmp_path, "images_{}", "1", "2")
    train = load(tmp_path).train
    inputs, _, _ = next(train.batches([torch.arange(3)], torch.device("cpu"), 0))
    assert inputs.shape == (3, 3, 224, 224)
    assert "RandomCrop" in repr(train.training_transform)  # type: ignore[attr-defined]
    assert "Flip" not in repr(train.training_transform)  # type: ignore[attr-defined]


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match=r"Pl@ntNet-300K must be in .* not there"):
        load(tmp_path)
    put(tmp_path, "images_{}", "1", "2")
    (tmp_path / "plantnet300K_species_id_2_name.json").write_text("[]")
    with pytest.raises(ShortlistError, match="must map identifiers of species to names"):
        load(tmp_path)
    (tmp_path / "plantnet300K_species_id_2_name.json").unlink()
    (tmp_path / "species_metadata.csv").write_text("id,name\n1,a\n")
    with pytest.raises(ShortlistError, match="must have the columns species_id and full_species"):
        load(tmp_path)
