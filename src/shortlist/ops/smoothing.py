"""The k-th largest value and the sum of the k largest: hard, and smoothed by Gaussian noise.

Shape suffixes: R rows (any leading dimensions), L classes, B draws, P ranks, G groups of ranks, M ranks of a group in
all draws.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.ops import lazy_noise
from shortlist.ops.checks import (
    check_floating,
    check_integer,
    check_k,
    check_n_samples,
    check_noise,
    check_not_negative,
)
from shortlist.ops.dtypes import widened, zero_if_tiny
from shortlist.ops.random import cpu_generator_from, standard_normal

# With more draws than this, positions are not kept: only how often each class was found.
DRAWS_AT_ONCE = 128


def topk_value(x: Tensor, k: int, dim: int = -1) -> Tensor:
    """The ``k``-th largest value along ``dim``. Its gradient is 1 at the position of that value, and 0 elsewhere.

    A slice with a NaN gives NaN. If several values are equal, any of them may get the gradient.

    Example:
        >>> topk_value(torch.tensor([2.4, 2.6, 2.3, 0.5]), k=2)
        tensor(2.4000)
    """
    return smooth_topk(x, k, epsilon=0.0, dim=dim)


def topk_sum(x: Tensor, k: int, dim: int = -1) -> Tensor:
    """The sum of the ``k`` largest values along ``dim``. Its gradient is 1 at each of them, and 0 elsewhere.

    Example:
        >>> topk_sum(torch.tensor([2.4, 2.6, 2.3, 0.5]), k=2)
        tensor(5.)
    """
    return smooth_topk_sum(x, k, epsilon=0.0, dim=dim)


def smooth_topk(
    x: Tensor,
    k: int,
    *,
    epsilon: float,
    n_samples: int = 5,
    dim: int = -1,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Monte-Carlo estimate of ``E[k-th largest of x + epsilon Z]`` along ``dim``, Z standard normal.

    The gradient is the mean over the draws of the one-hot vector at the position of the k-th largest value of
    ``x + epsilon Z``. Only these positions are kept for backward, not the noise.

    Args:
        x: Scores of any shape and float dtype. Half precision is perturbed in float32.
        k: Rank of the value, from 1 (the largest) to the number of classes.
        epsilon: Standard deviation of the noise. Zero gives ``topk_value``; values below 5e-32 (9e-302 in float64)
            count as zero.
        n_samples: Number B of draws, up to 2^24. Beyond 128, memory does not grow with it. ``exact_topk`` computes the
            limit of infinitely many draws.
        dim: Dimension of the classes.
        noise: ``(*x.shape, B)`` draws to use instead of fresh ones.
        generator: Source of the draws; by default that of the device. Ranks that share its seed still draw different
            noise.

    Returns:
        ``x`` without ``dim``, in the dtype of ``x``.

    Example:
        The worked example of Garcin et al. (2022), section 3.2:

        >>> x = torch.tensor([2.4, 2.6, 2.3, 0.5], requires_grad=True)
        >>> Z = torch.tensor([[0.2, -0.1, 0.1, 0.3], [0.1, 0.1, -0.1, 0.1], [-0.1, -0.1, 0.1, -0.1]]).T
        >>> value = smooth_topk(x, k=2, epsilon=1.0, noise=Z)
        >>> value.backward()
        >>> f"{value.item():.2f}", x.grad
        ('2.47', tensor([0.3333, 0.3333, 0.3333, 0.0000]))
    """
    return _smoothed(x, k, epsilon, n_samples, dim, noise, generator, total=False)


def smooth_topk_sum(
    x: Tensor,
    k: int,
    *,
    epsilon: float,
    n_samples: int = 5,
    dim: int = -1,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Monte-Carlo estimate of ``E[sum of the k largest of x + epsilon Z]``; arguments as in ``smooth_topk``.

    The gradient is the mean over the draws of the vector with ones at the k largest values of ``x + epsilon Z``.

    Example:
        >>> Z = torch.tensor([[0.2, -0.1, 0.1, 0.3], [0.1, 0.1, -0.1, 0.1], [-0.1, -0.1, 0.1, -0.1]]).T
        >>> smooth_topk_sum(torch.tensor([2.4, 2.6, 2.3, 0.5]), k=2, epsilon=1.0, noise=Z)
        tensor(5.0667)
    """
    return _smoothed(x, k, epsilon, n_samples, dim, noise, generator, total=True)


def rows_of(x: Tensor, k: int, dim: int) -> Tensor:
    """The checked operand of an operator, classes last, in working precision."""
    check_floating("x", x)
    check_integer("dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise ShortlistError(f"dim must name one of the {x.dim()} dimensions of x, got {dim}")
    check_k(k, x.shape[dim], x.shape[dim])
    return widened(x.movedim(dim, -1))


def _smoothed(
    x: Tensor,
    k: int,
    epsilon: float,
    n_samples: int,
    dim: int,
    noise: Tensor | None,
    generator: torch.Generator | None,
    *,
    total: bool,
) -> Tensor:
    """The k-th largest, or with ``total`` the sum of the k largest."""
    x_RL = rows_of(x, k, dim)
    check_not_negative("epsilon", epsilon, x_RL.dtype)
    epsilon = zero_if_tiny(epsilon, x_RL.dtype)
    check_n_samples(n_samples)
    if n_samples == math.inf:
        raise ShortlistError("n_samples must be finite here: exact_topk computes the limit")
    check_noise(noise, x, generator)
    noise_BRL = None if noise is None else noise.movedim(dim % x.dim(), -2).movedim(-1, 0).to(x_RL.dtype)
    groups = [slice(0 if total else k - 1, k)]
    total_R = smoothed_sums(x_RL, k, groups, epsilon, n_samples, noise_BRL, generator).squeeze(-1)
    # The maximum is NaN if any score is NaN.
    total_R = torch.where(x_RL.detach().amax(-1).isnan(), math.nan, total_R)
    return total_R.to(x.dtype)


def smoothed_sums(
    x_RL: Tensor,
    k: int,
    groups: Sequence[slice],
    epsilon: float,
    n_samples: int,
    noise_BRL: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """``(R, G)`` means over the draws of the sums over groups of ranks, all from the same draws.

    Each group is a slice of the k largest of ``x + epsilon Z``.
    """
    if epsilon == 0:
        positions_RK = x_RL.detach().topk(k).indices
        return torch.stack([x_RL.gather(-1, positions_RK[..., group]).sum(-1) for group in groups], -1)
    # With one group, positions of other ranks need not be kept.
    ranks = groups[0] if len(groups) == 1 else slice(0, k)
    within = [slice(None)] if len(groups) == 1 else groups
    if noise_BRL is None and n_samples > DRAWS_AT_ONCE:
        return _mean_of_many(x_RL, k, ranks, within, epsilon, n_samples, generator)
    n_samples = n_samples if noise_BRL is None else len(noise_BRL)
    positions_RBP, shift_RBP = find_places(x_RL.detach(), k, ranks, epsilon, n_samples, noise_BRL, generator)
    # One gather for all draws of a group, so that backward is one scatter into one tensor shaped like the scores.
    sums = [
        x_RL.gather(-1, positions_RBP[..., group].flatten(-2)).sum(-1) + shift_RBP[..., group].sum((-2, -1))
        for group in within
    ]
    return torch.stack(sums, -1) / n_samples


def _mean_of_many(
    x_RL: Tensor,
    k: int,
    ranks: slice,
    groups: Sequence[slice],
    epsilon: float,
    n_samples: int,
    generator: torch.Generator | None,
) -> Tensor:
    """The means over draws that come in blocks. Value and gradient only need how often each class was found."""
    found = [torch.zeros_like(x_RL, requires_grad=False) for _ in groups]
    shifts = [torch.zeros_like(x_RL[..., 0], requires_grad=False) for _ in groups]
    for start in range(0, n_samples, DRAWS_AT_ONCE):
        block = min(DRAWS_AT_ONCE, n_samples - start)
        positions_RBP, shift_RBP = find_places(x_RL.detach(), k, ranks, epsilon, block, None, generator)
        for group, found_RL, shift_R in zip(groups, found, shifts, strict=True):
            positions_RM = positions_RBP[..., group].flatten(-2)
            found_RL.scatter_add_(-1, positions_RM, torch.ones_like(positions_RM, dtype=x_RL.dtype))
            shift_R += shift_RBP[..., group].sum((-2, -1))
    # Classes that were never found may have infinite scores.
    means = [
        torch.where(found_RL > 0, x_RL * (found_RL / n_samples), 0).sum(-1) + shift_R / n_samples
        for found_RL, shift_R in zip(found, shifts, strict=True)
    ]
    return torch.stack(means, -1)


def find_places(
    x_RL: Tensor,
    k: int,
    ranks: slice,
    epsilon: float,
    n_samples: int,
    noise_BRL: Tensor | None,
    generator: torch.Generator | None,
    limits: lazy_noise.Limits = lazy_noise.DEFAULT_LIMITS,
) -> tuple[Tensor, Tensor]:
    """Positions of the ``ranks`` among the k largest of ``x + epsilon Z`` in all draws, and ``epsilon Z`` there.

    Both are ``(R, B, P)``, without gradient: the gradient is that of the scores at these positions.
    """
    if noise_BRL is None and lazy_noise.supports(x_RL, k, n_samples, limits):
        generator = cpu_generator_from(generator)
        rows_RL = x_RL.reshape(-1, x_RL.shape[-1]).contiguous()
        found = lazy_noise.largest_perturbed(rows_RL, k, ranks, epsilon, n_samples, generator, limits)
        if found is not None:
            shape = (*x_RL.shape[:-1], *found[0].shape[1:])
            return found[0].reshape(shape), found[1].reshape(shape)
    # Relative to the k-th largest score: large scores would lose the noise to rounding.
    level_R1 = x_RL.topk(k).values[..., -1:]
    x_RL = x_RL - torch.where(level_R1.isfinite(), level_R1, 0)
    positions, noise_there = [], []
    # A step that depends on the shape would make the compiler recompile for each shape: there, take all draws at once.
    is_compiling = torch.compiler.is_compiling()
    step = n_samples if is_compiling else max(1, limits.perturbed_at_once // max(1, x_RL.numel()))
    for start in range(0, n_samples, step):
        shape = (min(step, n_samples - start), *x_RL.shape)
        if noise_BRL is not None:
            z_BRL = noise_BRL[start : start + step].detach()
        else:
            z_BRL = standard_normal(shape, dtype=x_RL.dtype, device=x_RL.device, generator=generator)
        perturbed_BRL = torch.add(x_RL, z_BRL, alpha=epsilon)
        positions_BRP = perturbed_BRL.topk(k).indices[..., ranks]
        positions.append(positions_BRP)
        noise_there.append(z_BRL.gather(-1, positions_BRP))
    return torch.cat(positions).movedim(0, -2), epsilon * torch.cat(noise_there).movedim(0, -2)
