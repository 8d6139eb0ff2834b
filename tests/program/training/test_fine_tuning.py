"""Fine-tuning on a folder of narrow images: padding, mixing, and a head that learns faster."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from shortlist.__main__ import main
from shortlist.program.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from shortlist.program.losses import CrossEntropyConfig
from shortlist.program.predicting.predictor import Predictor
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.loop import Trainer, train
from tests.support.early_ends import train_until_step
from tests.support.small_runs import config_arguments, outcome, small_config, write_embeddings

FACTOR = 10.0


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four classes of 50 narrow images. The colours of their two ends tell them apart; the middle is the same."""
    root, noise = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    ends = {"ash": (255, 0), "elm": (0, 255), "fir": (255, 255), "oak": (0, 0)}
    for name, (top, bottom) in ends.items():
        (root / name).mkdir()
        for number in range(50):
            pixels = np.full((36, 10, 3), 128.0)
            pixels[:9], pixels[-9:] = top, bottom
            pixels += noise.normal(0, 20, pixels.shape)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def config(photos: Path) -> RunConfig:
    data = DataConfig(name="folder", root=str(photos), image_size=32, workers=0, fit="pad", mixup=0.2)
    return RunConfig(
        data=data,
        model=ModelConfig(name="test_resnet"),
        loss=CrossEntropyConfig(k=1),
        optim=OptimConfig(name="adamw", lr=1e-3, schedule="cosine", warmup_epochs=0.5, head_lr_factor=FACTOR),
        train=TrainConfig(epochs=5, batch_size=32, ks=(1,), device="cpu"),  # five steps an epoch
    )


@pytest.fixture(scope="module")
def finished(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config, folder=tmp_path_factory.mktemp("finished"), quiet=True).path


def test_it_learns_from_both_ends_of_narrow_images(finished: Path) -> None:
    """A crop of the middle sees no difference between the classes."""
    assert outcome(finished)["final"]["test"]["micro_top1"] > 0.9


def test_killed_and_resumed_it_ends_as_if_undisturbed(config: RunConfig, tmp_path: Path) -> None:
    data = replace(config.data, cutmix=1.0, randaugment=5)
    config = replace(config, data=data, train=replace(config.train, epochs=2))
    undisturbed = train(config, folder=tmp_path / "undisturbed", quiet=True).path
    train_until_step(config, tmp_path / "stopped", 7)
    train(config, folder=tmp_path / "stopped", resume=True, quiet=True)
    assert outcome(tmp_path / "stopped") == outcome(undisturbed)


def test_suggestions_see_an_image_as_its_test_did(finished: Path, photos: Path) -> None:
    run = RunFolder(finished)
    tested = load_file(finished / "test_predictions.safetensors")
    files = [photos / name for name in run.read_json("facts.json")["test_files"]]
    suggested = Predictor(run, device="cpu").suggest(files, 4)
    scores = torch.tensor([[suggestion.score for suggestion in best] for best in suggested])
    torch.testing.assert_close(scores, tested["scores"], rtol=1e-4, atol=1e-4)
    assert json.loads((finished / "preprocess.json").read_text())["fit"] == "pad"


def smaller(config: RunConfig, **settings: Any) -> RunConfig:
    data = replace(config.data, image_size=16, **settings)
    return replace(config, data=data, model=ModelConfig(name="glyphnet"), train=replace(config.train, epochs=1))


class Rates(Callback):
    """The learning rates at each step, and how far the first step moves the weights."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.moved: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        self.moved = {name: -weight.detach().clone() for name, weight in trainer.parts.network.named_parameters()}

    def on_step(self, trainer: Trainer) -> None:
        self.rates.append([group["lr"] for group in trainer.parts.optimizer.param_groups])
        if len(self.rates) == 1:
            for name, weight in trainer.parts.network.named_parameters():
                self.moved[name] += weight.detach()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_head_moves_by_the_factor_and_the_backbone_as_before(
    optimizer: Any, config: RunConfig, tmp_path: Path
) -> None:
    optim = replace(config.optim, name=optimizer, weight_decay=0.0)
    config = smaller(config)
    found = {}
    for factor in (1.0, FACTOR):
        found[factor] = Rates()
        other = replace(config, optim=replace(optim, head_lr_factor=factor))
        train(other, folder=tmp_path / str(factor), quiet=True, callbacks=[found[factor]])
    for name, usual in found[1.0].moved.items():
        factor = FACTOR if name.startswith("head.") else 1.0
        torch.testing.assert_close(found[FACTOR].moved[name], factor * usual, rtol=1e-2, atol=1e-5)
    assert [len(rates) for rates in found[1.0].rates] == [1] * 5
    assert len({rates[0] for rates in found[FACTOR].rates}) == 5  # by the schedule
    for rates in found[FACTOR].rates:
        assert rates == [rates[0], pytest.approx(FACTOR * rates[0])]


def test_embeddings_have_a_head_alone(tmp_path: Path) -> None:
    data = write_embeddings(tmp_path / "points.npz", images=60)
    fast, usual = (
        train(small_config(data, optim=OptimConfig(lr=lr, head_lr_factor=factor)), folder=tmp_path / name, quiet=True)
        for name, lr, factor in (("fast", 0.005, 10.0), ("usual", 0.05, 1.0))
    )
    torch.testing.assert_close(fast.load_best(), usual.load_best())


def test_the_settings_have_names_on_the_command_line(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = smaller(config, cutmix=0.5, randaugment=3)
    arguments = ["shortlist", "train", "folder", "--loss.name", "cross_entropy", *config_arguments(config)]
    monkeypatch.setattr("sys.argv", [*arguments, "--out", str(tmp_path / "run")])
    main()
    written = RunFolder(tmp_path / "run").config
    assert (written.data, written.optim) == (config.data, config.optim)
