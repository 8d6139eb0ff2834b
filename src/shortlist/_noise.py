"""Standard normal draws that differ from rank to rank."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist


def standard_normal(
    shape: Sequence[int], *, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Draw from ``generator``, or from the device's default generator.

    Training scripts often give every rank the same seed. A default generator would then repeat the same noise on
    every rank, so there the draws are hashed with the rank: all ranks consume their generators alike (a shuffle that
    ranks agree on stays agreed), yet each sees noise of its own. Rank 0 sees what one process alone would see.
    """
    noise = torch.randn(*shape, dtype=dtype, device=device, generator=generator)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return noise if generator is not None or rank == 0 else _rehash(noise, rank)


def _rehash(noise: Tensor, key: int) -> Tensor:
    """Map normals to other normals: the bits of a draw, mixed with ``key``, go through the quantile function."""
    bits = noise.view(torch.int64) if noise.dtype == torch.float64 else noise.view(torch.int32).long()
    mixed = _mix(bits + _mix(torch.full_like(bits, key)))
    # ``digits + 1`` bits centred on zero are exact in the dtype, and never hit the infinite quantiles at -1 and 1.
    digits = 52 if noise.dtype == torch.float64 else 23
    centred = _shift_right(mixed, 63 - digits) - 2**digits
    uniform = (centred.to(noise.dtype) + 0.5) * 2.0**-digits
    return torch.erfinv(uniform) * math.sqrt(2)


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) on int64, whose products wrap as uint64's do."""
    bits = (bits ^ _shift_right(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shift_right(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Logical shift: torch's own carries the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
