"""ImageNet and ImageNet-LT in their usual layouts."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.base import Problem
from shortlist.program.data.catalogue import load_problem
from shortlist.program.data.image_folder import FileSplit
from tests.support.pictures import put_classes, put_image

TENCH, GOLDFISH = "n01440764", "n01443537"


def load(root: Path, name: Literal["imagenet", "imagenet_lt"] = "imagenet") -> Problem:
    return load_problem(DataConfig(name=name, root=str(root), workers=0))


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    put_classes(tmp_path / "train", {TENCH: 20, GOLDFISH: 10})
    put_classes(tmp_path / "val", {TENCH: 3, GOLDFISH: 3})
    return tmp_path


def test_official_validation_is_the_test_and_validation_comes_from_training(imagenet: Path) -> None:
    problem = load(imagenet)
    assert (len(problem.train), len(problem.val), len(problem.test)) == (27, 3, 6)
    assert isinstance(problem.test, FileSplit)
    assert problem.test.files[0].startswith("val/")
    assert all(str(file).startswith("train/") for file in problem.facts.held_out["val_files"])
    assert problem.classes == (TENCH, GOLDFISH)


def test_it_may_lie_in_a_folder_of_its_name(tmp_path: Path) -> None:
    put_classes(tmp_path / "imagenet" / "train", {TENCH: 4, GOLDFISH: 4})
    put_classes(tmp_path / "imagenet" / "val", {TENCH: 1, GOLDFISH: 1})
    assert len(load(tmp_path).test) == 2


@pytest.mark.parametrize("name", ["LOC_synset_mapping.txt", "synset_words.txt", "imagenet_class_index.json"])
def test_names_come_from_any_of_the_usual_files(imagenet: Path, name: str) -> None:
    if name.endswith(".json"):
        content = json.dumps({"0": [TENCH, "tench"], "1": [GOLDFISH, "goldfish"]})
    else:
        content = f"{TENCH} tench, Tinca tinca\n{GOLDFISH} goldfish, Carassius auratus\n\n"
    (imagenet / name).write_text(content)
    assert load(imagenet).classes == (f"{TENCH} tench", f"{GOLDFISH} goldfish")


def test_errors_of_imagenet_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match=r"ImageNet must be in .* not there"):
        load(tmp_path)
    put_classes(tmp_path / "train", {TENCH: 4, GOLDFISH: 4})
    put_image(tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(ShortlistError, match="sort the images first"):
        load(tmp_path)
    (tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG").unlink()
    put_classes(tmp_path / "val", {TENCH: 1})
    (tmp_path / "imagenet_class_index.json").write_text("[1]")
    with pytest.raises(ShortlistError, match="must map numbers to pairs"):
        load(tmp_path)


@pytest.fixture
def long_tailed(imagenet: Path) -> Path:
    (imagenet / "ImageNet_LT_train.txt").write_text(
        f"train/{TENCH}/0.png 1\ntrain/{TENCH}/1.png 1\ntrain/{GOLDFISH}/0.png 0\n"
    )
    (imagenet / "ImageNet_LT_val.txt").write_text(f"train/{TENCH}/5.png 1\ntrain/{GOLDFISH}/5.png 0\n\n")
    (imagenet / "ImageNet_LT_test.txt").write_text(f"val/{GOLDFISH}/2.png 0\n")
    return imagenet


def test_lists_decide_images_labels_and_splits(long_tailed: Path) -> None:
    problem = load(long_tailed, "imagenet_lt")
    assert problem.train.labels.tolist() == [1, 1, 0]
    assert problem.val.labels.tolist() == [1, 0]
    assert problem.test.labels.tolist() == [0]
    assert problem.classes == (GOLDFISH, TENCH)  # by label, whatever the order of names
    inputs, _, _ = next(problem.test.batches([torch.tensor([0])], torch.device("cpu")))
    assert inputs.shape == (1, *problem.input_shape)
    assert problem.facts.held_out == {}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train", None, r"must have its list .*ImageNet_LT_train.txt"),
        ("train", "", "must name images, and names none"),
        ("train", "train/a.png one\n", r"line 1, must be a path and a label, got 'train/a.png one'"),
        ("val", "train/a.png\n", r"line 1, must be a path and a label"),
        ("val", f"train/{TENCH}/0.png 2\n", "labels of val must be below 2, got 2"),
        ("train", f"train/{TENCH}/0.png 2\n", "2 have none: 0, 1"),
        ("test", f"val/{TENCH}/77.png 0\n", rf"the images of test must be in .*1 are not there: val/{TENCH}/77.png"),
    ],
)
def test_errors_of_lists_say_what_is_wrong(long_tailed: Path, file: str, content: str | None, message: str) -> None:
    path = long_tailed / f"ImageNet_LT_{file}.txt"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ShortlistError, match=message):
        load(long_tailed, "imagenet_lt")
