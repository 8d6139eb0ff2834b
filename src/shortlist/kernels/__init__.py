"""Triton kernels for CUDA. Each has a plain twin in torch, and nothing here is imported before it is used."""

import functools
import importlib.util
import os

import torch
from torch import Tensor


def usable(scores: Tensor) -> bool:
    """Whether a kernel can take these scores: on a GPU, in a type it knows, in plain eager use.

    Triton needs a C compiler at hand. Where there is none, SHORTLIST_KERNELS=0 in the environment leaves all to torch.
    """
    return (
        scores.is_cuda
        and os.environ.get("SHORTLIST_KERNELS") != "0"
        and scores.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(scores)
        and _triton_is_installed()
    )


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
