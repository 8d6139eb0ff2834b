"""A run goes on with the data that it began with, wherever that is now."""

from pathlib import Path

import numpy as np
import pytest

from shortlist import ShortlistError
from shortlist.program.cli import commands
from shortlist.program.config import TrainConfig
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import read_classes
from shortlist.program.training.evaluate import evaluate_run
from shortlist.program.training.loop import train
from tests.support.early_ends import train_until_test
from tests.support.pictures import put_classes
from tests.support.small_runs import NUM_CLASSES, photos_config, small_config, write_embeddings

SETTINGS = TrainConfig(epochs=2, batch_size=32, ks=(1, 3), device="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embeddings(tmp_path_factory.mktemp("data") / "points.npz")


def test_a_run_goes_on_with_its_own_data_alone(data: Path, tmp_path: Path) -> None:
    """With one row more, other rows would be held out: the test would be on what was trained on."""
    own, x, y = tmp_path / "points.npz", np.load(data)["train_x"], np.load(data)["train_y"]
    np.savez(own, x=x, y=y)
    config = small_config(own, train=SETTINGS)
    run = RunFolder(train_until_test(config, tmp_path / "run"))
    np.savez(own, x=np.concatenate([x, x[:1]]), y=np.concatenate([y, y[:1]]))
    before, label = read_classes(run).train_images, y[0]
    now = rf"{label}: {before[label] + 1} training images, not {before[label]}"
    with pytest.raises(ShortlistError, match=rf"the data has changed \({now}\): other images would be held out"):
        train(config, folder=run.path, resume=True, quiet=True)
    with pytest.raises(ShortlistError, match=rf"the data has changed \({now}\): other images would be held out"):
        evaluate_run(run, device="cpu")
    np.savez(own, x=x, y=y, classes=np.array([f"{number:02}" for number in range(NUM_CLASSES)]))
    with pytest.raises(ShortlistError, match="the data has changed: its classes"):
        train(config, folder=run.path, resume=True, quiet=True)
    np.savez(own, x=x, y=y)
    assert train(config, folder=run.path, resume=True, quiet=True).finished


def test_a_run_goes_on_with_the_training_images_that_it_began_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the splits are the user's own, and nothing is held out."""
    for part in ("train", "val", "test"):
        put_classes(tmp_path / "photos" / part, {"elm": 6, "owl": 6})
    config = photos_config(tmp_path / "photos")
    train_until_test(config, tmp_path / "run")
    moved, there = (tmp_path / "photos" / part / "elm" / "5.png" for part in ("train", "test"))
    before = there.read_bytes()
    moved.rename(there)
    with pytest.raises(ShortlistError, match="the training images are not those"):
        train(config, folder=tmp_path / "run", resume=True, quiet=True)
    commands.evaluate([str(tmp_path / "run"), "--device", "cpu"])
    assert "training images have changed" in capsys.readouterr().err
    there.rename(moved)
    there.write_bytes(before)
    assert train(config, folder=tmp_path / "run", resume=True, quiet=True).finished
    commands.evaluate([str(tmp_path / "run"), "--device", "cpu"])
    assert "training images have changed" not in capsys.readouterr().err


def test_a_run_does_not_go_on_with_other_embeddings_of_the_same_labels(data: Path, tmp_path: Path) -> None:
    arrays = dict(np.load(data))
    np.savez(tmp_path / "other.npz", **arrays | {"train_x": arrays["train_x"] + 1})
    config, other = (small_config(path, train=SETTINGS) for path in (data, tmp_path / "other.npz"))
    train_until_test(config, tmp_path / "run")
    with pytest.raises(ShortlistError, match="the training images are not those"):
        train(other, folder=tmp_path / "run", resume=True, quiet=True)
    assert RunFolder(tmp_path / "run").config == config


def test_a_run_goes_on_where_its_data_is_now_and_however_it_is_read(tmp_path: Path) -> None:
    put_classes(tmp_path / "photos", {"elm": 12, "owl": 12})
    train_until_test(photos_config(tmp_path / "photos"), tmp_path / "run")
    (tmp_path / "photos").rename(tmp_path / "moved")
    config = photos_config(tmp_path / "moved", on_bad_image="skip", workers=1)
    run = train(config, folder=tmp_path / "run", resume=True, quiet=True)
    assert run.finished
    assert run.config == photos_config(tmp_path / "photos"), "it is still that run"
    with pytest.raises(ShortlistError, match=r"is not at .*photos: .*--root"):
        evaluate_run(run, device="cpu")
    there = evaluate_run(run, root=str(tmp_path / "moved"), device="cpu")[0]
    assert there.metrics == run.read_json("final.json")["test"]


def test_data_of_another_width_is_told_from_that_of_the_run(data: Path, tmp_path: Path) -> None:
    run = train(small_config(data, train=SETTINGS), folder=tmp_path / "run", quiet=True)
    arrays = {name: array[:, :5] if array.ndim == 2 else array for name, array in np.load(data).items()}
    np.savez(tmp_path / "narrow.npz", **arrays)
    with pytest.raises(ShortlistError, match=r"best\.safetensors does not fit .* for inputs of 5"):
        evaluate_run(run, root=str(tmp_path / "narrow.npz"))
