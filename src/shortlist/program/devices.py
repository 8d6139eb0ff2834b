"""Where a network computes, and with which arithmetic."""

import torch

from shortlist.errors import ShortlistError


def pick_device(name: str) -> torch.device:
    """The named device; ``auto`` takes a GPU if there is one."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ShortlistError(f"device must be auto or one of this machine's, got {name!r}: {error}") from None


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """The arithmetic of a run with this ``train.precision``, for use outside its training."""
    half = torch.float16 if precision == "16-mixed" and device.type != "cpu" else torch.bfloat16
    return torch.autocast(device.type, half, enabled=precision != "32-true")
