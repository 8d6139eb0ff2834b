"""Which dtype each computation runs in."""

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Half precision becomes float32: noise, sums over classes and differences of close scores need the digits."""
    return x.to(working_dtype(x.dtype))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def zero_if_tiny(scale: float, dtype: torch.dtype) -> float:
    """0 instead of a scale so small that scores divided by it could overflow in this dtype.

    Such a scale would be rounded to 0 in some places and not in others. Differences between scores may be up to 2^24.
    """
    return 0.0 if scale < smallest_scale(dtype) else scale


def smallest_scale(dtype: torch.dtype) -> float:
    """The smallest number that scores may be divided by."""
    return 2.0**24 / torch.finfo(dtype).max


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a loss, as in torch: that of the input, but at least float32 under autocast."""
    return widened(x).dtype if _under_autocast(x) else x.dtype


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product, as in ``F.linear``: that of autocast, if on (except for float64 inputs)."""
    if _under_autocast(x) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _under_autocast(x: Tensor) -> bool:
    # Only the meta device lacks autocast. Asking torch whether a device has it breaks graphs before torch 2.12.
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)
