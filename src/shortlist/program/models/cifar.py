"""Networks for 32 x 32 images, as the papers on CIFAR define them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shortlist.kernels.dispatch import Impl, supports

if TYPE_CHECKING:
    from shortlist.program.models.densenet_kernels.batch_norm import Statistics

# The defaults of torch's batch norms.
_EPS, _MOMENTUM = 1e-5, 0.1
# Side of the largest squares that the kernels average over.
_MAX_POOL = 8


class DenseNetBC(nn.Module):
    """DenseNet with bottlenecks and a compression of 1/2, for 32 x 32 images: three blocks of (depth - 4) / 6 layers.

    Args:
        impl: Whether kernels compute the blocks in training.

    Reference:
        Huang et al., Densely Connected Convolutional Networks, CVPR 2017.
    """

    def __init__(self, *, depth: int, growth: int, channels: int = 3, impl: Impl = "auto") -> None:
        super().__init__()
        self.impl = impl
        width = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
        for pool in (2, 2, None):
            layers.append(_DenseBlock(width, growth, (depth - 4) // 6, pool, impl))
            width += (depth - 4) // 6 * growth
            if pool:
                layers.append(nn.Conv2d(width, width // 2, 1, bias=False))
                width //= 2
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.num_features = width
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        norms = (module for module in self.modules() if isinstance(module, _BatchNorm))
        if supports(self.impl, images, traceable=True) and all(map(_is_unchanged, norms)):
            features: Tensor = self._uncompiled(images)
        else:
            features = self.layers(images)
        return features

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _uncompiled(self, images: Tensor) -> Tensor:
        """With kernels for the blocks, there is nothing left to compile."""
        features: Tensor = self.layers(images)
        return features


class _DenseBlock(nn.Module):
    """Layers that each read all channels before them, then a norm, an activation, and averages over squares.

    The original averages after the convolution that follows: the same result for four times the work.
    """

    def __init__(self, width: int, growth: int, depth: int, pool: int | None, impl: Impl) -> None:
        super().__init__()
        layers = nn.ModuleList(_DenseLayer(width + at * growth, growth) for at in range(depth))
        self.layers: Sequence[_DenseLayer] = layers  # type: ignore[assignment]
        self.norm = _norm(width + depth * growth)
        self.pool = pool
        """Side of the squares; None for the whole image."""
        self.impl = impl
        self.kernel_options: dict[str, Any] = {}
        """Further arguments of ``densenet_kernels.dense_block.dense_block``."""

    def forward(self, x: Tensor) -> Tensor:
        if supports(self.impl, x) and supports(self.impl, needs=self._kernel_needs(x)):
            return self._by_kernels(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        x = F.relu(self.norm(x))
        return F.avg_pool2d(x, self.pool) if self.pool else F.adaptive_avg_pool2d(x, 1)

    def _kernel_needs(self, x: Tensor) -> dict[str, bool]:
        """What the kernels need in order to do all that the modules would do."""
        num_images, _, height, width = x.shape
        pool = self.pool or width
        norms = [self.norm, *(norm for layer in self.layers for norm in (layer.squeeze_norm, layer.grow_norm))]
        return {
            "square images": height == width,
            f"images whose side is a multiple of {pool}": width % pool == 0,
            f"averages over at most {_MAX_POOL} x {_MAX_POOL} pixels": pool <= _MAX_POOL,
            "more than one pixel": num_images * width > 1,  # one has no variance, and torch says so
            "batch norms in training, as they were made": all(map(_is_unchanged, norms)),
        }

    def _by_kernels(self, x: Tensor) -> Tensor:
        from shortlist.program.models.densenet_kernels.dense_block import dense_block  # needs Triton

        out, statistics = dense_block(
            x,
            [
                [*_affine(layer.squeeze_norm), layer.squeeze.weight, *_affine(layer.grow_norm), layer.grow.weight]
                for layer in self.layers
            ],
            _affine(self.norm),
            eps=_EPS,
            pool=self.pool or x.shape[-1],
            **self.kernel_options,
        )
        shared, *own_statistics = statistics
        observed = [(layer.grow_norm, own) for layer, own in zip(self.layers, own_statistics, strict=True)]
        observed += [(norm, shared) for norm in (*(layer.squeeze_norm for layer in self.layers), self.norm)]
        _track(observed, x.numel() // x.shape[1])
        return out


class _DenseLayer(nn.Module):
    """The channels that one layer adds."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.squeeze_norm, self.squeeze = _norm(width), nn.Conv2d(width, 4 * growth, 1, bias=False)
        self.grow_norm, self.grow = _norm(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        squeezed = self.squeeze(F.relu(self.squeeze_norm(x)))
        grown: Tensor = self.grow(F.relu(self.grow_norm(squeezed)))
        return grown


class ResNet(nn.Module):
    """The residual network of depth 6n + 2 for 32 x 32 images: three stages of n blocks, 16, 32 and 64 channels wide.

    The shortcuts have no parameters. At the start of a stage they drop every other pixel and add channels of zeros.

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
    """Adds a correction to its input, at half the resolution if it adds channels."""

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
    return nn.BatchNorm2d(width, eps=_EPS, momentum=_MOMENTUM)


def _is_unchanged(norm: nn.Module) -> bool:
    """True if a norm is in training and as it was made: not frozen, not one that synchronises GPUs."""
    return (
        type(norm) is nn.BatchNorm2d
        and norm.training
        and (norm.eps, norm.momentum) == (_EPS, _MOMENTUM)
        and norm.affine
        and norm.running_mean is not None
        and norm.running_mean.dtype == torch.float32
    )


def _affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    return norm.weight, norm.bias


def _track(observed: Sequence[tuple[nn.BatchNorm2d, "Statistics"]], pixels: int) -> None:
    """Update the running statistics of all norms at once. Each takes as many of the given channels as it has."""
    counters, running, seen = [], [], []
    for norm, statistics in observed:
        assert norm.num_batches_tracked is not None
        assert norm.running_mean is not None
        assert norm.running_var is not None
        counters.append(norm.num_batches_tracked)
        running += [norm.running_mean, norm.running_var]
        seen += [statistics.mean_C[: norm.num_features], statistics.var_C[: norm.num_features]]
    with torch.no_grad():
        seen[1::2] = torch._foreach_mul(seen[1::2], pixels / (pixels - 1))  # Bessel's correction
        torch._foreach_lerp_(running, seen, _MOMENTUM)
        torch._foreach_add_(counters, 1)


def _initialise(network: nn.Module) -> None:
    """Initialise convolutions so that gradients keep their size (He et al. 2015)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * math.prod(module.kernel_size)
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
