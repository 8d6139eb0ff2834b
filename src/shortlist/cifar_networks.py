"""Networks for images of 32 x 32, as the papers on CIFAR define them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DenseNetBC(nn.Module):
    """DenseNet with bottlenecks and a compression of 1/2, for 32 x 32 images: three blocks of (depth - 4) / 6 layers.

    Reference:
        Huang et al., Densely Connected Convolutional Networks, CVPR 2017.
    """

    def __init__(self, *, depth: int, growth: int, channels: int = 3) -> None:
        super().__init__()
        width = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
        for block in range(3):
            for _ in range((depth - 4) // 6):
                layers.append(_DenseLayer(width, growth))
                width += growth
            if block < 2:
                # The original pools last: the same numbers, for four times the work.
                layers += [*_activated(width), nn.AvgPool2d(2), nn.Conv2d(width, width // 2, 1, bias=False)]
                width //= 2
        self.layers = nn.Sequential(*layers, *_activated(width), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.num_features = width
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images)
        return features


class _DenseLayer(nn.Module):
    """Adds ``growth`` channels to those it was given."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(*_activated(width), nn.Conv2d(width, 4 * growth, 1, bias=False))
        self.grow = nn.Sequential(*_activated(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.grow(self.squeeze(x))], 1)


class ResNet(nn.Module):
    """The residual network of depth 6n + 2 for 32 x 32 images: three stages of n blocks, 16, 32 and 64 channels wide.

    Its shortcuts have no parameters: where a stage begins they drop every other pixel and fill new channels with zeros.

    Reference:
        He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2.
    """

    num_features = 64

    def __init__(self, *, depth: int, channels: int = 3) -> None:
        super().__init__()
        width = 16
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False), *_activated(width)]
        for wide in (16, 32, 64):
            for _ in range((depth - 2) // 6):
                layers.append(_ResidualBlock(width, wide))
                width = wide
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images)
        return features


class _ResidualBlock(nn.Module):
    """Adds a correction to what it was given, at half the resolution if it widens it."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.stride, self.new_channels = (1 if wide == width else 2), wide - width
        self.correction = nn.Sequential(
            nn.Conv2d(width, wide, 3, self.stride, padding=1, bias=False),
            *_activated(wide),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            _norm(wide),
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.new_channels:
            before = self.new_channels // 2
            shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.new_channels - before))
        return F.relu(shortcut + self.correction(x))


def _activated(width: int) -> tuple[nn.Module, nn.Module]:
    return _norm(width), nn.ReLU()


def _norm(width: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(width)
    norm.num_batches_tracked = None  # used by no norm with a momentum, and counting is a kernel for each of them
    return norm


def _initialise(network: nn.Module) -> None:
    """Such that a layer keeps the size of the gradient (He et al. 2015)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * math.prod(module.kernel_size)
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
