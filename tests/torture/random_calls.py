"""Random calls of every public loss and operator."""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import shortlist as sl
from shortlist import functional
from tests.torture import formulas


class TooSlowError(Exception):
    """A call has run past its time limit."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise TooSlowError(f"ran for more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Loss:
    """A loss as a function, as a Module, and as a formula for one row and label."""

    formula: Callable[..., Any]
    module: Callable[..., torch.nn.Module]
    noised: bool = False
    settings: tuple[str, ...] = ()
    """What the formula takes besides row, label and noise."""
    most_k: int = -1
    """Largest K: L (0) or L - 1 (-1)."""
    most_classes: int = 40


LOSSES = {
    "topk_error": Loss(formulas.topk_error, sl.TopKError, settings=("k",), most_k=0),
    "topk_hinge": Loss(formulas.topk_hinge, sl.TopKHinge, settings=("k",)),
    "convex_topk_hinge": Loss(formulas.convex_topk_hinge, sl.ConvexTopKHinge, settings=("k",)),
    "calibrated_topk_hinge": Loss(formulas.calibrated_topk_hinge, sl.CalibratedTopKHinge, settings=("k",)),
    "smooth_topk_hinge": Loss(formulas.smooth_topk_hinge, sl.SmoothTopKHinge, settings=("k", "tau"), most_classes=8),
    "topk_cross_entropy": Loss(formulas.topk_cross_entropy, sl.TopKCrossEntropy, settings=("k",), most_classes=7),
    "focal": Loss(formulas.focal, sl.FocalLoss, settings=("gamma",)),
    "ldam": Loss(formulas.ldam, sl.LDAMLoss, settings=("class_counts", "max_margin", "scale")),
    "logit_adjusted": Loss(formulas.logit_adjusted, sl.LogitAdjustedLoss, settings=("class_counts", "tau")),
    "noised_topk_hinge": Loss(
        formulas.noised_topk_hinge,
        sl.NoisedTopKHinge,
        noised=True,
        settings=("k", "epsilon", "margin", "relative"),
    ),
    "imbalanced_noised_topk_hinge": Loss(
        formulas.imbalanced_noised_topk_hinge,
        sl.ImbalancedNoisedTopKHinge,
        noised=True,
        settings=("class_counts", "k", "epsilon", "max_margin", "scale", "relative"),
    ),
}
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "topk_value": sl.topk_value,
    "topk_sum": sl.topk_sum,
    "smooth_topk": sl.smooth_topk,
    "smooth_topk_sum": sl.smooth_topk_sum,
    "exact_topk": sl.exact_topk,
}
OTHERS = ("class_margins", "CosineLinear", "TopKMetrics")
NAMES = (*LOSSES, *OPERATORS, *OTHERS)


@dataclass(frozen=True)
class Call:
    """A call with all its arguments by name."""

    name: str
    arguments: dict[str, Any]
    as_module: bool = False
    generic: bool = False
    """True if no two scores are equal, so that there is a gradient."""

    def __call__(self) -> Any:
        arguments = dict(self.arguments)
        if self.name in OPERATORS:
            return OPERATORS[self.name](**arguments)
        if self.name == "class_margins":
            return sl.class_margins(**arguments)
        if self.name == "CosineLinear":
            features, directions = arguments["features"], arguments["directions"]
            head = sl.CosineLinear(directions.shape[1], directions.shape[0], dtype=directions.dtype)
            head.weight.data = directions
            return head(features)
        if self.name == "TopKMetrics":
            metrics = sl.TopKMetrics(arguments["num_classes"], arguments["ks"])
            metrics.update(arguments["scores"], arguments["target"])
            return metrics.compute()
        if not self.as_module:
            return getattr(functional, self.name)(**arguments)
        at_call = {name: arguments.pop(name) for name in ("noise", "generator") if name in arguments}
        inputs = [arguments.pop(name) for name in ("scores", "target") if name in arguments]
        return LOSSES[self.name].module(**arguments)(*inputs, **at_call)

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={_shown(value)}" for name, value in self.arguments.items())
        return f"{self.name}({shown}){' as a Module' if self.as_module else ''}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if value.numel() <= 12 and not value.is_meta:
            return f"{kind} {value.tolist()}"
        return kind
    return repr(value)[:80]


Chance = np.random.Generator


def random_call(chance: Chance, name: str | None = None) -> Call:
    name = name or str(chance.choice(NAMES))
    if name in LOSSES:
        return _random_loss(chance, name)
    if name in OPERATORS:
        return _random_operator(chance, name)
    if name == "class_margins":
        return Call(name, {"class_counts": _counts(chance, 6), "max_margin": float(chance.choice([0, 0.2, 3.0]))})
    if name == "CosineLinear":
        dtype = torch.float64 if chance.random() < 0.5 else torch.float32
        shape = (*chance.integers(1, 4, size=chance.integers(0, 3)), 5)
        features = torch.from_numpy(10.0 ** chance.uniform(-3, 4) * chance.normal(size=shape)).to(dtype)
        return Call(name, {"features": features, "directions": torch.from_numpy(chance.normal(size=(4, 5))).to(dtype)})
    num_classes, rows = int(chance.integers(2, 9)), int(chance.integers(1, 20))
    scores, _ = _scores(chance, (rows, num_classes), torch.float32)
    target = torch.from_numpy(chance.integers(num_classes, size=rows))
    ks = tuple(sorted({1, int(chance.integers(1, num_classes + 1))}))
    return Call(name, {"scores": scores, "target": target, "num_classes": num_classes, "ks": ks})


def _random_loss(chance: Chance, name: str) -> Call:
    loss = LOSSES[name]
    num_classes = int(chance.integers(2, 8 if chance.random() < 0.8 else loss.most_classes))
    num_classes = min(num_classes, loss.most_classes)
    rows = int(chance.integers(0, 5)) if chance.random() < 0.1 else int(chance.integers(1, 5))
    further = [int(size) for size in chance.integers(1, 4, size=chance.choice([0, 0, 0, 1, 2]))]
    shape = (rows, num_classes, *further) if chance.random() < 0.85 else (num_classes,)
    scores, generic = _scores(chance, shape, _dtype(chance))
    if chance.random() < 0.05 and scores.numel():
        scores.view(-1)[int(chance.integers(scores.numel()))] = float(chance.choice([math.nan, math.inf, -math.inf]))
        generic = False
    arguments: dict[str, Any] = {"scores": scores}
    labels_shape = shape[:1] + shape[2:] if len(shape) > 1 else ()
    arguments["reduction"] = str(chance.choice(["mean", "sum", "none"]))
    if chance.random() < 0.7:
        labels = torch.from_numpy(np.asarray(chance.integers(num_classes, size=labels_shape)))
        if chance.random() < 0.3:
            ignored = int(chance.choice([-100, -1, 0, 10_000]))
            labels = torch.where(torch.from_numpy(np.asarray(chance.random(labels_shape) < 0.3)), ignored, labels)
            arguments["ignore_index"] = ignored
        arguments["target"] = labels.to(torch.uint8) if chance.random() < 0.1 and (labels >= 0).all() else labels
        if arguments["target"].dtype == torch.uint8 and arguments.get("ignore_index", 0) > 255:
            arguments["target"] = labels
    else:
        probabilities = chance.dirichlet(np.full(num_classes, 0.5), size=labels_shape)
        class_last = torch.from_numpy(np.asarray(probabilities)).reshape(*labels_shape, num_classes)
        arguments["target"] = class_last.movedim(-1, min(1, len(shape) - 1)).to(scores.dtype)
    if chance.random() < 0.3:
        weight = chance.uniform(0, 2, size=num_classes) * (chance.random(num_classes) < 0.9)
        arguments["weight"] = torch.from_numpy(weight).to(scores.dtype)
    if "k" in loss.settings:
        arguments["k"] = int(chance.integers(1, num_classes + loss.most_k + 1))
        if name == "topk_cross_entropy" and chance.random() < 0.3:
            arguments["k"] = tuple({arguments["k"], int(chance.integers(1, num_classes))})
    if "class_counts" in loss.settings:
        arguments["class_counts"] = _counts(chance, num_classes)
    if "tau" in loss.settings:
        arguments["tau"] = float(chance.choice([0.0, 0.01, 0.1, 1.0, 1.5, 20.0]))
    if "gamma" in loss.settings:
        arguments["gamma"] = float(chance.choice([0.0, 0.5, 1.0, 2.0, 5.0]))
    if "max_margin" in loss.settings:
        arguments["max_margin"] = float(chance.choice([0.0, 0.2, 0.5, 3.0]))
        arguments["scale"] = float(chance.choice([0.1, 1.0, 30.0, 50.0]))
    if loss.noised:
        if chance.random() < 0.3:
            size = int(chance.integers(1, min(num_classes, 4)))
            arguments["k"] = tuple(int(k) for k in 1 + chance.choice(num_classes - 1, size=size, replace=False))
        if "margin" in loss.settings and chance.random() < 0.5:
            arguments["margin"] = float(chance.choice([0.0, 0.3, 1.0, 20.0]))
        if chance.random() < 0.3:
            arguments["relative"] = True
        arguments["epsilon"] = _epsilon(chance)
        if chance.random() < 0.15:
            arguments["n_samples"] = math.inf
        else:
            arguments["noise"] = _noise(chance, scores)
    return Call(name, arguments, as_module=chance.random() < 0.4, generic=generic)


def _random_operator(chance: Chance, name: str) -> Call:
    shape = tuple(int(size) for size in chance.integers(1, 6, size=chance.integers(1, 4)))
    dim = int(chance.integers(-len(shape), len(shape)))
    size = int(chance.integers(1, 12))
    shape = tuple(size if place == dim % len(shape) else other for place, other in enumerate(shape))
    x, generic = _scores(chance, shape, _dtype(chance))
    if chance.random() < 0.05:
        x.view(-1)[int(chance.integers(x.numel()))] = math.nan
        generic = False
    arguments: dict[str, Any] = {"x": x, "k": int(chance.integers(1, size + 1))}
    if chance.random() < 0.8 or dim % len(shape) != len(shape) - 1:
        arguments["dim"] = dim
    if name.startswith(("smooth", "exact")):
        arguments["epsilon"] = _epsilon(chance)
    if name.startswith("smooth"):
        arguments["noise"] = _noise(chance, x)
    return Call(name, arguments, generic=generic)


def _dtype(chance: Chance) -> torch.dtype:
    choices = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return choices[int(chance.choice(4, p=[0.5, 0.3, 0.1, 0.1]))]


def _scores(chance: Chance, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Scores at any scale, sometimes with ties or outliers; and True if no two are equal."""
    values = chance.normal(size=shape)
    ties = chance.random() < 0.25
    if ties:
        values = np.round(values)
    values = values * 10.0 ** chance.uniform(-3, 4)
    if chance.random() < 0.15:
        values = np.where(chance.random(shape) < 0.2, values * 10.0 ** chance.uniform(2, 6), values)
    if chance.random() < 0.15:
        values = values + 10.0 ** chance.uniform(0, 4)
    if dtype == torch.float16:
        values = np.clip(values, -6e4, 6e4)
    return torch.from_numpy(np.asarray(values)).to(dtype), not ties and dtype == torch.float64


def _epsilon(chance: Chance) -> float:
    return 0.0 if chance.random() < 0.1 else float(10.0 ** chance.uniform(-6, 1))


def _noise(chance: Chance, like: Tensor) -> Tensor:
    draws = int(chance.integers(1, 5))
    dtype = like.dtype if chance.random() < 0.8 else torch.float32
    return torch.from_numpy(chance.normal(size=(*like.shape, draws))).to(dtype)


def _counts(chance: Chance, num_classes: int) -> Any:
    counts = chance.integers(1, 10 ** int(chance.integers(1, 6)), size=num_classes)
    form = int(chance.integers(4))
    if form == 0:
        return [int(count) for count in counts]
    return torch.from_numpy(counts if form == 1 else counts + 0.5 * (form == 3)).to(
        torch.int64 if form == 1 else torch.float64
    )
