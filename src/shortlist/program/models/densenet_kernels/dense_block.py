"""A block of DenseNet in training: torch computes the convolutions, ``batch_norm`` everything between them.

Every layer of a block normalises all channels before it. The statistics of a channel are the same for all these layers,
so they are computed once, when the channel is made. Channels are written to where the next layers read them, so nothing
is concatenated, and their gradients are summed in place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shortlist.program.models.densenet_kernels.batch_norm import (
    TILINGS,
    Norm,
    Statistics,
    Tilings,
    activate,
    activate_backward,
    compute_statistics,
    empty_gradient,
    empty_statistics,
    statistics_backward,
)

_PARAMETERS_A_LAYER = 6


def dense_block(
    images: Tensor,
    layers: Sequence[Sequence[Tensor]],
    last_norm: Sequence[Tensor],
    *,
    eps: float,
    pool: int,
    tilings: Tilings = TILINGS,
) -> tuple[Tensor, list[Statistics]]:
    """All layers of a block, then a norm, an activation and average pooling.

    Args:
        images: ``(N, C, H, W)``.
        layers: For each layer the weight and bias of its first norm, the kernel of its 1 x 1 convolution, the weight
            and bias of its second norm, and the kernel of its 3 x 3 convolution.
        last_norm: Weight and bias.
        eps: Added to all variances.
        pool: Side of the squares to average over: a divisor of H and W, and small, since it is unrolled.

    Returns:
        ``(N, C + growth * layers, H / pool, W / pool)``, then the statistics of all these channels, and those of the
        output of each layer's first convolution.
    """
    parameters = [parameter for layer in (*layers, last_norm) for parameter in layer]
    out, *statistics = _DenseBlock.apply(images, pool, eps, tilings, *parameters)
    return out, list(_paired(statistics))


@dataclass(frozen=True)
class _Layer:
    squeeze_norm: Norm
    squeeze: Tensor
    """``(width, channels)``: a 1 x 1 convolution is a matrix product."""
    grow_norm: Norm
    grow: Tensor


class _DenseBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, images: Tensor, pool: int, eps: float, tilings: Tilings, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        # Convolutions in the dtype of the images; norms keep theirs.
        used = _converted(parameters, [images.dtype if value.dim() == 4 else value.dtype for value in parameters])
        layers, last_norm = _layers(used, eps)
        to_statistics = partial(compute_statistics, tiling=tilings.statistics)
        to_activated = partial(activate, tiling=tilings.activate)
        num_images, channels, height, width = images.shape
        total = channels + sum(len(layer.grow) for layer in layers)
        features_RC = images.new_empty(num_images * height * width, total)
        shared = empty_statistics(features_RC)
        to_statistics(_rows(images), shared.of(0, channels), features_RC[:, :channels])
        kept, statistics = [], [shared]
        for layer in layers:
            activated_RC = to_activated(features_RC[:, :channels], shared.of(0, channels), layer.squeeze_norm)
            squeezed_RC = activated_RC @ layer.squeeze.t()
            own = empty_statistics(squeezed_RC)
            to_statistics(squeezed_RC, own)
            wide_RC = to_activated(squeezed_RC, own, layer.grow_norm)
            grown_RC = _rows(F.conv2d(_images(wide_RC, images.shape), layer.grow, padding=1))
            end = channels + len(layer.grow)
            to_statistics(grown_RC, shared.of(channels, end), features_RC[:, channels:end])
            kept += [activated_RC, squeezed_RC, wide_RC]
            statistics.append(own)
            channels = end
        pooled_RC = to_activated(features_RC, shared, last_norm, width=width, pool=pool)
        unpaired = [values_C for pair in statistics for values_C in (pair.mean_C, pair.var_C)]
        ctx.save_for_backward(features_RC, *used, *kept, *unpaired)
        ctx.settings = images.shape, pool, eps, tilings, len(used), len(kept)
        ctx.mark_non_differentiable(*unpaired)
        ctx.set_materialize_grads(False)
        return pooled_RC.view(num_images, height // pool, width // pool, total).permute(0, 3, 1, 2), *unpaired

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *of_statistics: None) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return None, None, None, None, *(None for _ in ctx.dtypes)
        (shape, pool, eps, tilings, num_used, num_kept), (features_RC, *saved) = ctx.settings, ctx.saved_tensors
        used, kept = saved[:num_used], saved[num_used:][:num_kept]
        shared, *own_statistics = _paired(saved[num_used + num_kept :])
        layers, last_norm = _layers(used, eps)
        from_activated = partial(activate_backward, tiling=tilings.activate_backward)
        from_statistics = partial(statistics_backward, tiling=tilings.statistics_backward)
        total = empty_gradient(torch.empty_like(features_RC))
        last = from_activated(_rows(upstream), features_RC, shared, last_norm, total, width=shape[3], pool=pool)
        gradients: list[Tensor] = [*last]
        end = features_RC.shape[1]
        for layer, own in zip(reversed(layers), reversed(own_statistics), strict=True):
            *kept, activated_RC, squeezed_RC, wide_RC = kept
            first = end - len(layer.grow)
            grown_RC = from_statistics(total.of(first, end), features_RC[:, first:end], shared.of(first, end), eps)
            wide, grow = _convolution_backward(_images(grown_RC, shape), _images(wide_RC, shape), layer.grow)
            own_total = empty_gradient(_rows(wide))
            grow_norm = from_activated(own_total.gradient_RC, squeezed_RC, own, layer.grow_norm, own_total)
            squeezed_gradient_RC = from_statistics(own_total, squeezed_RC, own, eps)
            squeeze = squeezed_gradient_RC.t() @ activated_RC
            activated_gradient_RC = squeezed_gradient_RC @ layer.squeeze
            before = (features_RC[:, :first], shared.of(0, first), layer.squeeze_norm, total.of(0, first))
            squeeze_norm = from_activated(activated_gradient_RC, *before, adds=True)
            gradients = [*squeeze_norm, squeeze[:, :, None, None], *grow_norm, grow, *gradients]
            end = first
        inputs_RC = from_statistics(total.of(0, end), features_RC[:, :end], shared.of(0, end), eps)
        return _images(inputs_RC, shape), None, None, None, *_converted(gradients, ctx.dtypes)


def _rows(images: Tensor) -> Tensor:
    """``(pixels, channels)``, contiguous: without a copy if the images are channels-last and contiguous."""
    return images.permute(0, 2, 3, 1).reshape(-1, images.shape[1]).contiguous()


def _images(rows_RC: Tensor, shape: Sequence[int]) -> Tensor:
    """Back to images of this shape, with any number of channels."""
    num_images, _, height, width = shape
    return rows_RC.view(num_images, height, width, -1).permute(0, 3, 1, 2)


def _paired(tensors: Sequence[Tensor]) -> Iterator[Statistics]:
    return (Statistics(mean, var) for mean, var in zip(tensors[::2], tensors[1::2], strict=True))


def _layers(parameters: Sequence[Tensor], eps: float) -> tuple[list[_Layer], Norm]:
    """Sort the parameters by their use."""
    *of_layers, last_weight, last_bias = parameters
    layers = []
    for at in range(0, len(of_layers), _PARAMETERS_A_LAYER):
        squeeze_weight, squeeze_bias, squeeze, grow_weight, grow_bias, grow = of_layers[at : at + _PARAMETERS_A_LAYER]
        squeeze_norm, grow_norm = Norm(squeeze_weight, squeeze_bias, eps), Norm(grow_weight, grow_bias, eps)
        layers.append(_Layer(squeeze_norm, squeeze.flatten(1), grow_norm, grow))
    return layers, Norm(last_weight, last_bias, eps)


def _converted(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """In these dtypes, all at once: one by one would take dozens of launches."""
    pairs = zip(tensors, dtypes, strict=True)
    out = [old if old.dtype == dtype else torch.empty_like(old, dtype=dtype) for old, dtype in pairs]
    changed = [at for at, (old, new) in enumerate(zip(tensors, out, strict=True)) if new is not old]
    if changed:
        torch._foreach_copy_([out[at] for at in changed], [tensors[at] for at in changed])
    return out


def _convolution_backward(upstream: Tensor, images: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the images and the kernel of a 3 x 3 convolution."""
    of_images, of_kernel, _ = torch.ops.aten.convolution_backward(
        upstream, images, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    return of_images, of_kernel
