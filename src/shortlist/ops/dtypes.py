"""Which precision the arithmetic runs in."""

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Half types are widened to float32: noise, sums over classes and differences of close scores need it."""
    return x.to(working_dtype(x.dtype))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def zero_if_tiny(scale: float, dtype: torch.dtype) -> float:
    """0 in place of a scale so small that scores divided by it would overflow in this dtype.

    It would round to 0 in some places and not in others. The factor leaves room for differences of up to ten million.
    """
    return 0.0 if scale < 2.0**24 / torch.finfo(dtype).max else scale


def result_dtype(x: Tensor) -> torch.dtype:
    """As torch's own losses: the dtype of the input, but at least float32 under autocast."""
    return widened(x).dtype if _under_autocast(x) else x.dtype


def product_dtype(x: Tensor) -> torch.dtype:
    """As ``F.linear``: the dtype of the input, or that of autocast, which leaves float64 alone."""
    if _under_autocast(x) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _under_autocast(x: Tensor) -> bool:
    # Of the devices only meta has no autocast. To ask torch for that would break compiled graphs before torch 2.12.
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)
