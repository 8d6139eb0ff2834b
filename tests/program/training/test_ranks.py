"""A run on several ranks has the numbers of a run on one."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shortlist.program.config import ModelConfig, TrainConfig
from shortlist.program.losses import CrossEntropyConfig, NoisedTopKHingeConfig
from shortlist.program.models.build import build_model
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import read_correction
from shortlist.program.training.loop import train
from tests.support.early_ends import train_until_step
from tests.support.pictures import put_classes
from tests.support.ranks import train_on_ranks
from tests.support.small_runs import (
    assert_close,
    config_arguments,
    outcome,
    photos_config,
    small_config,
    write_embeddings,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embeddings(tmp_path_factory.mktemp("data") / "points.npz")


def test_two_ranks_stop_together_and_resume_with_the_same_numbers(data: Path, tmp_path: Path) -> None:
    config = small_config(data, train=TrainConfig(epochs=3, batch_size=12, ks=(1, 3), device="cpu"))
    train_on_ranks(2, config, tmp_path / "stopped", stop_after=52)  # by a signal to the second; 51 steps an epoch
    state = RunFolder(tmp_path / "stopped").load_checkpoint(pytest.fail)
    assert state is not None
    assert state["position"]["epoch"] in (1, 2)  # ranks agree at the latest at the end of the second epoch
    train_on_ranks(2, config, tmp_path / "stopped", resume=True)
    train_on_ranks(2, config, tmp_path / "undisturbed")
    stopped, undisturbed = outcome(tmp_path / "stopped"), outcome(tmp_path / "undisturbed")
    for line, other in zip(stopped["metrics"], undisturbed["metrics"], strict=True):
        assert_close(line, other, rel=1e-6)


def test_two_ranks_give_the_metrics_of_one(data: Path, tmp_path: Path) -> None:
    """Started as users do it, by torchrun."""
    # The expectation instead of draws: each rank draws its own noise, which one process cannot repeat.
    loss = NoisedTopKHingeConfig(k=3, epsilon=0.3, n_samples=float("inf"))
    settings = TrainConfig(epochs=3, batch_size=50, accumulate=2, ks=(1, 3), device="cpu", eval_batch_size=7)
    config = small_config(data, loss=loss, train=settings)
    alone = train(config, folder=tmp_path / "alone", quiet=True).path
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "shortlist", "train", "embeddings", *config_arguments(config), "--out", str(tmp_path / "both")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    one, two = outcome(alone), outcome(tmp_path / "both")
    for line, other in zip(one["metrics"], two["metrics"], strict=True):
        assert_close(line, other, rel=1e-4)
    assert_close(one["final"]["test"], two["final"]["test"], rel=1e-4)
    assert RunFolder(tmp_path / "both").read_environment()["world_size"] == 2
    chosen_by_one, chosen_by_two = (read_correction(RunFolder(tmp_path / name)) for name in ("alone", "both"))
    assert chosen_by_one is not None
    assert chosen_by_two is not None
    assert chosen_by_two.images == 240
    assert chosen_by_two.tau == pytest.approx(chosen_by_one.tau, rel=0.01)
    assert_close(chosen_by_one.val, chosen_by_two.val, rel=1e-4)


def test_an_epoch_has_the_same_loss_on_however_many_ranks_it_goes_on(data: Path, tmp_path: Path) -> None:
    loss = CrossEntropyConfig(k=3)
    config = small_config(data, loss=loss, train=TrainConfig(epochs=1, batch_size=36, ks=(1, 3), device="cpu"))
    whole = outcome(train(config, folder=tmp_path / "whole", quiet=True).path)
    train_on_ranks(2, config, train_until_step(config, tmp_path / "stopped", 7), resume=True)
    stopped = outcome(tmp_path / "stopped")
    assert_close(whole["metrics"][0], stopped["metrics"][0], rel=1e-4)


def test_ranks_without_a_validation_image_wait_for_nobody(tmp_path: Path) -> None:
    """And the rank whose only other image of a part cannot be read still trains with it."""
    for split, images in (("train", 8), ("val", 1), ("test", 2)):
        put_classes(tmp_path / "photos" / split, {"elm": images, "owl": images})
    (tmp_path / "photos" / "train" / "elm" / "3.png").write_bytes(b"no picture")
    config = photos_config(tmp_path / "photos", on_bad_image="skip", image_size=4)  # of which one place is left
    batches = replace(config.train, batch_size=6)  # two images a rank
    config = replace(config, model=ModelConfig(name="resnet32"), train=batches)
    train_on_ranks(3, config, tmp_path / "run")
    assert RunFolder(tmp_path / "run").read_json("final.json")["skipped_files"] == ["train/elm/3.png"]


def test_ranks_of_a_frozen_network_share_its_features_and_give_the_metrics_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHORTLIST_DATA", str(tmp_path))
    put_classes(tmp_path / "photos", dict.fromkeys(("ash", "elm", "owl", "yew"), 12))
    torch.save(build_model(ModelConfig(name="glyphnet"), (3, 16, 16), 4).backbone.state_dict(), tmp_path / "weights.pt")
    model = ModelConfig(name="glyphnet", weights=str(tmp_path / "weights.pt"), frozen=True)
    config = replace(photos_config(tmp_path / "photos"), model=model)
    train_on_ranks(2, config, tmp_path / "two")
    assert len(list((tmp_path / "features").glob("*.safetensors"))) == 3
    train(config, folder=tmp_path / "one", quiet=True)
    for one, two in zip(outcome(tmp_path / "one")["metrics"], outcome(tmp_path / "two")["metrics"], strict=True):
        assert_close(one, two, rel=1e-5)
