"""Frozen networks: features are computed once, and the run is that of the whole network all the same."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

from shortlist import ShortlistError
from shortlist.program.config import ModelConfig, RunConfig, changed
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.model import load_model
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.evaluate import evaluate_run
from shortlist.program.training.loop import train
from shortlist.program.training.predict import Predictor
from tests.support.early_ends import train_until_step, train_until_test
from tests.support.pictures import put_classes, put_image
from tests.support.ranks import train_on_ranks
from tests.support.small_runs import assert_close, outcome, photos_config, small_config, write_embeddings

IMAGES = 72
BATCHES = 3 * 3  # of the 46, 13 and 13 images of the splits, one by one of at most 16


class Computed(Callback):
    """How many batches went through the backbone, and what was said."""

    def __init__(self) -> None:
        self.images = 0
        self.messages: list[str] = []

    def on_features(self, done: int, total: int) -> None:
        self.images = done

    def on_message(self, message: str) -> None:
        self.messages.append(message)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SHORTLIST_DATA", str(folder))
    return folder / "features"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    put_classes(tmp_path / "photos", dict.fromkeys(("ash", "elm", "owl", "yew"), IMAGES // 4))
    return tmp_path / "photos"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return put_weights(tmp_path_factory.mktemp("weights") / "first.safetensors", seed=0)


def put_weights(path: Path, seed: int) -> Path:
    """Of a network with batch normalisation, whose statistics are not those it would start with."""
    torch.manual_seed(seed)
    network = timm.create_model("test_resnet", num_classes=7).train()
    with torch.no_grad():
        network(2 * torch.randn(8, 3, 32, 32) + 1)
    safetensors.torch.save_file(network.state_dict(), path)
    return path


def config_for(photos: Path, weights: Path, changes: dict[str, Any] | None = None) -> RunConfig:
    config = photos_config(photos, epochs=3, image_size=32)
    config = replace(config, model=ModelConfig(name="test_resnet", weights=str(weights), frozen=True))
    return changed(config, {"optim.lr": 0.01, **(changes or {})})


def trained(config: RunConfig, folder: Path, **options: Any) -> tuple[RunFolder, Computed]:
    computed = Computed()
    return train(config, folder=folder, quiet=True, callbacks=[computed], **options), computed


def test_only_the_last_layer_changes_and_the_run_holds_the_whole_network(
    photos: Path, weights: Path, tmp_path: Path
) -> None:
    run, computed = trained(config_for(photos, weights), tmp_path / "run")
    assert computed.images == IMAGES
    given, model = safetensors.torch.load_file(weights), load_model(run)
    for name, tensor in model.backbone.state_dict().items():
        assert torch.equal(tensor, given[name]), name  # with the statistics of batch normalisation
    state = run.load_checkpoint(pytest.fail)
    assert state is not None
    assert state["model"].keys() == {"head.weight", "head.bias"}


def test_the_images_give_the_numbers_that_the_features_gave(photos: Path, weights: Path, tmp_path: Path) -> None:
    run, _ = trained(config_for(photos, weights), tmp_path / "run")
    for split in ("test", "val"):
        by_images, _ = evaluate_run(run, split=split, device="cpu")
        assert_close(run.read_json("final.json")[split], by_images.metrics, rel=1e-6)
    by_images, problem = evaluate_run(run, device="cpu")
    by_features = safetensors.torch.load_file(run.path / "test_predictions.safetensors")
    torch.testing.assert_close(by_images.scores, by_features["scores"], rtol=1e-4, atol=1e-5)
    file = photos / problem.test.files[0]  # type: ignore[attr-defined]
    ((_, suggestions),) = Predictor(run, "cpu").suggest([file], 4)
    torch.testing.assert_close(
        torch.tensor([suggestion.score for suggestion in suggestions]), by_features["scores"][0], rtol=1e-4, atol=1e-5
    )
    assert any((run.path / "pictures").iterdir())  # of the images, for the report


@pytest.mark.parametrize(
    "changes",
    [
        {"loss.name": "balanced_softmax"},
        {"data.label_noise": 0.5, "data.noise_groups": "consecutive"},
        {"train.epochs": 1, "train.batch_size": 16, "optim.name": "adamw"},
    ],
)
def test_features_serve_every_loss_label_and_seed(
    photos: Path, weights: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = config_for(photos, weights)
    trained(config, tmp_path / "first")
    _, computed = trained(changed(config, {"seed": 1, **changes}), tmp_path / "second")
    assert computed.images == 0


def touched(photos: Path, weights: Path) -> dict[str, Any]:
    """Replaced by another image with a file of the same size."""
    path = photos / "elm" / "3.png"
    before = path.read_bytes()
    path.write_bytes(before)
    os.utime(path, ns=(1, 1))
    return {}


def other_weights(photos: Path, weights: Path) -> dict[str, Any]:
    return {"model.weights": str(put_weights(photos.parent / "other.safetensors", seed=1))}


@pytest.mark.parametrize(
    ("change", "images"),
    [
        (touched, IMAGES),
        (other_weights, IMAGES),
        (lambda photos, weights: {"data.fit": "pad"}, IMAGES),
        (lambda photos, weights: {"data.image_size": 48}, IMAGES),
        (lambda photos, weights: {"train.precision": "bf16-mixed"}, IMAGES),
        (lambda photos, weights: {"data.imbalance": 2}, None),  # of the training images that are left
    ],
)
def test_features_of_other_images_or_another_network_are_computed(
    photos: Path, weights: Path, tmp_path: Path, change: Callable[[Path, Path], dict[str, Any]], images: int | None
) -> None:
    config = config_for(photos, weights)
    trained(config, tmp_path / "first")
    _, computed = trained(changed(config, change(photos, weights)), tmp_path / "second")
    if change is touched:  # the split that it is in
        assert 0 < computed.images < IMAGES
    elif images is not None:
        assert computed.images == images
    else:
        assert 0 < computed.images < IMAGES


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-7], lambda content: content[:-3] + b"\0\1\2", lambda _: b""]
)
def test_damaged_features_are_noticed_and_computed_again(
    photos: Path, weights: Path, tmp_path: Path, cache: Path, damage: Callable[[bytes], bytes]
) -> None:
    config = config_for(photos, weights)
    trained(config, tmp_path / "first")
    for path in cache.glob("*.safetensors"):
        path.write_bytes(damage(path.read_bytes()))
    _, computed = trained(config, tmp_path / "second")
    assert computed.images == IMAGES
    assert sum("damaged" in message for message in computed.messages) == 3
    assert outcome(tmp_path / "first") == outcome(tmp_path / "second")


def test_without_a_place_to_keep_features_training_goes_on(
    photos: Path, weights: Path, tmp_path: Path, cache: Path
) -> None:
    cache.write_text("a file in the place of the folder")
    run, computed = trained(config_for(photos, weights), tmp_path / "run")
    assert run.finished
    assert any("cannot be kept" in message and str(cache) in message for message in computed.messages)


def test_unreadable_images_are_left_out_and_counted_also_when_features_are_found(
    photos: Path, weights: Path, tmp_path: Path
) -> None:
    config = config_for(photos, weights, {"data.on_bad_image": "skip"})
    (photos / "elm" / "2.png").write_bytes(b"not an image")
    for name in ("first", "found"):
        run, computed = trained(config, tmp_path / name)
        assert run.read_json("final.json")["skipped_files"] == ["elm/2.png"]
        assert computed.images == (IMAGES if name == "first" else 0)
    assert outcome(tmp_path / "first") == outcome(tmp_path / "found")
    with pytest.raises(ShortlistError, match=r"2\.png cannot be read"):
        trained(config_for(photos, weights), tmp_path / "failing")
    assert not (tmp_path / "failing").exists()


@pytest.mark.parametrize("step", [1, 9])  # before and after the first best weights; an epoch has 6 steps
def test_a_resumed_run_ends_as_if_undisturbed_without_the_file_that_it_started_from(
    photos: Path, weights: Path, tmp_path: Path, step: int
) -> None:
    own = tmp_path / "own.safetensors"
    own.write_bytes(weights.read_bytes())
    config = config_for(photos, own)
    train(config, folder=tmp_path / "undisturbed", quiet=True)
    train_until_step(config, tmp_path / "stopped", step)
    if step == 9:
        own.unlink()
    _, computed = trained(config, tmp_path / "stopped", resume=True)
    assert computed.images == 0
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "undisturbed")


def test_a_last_layer_does_not_go_on_with_the_features_of_other_weights(
    photos: Path, weights: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.safetensors"
    own.write_bytes(weights.read_bytes())
    config = config_for(photos, own)
    train_until_step(config, tmp_path / "run", 1)
    (tmp_path / "run" / "environment.json").unlink()  # which knows the file's checksum
    put_weights(own, seed=1)
    with pytest.raises(ShortlistError, match="other weights"):
        train(config, folder=tmp_path / "run", resume=True, quiet=True)


def test_two_ranks_give_the_metrics_of_one(photos: Path, weights: Path, tmp_path: Path) -> None:
    config = config_for(photos, weights)
    train_on_ranks(2, config, tmp_path / "two")
    train(config, folder=tmp_path / "one", quiet=True)
    one, two = (json.loads((tmp_path / name / "final.json").read_text()) for name in ("one", "two"))
    assert_close(one["test"], two["test"], rel=1e-5)


def test_what_cannot_be_frozen_is_refused(photos: Path, weights: Path, tmp_path: Path) -> None:
    config = config_for(photos, weights)
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
