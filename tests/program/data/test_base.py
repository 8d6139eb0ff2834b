"""Images become the network's input in the same way when traced, compiled or without gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from shortlist.program.data.base import Preprocess

IMAGES = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).view(2, 3, 4, 4)


def preprocess_of(request: pytest.FixtureRequest) -> Preprocess:
    """A different one for each test, so that no cached value of another test is used."""
    mean = (0.1, 0.2, len(request.node.name) / 100)
    return Preprocess(channels=3, resize=4, crop=4, mean=mean, std=(0.5, 0.4, 0.3))


def literally(preprocess: Preprocess, images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (preprocess.mean, preprocess.std))
    return (images / 255 - mean) / std


class Normalise(nn.Module):
    def __init__(self, preprocess: Preprocess) -> None:
        super().__init__()
        self.preprocess = preprocess

    def forward(self, images: Tensor) -> Tensor:
        return self.preprocess.normalise(images)


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
def test_an_export_leaves_nothing_behind(strict: bool, request: pytest.FixtureRequest) -> None:
    preprocess = preprocess_of(request)
    exported = torch.export.export(Normalise(preprocess), (IMAGES,), strict=strict).module()
    want = literally(preprocess, IMAGES)
    torch.testing.assert_close(preprocess.normalise(IMAGES), want)
    torch.testing.assert_close(exported(IMAGES), want)
    # Nor do cached values disturb an export.
    again = torch.export.export(Normalise(preprocess), (IMAGES,), strict=strict).module()
    torch.testing.assert_close(again(IMAGES), want)


def test_fake_images_leave_nothing_behind(request: pytest.FixtureRequest) -> None:
    preprocess = preprocess_of(request)
    with FakeTensorMode() as mode:
        preprocess.normalise(mode.from_tensor(IMAGES))
    torch.testing.assert_close(preprocess.normalise(IMAGES), literally(preprocess, IMAGES))


def test_gradients_flow_after_a_use_in_inference_mode(request: pytest.FixtureRequest) -> None:
    preprocess = preprocess_of(request)
    with torch.inference_mode():
        preprocess.normalise(IMAGES)
    images = IMAGES.float().requires_grad_()
    preprocess.normalise(images).sum().backward()
    assert images.grad is not None
    torch.testing.assert_close(images.grad[0, :, 0, 0], 1 / (255 * torch.tensor(preprocess.std)))
