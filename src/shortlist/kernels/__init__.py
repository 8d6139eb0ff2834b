"""Triton kernels for CUDA. Each has a plain twin in torch, and nothing here is imported before it is used."""

import importlib.util
import os

import torch
from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def at_hand(inputs: Tensor) -> bool:
    """Whether kernels could work on these inputs: on a GPU, in a type they know, outside torch.func.

    Triton needs a C compiler at hand. Where there is none, SHORTLIST_KERNELS=0 in the environment leaves all to torch.
    """
    return (
        inputs.is_cuda
        and inputs.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and _HAS_TRITON
        and os.environ.get("SHORTLIST_KERNELS") != "0"
        and not torch._C._are_functorch_transforms_active()
    )


def usable(inputs: Tensor) -> bool:
    """As ``at_hand``, and not while ``torch.compile`` traces: for kernels that are no operators it could keep."""
    return at_hand(inputs) and not torch.compiler.is_compiling()


def take_labelled_rows(scores: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Whether kernels can take this batch: ``(N, L)`` scores with ``(N,)`` labels, all on one GPU."""
    return (
        isinstance(scores, Tensor)
        and isinstance(target, Tensor)
        and at_hand(scores)
        and scores.dim() == 2
        and scores.shape[1] > 1
        and target.dtype == torch.int64
        and target.shape == scores.shape[:1]
        and target.shape[0] > 0  # not its length, which would fix the batch size of an exported graph
        and target.device == scores.device
        and (weight is None or (isinstance(weight, Tensor) and weight.device == scores.device))
    )
