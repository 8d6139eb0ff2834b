"""Random draws that differ between ranks, and the hash behind them."""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist


def standard_normal(
    shape: Sequence[int], *, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Standard normal draws from ``generator``, or from the default generator of the device.

    Training scripts often give every rank the same seed, so default generators would produce the same noise on every
    rank. Default draws are therefore hashed with the rank. All ranks still advance their generators equally, so a
    shuffle stays the same on all ranks. Rank 0 gets the draws of a single process.
    """
    if generator is not None:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)
    # Without generator=None, with which torch.compile would not accept symbolic shapes.
    noise = torch.randn(*shape, dtype=dtype, device=device)
    rank = _rank()
    return noise if rank == 0 else rehash(noise, rank)


def cpu_generator_from(generator: torch.Generator | None) -> torch.Generator:
    """A new generator, seeded by one draw from ``generator`` or the default one.

    For draws whose number depends on the data: ranks advance their generators equally, whatever they draw from the new
    one. Ranks that share the seed of the default generator get different draws, as in ``standard_normal``.
    """
    seed = torch.randint(2**62, (1,), generator=generator, device="cpu")
    rank = _rank() if generator is None else 0
    if rank != 0:
        seed = mix_bits(seed + mix_bits(torch.full_like(seed, rank)))
    return torch.Generator().manual_seed(int(seed))


def rank_key(generator: torch.Generator | None) -> int:
    """A key to mix into a seed from ``generator``, so that ranks get different draws; 0 on rank 0."""
    return _key_of(_rank()) if generator is None else 0


@functools.cache  # computing it takes a tenth of the time of a small loss
def _key_of(rank: int) -> int:
    return int(mix_bits(torch.tensor(rank, device="cpu"))) if rank else 0


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def rehash(noise: Tensor, key: int) -> Tensor:
    """Map normal numbers to other normal numbers: hash their bits with ``key``."""
    bits = noise.view(torch.int64) if noise.dtype == torch.float64 else noise.view(torch.int32).long()
    return normal_from_bits(mix_bits(bits + mix_bits(torch.full_like(bits, key))), noise.dtype)


def normal_from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers from uniform int64 bits, by the quantile function."""
    # ``digits + 1`` bits centred on zero are exact in the dtype, and never reach -1 or 1, where erfinv is infinite.
    digits = 52 if dtype == torch.float64 else 23
    centred = shift_right(bits, 63 - digits) - 2**digits
    uniform = (centred.to(dtype) + 0.5) * 2.0**-digits
    return torch.erfinv(uniform) * math.sqrt(2)


def mix_bits(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014). Products of int64 wrap around as those of uint64."""
    bits = (bits ^ shift_right(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ shift_right(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ shift_right(bits, 31)


def shift_right(bits: Tensor, by: int) -> Tensor:
    """Logical shift; the ``>>`` of torch extends the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
