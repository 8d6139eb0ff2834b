"""Classifiers whose K suggestions contain the right answer."""

import importlib.util
from typing import TYPE_CHECKING, Any

from shortlist import functional
from shortlist.errors import ShortlistError
from shortlist.exact import exact_topk
from shortlist.heads import CosineLinear
from shortlist.losses import (
    CalibratedTopKHinge,
    ConvexTopKHinge,
    FocalLoss,
    ImbalancedNoisedTopKHinge,
    LDAMLoss,
    LogitAdjustedLoss,
    NoisedTopKHinge,
    SmoothTopKHinge,
    TopKError,
    TopKHinge,
)
from shortlist.margins import class_margins
from shortlist.noised_head import NoisedTopKHead
from shortlist.parallel import ClassParallelNoisedTopKHead
from shortlist.smoothing import smooth_topk, smooth_topk_sum, topk_sum, topk_value

if TYPE_CHECKING:
    from shortlist.metrics import TopKMetrics

__version__ = "0.1.0"

__all__ = [
    "CalibratedTopKHinge",
    "ClassParallelNoisedTopKHead",
    "ConvexTopKHinge",
    "CosineLinear",
    "FocalLoss",
    "ImbalancedNoisedTopKHinge",
    "LDAMLoss",
    "LogitAdjustedLoss",
    "NoisedTopKHead",
    "NoisedTopKHinge",
    "ShortlistError",
    "SmoothTopKHinge",
    "TopKError",
    "TopKHinge",
    "TopKMetrics",
    "class_margins",
    "exact_topk",
    "functional",
    "smooth_topk",
    "smooth_topk_sum",
    "topk_sum",
    "topk_value",
]
# ``import *`` and ``help`` ask for all that is named there.
if not TYPE_CHECKING and importlib.util.find_spec("torchmetrics") is None:
    __all__.remove("TopKMetrics")


def __getattr__(name: str) -> Any:
    # The metrics bring torchmetrics along: seconds to import, and not needed to train.
    if name == "TopKMetrics":
        from shortlist.metrics import TopKMetrics

        return TopKMetrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
