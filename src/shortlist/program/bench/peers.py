"""The packages to compare with. Each is optional: one that cannot be imported is named once and left out."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of scores and labels."""
HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of features, class weights and labels."""


def pytopk(k: int, epsilon: float, n_samples: int, say: Callable[[str], None]) -> Loss | None:
    """The noised loss in its authors' package, pytopk."""
    package = _package("pytopk", say)
    return None if package is None else cast(Loss, package.BalNoisedTopK(k=k, epsilon=epsilon, n_sample=n_samples))


def cut_cross_entropy(say: Callable[[str], None]) -> HeadLoss | None:
    """Linear layer and cross-entropy without stored scores, https://github.com/apple/ml-cross-entropy."""
    package = _package("cut_cross_entropy", say)
    return None if package is None else cast(HeadLoss, package.linear_cross_entropy)


def liger(say: Callable[[str], None]) -> HeadLoss | None:
    """Linear layer and cross-entropy in chunks, https://github.com/linkedin/Liger-Kernel."""
    package = _package("liger_kernel.transformers.fused_linear_cross_entropy", say)
    if package is None:
        return None
    fused = package.LigerFusedLinearCrossEntropyLoss()

    def loss(features: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return cast(Tensor, fused(weight, features, target))

    return loss


@cache
def _package(name: str, say: Callable[[str], None]) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # on a machine it was not made for, a package may fail to load in any way
        say(f"{name.partition('.')[0]} is left out: {error}")
        return None
