"""The choice between a Triton kernel and plain torch."""

import importlib.util
import os
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from shortlist.errors import ShortlistError

Impl = Literal["auto", "reference", "triton"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_NOTHING: Mapping[str, bool] = {}


def supports(
    impl: Impl,
    inputs: Tensor | None = None,
    *,
    labels: tuple[Tensor, Tensor | None] | None = None,
    traceable: bool = False,
    needs: Mapping[str, bool] = _NOTHING,
) -> bool:
    """True if a kernel shall do the work, False if plain torch shall.

    Kernels need a GPU, Triton and a C compiler. Where there is no compiler, set SHORTLIST_KERNELS=0 in the environment.

    Args:
        impl: ``"reference"`` is always False. ``"auto"`` is True where the kernel can run. ``"triton"`` raises where it
            cannot, and also accepts tensors on the CPU if Triton's interpreter is on.
        inputs: What the kernel reads; None if that was asked before.
        labels: Target and weight, for kernels that need ``(N, L)`` scores with ``(N,)`` labels.
        traceable: The kernel is an operator that ``torch.compile`` can keep in its graph.
        needs: What else the kernel needs, in words, and whether it has it.

    Raises:
        ShortlistError: The kernel is forced, and cannot run.
    """
    if impl == "reference":
        return False
    problem = None if inputs is None else _problem_with(inputs, impl == "triton", traceable)
    if problem is None and inputs is not None and labels is not None:
        problem = _problem_with_labels(inputs, *labels)
    if problem is None:
        for need, is_met in needs.items():
            if not is_met:
                problem = f"needs {need}"
    if problem is not None and impl == "triton":
        raise ShortlistError(f"the kernel of impl='triton' {problem}; impl='reference' does without")
    return problem is None


def _problem_with(inputs: Tensor, is_forced: bool, traceable: bool) -> str | None:
    if not inputs.is_cuda and not (is_forced and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"needs tensors on a GPU, got {inputs.device}"
    if inputs.dtype not in _DTYPES:
        return f"needs float16, bfloat16 or float32, got {inputs.dtype}"
    if not _HAS_TRITON:
        return "needs Triton: pip install triton"
    if os.environ.get("SHORTLIST_KERNELS") == "0":
        return "is switched off by SHORTLIST_KERNELS=0 in the environment"
    if torch._C._are_functorch_transforms_active():
        return "cannot run inside torch.func"
    if not traceable and torch.compiler.is_compiling():
        return "cannot run inside torch.compile"
    return None


def _problem_with_labels(scores: Tensor, target: Tensor, weight: Tensor | None) -> str | None:
    if scores.dim() != 2 or scores.shape[1] < 2:
        return "needs scores of shape (N, L) with L >= 2"
    if not isinstance(target, Tensor) or target.dtype != torch.int64 or target.shape != scores.shape[:1]:
        return "needs int64 labels of shape (N,)"
    if target.shape[0] == 0:  # not its length, which would fix the batch size of an exported graph
        return "needs at least one row"
    if target.device != scores.device:
        return f"needs the target on {scores.device}, got {target.device}"
    if weight is not None and (not isinstance(weight, Tensor) or weight.device != scores.device):
        return f"needs the weight on {scores.device}"
    return None
