"""Triton kernels for CUDA. Each has a plain twin in torch, and nothing here is imported before it is used."""

import functools
import importlib.util

import torch
from torch import Tensor


def usable(scores: Tensor) -> bool:
    """Whether a kernel can take these scores: on a GPU, in a type it knows, in plain eager use."""
    return (
        scores.is_cuda
        and scores.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(scores)
        and _triton_is_installed()
    )


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
