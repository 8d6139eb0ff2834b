"""What a training shows, and when callbacks are called."""

import errno
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

import shortlist as sl
from shortlist import ShortlistError
from shortlist.program.cli import main as cli
from shortlist.program.config import TrainConfig
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.evaluate import Evaluation, evaluate_run
from shortlist.program.training.loop import Interrupted, Trainer, train
from tests.support.early_ends import StopAfterStep
from tests.support.pictures import put_classes
from tests.support.small_runs import NUM_CLASSES, config_arguments, photos_config, small_config, write_embeddings

SETTINGS = TrainConfig(epochs=2, batch_size=64, ks=(1, 3), device="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embeddings(tmp_path_factory.mktemp("data") / "points.npz", images=100)


class Diary(Callback):
    """Notes every moment, with epoch and step."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, int, int]] = []

    def _note(self, moment: str, trainer: Trainer) -> None:
        self.moments.append((moment, trainer.position.epoch, trainer.position.step))

    def on_fit_start(self, trainer: Trainer) -> None:
        self._note("start", trainer)

    def on_step(self, trainer: Trainer) -> None:
        self._note("step", trainer)

    def on_validation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self._note("validation", trainer)

    def on_epoch_end(self, trainer: Trainer, line: dict[str, Any]) -> None:
        assert trainer.run.metrics()[-1] == line
        self._note("epoch", trainer)

    def on_checkpoint(self, trainer: Trainer) -> None:
        state = trainer.run.load_checkpoint(pytest.fail)
        assert state is not None
        assert (state["position"]["epoch"], state["position"]["step"]) == (
            trainer.position.epoch,
            trainer.position.step,
        )
        self._note("checkpoint", trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        self._note("end", trainer)

    def close(self) -> None:
        self.moments.append(("close", -1, -1))


def test_callbacks_are_called_in_the_order_of_the_training(data: Path, tmp_path: Path) -> None:
    config, diary = small_config(data, train=SETTINGS), Diary()  # two steps an epoch
    with pytest.raises(Interrupted):
        train(config, folder=tmp_path, quiet=True, callbacks=[diary, StopAfterStep(3)])
    assert diary.moments == [
        ("start", 0, 0),
        *[("step", 0, 1), ("step", 0, 2), ("validation", 0, 2), ("epoch", 0, 2), ("checkpoint", 1, 0)],
        *[("step", 1, 1), ("checkpoint", 1, 1), ("close", -1, -1)],
    ]
    diary.moments.clear()
    train(config, folder=tmp_path, resume=True, quiet=True, callbacks=[diary])
    assert diary.moments == [
        ("start", 1, 1),
        *[("step", 1, 2), ("validation", 1, 2), ("epoch", 1, 2), ("checkpoint", 2, 0)],
        *[("end", 2, 0), ("close", -1, -1)],
    ]


def test_progress_is_one_line_an_epoch_where_nobody_watches(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = config_arguments(small_config(data, train=SETTINGS))
    monkeypatch.setattr(sys, "argv", ["shortlist", "train", "embeddings", *arguments, "--out", str(tmp_path / "run")])
    cli.main()
    shown = capfd.readouterr()
    epochs = [line for line in shown.err.splitlines() if line.startswith("epoch ")]
    assert len(epochs) == 2
    assert "images/s" in epochs[0]
    assert "\r" not in shown.err
    assert "macro_top3" in shown.out


def test_what_was_found_is_said_before_it_is_trained_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    put_classes(tmp_path / "photos", {"elm": 12, "owl": 24})
    (tmp_path / "photos" / "elm" / "IMG:cat:1.HEIC").touch()
    train(photos_config(tmp_path / "photos"), folder=tmp_path / "run")
    said = capfd.readouterr().err.partition("epoch 1/2")[0]
    assert "2 classes, 30 training, 3 validation and 3 test images" in said
    assert "not used: 1: elm/IMG:cat:1.HEIC" in said
    assert "without" not in said


def test_classes_that_nothing_measures_are_named_and_still_suggested(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    put_classes(tmp_path / "photos", {"elm": 12, "owl": 24, "yeti": 1, "roc": 2})
    run = train(photos_config(tmp_path / "photos"), folder=tmp_path / "run")
    said = capfd.readouterr().err.partition("epoch 1/2")[0]
    assert "4 classes, 33 training, 3 validation and 3 test images" in said
    assert "2 classes without validation and test images: roc, yeti" in said
    assert evaluate_run(run, device="cpu")[0].metrics == run.read_json("final.json")["test"]
    names = {suggestion.name for suggestion in sl.load(run.path).suggest(tmp_path / "photos" / "yeti" / "0.png", k=4)}
    assert names == {"elm", "owl", "roc", "yeti"}


def test_classes_without_test_images_are_told_from_those_without_validation_images(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for split, classes in {"train": {"elm": 5, "owl": 5}, "val": {"elm": 3}, "test": {"owl": 3}}.items():
        put_classes(tmp_path / "photos" / split, classes)
    train(photos_config(tmp_path / "photos"), folder=tmp_path / "run")
    said = capfd.readouterr().err.partition("epoch 1/2")[0]
    assert "1 class without validation images: owl; 1 class without test images: elm" in said


def test_images_whose_scores_are_all_alike_are_told_of(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = dict(np.load(data))
    arrays["test_x"][:5] = 0  # as an embedding that failed
    np.savez(tmp_path / "failed.npz", **arrays)
    config = small_config(tmp_path / "failed.npz", train=SETTINGS)
    run = train(config, folder=tmp_path / "run")
    assert "by a tie" not in capfd.readouterr().err, "the last layer has a bias"
    load = RunFolder.load_best

    def without_bias(folder: RunFolder) -> dict[str, Tensor]:
        return load(folder) | {"head.bias": torch.zeros(NUM_CLASSES)}

    monkeypatch.setattr(RunFolder, "load_best", without_bias)
    (run.path / "final.json").unlink()
    train(config, folder=run.path, resume=True)
    assert f"by a tie with the K-th best score: {5 / 240:.2%} at K = 1" in capfd.readouterr().err
    assert run.read_json("final.json")["test"]["tied_top1"] == pytest.approx(5 / 240)
    assert "at K = 1" in evaluate_run(run)[0].ties
    assert not evaluate_run(run, split="val")[0].ties


class SameSuggestions(Callback):
    @torch.inference_mode()
    def on_validation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        evaluation.suggestions[:] = evaluation.suggestions[0].clone()


def test_a_network_that_suggests_the_same_for_all_images_is_told_of_once(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(small_config(data, train=SETTINGS), folder=tmp_path, callbacks=[SameSuggestions()])
    assert capfd.readouterr().err.count("all validation images have the same suggestions") == 1


def test_events_that_cannot_be_written_are_named(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(writer: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SummaryWriter, "flush", full)
    with pytest.raises(ShortlistError, match=r"cannot write .*/tensorboard: No space left on device; make room"):
        train(small_config(data), folder=tmp_path, quiet=True)
