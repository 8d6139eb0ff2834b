"""Random numbers that depend only on their purpose, not on what was drawn before."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from shortlist.ops.random import mix_bits, shift_right


def mix_seed(*numbers: int) -> int:
    """One seed from several numbers; neighbouring numbers give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little") >> 1


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and NumPy during the block, for code that draws from them, such as timm's.

    Afterwards they are as before: what others draw does not depend on it.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed((seed & 0xFFFFFFFF, seed >> 32))  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def uniform_for(indices: Tensor, seed: int, columns: int) -> Tensor:
    """``(N, columns)`` uniform numbers in [0, 1). Each row depends on the seed and its index only."""
    column = torch.arange(columns, device=indices.device)
    bits = mix_bits(mix_bits(indices.unsqueeze(1) * columns + column) + mix_seed(seed))
    return shift_right(bits, 40).float() * 2.0**-24
