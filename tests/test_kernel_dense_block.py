"""The kernels of DenseNet's blocks against its plain path.

Without a GPU they run in Triton's interpreter, on few pixels and small tiles.
"""

import copy
import importlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shortlist import kernels
from shortlist.cifar_networks import DenseNetBC

pytest.importorskip("triton")
batch_norm = importlib.import_module("shortlist.kernels.batch_norm")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and several parts, the last of them not full."""
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "usable", lambda x: x.dtype != torch.float64)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for kernel in ("_OBSERVING", "_ACTIVATING", "_PULLING", "_SETTLING"):
        small = replace(getattr(batch_norm, kernel), rows=16, columns=8, most_parts=4)
        monkeypatch.setattr(batch_norm, kernel, small)


def network(growth: int) -> DenseNetBC:
    """Two layers a block; norms that are not the identity, and whose activation cuts where the mean is not zero."""
    torch.manual_seed(0)
    model = DenseNetBC(depth=16, growth=growth, channels=3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
    return model.to(DEVICE).to(memory_format=torch.channels_last)


def trained_once(model: DenseNetBC, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Features, and the gradients and buffers that one step leaves."""
    images = images.clone().requires_grad_()
    features = model.train()(images)
    weights = torch.linspace(-1, 1, features.numel(), dtype=features.dtype, device=DEVICE).view_as(features)
    (features * weights).sum().backward()
    left = {name: parameter.grad for name, parameter in model.named_parameters()} | dict(model.named_buffers())
    assert images.grad is not None
    return features.detach(), {name: each for name, each in left.items() if each is not None} | {"images": images.grad}


@pytest.mark.parametrize(("growth", "count"), [(6, 3), (8, 1)])
def test_kernels_compute_what_torch_computes(growth: int, count: int) -> None:
    """With channels that can be read eight at a time, and others."""
    model = network(growth)
    images = 2 + torch.randn(count, 3, 16, 16, device=DEVICE)
    features, left = trained_once(copy.deepcopy(model), images)
    expected_features, expected = trained_once(copy.deepcopy(model).double(), images.double())
    torch.testing.assert_close(features.double(), expected_features, rtol=1e-4, atol=1e-5)
    assert left.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.abs().max().item()
        error = (left[name] - value).abs().max().item()
        assert error <= 1e-4 * scale, name


@pytest.mark.parametrize("shape", [(2, 3, 16, 8), (2, 3, 18, 18)])
def test_images_that_no_kernel_takes_are_left_to_torch(shape: tuple[int, ...]) -> None:
    model, images = network(6), torch.randn(shape, device=DEVICE)
    features, _ = trained_once(copy.deepcopy(model), images)
    expected, _ = trained_once(copy.deepcopy(model).double(), images.double())
    torch.testing.assert_close(features.double(), expected, rtol=1e-4, atol=1e-5)
