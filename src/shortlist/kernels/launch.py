"""Launch kernels with little work for the host.

Triton inspects every argument at each launch to find the binary compiled for such arguments. This takes the host longer
than a small kernel takes the GPU. Training repeats calls of the same sizes, so a ``Launcher`` finds binaries by size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Pointers = Sequence[Tensor | tuple[Tensor | None, ...] | None]


class Launcher:
    """A Triton kernel whose parameters are pointers, then numbers, then constants.

    Pointers and numbers may be grouped in tuples. The first pointer is a tensor.

    Args:
        max_binaries: Forget all binaries when there are more: sizes that never return must not pile up.
    """

    def __init__(self, kernel: Any, *, max_binaries: int = 4096) -> None:
        self._kernel = kernel
        self._max_binaries = max_binaries
        self._binaries: dict[tuple[object, ...], Any] = {}

    def __len__(self) -> int:
        """The number of binaries remembered."""
        return len(self._binaries)

    def __call__(
        self,
        grid: tuple[int, int, int],
        pointers: Pointers,
        numbers: tuple[float | tuple[float, ...], ...],
        constants: tuple[int, ...],
        *,
        kinds: tuple[object, ...],
        num_warps: int,
    ) -> None:
        """Launch the kernel.

        Args:
            kinds: The ``kind`` of each tensor that came from a caller. Tensors made here follow from the sizes.
        """
        assert isinstance(pointers[0], Tensor)
        device = pointers[0].get_device()  # -1 for the CPU
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):  # Triton launches on the current device, wherever the tensors are
                self(grid, pointers, numbers, constants, kinds=kinds, num_warps=num_warps)
            return
        key = (grid, numbers, constants, kinds)
        binary = self._binaries.get(key)
        if binary is not None:
            binary[grid](*pointers, *numbers, *constants)
            return
        binary = self._kernel[grid](*pointers, *numbers, *constants, num_warps=num_warps)
        if binary is not None:  # the interpreter has none
            if len(self._binaries) >= self._max_binaries:
                self._binaries.clear()
            self._binaries[key] = binary


def kind(tensor: Tensor | None) -> object:
    """What a binary is specialised for: the tensor's dtype, and whether its address is divisible by 16."""
    return None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16 == 0, tensor.device)


# Triton has both functions as part of its language, fifty times slower on the host.
def next_power_of_2(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
