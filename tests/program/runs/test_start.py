"""Runs that start from weights: by the commands, from a file, another run or a package."""

import json
import re
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

from shortlist import ShortlistError
from shortlist.program import recipes
from shortlist.program.cli import commands
from shortlist.program.cli.parsing import parse_recipe
from shortlist.program.config import ModelConfig, RunConfig, changed
from shortlist.program.models.build import build_model
from shortlist.program.predicting.predictor import Predictor
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.model import load_model
from shortlist.program.training.build import build
from shortlist.program.training.evaluate import evaluate_run
from shortlist.program.training.loop import train
from tests.support.early_ends import train_until_test
from tests.support.pictures import put_classes
from tests.support.small_runs import photos_config

HALF = [0.5, 0.5, 0.5]  # timm's mean and deviation for test_resnet, which are not those of ImageNet


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    put_classes(root, {"elm": 10, "owl": 10, "yew": 10})
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "test_resnet.safetensors"
    safetensors.torch.save_file(timm.create_model("test_resnet", num_classes=7).state_dict(), path)
    return path


def config_for(photos: Path, weights: Path | str, **settings: Any) -> RunConfig:
    config = photos_config(photos, **{"image_size": 32, **settings})
    return replace(config, model=ModelConfig(name="test_resnet", weights=str(weights)))


@pytest.fixture(scope="module")
def interrupted(photos: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_until_test(config_for(photos, weights), tmp_path_factory.mktemp("runs") / "interrupted")


@pytest.fixture(scope="module")
def finished(photos: Path, weights: Path, interrupted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    shutil.copytree(interrupted, folder)
    train(config_for(photos, weights), folder=folder, resume=True, quiet=True)
    return folder


def test_training_starts_from_the_file_and_the_settings_need_no_more(
    photos: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe's own weights, which would be downloaded, are replaced without being asked for."""
    settings = f"--model.name test_resnet --model.weights {weights} --data.root {photos} --data.image-size 32"
    settings += " --data.workers 0 --train.epochs 1 --train.batch-size 8 --loss.k 1 --train.ks 1 --optim.lr 0"
    commands.train(["folder", *settings.split(), "--train.device", "cpu", "--out", str(tmp_path / "run")])
    said = " ".join(capsys.readouterr().err.split())
    assert "last layer is left out" in said
    assert "fc.weight" in said
    given, run = safetensors.torch.load_file(weights), RunFolder(tmp_path / "run")
    for name, parameter in load_model(run).backbone.named_parameters():
        assert torch.equal(parameter, given[name]), name  # the learning rate is 0
    recorded = run.read_json("environment.json")["start_sha256"]
    assert len(recorded) == 64


def test_the_networks_mean_and_deviation_are_used_and_recorded(photos: Path, weights: Path, finished: Path) -> None:
    recorded = RunFolder(finished).read_json("preprocess.json")
    assert (recorded["mean"], recorded["std"]) == (HALF, HALF)
    problem = build(config_for(photos, weights), finished / "other").problem
    inputs, _, _ = next(problem.test.batches([torch.tensor([0])], torch.device("cpu")))
    pixels = problem.test.thumbnail(0)
    assert pixels is not None
    torch.testing.assert_close(inputs[0], pixels / 127.5 - 1)


def test_evaluation_and_suggestions_repeat_the_test(photos: Path, finished: Path) -> None:
    run = RunFolder(finished)
    tested = safetensors.torch.load_file(finished / "test_predictions.safetensors")["scores"]
    torch.testing.assert_close(evaluate_run(run, device="cpu")[0].scores, tested, rtol=0, atol=0)
    files = [photos / file for file in run.read_json("facts.json")["test_files"]]
    suggested = [[guess.score for guess in best] for best in Predictor(run, device="cpu").suggest(files, 3)]
    torch.testing.assert_close(torch.tensor(suggested), tested[:, :3], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("model", "normalise", "expected"),
    [
        (ModelConfig(name="test_resnet"), "auto", 0.485),  # as before there was a choice
        (ModelConfig(name="test_resnet"), "network", 0.5),
        (ModelConfig(name="test_resnet", weights="FILE"), "auto", 0.5),
        (ModelConfig(name="test_resnet", weights="FILE"), "data", 0.485),
    ],
)
def test_which_mean_is_used(
    model: ModelConfig, normalise: str, expected: float, photos: Path, weights: Path, tmp_path: Path
) -> None:
    model = replace(model, weights=model.weights and str(weights))
    config = replace(photos_config(photos, image_size=32, normalise=normalise), model=model)
    problem = build(config, tmp_path / "run").problem
    assert problem.preprocess is not None
    assert problem.preprocess.mean[0] == expected
    assert problem.train.preprocess == problem.val.preprocess == problem.test.preprocess == problem.preprocess


def test_networks_without_a_mean_of_their_own_are_refused_if_asked_for_it(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match=r"data\.normalise.*glyphnet"):
        build(photos_config(photos, normalise="network"), tmp_path / "run")


def test_a_run_gives_its_best_weights_and_its_mean(photos: Path, finished: Path, tmp_path: Path) -> None:
    given = load_model(RunFolder(finished)).backbone.state_dict()
    shutil.copytree(finished, tmp_path / "source")
    source = RunFolder(tmp_path / "source")
    source.write_json("preprocess.json", source.read_json("preprocess.json") | {"mean": [0.1, 0.2, 0.3]})
    parts = build(config_for(photos, source.path), tmp_path / "run")
    for name, tensor in parts.network.backbone.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(tensor, given[name])
    assert parts.problem.preprocess is not None
    assert parts.problem.preprocess.mean == (0.1, 0.2, 0.3)
    other = replace(config_for(photos, source.path), model=ModelConfig(name="resnet32", weights=str(source.path)))
    with pytest.raises(ShortlistError, match=r"--model\.name test_resnet"):
        build(other, tmp_path / "run")


def test_the_recipe_for_a_package_trains_and_suggests(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHORTLIST_DATA", str(tmp_path / "cache"))
    settings = "--data.image-size 32 --data.workers 0 --train.epochs 1 --loss.k 1 --train.ks 1 --train.device cpu"
    out = ["--out", str(tmp_path / "run"), "--data.root", str(photos)]
    commands.train(["folder_lite", *settings.split(), *out])
    assert "classifier.weight" in capsys.readouterr().err
    recorded = RunFolder(tmp_path / "run").read_json("preprocess.json")
    assert (recorded["mean"], recorded["std"]) == (HALF, HALF)
    commands.predict([str(tmp_path / "run"), str(photos / "elm" / "0.png"), "--json", "--device", "cpu"])
    assert json.loads(capsys.readouterr().out)["suggestions"][0]["name"] in ("elm", "owl", "yew")


def test_a_resumed_run_notices_other_weights_and_does_without_lost_ones(
    photos: Path, interrupted: Path, finished: Path, tmp_path: Path
) -> None:
    """Its checkpoint has all that it needs."""
    place = tmp_path / "moving.safetensors"
    shutil.copy(RunFolder(interrupted).config.model.weights, place)
    config = config_for(photos, place)
    train_until_test(config, tmp_path / "run")
    safetensors.torch.save_file(timm.create_model("test_resnet").state_dict(), place)
    with pytest.raises(ShortlistError, match=re.escape(f"{place} has changed")):
        train(config, folder=tmp_path / "run", resume=True, quiet=True)
    place.unlink()
    assert train(config, folder=tmp_path / "run", resume=True, quiet=True).finished
    scores = [safetensors.torch.load_file(run / "test_predictions.safetensors") for run in (tmp_path / "run", finished)]
    assert torch.equal(scores[0]["scores"], scores[1]["scores"])
    with pytest.raises(ShortlistError, match="there is no file"):
        build(config, tmp_path / "another")


def test_if_all_checkpoints_are_damaged_training_starts_from_the_weights_again(
    photos: Path, weights: Path, interrupted: Path, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(interrupted, tmp_path / "run")
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("*.pt"):
        checkpoint.write_bytes(b"damaged")
    train(config_for(photos, weights), folder=tmp_path / "run", resume=True, quiet=True)
    scores = [safetensors.torch.load_file(run / "test_predictions.safetensors") for run in (tmp_path / "run", finished)]
    assert torch.equal(scores[0]["scores"], scores[1]["scores"])


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of the network, which refuses everything."""
    asked: list[Any] = []

    def refuse(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return asked


@pytest.mark.parametrize(
    "start",
    [{"pretrained": True, "weights": ""}, {"weights": "/nobody/weights.pth"}, {"weights": "package"}],
    ids=str,
)
def test_a_strangers_run_leads_to_no_hub_and_no_file(
    start: dict[str, Any], photos: Path, finished: Path, tmp_path: Path, no_network: list[Any]
) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(finished, run.path)
    settings = run.read_json("config.json")
    settings["model"] |= start
    run.write_json("config.json", settings)
    commands.evaluate([str(run.path), "--root", str(photos), "--device", "cpu"])
    commands.predict([str(run.path), str(photos / "elm" / "0.png"), "--device", "cpu"])
    commands.report([str(run.path), "--out", str(tmp_path / "report.html")])
    assert not no_network


def test_a_resumed_run_asks_no_hub(photos: Path, interrupted: Path, tmp_path: Path, no_network: list[Any]) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(interrupted, run.path)
    config = changed(run.config, {"model.weights": "", "model.pretrained": True})
    settings = run.read_json("config.json")
    settings["model"] |= {"weights": "", "pretrained": True}
    settings["data"]["normalise"] = "network"
    run.write_json("config.json", settings)
    train(changed(config, {"data.normalise": "network"}), folder=run.path, resume=True, quiet=True)
    assert not no_network


@pytest.mark.parametrize("name", ["hf-hub:timm/test_resnet.r160_in1k", "local-dir:/etc"])
def test_a_strangers_address_in_the_place_of_a_network_is_refused(
    name: str, photos: Path, finished: Path, tmp_path: Path, no_network: list[Any]
) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(finished, run.path)
    settings = run.read_json("config.json")
    settings["model"]["name"] = name
    run.write_json("config.json", settings)
    for command in (commands.evaluate, commands.predict):
        images = [str(photos / "elm" / "0.png")] if command is commands.predict else []
        with pytest.raises(ShortlistError, match=re.escape(name)):
            command([str(run.path), *images, "--device", "cpu"])
    assert not no_network


def test_weights_and_pretrained_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ShortlistError, match=r"exclude.*--model\.no-pretrained"):
        ModelConfig(name="resnet18", pretrained=True, weights="some.pth")
    with pytest.raises(SystemExit):
        parse_recipe(commands.TrainArguments, ["folder", "--model.weights", "x.pth", "--model.pretrained"], "train")
    assert "exclude" in capsys.readouterr().err
    with pytest.raises(ShortlistError, match="needs a network"):
        ModelConfig(name="none", weights="some.pth")


def test_the_network_of_the_recipe_for_a_package_is_the_only_difference() -> None:
    lite, usual = recipes.build("folder_lite"), recipes.build("folder")
    assert replace(lite, model=usual.model, recipe="folder") == usual
    assert build_model(lite.model, (3, 32, 32), 2).backbone(torch.zeros(2, 3, 32, 32)).shape == (2, 1280)
