"""Classes that are added after training, through the command."""

import errno
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import shortlist as sl
from shortlist.program.cli import main as cli
from shortlist.program.config import ModelConfig
from shortlist.program.losses import ImbalancedNoisedTopKHingeConfig
from shortlist.program.predicting.calibration import calibrate
from shortlist.program.runs.folder import BEST, RunFolder, file_digest
from shortlist.program.training.loop import train
from tests.support.pictures import colour_of, put_image
from tests.support.small_runs import NUM_CLASSES, photos_config, small_config, write_embeddings


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["shortlist", *map(str, words)])
    cli.main()


def failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as stopped:
        command(monkeypatch, *words)
    assert stopped.value.code == 1
    return capsys.readouterr().err


@pytest.fixture(params=["linear", "cosine"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunFolder:
    """Of vectors, without the last class of ``write_embeddings``."""
    arrays = dict(np.load(write_embeddings(tmp_path / "all.npz")))
    for split in ("train", "val", "test"):
        old = arrays[f"{split}_y"] < NUM_CLASSES - 1
        np.save(tmp_path / f"{split}-new.npy", arrays[f"{split}_x"][~old])
        arrays[f"{split}_x"], arrays[f"{split}_y"] = arrays[f"{split}_x"][old], arrays[f"{split}_y"][old]
    np.savez(tmp_path / "old.npz", **arrays)
    (tmp_path / "train-new.npy").rename(tmp_path / "owl.npy")
    config = small_config(tmp_path / "old.npz")
    if request.param == "cosine":
        loss = ImbalancedNoisedTopKHingeConfig(k=3, epsilon=0.02, max_margin=0.2, scale=20)
        config = small_config(tmp_path / "old.npz", model=ModelConfig(name="none", head="cosine"), loss=loss)
    return train(config, folder=tmp_path / "run", quiet=True)


def top_3(run: Path, vectors: np.ndarray) -> list[list[str]]:
    return [[item.name for item in found] for found in sl.load(run, "cpu").suggest(vectors, 3)]


def test_a_new_class_is_suggested_for_its_own_and_not_for_others(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file_digest(run.path / BEST)
    command(monkeypatch, "add-class", run.path, tmp_path / "owl.npy")
    child = tmp_path / "run+owl"
    own = top_3(child, np.load(tmp_path / "test-new.npy"))
    assert np.mean(["owl" in found for found in own]) > 0.6  # by chance 0.25
    old = np.load(tmp_path / "old.npz")
    others = top_3(child, old["val_x"])
    # As often as the NUM_CLASSES - 1 old classes are for photos of others.
    names = sl.load(run.path, "cpu").classes
    right = [names[label] in found for label, found in zip(old["val_y"], top_3(run.path, old["val_x"]), strict=True)]
    share = (3 - np.mean(right)) / (NUM_CLASSES - 2)
    assert np.mean(["owl" in found for found in others]) == pytest.approx(share, abs=0.02)

    record = json.loads((child / "added.json").read_text())
    assert (record["parent"], record["parent_sha256"]) == (str(run.path.resolve()), before)
    assert file_digest(run.path / BEST) == before
    now, then = (sl.load(folder, "cpu", correct=False).scores(old["test_x"]) for folder in (child, run.path))
    assert now[:, :-1].equal(then) or np.allclose(now[:, :-1], then, atol=1e-5)


def test_the_new_run_works_with_the_other_commands(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = calibrate(run)
    child = tmp_path / "child"
    command(monkeypatch, "add-class", run.path, tmp_path / "owl.npy", "--out", child)
    assert "calibrated anew" in capsys.readouterr().err
    assert sl.load(child, "cpu").unpromised == ["owl"]
    command(monkeypatch, "evaluate", child, "--device", "cpu")
    told = capsys.readouterr()
    assert "owl" in told.err
    assert 0 < json.loads(told.out)["macro_top3"] <= 1
    command(monkeypatch, "report", child, "--out", tmp_path / "report.html")
    (tmp_path / "owl.npy").rename(tmp_path / "emu.npy")
    command(monkeypatch, "add-class", child, tmp_path / "emu.npy")
    twice = tmp_path / "child+emu"
    assert sl.load(twice, "cpu").classes[-2:] == ("owl", "emu")
    # No image of theirs is among those that choose it, so they change nothing.
    command(monkeypatch, "calibrate", twice)
    for place in (child, twice):
        after = json.loads((place / "calibration.json").read_text())
        for name in ("temperature", "prior", "imbalance"):
            assert after[name] == pytest.approx(getattr(before, name), rel=1e-3), name


def test_the_same_photos_give_the_same_weights(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (1, 2):
        torch.manual_seed(seed)
        command(monkeypatch, "add-class", run.path, tmp_path / "owl.npy", "--out", tmp_path / str(seed))
    assert file_digest(tmp_path / "1" / BEST) == file_digest(tmp_path / "2" / BEST)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_an_interrupted_addition_leaves_nothing(
    error: BaseException, run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = sorted(tmp_path.rglob("*"))
    sync, left = os.fsync, iter(range(4))  # the fifth file cannot be written

    def fsync(file: int) -> None:
        if next(left, None) is None:
            raise error
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        command(monkeypatch, "add-class", run.path, tmp_path / "owl.npy")
    assert sorted(tmp_path.rglob("*")) == present


def test_names_may_be_anything(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("..", "a\nb", "=1+1", "<b>", "OWL", "ü" * 100)
    for name in names:
        (tmp_path / f"{name}.npy").write_bytes((tmp_path / "owl.npy").read_bytes())
    place = run.path
    for number, name in enumerate(("owl", *names)):
        command(monkeypatch, "add-class", place, tmp_path / f"{name}.npy", "--out", tmp_path / str(number))
        place = tmp_path / str(number)
        assert ("is that meant" in capsys.readouterr().err) == (name == "OWL")
    assert sl.load(place, "cpu").classes[-len(names) :] == names
    command(monkeypatch, "add-class", run.path, tmp_path / f"{names[-1]}.npy")
    assert (tmp_path / "run+1-class").is_dir()


@pytest.fixture
def photo_run(tmp_path: Path) -> RunFolder:
    for label in range(3):
        for number in range(6):
            put_image(tmp_path / "photos" / f"bird{label}" / f"{number}.png", colour_of(10 * label + number))
    return train(photos_config(tmp_path / "photos", epochs=1), folder=tmp_path / "run", quiet=True)


def test_photos_in_a_folder_for_each_class(
    photo_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("owl", "emu"):
        put_image(tmp_path / "new" / name / "0.png", colour_of(40))
    (tmp_path / "new" / "owl" / "bad.png").write_bytes(b"no image")
    command(monkeypatch, "add-class", photo_run.path, tmp_path / "new", "--out", tmp_path / "child")
    assert "bad.png" in capsys.readouterr().err
    assert json.loads((tmp_path / "child" / "classes.json").read_text())["train_images"][-2:] == [1, 1]
    assert sl.load(tmp_path / "child", "cpu").classes[-2:] == ("emu", "owl")
    command(monkeypatch, "predict", tmp_path / "child", tmp_path / "new" / "emu", "--device", "cpu")


def test_what_cannot_be_added_is_named_and_nothing_is_written(
    photo_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "0.png").write_bytes(b"no image")
    present = {*tmp_path.iterdir()}
    for folder, fact in (("photos/bird1", "bird1"), ("empty", "empty"), ("bad", "0.png"), ("absent", "absent")):
        assert fact in failure(monkeypatch, capsys, "add-class", photo_run.path, tmp_path / folder)
    (photo_run.path / "final.json").rename(tmp_path / "final")
    assert "finished" in failure(monkeypatch, capsys, "add-class", photo_run.path, tmp_path / "photos")
    (tmp_path / "final").rename(photo_run.path / "final.json")
    put_image(tmp_path / "owl" / "0.png", colour_of(40))
    (tmp_path / "photos").rename(tmp_path / "moved")
    assert "--root" in failure(monkeypatch, capsys, "add-class", photo_run.path, tmp_path / "owl")
    assert {path.name for path in present} - {"photos"} == {path.name for path in tmp_path.iterdir()} - {"owl", "moved"}
