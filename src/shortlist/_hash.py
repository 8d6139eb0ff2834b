"""Hashing of integers held in tensors: random numbers that depend on a key, not on an order of drawing."""

from torch import Tensor


def mix_bits(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) on int64, whose products wrap as uint64's do."""
    bits = (bits ^ shift_right(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ shift_right(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ shift_right(bits, 31)


def shift_right(bits: Tensor, by: int) -> Tensor:
    """Logical shift: torch's own carries the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
