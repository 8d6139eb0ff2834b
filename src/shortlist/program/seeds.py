"""Random numbers that depend only on their purpose, not on what was drawn before."""

import hashlib

import torch
from torch import Tensor

from shortlist.ops.random import mix_bits, shift_right


def mix_seed(*numbers: int) -> int:
    """One seed from several numbers; neighbouring numbers give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little") >> 1


def uniform_for(indices: Tensor, seed: int, columns: int) -> Tensor:
    """``(N, columns)`` uniform numbers in [0, 1). Each row depends on the seed and its index only."""
    column = torch.arange(columns, device=indices.device)
    bits = mix_bits(mix_bits(indices.unsqueeze(1) * columns + column) + mix_seed(seed))
    return shift_right(bits, 40).float() * 2.0**-24
