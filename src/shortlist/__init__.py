"""Classifiers whose K suggestions contain the right answer.

The public names load on demand (PEP 562): torch takes seconds to import, and a command line with a typing error, or a
call for help, must not wait for it.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

# Type checkers read this branch alone. They must not see a module-level ``__getattr__``, which would make every
# misspelt name valid to them.
if TYPE_CHECKING:
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
    from shortlist.metrics import TopKMetrics
    from shortlist.noised_head import NoisedTopKHead
    from shortlist.parallel import ClassParallelNoisedTopKHead
    from shortlist.smoothing import smooth_topk, smooth_topk_sum, topk_sum, topk_value

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

if not TYPE_CHECKING:
    _MODULE_OF = {
        "CalibratedTopKHinge": "losses",
        "ClassParallelNoisedTopKHead": "parallel",
        "ConvexTopKHinge": "losses",
        "CosineLinear": "heads",
        "FocalLoss": "losses",
        "ImbalancedNoisedTopKHinge": "losses",
        "LDAMLoss": "losses",
        "LogitAdjustedLoss": "losses",
        "NoisedTopKHead": "noised_head",
        "NoisedTopKHinge": "losses",
        "ShortlistError": "errors",
        "SmoothTopKHinge": "losses",
        "TopKError": "losses",
        "TopKHinge": "losses",
        "TopKMetrics": "metrics",
        "class_margins": "margins",
        "exact_topk": "exact",
        "smooth_topk": "smoothing",
        "smooth_topk_sum": "smoothing",
        "topk_sum": "smoothing",
        "topk_value": "smoothing",
    }
    # ``import *`` and ``help`` load every name in ``__all__``.
    if importlib.util.find_spec("torchmetrics") is None:
        __all__.remove("TopKMetrics")

    def __getattr__(name):
        if name == "functional":
            return importlib.import_module("shortlist.functional")
        if name not in _MODULE_OF:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[__name__])  # so that Python suggests a name
        value = getattr(importlib.import_module(f"shortlist.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
