"""Random draws that differ between ranks, and the hash that they are made of."""

import functools
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
    if generator is not None:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)
    # Not with generator=None: torch.compile would then take no symbolic shapes.
    noise = torch.randn(*shape, dtype=dtype, device=device)
    rank = _rank()
    return noise if rank == 0 else _rehash(noise, rank)


def cpu_generator_from(generator: torch.Generator | None) -> torch.Generator:
    """A generator for draws whose number depends on the data: it takes one draw from ``generator``, or the default one.

    So ranks stay agreed on what is drawn afterwards, however much each draws, and in whichever way. As in
    ``standard_normal``, ranks that share the seed of the default generator have draws of their own.
    """
    seed = torch.randint(2**62, (1,), generator=generator, device="cpu")
    rank = _rank() if generator is None else 0
    if rank != 0:
        seed = mix_bits(seed + mix_bits(torch.full_like(seed, rank)))
    return torch.Generator().manual_seed(int(seed))


def rank_key(generator: torch.Generator | None) -> int:
    """What to mix into a seed drawn from ``generator`` so that ranks have draws of their own; 0 on rank 0."""
    return _key_of(_rank()) if generator is None else 0


@functools.cache  # one hash costs as much as a tenth of a small loss
def _key_of(rank: int) -> int:
    return int(mix_bits(torch.tensor(rank, device="cpu"))) if rank else 0


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _rehash(noise: Tensor, key: int) -> Tensor:
    """Map normals to other normals: the bits of a draw, mixed with ``key``, go through the quantile function."""
    bits = noise.view(torch.int64) if noise.dtype == torch.float64 else noise.view(torch.int32).long()
    mixed = mix_bits(bits + mix_bits(torch.full_like(bits, key)))
    # ``digits + 1`` bits centred on zero are exact in the dtype, and never hit the infinite quantiles at -1 and 1.
    digits = 52 if noise.dtype == torch.float64 else 23
    centred = shift_right(mixed, 63 - digits) - 2**digits
    uniform = (centred.to(noise.dtype) + 0.5) * 2.0**-digits
    return torch.erfinv(uniform) * math.sqrt(2)


def mix_bits(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) on int64, whose products wrap as uint64's do."""
    bits = (bits ^ shift_right(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ shift_right(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ shift_right(bits, 31)


def shift_right(bits: Tensor, by: int) -> Tensor:
    """Logical shift: torch's own carries the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
