"""A user's own folder of images."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.base import Problem, Split
from shortlist.program.data.catalogue import load_problem
from shortlist.program.data.image_folder import FileSplit
from tests.support.pictures import put_classes, put_image


def load(root: Path, **settings: object) -> Problem:
    usual: dict[str, Any] = {"name": "folder", "root": str(root), "workers": 0, "image_size": 16}
    return load_problem(DataConfig(**usual | settings))


def files(split: Split) -> tuple[str, ...]:
    assert isinstance(split, FileSplit)
    return tuple(split.files)


def sizes(problem: Problem) -> tuple[int, int, int]:
    return len(problem.train), len(problem.val), len(problem.test)


def test_plain_classes_are_split_in_three_and_it_is_noted(tmp_path: Path) -> None:
    put_classes(tmp_path, {"class10": 20, "class9": 10})
    problem = load(tmp_path)
    assert problem.classes == ("class9", "class10")
    assert sizes(problem) == (24, 3, 3)
    everything = files(problem.train) + files(problem.val) + files(problem.test)
    assert len(set(everything)) == 30
    assert problem.facts.held_out == {"val_files": files(problem.val), "test_files": files(problem.test)}
    for split in (problem.train, problem.val, problem.test):
        for file, label in zip(files(split), split.labels.tolist(), strict=True):
            assert file.startswith(problem.classes[label] + "/")


@pytest.mark.parametrize("augment", ["auto", "none"])
@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_augmentation_by_timm_depends_on_seed_and_index_alone(tmp_path: Path, augment: str, fit: str) -> None:
    for name in ("a", "b"):
        for number in range(12):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.effect_noise((9, 24), 90).convert("RGB").save(tmp_path / name / f"{number}.png")

    def augmented(seed: int, *, workers: int = 0, backwards: bool = False) -> Tensor:
        train = load(tmp_path, randaugment=9, augment=augment, fit=fit, workers=workers).train
        order = torch.arange(len(train))
        plan = torch.split(order.flip(0) if backwards else order, 5)
        found: dict[int, Tensor] = {}
        for inputs, _, indices in train.batches(plan, torch.device("cpu"), seed):
            found |= dict(zip(indices.tolist(), inputs, strict=True))
        return torch.stack([found[index] for index in range(len(train))])

    here = augmented(3)
    assert torch.equal(here, augmented(3, workers=2))
    assert torch.equal(here, augmented(3, backwards=True))
    assert not torch.equal(here, augmented(4))


def test_the_seed_decides_the_split(tmp_path: Path) -> None:
    put_classes(tmp_path, {"a": 30, "b": 30})
    first, again, other = load(tmp_path), load(tmp_path), load(tmp_path, seed=1)
    assert first.facts == again.facts
    assert first.facts != other.facts


def test_given_splits_are_used_as_they_are(tmp_path: Path) -> None:
    put_classes(tmp_path / "train", {"a": 5, "b": 1})
    put_classes(tmp_path / "valid", {"a": 1, "b": 1})
    put_classes(tmp_path / "test", {"b": 3})
    problem = load(tmp_path)
    assert sizes(problem) == (6, 2, 3)
    assert problem.test.labels.tolist() == [1, 1, 1]
    assert problem.facts.held_out == {}


def test_images_beside_the_splits_are_not_left_out_in_silence(tmp_path: Path) -> None:
    put_classes(tmp_path / "train", {"a": 10, "b": 10})
    put_classes(tmp_path / "tests", {"a": 3, "b": 3})
    put_image(tmp_path / "extra" / "deep" / "down" / "1.png")
    put_image(tmp_path / "loose.png")
    put_image(tmp_path / ".thumbnails" / "1.png")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "read.txt").touch()
    assert load(tmp_path).facts.ignored_files == "3: extra/, tests/, loose.png"


@pytest.mark.parametrize(("given", "missing"), [("val", "test"), ("test", "val")])
def test_a_missing_split_is_taken_from_training(tmp_path: Path, given: str, missing: str) -> None:
    put_classes(tmp_path / "train", {"a": 10, "b": 20})
    put_classes(tmp_path / given, {"a": 4, "b": 4})
    problem = load(tmp_path, val_fraction=0.2)
    assert len(problem.train) == 24
    assert len(problem.split(given)) == 8
    assert torch.bincount(problem.split(missing).labels).tolist() == [2, 4]
    assert list(problem.facts.held_out) == [f"{missing}_files"]


def test_folders_of_splits_are_known_in_capitals_too_and_each_is_one(tmp_path: Path) -> None:
    put_classes(tmp_path / "Train", {"a": 5, "b": 5})
    put_classes(tmp_path / "VAL", {"a": 2, "b": 2})
    put_classes(tmp_path / "test", {"a": 3, "b": 3})
    assert sizes(load(tmp_path)) == (10, 4, 6)
    put_classes(tmp_path / "validation", {"a": 2, "b": 2})
    with pytest.raises(ShortlistError, match="one folder for val, got VAL and validation"):
        load(tmp_path)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    put_classes(tmp_path, {"train": 5, "car": 5})
    assert load(tmp_path).classes == ("car", "train")


def put_splits(root: Path) -> None:
    for part in ("train", "val", "test"):
        put_classes(root / part, {"a": 4, "b": 4})


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_a_stray_image_beside_the_classes_of_a_split_is_named(tmp_path: Path, part: str) -> None:
    """An earlier version took the split for a class, or lost the user's test images."""
    put_splits(tmp_path)
    put_image(tmp_path / part / "overview.png")
    with pytest.raises(ShortlistError, match=rf"{part} must hold images or folders of images.*overview\.png"):
        load(tmp_path)


def test_a_split_without_folders_of_classes_is_not_left_out_in_silence(tmp_path: Path) -> None:
    put_splits(tmp_path)
    for image in (tmp_path / "test" / "a").iterdir():
        image.rename(tmp_path / "test" / image.name)
    shutil.rmtree(tmp_path / "test" / "a")
    shutil.rmtree(tmp_path / "test" / "b")
    with pytest.raises(ShortlistError, match="test must hold a folder for each class"):
        load(tmp_path)


def test_splits_without_one_for_training_are_an_error(tmp_path: Path) -> None:
    put_splits(tmp_path)
    (tmp_path / "train").rename(tmp_path / "pictures")
    with pytest.raises(ShortlistError, match="there must be a folder train"):
        load(tmp_path)


def test_batches_come_out_with_training_augmented(tmp_path: Path) -> None:
    put_classes(tmp_path, {"a": 4, "b": 4})
    problem = load(tmp_path)
    inputs, labels, _ = next(problem.train.batches([torch.arange(4)], torch.device("cpu"), 0))
    assert inputs.shape == (4, *problem.input_shape) == (4, 3, 16, 16)
    assert torch.equal(labels, problem.train.labels)


def test_imbalance_and_noise_apply(tmp_path: Path) -> None:
    put_classes(tmp_path, {"a": 20, "b": 20})
    problem = load(tmp_path, imbalance=4, label_noise=1, noise_groups="consecutive")
    assert len(problem.train) == 16 + 4
    assert problem.facts.label_noise is not None
    assert problem.facts.label_noise.of == 20
    with pytest.raises(ShortlistError, match=r"data.noise_groups must be consecutive for folder"):
        load(tmp_path, label_noise=0.5)


def test_ignored_files_are_noted(tmp_path: Path) -> None:
    put_classes(tmp_path, {"a": 4, "b": 4})
    (tmp_path / "a" / "notes.txt").touch()
    assert load(tmp_path).facts.ignored_files == "1: a/notes.txt"


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match=r"data.root must name the folder"):
        load_problem(DataConfig(name="folder"))
    with pytest.raises(ShortlistError, match=r"data.root must be a folder of images: there is no folder .*nowhere"):
        load(tmp_path / "nowhere")
    put_image(tmp_path / "a" / "0.png")
    with pytest.raises(ShortlistError, match="at least two classes, got 1"):
        load(tmp_path)
    put_image(tmp_path / "b" / "0.png")
    with pytest.raises(ShortlistError, match=r"no class has the 3 images .* for validation and test: a \(1\), b \(1\)"):
        load(tmp_path)


def test_a_class_unknown_in_training_is_an_error(tmp_path: Path) -> None:
    put_classes(tmp_path / "train", {"a": 5, "b": 5})
    put_classes(tmp_path / "val", {"a": 5, "yeti": 5})
    with pytest.raises(ShortlistError, match=r"every class of .*val must have .*1 have none: yeti"):
        load(tmp_path)


def test_a_run_must_not_be_among_the_classes(tmp_path: Path) -> None:
    put_classes(tmp_path / "plain", {"a": 5, "b": 5})
    put_splits(tmp_path / "split")
    plain, split = load(tmp_path / "plain"), load(tmp_path / "split")
    for problem, folder in ((plain, tmp_path / "plain"), (split, tmp_path / "split" / "val")):
        for path in (folder / "runs", folder / "a" / "run"):
            with pytest.raises(ShortlistError, match=f"{path}, .* must not be in {folder}, "):
                problem.refuse_run_folder(path)
    split.refuse_run_folder(tmp_path / "split" / "runs")
    plain.refuse_run_folder(tmp_path / "runs")


def test_an_empty_split_is_an_error(tmp_path: Path) -> None:
    put_classes(tmp_path / "train", {"a": 5, "b": 5})
    (tmp_path / "val" / "a").mkdir(parents=True)
    with pytest.raises(ShortlistError, match=r"val must hold images in folders of classes, and holds none"):
        load(tmp_path)
