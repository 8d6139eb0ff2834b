"""Weights of timm from its hub: one that does not answer is reported at once, and weights at hand need none."""

import socket
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

from shortlist import ShortlistError
from shortlist.program.config import ModelConfig
from shortlist.program.models.build import build_model

PRETRAINED = ModelConfig(name="test_resnet", pretrained=True)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which the hub's library keeps what it downloaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_unreachable_hub_is_named_without_another_try(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub = f"http://127.0.0.1:{closed_port()}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub)
    with pytest.raises(ShortlistError) as error:
        build_model(PRETRAINED, (3, 64, 64), 5)
    for fact in ("test_resnet", hub, "--model.weights FILE", "shortlist[lite]", "--model.no-pretrained"):
        assert fact in str(error.value)
    assert "etry" not in capfd.readouterr().err


def test_weights_in_the_cache_need_no_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # any request is an error
    with pytest.raises(ShortlistError, match="test_resnet"):
        build_model(PRETRAINED, (3, 64, 64), 5)
    weights = timm.create_model("test_resnet").state_dict()
    fill(cache, weights)
    backbone = build_model(PRETRAINED, (3, 64, 64), 5).backbone
    assert all(torch.equal(tensor, weights[name]) for name, tensor in backbone.state_dict().items())


def fill(cache: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write weights of test_resnet to the cache as the hub's library lays it out."""
    place, commit = cache / "models--timm--test_resnet.r160_in1k", "0" * 40
    for folder in ("refs", f"snapshots/{commit}"):
        (place / folder).mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    safetensors.torch.save_file(weights, place / "snapshots" / commit / "model.safetensors")


@pytest.mark.parametrize(
    "name", ["hf-hub:timm/test_resnet.r160_in1k", "hf_hub:a/b", "local-dir:/tmp", "timm/test_resnet", "test_resnet.a:b"]
)
def test_addresses_are_no_names_of_networks(name: str) -> None:
    for pretrained in (False, True):
        with pytest.raises(ShortlistError, match=r"model\.name.*--model\.weights"):
            build_model(ModelConfig(name=name, pretrained=pretrained), (3, 64, 64), 5)
