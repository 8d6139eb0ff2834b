"""Train classifiers whose K suggestions contain the right answer.

The public names are loaded on demand (PEP 562). Importing torch takes seconds, and a command with a typing error or
``--help`` must not wait for it.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

# For type checkers. They must not see a module-level ``__getattr__``, or they would accept every misspelt name.
if TYPE_CHECKING:
    from shortlist import functional
    from shortlist.composed_losses import MixedLoss, PriorAdjusted
    from shortlist.errors import ShortlistError
    from shortlist.heads.class_parallel import ClassParallelNoisedTopKHead
    from shortlist.heads.cosine import CosineLinear, ScaledCosine
    from shortlist.heads.noised import NoisedTopKHead
    from shortlist.losses import (
        CalibratedTopKHinge,
        ConvexTopKHinge,
        FocalLoss,
        ImbalancedNoisedTopKHinge,
        LDAMLoss,
        LogitAdjustedLoss,
        NoisedAverageKHinge,
        NoisedTopKHinge,
        SmoothTopKHinge,
        TopKCrossEntropy,
        TopKError,
        TopKHinge,
    )
    from shortlist.metrics import SetMetrics, TopKMetrics
    from shortlist.ops.class_counts import class_margins
    from shortlist.ops.exact import exact_topk
    from shortlist.ops.smoothing import smooth_topk, smooth_topk_sum, topk_sum, topk_value
    from shortlist.prior_correction import PriorCorrection
    from shortlist.program.predicting.predictor import load
    from shortlist.sets import PredictionSets

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
    "MixedLoss",
    "NoisedAverageKHinge",
    "NoisedTopKHead",
    "NoisedTopKHinge",
    "PredictionSets",
    "PriorAdjusted",
    "PriorCorrection",
    "ScaledCosine",
    "SetMetrics",
    "ShortlistError",
    "SmoothTopKHinge",
    "TopKCrossEntropy",
    "TopKError",
    "TopKHinge",
    "TopKMetrics",
    "class_margins",
    "exact_topk",
    "functional",
    "load",
    "smooth_topk",
    "smooth_topk_sum",
    "topk_sum",
    "topk_value",
]

if not TYPE_CHECKING:
    _MODULE_OF = {
        "CalibratedTopKHinge": "losses",
        "ClassParallelNoisedTopKHead": "heads.class_parallel",
        "ConvexTopKHinge": "losses",
        "CosineLinear": "heads.cosine",
        "FocalLoss": "losses",
        "ImbalancedNoisedTopKHinge": "losses",
        "LDAMLoss": "losses",
        "LogitAdjustedLoss": "losses",
        "MixedLoss": "composed_losses",
        "NoisedAverageKHinge": "losses",
        "NoisedTopKHead": "heads.noised",
        "NoisedTopKHinge": "losses",
        "PredictionSets": "sets",
        "PriorAdjusted": "composed_losses",
        "PriorCorrection": "prior_correction",
        "ScaledCosine": "heads.cosine",
        "SetMetrics": "metrics",
        "ShortlistError": "errors",
        "SmoothTopKHinge": "losses",
        "TopKCrossEntropy": "losses",
        "TopKError": "losses",
        "TopKHinge": "losses",
        "TopKMetrics": "metrics",
        "class_margins": "ops.class_counts",
        "exact_topk": "ops.exact",
        "load": "program.predicting.predictor",
        "smooth_topk": "ops.smoothing",
        "smooth_topk_sum": "ops.smoothing",
        "topk_sum": "ops.smoothing",
        "topk_value": "ops.smoothing",
    }
    # ``import *`` and ``help`` load every name in ``__all__``; these need more than torch. Windows has no fcntl.
    _NEEDS = {
        "SetMetrics": ["torchmetrics"],
        "TopKMetrics": ["torchmetrics"],
        "load": ["fcntl", "timm", "torchmetrics"],
    }
    __all__ = [name for name in __all__ if all(map(importlib.util.find_spec, _NEEDS.get(name, [])))]

    def __getattr__(name):
        if name == "functional":
            return importlib.import_module("shortlist.functional")
        if name not in _MODULE_OF:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[__name__])  # Python then suggests a name
        try:
            module = importlib.import_module(f"shortlist.{_MODULE_OF[name]}")
        except ModuleNotFoundError as missing:
            if name != "load":
                raise
            if missing.name in sys.stdlib_module_names:  # fcntl
                raise ImportError(
                    "shortlist.load runs on Linux and macOS; losses and metrics run elsewhere too"
                ) from missing
            raise ImportError(f"shortlist.load needs {missing.name}: pip install 'shortlist[train]'") from missing
        value = getattr(module, name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
