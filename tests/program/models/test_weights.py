"""Weights from files: every usual layout brings the same network back, and what does not fit is named."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from shortlist import ShortlistError
from shortlist.program.config import ModelConfig
from shortlist.program.models.build import build_model
from shortlist.program.models.weights import load_backbone, read_weights

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def whole() -> nn.Module:
    """A small network with a last layer for ten classes, and statistics of batches that are not the initial ones."""
    torch.manual_seed(1)
    model: nn.Module = timm.create_model("test_resnet", num_classes=10)
    for name, tensor in model.state_dict().items():
        if name.endswith(("running_mean", "running_var")):
            tensor.uniform_(0.5, 1.5)
    return model.eval()


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def prefixed(prefix: str) -> Callable[[Weights], bytes]:
    return lambda weights: saved({prefix + name: tensor for name, tensor in weights.items()})


LAYOUTS: dict[str, Callable[[Weights], bytes]] = {
    "safetensors": lambda weights: safetensors.torch.save(weights),
    "plain": saved,
    "state_dict": lambda weights: saved({"epoch": 3, "arch": "test_resnet", "state_dict": weights}),
    "model": lambda weights: saved({"model": weights, "optimizer": {"state": {}}}),
    "model_state_dict": lambda weights: saved({"model_state_dict": weights, "loss": torch.zeros(1)}),
    "averaged": lambda weights: saved(
        {"state_dict": {name: torch.zeros_like(tensor) for name, tensor in weights.items()}, "state_dict_ema": weights}
    ),
    "module.": prefixed("module."),
    "model.": prefixed("model."),
    "_orig_mod.": prefixed("_orig_mod."),
    "backbone.": prefixed("backbone."),
    "module._orig_mod.": prefixed("module._orig_mod."),
    "half": lambda weights: saved({name: tensor.half() for name, tensor in weights.items()}),
    "no count of batches": lambda weights: saved(
        {name: tensor for name, tensor in weights.items() if not name.endswith("num_batches_tracked")}
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_brings_the_features_back(layout: str, whole: nn.Module) -> None:
    backbone = build_model(ModelConfig(name="test_resnet"), (3, 64, 64), 5).backbone.eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = whole.forward_head(whole.forward_features(images), pre_logits=True)  # type: ignore[operator]
        assert not torch.allclose(backbone(images), expected, atol=1e-2)
        told = load_backbone(backbone, read_weights(LAYOUTS[layout](weights_of(whole)), "file"), "file", "test_resnet")
        atol = 0.1 if layout == "half" else 1e-5
        torch.testing.assert_close(backbone(images), expected, rtol=0.01, atol=atol)
    assert "fc.weight" in told
    assert "not used" not in told


def weights_of(network: nn.Module) -> Weights:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize("name", ["glyphnet", "densenet40_40", "resnet32"])
def test_weights_of_a_run_fit_our_networks_for_other_classes_and_another_head(name: str) -> None:
    old = build_model(ModelConfig(name=name, head="cosine"), (3, 32, 32), 5)
    new = build_model(ModelConfig(name=name), (3, 32, 32), 7)
    head = weights_of(new.head)
    told = load_backbone(new.backbone, read_weights(safetensors.torch.save(weights_of(old)), "file"), "file", name)
    for tensor, expected in zip(new.backbone.state_dict().values(), old.backbone.state_dict().values(), strict=True):
        assert torch.equal(tensor, expected)
    assert torch.equal(new.head.state_dict()["weight"], head["weight"])
    assert "head.weight" in told


def test_what_the_network_does_not_know_is_told(whole: nn.Module) -> None:
    backbone = build_model(ModelConfig(name="test_resnet"), (3, 64, 64), 5).backbone
    weights = weights_of(whole) | {f"decoder.{number}": torch.zeros(1) for number in range(7)}
    told = load_backbone(backbone, weights, "file", "test_resnet")
    assert "7 not used" in told
    assert "decoder.0" in told


def test_missing_weights_are_named_and_nothing_is_loaded(whole: nn.Module) -> None:
    backbone = build_model(ModelConfig(name="test_resnet"), (3, 64, 64), 5).backbone
    before, weights = weights_of(backbone), weights_of(whole)
    del weights["conv1.0.weight"], weights["layer1.0.bn1.running_mean"]
    with pytest.raises(ShortlistError, match=r"(?s)lacks 2 of .*conv1\.0\.weight.*layer1\.0\.bn1\.running_mean"):
        load_backbone(backbone, weights, "file", "test_resnet")
    with pytest.raises(ShortlistError, match=r"lacks .*conv1\.0\.weight.*, and has .*blocks.*--model\.name"):
        load_backbone(backbone, weights_of(timm.create_model("test_vit")), "file", "test_resnet")
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_wrong_shapes_are_named(whole: nn.Module) -> None:
    grey = build_model(ModelConfig(name="test_resnet"), (1, 64, 64), 5).backbone
    with pytest.raises(
        ShortlistError, match=r"1 tensor of another shape.*conv1\.0\.weight \(\d+, 3, .*, not \(\d+, 1, "
    ):
        load_backbone(grey, weights_of(whole), "file", "test_resnet")


def test_code_in_a_file_is_never_run(whole: nn.Module, tmp_path: Any) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return exec, (f"open({str(tmp_path / 'was run')!r}, 'w')",)

    for content in (saved({"state_dict": weights_of(whole), "x": Attack()}), saved(whole), pickle.dumps(Attack())):
        with pytest.raises(ShortlistError, match=r"some\.pth.*state_dict\(\)"):
            read_weights(content, "some.pth")
    assert not (tmp_path / "was run").exists()


def test_a_file_that_contains_itself_ends() -> None:
    content: dict[str, Any] = {}
    content["model"] = content
    with pytest.raises(ShortlistError, match="holds no weights"):
        read_weights(saved(content), "file")


@pytest.mark.parametrize("content", [b"", b"no weights", saved([1, 2]), saved({"lr": 0.1}), b"\x01" + bytes(7) + b"{"])
def test_files_without_weights_are_named(content: bytes) -> None:
    with pytest.raises(ShortlistError, match=r"some\.pth"):
        read_weights(content, "some.pth")


@pytest.mark.parametrize("length", [100, 5_000])
def test_a_file_that_was_cut_is_named(whole: nn.Module, length: int) -> None:
    for layout in ("safetensors", "plain"):
        with pytest.raises(ShortlistError, match=r"some\.pth"):
            read_weights(LAYOUTS[layout](weights_of(whole))[:length], "some.pth")
