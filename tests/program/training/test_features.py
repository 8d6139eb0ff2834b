"""Frozen networks: features are computed once, and the run is that of the whole network all the same."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

from shortlist import ShortlistError
from shortlist.program.config import ModelConfig, RunConfig, changed
from shortlist.program.data.in_memory import TensorSplit
from shortlist.program.predicting.predictor import Predictor
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.model import load_model
from shortlist.program.training.build import build
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.evaluate import evaluate_run
from shortlist.program.training.loop import train
from tests.support.early_ends import train_until_step
from tests.support.pictures import put_classes
from tests.support.small_runs import assert_close, outcome, photos_config, small_config, write_embeddings

CLASSES = ("ash", "elm", "owl", "yew")
IMAGES = 12 * len(CLASSES)


class Computed(Callback):
    """How many images went through the backbone, and what was said."""

    def __init__(self) -> None:
        self.images = 0
        self.messages: list[str] = []

    def on_features(self, done: int, total: int) -> None:
        self.images = done

    def on_message(self, message: str) -> None:
        self.messages.append(message)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where features are kept."""
    with pytest.MonkeyPatch.context() as patched:
        folder = tmp_path_factory.mktemp("cache")
        patched.setenv("SHORTLIST_DATA", str(folder))
        yield folder / "features"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "photos"
    put_classes(folder, dict.fromkeys(CLASSES, IMAGES // len(CLASSES)))
    return folder


@pytest.fixture(scope="module")
def config(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    weights = put_weights(tmp_path_factory.mktemp("weights") / "first.safetensors", seed=0)
    usual = replace(
        photos_config(photos, epochs=3, image_size=32),
        model=ModelConfig(name="test_resnet", weights=str(weights), frozen=True),
    )
    return changed(usual, {"optim.lr": 0.01})


@pytest.fixture(scope="module")
def first(config: RunConfig, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run, which has computed the features."""
    run, computed = trained(config, tmp_path_factory.mktemp("runs") / "first")
    assert computed.images == IMAGES
    return run


def put_weights(path: Path, seed: int) -> Path:
    """Of a network with batch normalisation, whose statistics are not those it would start with."""
    torch.manual_seed(seed)
    network = timm.create_model("test_resnet", num_classes=7).train()
    with torch.no_grad():
        network(2 * torch.randn(8, 3, 32, 32) + 1)
    safetensors.torch.save_file(network.state_dict(), path)
    return path


def trained(config: RunConfig, folder: Path, **options: Any) -> tuple[RunFolder, Computed]:
    computed = Computed()
    return train(config, folder=folder, quiet=True, callbacks=[computed], **options), computed


def training_inputs(config: RunConfig, folder: Path) -> tuple[torch.Tensor, Computed]:
    """Of a training that is only built."""
    computed = Computed()
    split = build(config, folder, callbacks=[computed]).problem.train
    assert isinstance(split, TensorSplit)
    return split.inputs, computed


def test_only_the_last_layer_changes_and_the_run_holds_the_whole_network(config: RunConfig, first: RunFolder) -> None:
    given, model = safetensors.torch.load_file(config.model.weights), load_model(first)
    for name, tensor in model.backbone.state_dict().items():
        assert torch.equal(tensor, given[name]), name  # with the statistics of batch normalisation
    state = first.load_checkpoint(pytest.fail)
    assert state is not None
    assert state["model"].keys() == {"head.weight", "head.bias"}


def test_the_images_give_the_numbers_that_the_features_gave(photos: Path, first: RunFolder) -> None:
    by_features = safetensors.torch.load_file(first.path / "test_predictions.safetensors")
    by_images, problem = evaluate_run(first, device="cpu")
    assert_close(first.read_json("final.json")["test"], by_images.metrics, rel=1e-6)
    torch.testing.assert_close(by_images.scores, by_features["scores"], rtol=1e-4, atol=1e-5)
    file = photos / problem.test.files[0]  # type: ignore[attr-defined]
    suggestions = Predictor(first, "cpu").suggest(file, 4)
    scores = torch.tensor([suggestion.score for suggestion in suggestions])
    torch.testing.assert_close(scores, by_features["scores"][0], rtol=1e-4, atol=1e-5)
    assert any((first.path / "pictures").iterdir())  # of the images, for the report


def test_features_serve_every_loss_label_and_seed(config: RunConfig, first: RunFolder, tmp_path: Path) -> None:
    settings = {"loss.name": "balanced_softmax", "data.label_noise": 0.5, "data.noise_groups": "consecutive"}
    other = changed(config, {"seed": 1, "train.batch_size": 16, "optim.name": "adamw", **settings})
    inputs, computed = training_inputs(other, tmp_path / "run")
    assert computed.images == 0
    assert torch.equal(inputs, training_inputs(config, tmp_path / "run")[0])


@pytest.mark.parametrize(
    ("setting", "value"),
    [("data.fit", "pad"), ("data.image_size", 48), ("train.precision", "bf16-mixed"), ("model.weights", "other")],
)
def test_another_network_or_preprocessing_has_features_of_its_own(
    config: RunConfig, first: RunFolder, tmp_path: Path, setting: str, value: Any
) -> None:
    if setting == "model.weights":
        value = str(put_weights(tmp_path / "other.safetensors", seed=1))
    _, computed = training_inputs(changed(config, {setting: value}), tmp_path / "run")
    assert computed.images == IMAGES


def test_features_of_replaced_images_are_computed_again(
    config: RunConfig, first: RunFolder, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(photos, tmp_path / "photos")  # with the times of the last change
    moved = changed(config, {"data.root": str(tmp_path / "photos")})
    before, computed = training_inputs(moved, tmp_path / "run")
    assert computed.images == 0
    for path in (tmp_path / "photos" / "elm").iterdir():
        other = tmp_path / "photos" / "owl" / path.name
        assert other.stat().st_size == path.stat().st_size  # which alone would not tell
        shutil.copyfile(other, path)
    after, computed = training_inputs(moved, tmp_path / "run")
    assert computed.images == IMAGES
    assert not torch.equal(before, after)


def test_of_a_thinned_class_the_images_that_are_left_have_features(
    config: RunConfig, first: RunFolder, tmp_path: Path
) -> None:
    inputs, computed = training_inputs(changed(config, {"data.imbalance": 3}), tmp_path / "run")
    assert computed.images == len(inputs)  # validation and test are as before
    assert len(inputs) < len(training_inputs(config, tmp_path / "run")[0])


def test_damaged_features_are_noticed_and_computed_again(
    config: RunConfig, first: RunFolder, cache: Path, tmp_path: Path
) -> None:
    wanted, _ = training_inputs(config, tmp_path / "run")
    damages: list[Callable[[bytes], bytes]] = [
        lambda content: content[:-7],
        lambda content: content[:-3] + b"\0\1\2",
        lambda content: b"",
    ]
    for damage in damages:
        for path in cache.glob("*.safetensors"):
            path.write_bytes(damage(path.read_bytes()))
        found, computed = training_inputs(config, tmp_path / "run")
        assert computed.images == IMAGES
        assert sum("damaged" in message for message in computed.messages) == 3  # once for each split
        assert torch.equal(found, wanted)


def test_without_a_place_to_keep_features_training_goes_on(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHORTLIST_DATA", str(tmp_path))
    (tmp_path / "features").write_text("a file in the place of the folder")
    _, computed = training_inputs(config, tmp_path / "run")
    assert computed.images == IMAGES
    assert any("cannot be kept" in message and str(tmp_path) in message for message in computed.messages)


def test_unreadable_images_are_left_out_and_counted_also_when_features_are_found(
    config: RunConfig, cache: Path, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "photos" / "elm" / "2.png").write_bytes(b"not an image")
    failing = changed(config, {"data.root": str(tmp_path / "photos"), "train.epochs": 1})
    skipping = changed(failing, {"data.on_bad_image": "skip"})
    for name in ("computed", "found"):
        run, computed = trained(skipping, tmp_path / name)
        assert run.read_json("final.json")["skipped_files"] == ["elm/2.png"]
        assert (computed.images > 0) == (name == "computed")
    assert outcome(tmp_path / "computed") == outcome(tmp_path / "found")
    with pytest.raises(ShortlistError, match=r"2\.png cannot be read"):
        train(failing, folder=tmp_path / "failing", quiet=True)
    assert not (tmp_path / "failing").exists()


@pytest.mark.parametrize("step", [1, 7])  # before and after the first best weights; an epoch has 4 or 5 steps
def test_a_resumed_run_ends_as_if_undisturbed(config: RunConfig, first: RunFolder, tmp_path: Path, step: int) -> None:
    folder, own = tmp_path / "stopped", tmp_path / "own.safetensors"
    shutil.copyfile(config.model.weights, own)
    config = changed(config, {"model.weights": str(own)})
    train_until_step(config, folder, step)
    if (folder / "best.safetensors").exists():
        own.unlink()  # the run holds all that it needs
    _, computed = trained(config, folder, resume=True)
    assert computed.images == 0
    stopped, undisturbed = outcome(folder), outcome(first.path)
    assert stopped == undisturbed


def test_a_last_layer_does_not_go_on_with_the_features_of_other_weights(
    config: RunConfig, cache: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.safetensors"
    shutil.copyfile(config.model.weights, own)
    config = changed(config, {"model.weights": str(own)})
    train_until_step(config, tmp_path / "run", 1)
    (tmp_path / "run" / "environment.json").unlink()  # which knows the checksum of the file
    put_weights(own, seed=1)
    with pytest.raises(ShortlistError, match="other weights"):
        train(config, folder=tmp_path / "run", resume=True, quiet=True)


def test_what_cannot_be_frozen_is_refused(config: RunConfig, tmp_path: Path) -> None:
    embeddings = small_config(write_embeddings(tmp_path / "points.npz", 24))
    for refused, message in (
        (changed(config, {"model.weights": ""}), r"--model\.pretrained, or --model\.weights"),
        (changed(config, {"model.weights": "", "model.name": "glyphnet", "model.pretrained": True}), "pre-trained"),
        (changed(config, {"data.mixup": 0.2}), r"data\.mixup must be 0 with model\.frozen"),
        (changed(embeddings, {"model.frozen": True}), "features already"),
    ):
        with pytest.raises(ShortlistError, match=message):
            train(refused, folder=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
