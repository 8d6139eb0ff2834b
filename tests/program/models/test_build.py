"""Networks: the paper's own, timm's by name, with either last layer."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shortlist import CosineLinear, ShortlistError
from shortlist.program.config import ModelConfig
from shortlist.program.models.build import build_model
from shortlist.program.models.cifar import ResNet
from shortlist.program.runs.folder import RunFolder, as_safetensors


def test_densenet_40_40_has_the_parameters_of_the_papers_network() -> None:
    model = build_model(ModelConfig(name="densenet40_40"), (3, 32, 32), 100)
    growth, channels = 40, 80
    count = 3 * channels * 9
    for block in range(3):
        for _ in range(6):  # normalisation, 1 x 1 to four times the growth, normalisation, 3 x 3
            count += 2 * channels + channels * 4 * growth + 2 * 4 * growth + 4 * growth * growth * 9
            channels += growth
        if block < 2:
            count += 2 * channels + channels * (channels // 2)
            channels //= 2
    count += 2 * channels + channels * 100 + 100
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_resnet_32_has_the_parameters_that_its_authors_count() -> None:
    """0.46 million in table 6 of He et al. (2016), with ten classes."""
    model = build_model(ModelConfig(name="resnet32"), (3, 32, 32), 10)
    convolutions = 3 * 16 * 9 + 10 * 16 * 16 * 9 + (16 + 9 * 32) * 32 * 9 + (32 + 9 * 64) * 64 * 9
    norms = 2 * (11 * 16 + 10 * 32 + 10 * 64)
    assert sum(parameter.numel() for parameter in model.parameters()) == convolutions + norms + 64 * 10 + 10
    assert round((convolutions + norms) / 1e6, 2) == 0.46


def test_a_residual_network_without_corrections_passes_its_input_on() -> None:
    """Every other pixel of it, between channels of zeros: the shortcuts alone lose no channel and mix none."""
    network = ResNet(depth=32).eval()
    blocks = network.layers[3:18]
    with torch.no_grad():
        for module in blocks.modules():
            if isinstance(module, nn.Sequential) and isinstance(module[-1], nn.BatchNorm2d):
                module[-1].weight.zero_()
        x = torch.rand(2, 16, 32, 32)
        expected = torch.zeros(2, 64, 8, 8)
        expected[:, 24:40] = x[:, :, ::4, ::4]
        torch.testing.assert_close(blocks(x), expected)


@pytest.mark.parametrize("name", ["glyphnet", "densenet40_40", "resnet32", "resnet18", "mobilenetv3_small_050"])
@pytest.mark.parametrize("head", ["linear", "cosine"])
def test_any_network_takes_either_head(name: str, head: str) -> None:
    model = build_model(ModelConfig(name=name, head=head), (3, 64, 64), 7)  # type: ignore[arg-type]
    assert isinstance(model.head, CosineLinear) == (head == "cosine")
    scores = model.eval()(torch.randn(2, 3, 64, 64))
    assert scores.shape == (2, 7)
    assert (scores.abs() <= 1.001).all() or head == "linear"


def test_the_residual_network_is_that_of_its_paper() -> None:
    """Written once more, with functions alone."""
    network = ResNet(depth=14).eval()
    convolutions = [module.weight for module in network.modules() if isinstance(module, nn.Conv2d)]
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        for values in (norm.weight, norm.bias, norm.running_mean):
            nn.init.normal_(values)  # type: ignore[arg-type]

    def layer(x: Tensor, place: int, stride: int = 1) -> Tensor:
        out: Tensor = norms[place](F.conv2d(x, convolutions[place], stride=stride, padding=1))
        return out

    images = torch.randn(2, 3, 32, 32)
    x, place = F.relu(layer(images, 0)), 1
    for width in (16, 32, 64):
        for first in (True, False):
            stride = 2 if first and width > 16 else 1
            corrected = layer(F.relu(layer(x, place, stride)), place + 1)
            if stride == 2:
                around = torch.zeros(2, width // 4, *corrected.shape[2:])
                x = torch.cat([around, x[:, :, ::2, ::2], around], 1)
            x, place = F.relu(x + corrected), place + 2
    torch.testing.assert_close(network(images), x.mean((2, 3)))


@pytest.mark.parametrize("name", ["densenet40_40", "resnet32"])
def test_convolutions_begin_such_that_gradients_keep_their_size(name: str) -> None:
    for module in build_model(ModelConfig(name=name), (3, 32, 32), 10).modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] ** 2
            spread = module.weight.std().item() * (fan_out / 2) ** 0.5
            assert spread == pytest.approx(1, abs=5 / (2 * module.weight.numel()) ** 0.5)


@pytest.mark.parametrize("name", ["glyphnet", "densenet40_40", "resnet32", "resnet18"])
def test_weights_on_disk_bring_a_network_back(name: str, tmp_path: Path) -> None:
    """A file cannot hold the version numbers that torch keeps in a state dict and reads when it loads one."""
    run, images = RunFolder(tmp_path), torch.randn(2, 3, 32, 32)
    model = build_model(ModelConfig(name=name), (3, 32, 32), 7)
    model.train()(images)
    run.save_best(as_safetensors(model.state_dict()))
    again = build_model(ModelConfig(name=name), (3, 32, 32), 7)
    again.load_state_dict(run.load_best())
    torch.testing.assert_close(again.eval()(images), model.eval()(images), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050"])
def test_photographs_go_through_a_network_with_channels_last(name: str, tmp_path: Path) -> None:
    """Also after its weights were read from a file, which does not say in which order they were."""
    run, given = RunFolder(tmp_path), build_model(ModelConfig(name=name), (3, 64, 64), 7)
    run.save_best(as_safetensors(given.state_dict()))
    model = build_model(ModelConfig(name=name), (3, 64, 64), 7)
    model.load_state_dict(run.load_best())
    passed: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda layer, inputs, output: passed.append(output))
    model(torch.randn(2, 3, 64, 64))
    assert passed
    assert all(image.is_contiguous(memory_format=torch.channels_last) for image in passed)


def test_grey_images_and_embeddings_are_inputs_too() -> None:
    assert build_model(ModelConfig(name="resnet18"), (1, 32, 32), 5).eval()(torch.randn(1, 1, 32, 32)).shape == (1, 5)
    assert build_model(ModelConfig(name="none"), (12,), 5)(torch.randn(3, 12)).shape == (3, 5)


def test_scores_are_not_rounded_by_mixed_precision() -> None:
    model, features = build_model(ModelConfig(name="none", head="cosine"), (12,), 5), torch.randn(3, 12)
    plain = model(features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(features), plain)


def test_glyphnet_does_not_mix_the_images_of_a_batch() -> None:
    model, images = build_model(ModelConfig(name="glyphnet"), (1, 28, 28), 5), torch.randn(4, 1, 28, 28)
    torch.testing.assert_close(model(images)[:1], model(images[:1]))


def test_weights_that_cannot_be_fetched_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ShortlistError, match=r"resnet18.*--model\.no-pretrained"):
        build_model(ModelConfig(name="resnet18", pretrained=True), (3, 32, 32), 5)


def test_a_size_that_a_network_cannot_take_is_answered_with_its_own() -> None:
    network = ModelConfig(name="vit_tiny_patch16_384")
    with pytest.raises(ShortlistError, match=r"32 x 32.*--data\.image-size 384"):
        build_model(network, (3, 32, 32), 5)


def test_a_misspelt_network_is_answered_with_those_close_to_it() -> None:
    with pytest.raises(ShortlistError, match=r"resnet5O.*resnet50"):
        build_model(ModelConfig(name="resnet5O"), (3, 32, 32), 5)
