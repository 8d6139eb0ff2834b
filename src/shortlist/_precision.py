"""Which precision the arithmetic runs in."""

import torch
from torch import Tensor


def working(x: Tensor) -> Tensor:
    """Half types are widened to float32: noise, sums over classes and differences of close scores need it."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def result_dtype(x: Tensor) -> torch.dtype:
    """As torch's own losses: the dtype of the input, but at least float32 under autocast."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return working(x).dtype
    return x.dtype
