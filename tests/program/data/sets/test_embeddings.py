"""Files of embeddings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.base import Problem
from shortlist.program.data.catalogue import load_problem
from shortlist.program.data.in_memory import TensorSplit

Arrays = dict[str, np.ndarray[Any, Any]]


def load(path: Path, **settings: Any) -> Problem:
    return load_problem(DataConfig(name="embeddings", root=str(path), **settings))


def rows(count: int, classes: int = 3, width: int = 4) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    labels = np.arange(count) % classes
    return (np.random.default_rng(0).normal(size=(count, width)) + labels[:, None]).astype(np.float32), labels


def complete() -> Arrays:
    arrays: Arrays = {}
    for part, count in {"train": 30, "val": 6, "test": 9}.items():
        arrays[f"{part}_x"], arrays[f"{part}_y"] = rows(count)
    return arrays


def save(path: Path, arrays: Arrays, classes: list[str] | None = None) -> Path:
    if path.suffix == ".npz":
        names: Arrays = {"classes": np.array(classes)} if classes else {}
        np.savez(path, **{**arrays, **names})  # type: ignore[arg-type]
    else:
        metadata = {"classes": json.dumps(classes)} if classes else None
        safetensors.torch.save_file({k: torch.from_numpy(v) for k, v in arrays.items()}, path, metadata)
    return path


def test_what_else_is_in_the_file_is_nothing_to_us(tmp_path: Path) -> None:
    further: Arrays = {"paths": np.array(["a.png", "b.png"]), "meta": np.array([{"any": "thing"}])}
    assert len(load(save(tmp_path / "a.npz", complete() | further)).train) == 30


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_all_that_is_given_is_used(tmp_path: Path, suffix: str) -> None:
    arrays = complete()
    problem = load(save(tmp_path / f"a{suffix}", arrays, ["x", "y", "z"]))
    assert problem.classes == ("x", "y", "z")
    assert problem.input_shape == (4,)
    assert problem.preprocess is None
    assert problem.facts.held_out == {}
    for part in ("train", "val", "test"):
        split = problem.split(part)
        assert isinstance(split, TensorSplit)
        np.testing.assert_array_equal(split.inputs.numpy(), arrays[f"{part}_x"])
        np.testing.assert_array_equal(split.labels.numpy(), arrays[f"{part}_y"])


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("prefix", ["", "train_"])
def test_missing_parts_are_held_out_and_noted(tmp_path: Path, suffix: str, prefix: str) -> None:
    x, y = rows(60)
    problem = load(save(tmp_path / f"a{suffix}", {f"{prefix}x": x, f"{prefix}y": y}))
    assert (len(problem.train), len(problem.val), len(problem.test)) == (48, 6, 6)
    assert problem.classes == ("0", "1", "2")
    assert isinstance(problem.val, TensorSplit)
    np.testing.assert_array_equal(problem.val.inputs.numpy(), x[np.array(problem.facts.held_out["val_indices"])])
    np.testing.assert_array_equal(problem.test.labels.numpy(), y[np.array(problem.facts.held_out["test_indices"])])


def test_other_embeddings_of_the_same_test_rows_count_as_the_same_test(tmp_path: Path) -> None:
    """Otherwise runs on the features of two networks could not be compared."""
    arrays = complete()
    dino = load(save(tmp_path / "dino.npz", arrays)).facts
    features = {name: arrays[name] + 1 for name in ("train_x", "test_x")}
    clip = load(save(tmp_path / "clip.npz", arrays | features)).facts
    other = load(save(tmp_path / "other.npz", arrays | {"test_y": np.roll(arrays["test_y"], 1)})).facts
    assert dino.test_digest == clip.test_digest != other.test_digest
    assert dino.train_digest == other.train_digest != clip.train_digest


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("label_dtype", [np.uint8, np.int32, np.int64])
def test_every_usual_type_is_read(tmp_path: Path, dtype: type, label_dtype: type) -> None:
    x, y = rows(30)
    problem = load(save(tmp_path / "a.npz", {"x": x.astype(dtype), "y": y.astype(label_dtype)}))
    inputs, labels, _ = next(problem.train.batches([torch.arange(5)], torch.device("cpu")))
    assert inputs.dtype == torch.float32
    assert labels.dtype == torch.int64


def test_imbalance_and_noise_apply_to_training(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", complete())
    problem = load(path, imbalance=5, label_noise=1, noise_groups="consecutive")
    assert len(problem.train) == 10 + 4 + 2
    assert problem.facts.label_noise is not None
    assert problem.facts.label_noise.of == 16
    assert len(problem.val) == 6


def broken(**changes: Any) -> Arrays:
    arrays = {**complete(), **changes}
    return {name: array for name, array in arrays.items() if array is not None}


NOT_FINITE = rows(30)[0]
NOT_FINITE[7, 2] = np.nan


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            broken(train_x=None, train_y=None),
            r"must hold train_x and train_y, or x and y; it holds test_x, test_y, val_x",
        ),
        (broken(val_y=None), "must hold both val_x and val_y, or neither"),
        (broken(train_x=np.zeros((30, 2, 2), np.float32)), r"train_x .* must be \(N, d\) floats, got \(30, 2, 2\)"),
        (broken(train_x=np.zeros((30, 4), np.int64)), r"train_x .* must be \(N, d\) floats, got .* of torch.int64"),
        (broken(train_x=np.zeros((0, 4), np.float32)), r"train_x .* must be \(N, d\) floats, got \(0, 4\)"),
        (broken(train_y=np.arange(29)), r"train_y .* must be \(30,\) whole numbers, got \(29,\)"),
        (broken(train_y=np.zeros(30)), r"train_y .* must be \(30,\) whole numbers, got \(30,\) of torch.float64"),
        (broken(train_x=NOT_FINITE), "train_x .* must be finite in torch.float32, and row 7 is not"),
        (broken(train_x=np.full((30, 4), 1e60)), "train_x .* must be finite in torch.float32, and row 0 is not"),
        (broken(train_y=np.arange(30) + 2_000_000_000), "labels .* 30 rows cannot use all up to 2000000029"),
        (broken(val_x=np.zeros((6, 3), np.float32)), "val_x .* must have 4 columns as train_x has, got 3"),
        (broken(test_y=np.full(9, 3)), r"test_y .* must be in \[0, 2\], got 3"),
        (broken(train_y=np.arange(30) % 3 - 1), r"train_y .* must be in \[0, 1\], got -1"),
        (broken(train_y=np.arange(30) % 3 * 2), "every class of .* 2 have none: 1, 3"),
    ],
)
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_errors_say_what_is_wrong(tmp_path: Path, suffix: str, arrays: Arrays, message: str) -> None:
    with pytest.raises(ShortlistError, match=message):
        load(save(tmp_path / f"a{suffix}", arrays))


def test_more_names_than_classes_are_classes_without_rows(tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match="1 have none: d"):
        load(save(tmp_path / "a.npz", complete(), ["a", "b", "c", "d"]))


def test_names_must_be_strings(tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match="its class names must be a list of strings"):
        load(save(tmp_path / "a.npz", {**complete(), "classes": np.arange(3)}))


@pytest.mark.parametrize("name", ["y", "train_y", "test_y"])
def test_labels_that_are_names_are_told_what_to_be(tmp_path: Path, name: str) -> None:
    names = np.array(["cat", "dog", "emu"])
    message = rf"{name} must hold labels as whole numbers from 0, got <U3; .* in an array of strings called classes"
    with pytest.raises(ShortlistError, match=message):
        load(save(tmp_path / "a.npz", {**complete(), name: names}))
    with pytest.raises(ShortlistError, match="train_x must hold numbers, got <U3"):
        load(save(tmp_path / "a.npz", {**complete(), "train_x": names}))


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, complete())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ShortlistError, match=f"{name} cannot be read"):
        load(path)
    path.write_bytes(b"hello")
    with pytest.raises(ShortlistError, match=f"{name} cannot be read"):
        load(path)


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.array([{}, {}], dtype=object), y=np.arange(2))
    with pytest.raises(ShortlistError, match=r"a.npz cannot be read: Object arrays cannot be loaded"):
        load(path)


def test_other_files_and_no_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match=r"data.root must name the file of your embeddings, .* got ''"):
        load_problem(DataConfig(name="embeddings"))
    with pytest.raises(ShortlistError, match=r"data.root must be a file of embeddings"):
        load(tmp_path / "a.npz")
    (tmp_path / "a.csv").touch()
    with pytest.raises(ShortlistError, match=r"must end in .npz or .safetensors, got a.csv"):
        load(tmp_path / "a.csv")
    with pytest.raises(ShortlistError, match=r"data.image_size"):
        load(tmp_path / "a.csv", image_size=32)
