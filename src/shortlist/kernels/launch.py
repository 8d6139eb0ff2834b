"""Launching a kernel with less ado.

At each launch Triton looks at every argument anew to find the binary compiled for arguments of that kind, which takes
the host longer than a small kernel takes the GPU. Training calls with the same sizes over and over, so the binary is
remembered here by the sizes themselves.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Binaries to remember; sizes that never come again would otherwise pile up.
_MOST = 4096


class Launcher:
    """A Triton kernel whose parameters are pointers, the first of them never None, then numbers, then constants."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._binaries: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        pointers: Sequence[Tensor | None],
        numbers: tuple[float, ...],
        constants: tuple[int, ...],
        *,
        kinds: tuple[object, ...],
        num_warps: int,
    ) -> None:
        """Launch it.

        Args:
            kinds: ``kind`` of each tensor that somebody else made. Those made here follow from the sizes.
        """
        assert pointers[0] is not None
        device = pointers[0].get_device()  # -1 for the CPU
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):  # Triton launches on the current one, wherever the tensors are
                self(grid, pointers, numbers, constants, kinds=kinds, num_warps=num_warps)
            return
        key = (grid, numbers, constants, kinds)
        binary = self._binaries.get(key)
        if binary is not None:
            binary[grid](*pointers, *numbers, *constants)
            return
        binary = self._kernel[grid](*pointers, *numbers, *constants, num_warps=num_warps)
        if binary is not None:  # the interpreter has none
            if len(self._binaries) >= _MOST:
                self._binaries.clear()
            self._binaries[key] = binary


def kind(tensor: Tensor | None) -> object:
    """What of a tensor a binary is specialised for: its type, and whether its address is divisible by 16."""
    return None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16 == 0, tensor.device)


# As in triton, where they are functions of its language and fifty times as slow.
def power_of_2(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


def divided_up(a: int, b: int) -> int:
    return -(-a // b)
