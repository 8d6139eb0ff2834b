"""Launching a kernel with less ado.

At each launch Triton looks at every argument anew to find the binary compiled for arguments of that kind, which takes
the host longer than a small kernel takes the GPU. Training calls with the same sizes over and over, so the binary is
remembered here by the sizes themselves.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Launcher:
    """A Triton kernel whose parameters are pointers, then numbers, then constants."""

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
        num_warps: int,
    ) -> None:
        # What a binary is specialised for: numbers that are 1 or divisible by 16, types, addresses divisible by 16.
        kinds = tuple([None if p is None else (p.dtype, p.data_ptr() % 16 == 0, p.device.index) for p in pointers])
        key = (numbers, constants, num_warps, kinds)
        binary = self._binaries.get(key)
        if binary is not None:
            binary[grid](*pointers, *numbers, *constants)
            return
        binary = self._kernel[grid](*pointers, *numbers, *constants, num_warps=num_warps)
        if binary is not None:  # the interpreter has none
            self._binaries[key] = binary
