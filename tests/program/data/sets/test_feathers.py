"""FeathersV1 as its authors publish it and as folders of splits; the real photographs if they are there."""

import csv
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path, PurePosixPath

import pytest

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data import catalogue
from shortlist.program.data.base import SPLITS, Problem, Split
from shortlist.program.data.catalogue import load_problem
from shortlist.program.data.image_folder import FileSplit
from tests.support.pictures import put_image

REAL = Path(os.environ.get("SHORTLIST_DATA", "")) / "feathers"
# Numbers of the files of two small classes of the authors' repository, in the splits that we published results for.
SPECIES = {
    ("accipitriformes", "accipiter_brevipes"): {"train": range(10), "val": range(10, 11), "test": range(11, 14)},
    ("accipitriformes", "aegypius_monachus"): {"train": range(3), "val": range(0), "test": range(3, 4)},
}


def load(root: Path) -> Problem:
    return load_problem(DataConfig(name="feathers", root=str(root), workers=0))


def put_clone(root: Path) -> None:
    for (order, species), splits in SPECIES.items():
        for numbers in splits.values():
            for number in numbers:
                put_image(root / "images" / order / species / f"{order}_{species}_{number:05d}.jpg")


def put_splits(root: Path) -> None:
    for (order, species), splits in SPECIES.items():
        for split, numbers in splits.items():
            for number in numbers:
                put_image(root / split / f"{order}__{species}" / f"{order}_{species}_{number:05d}.webp")


def stems(split: Split) -> list[str]:
    assert isinstance(split, FileSplit)
    return [PurePosixPath(file).stem for file in split.files]


@pytest.mark.parametrize(
    ("put", "below"), [(put_clone, ""), (put_clone, "feathersv1-dataset"), (put_splits, ""), (put_splits, "feathers")]
)
def test_every_layout_gives_the_same_splits(tmp_path: Path, put: Callable[[Path], None], below: str) -> None:
    put(tmp_path / below)
    problem = load(tmp_path)
    assert problem.classes == ("accipitriformes__accipiter_brevipes", "accipitriformes__aegypius_monachus")
    for name in SPLITS:
        wanted = [
            (f"{order}_{species}_{number:05d}", label)
            for label, ((order, species), splits) in enumerate(SPECIES.items())
            for number in splits[name]
        ]
        split = problem.split(name)
        assert list(zip(stems(split), split.labels.tolist(), strict=True)) == wanted
    assert problem.facts.held_out == {}


def test_images_that_our_list_does_not_know_are_told_and_not_used(tmp_path: Path) -> None:
    put_clone(tmp_path)
    put_image(tmp_path / "images" / "galliformes" / "guttera_pucherani" / "galliformes_guttera_pucherani_00000.jpg")
    put_image(tmp_path / "images" / "accipitriformes" / "aegypius_monachus" / "mine.jpg")
    problem = load(tmp_path)
    assert len(problem.classes) == 2
    assert problem.facts.ignored_files is not None
    assert problem.facts.ignored_files.startswith("2: ")
    assert "mine.jpg" in problem.facts.ignored_files


def test_a_part_of_it_is_not_complete(tmp_path: Path) -> None:
    put_clone(tmp_path)
    (problem,) = catalogue.check("feathers", str(tmp_path))
    assert "595 classes and 28,271 images, got 2 classes and 18 images" in problem


def test_nothing_there_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match=r"FeathersV1 must be in .*shortlist datasets feathers"):
        load(tmp_path)


@pytest.mark.skipif(
    not os.environ.get("SHORTLIST_DATA") or not REAL.is_dir(),
    reason="SHORTLIST_DATA does not point to a folder that holds feathers",
)
def test_the_real_photographs_are_cut_as_the_list_says() -> None:
    """The last fifth of each class by file number is the test, and of the rest the last tenth the validation."""
    problem = load(REAL.parent)
    assert [len(problem.split(name)) for name in SPLITS] == [20_584, 2_029, 5_658]
    assert len(problem.classes) == 595
    numbers: dict[str, dict[str, list[int]]] = {}
    for name in SPLITS:
        split = problem.split(name)
        for stem, label in zip(stems(split), split.labels.tolist(), strict=True):
            numbers.setdefault(problem.classes[label], {}).setdefault(name, []).append(int(stem.rpartition("_")[2]))
    with (files("shortlist.program.data.sets") / "feathers_split.csv").open(encoding="utf-8") as lines:
        cuts = {f"{row['order']}__{row['species']}": row for row in csv.DictReader(lines)}
    assert cuts.keys() == numbers.keys()
    for name, found in numbers.items():
        first_val, first_test = int(cuts[name]["first_val"]), int(cuts[name]["first_test"])
        together = sorted(number for part in found.values() for number in part)
        held_out = round(len(together) / 5)
        kept = len(together) - held_out
        assert len(found.get("test", [])) == held_out
        assert len(found.get("val", [])) == (max(1, kept // 10) if kept >= 5 else 0)
        assert found["train"] == [number for number in together if number < first_val]
        assert found.get("val", []) == [number for number in together if first_val <= number < first_test]
