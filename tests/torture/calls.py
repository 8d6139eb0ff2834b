"""Random calls, judged by the formulas in ``formulas.py``."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.torture import formulas
from tests.torture.cases import Outcome, Part
from tests.torture.formulas import Row
from tests.torture.random_calls import LOSSES, NAMES, OPERATORS, Call, Chance, TooSlowError, random_call, time_limit

_SECONDS = 30
_GRADIENT_SHARE = 0.3
# How many roundings an answer may be off. Sums over a row have a few dozen terms.
_ROUNDINGS = 64


def wide(tensor: Tensor) -> Row:
    return tensor.detach().double().numpy().astype(np.longdouble)


def working(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Expected:
    """The right answer of a call, and the error that rounding may cause."""

    value: Row
    tolerance: Row


def expected(call: Call) -> Expected:
    if call.name in LOSSES:
        return _expected_loss(call)
    if call.name in OPERATORS:
        return _expected_operator(call)
    if call.name == "class_margins":
        counts, largest = call.arguments["class_counts"], call.arguments["max_margin"]
        precise = isinstance(counts, Tensor) and counts.dtype == torch.float64
        value = formulas.margins(np.asarray(counts, dtype=np.longdouble), largest)
        return Expected(value, np.abs(value) * np.longdouble(1e-14 if precise else 1e-6))
    features, directions = call.arguments["features"], call.arguments["directions"]
    value = formulas.cosines(wide(features), wide(directions))
    return Expected(value, np.full(value.shape, _ROUNDINGS * torch.finfo(features.dtype).eps, np.longdouble))


def _expected_loss(call: Call) -> Expected:
    arguments = call.arguments
    scores, target = arguments["scores"], arguments["target"]
    class_dim = min(1, scores.dim() - 1)
    rows = np.moveaxis(wide(scores), class_dim, -1)
    num_classes = rows.shape[-1]
    flat = rows.reshape(-1, num_classes)
    epsilon = torch.finfo(working(scores)).eps
    noise = arguments.get("noise")
    draws = None
    if noise is not None:
        turned = np.moveaxis(wide(noise.to(working(scores))), class_dim, -2)
        draws = turned.reshape(len(flat), num_classes, noise.shape[-1])
    weight = np.ones(num_classes, np.longdouble) if "weight" not in arguments else wide(arguments["weight"])
    losses, errors, shares = [], [], []
    of_classes = target.is_floating_point()
    labels = wide(target) if of_classes else target.numpy().astype(np.int64)
    labels = np.moveaxis(labels, class_dim, -1).reshape(-1, num_classes) if of_classes else labels.reshape(-1)
    for place, (row, label) in enumerate(zip(flat, labels, strict=True)):
        if not of_classes and label == arguments.get("ignore_index", -100):
            losses.append(np.longdouble(0))
            errors.append(np.longdouble(0))
            shares.append(np.longdouble(0))
            continue
        candidates = {int(label): np.longdouble(1)} if not of_classes else dict(enumerate(label))
        loss = error = np.longdouble(0)
        for candidate, probability in candidates.items():
            value = np.longdouble(math.nan)
            if np.isfinite(row).all():
                value = _row_loss(call, row, candidate, None if draws is None else draws[place])
            factor = probability * weight[candidate]
            loss += factor * value
            error += factor * _ROUNDINGS * epsilon * (_magnitude(call, row, candidate) + abs(value))
        losses.append(loss)
        errors.append(error)
        shares.append(np.longdouble(1) if of_classes else weight[label])
    values, tolerances = np.array(losses, np.longdouble), np.array(errors, np.longdouble)
    with np.errstate(all="ignore"):
        if arguments["reduction"] == "none":
            shape = rows.shape[:-1]
            return Expected(values.reshape(shape), tolerances.reshape(shape))
        tolerance = tolerances.sum() + _ROUNDINGS * epsilon * np.abs(values).sum()
        if arguments["reduction"] == "sum":
            return Expected(values.sum(), tolerance)
        total = np.array(shares, np.longdouble).sum()
        return Expected(values.sum() / total, tolerance / total)


def _row_loss(call: Call, row: Row, label: int, draws: Row | None) -> Any:
    settings = {name: call.arguments[name] for name in LOSSES[call.name].settings if name in call.arguments}
    if "class_counts" in settings:
        settings["class_counts"] = np.asarray(settings["class_counts"], dtype=np.longdouble)
    if LOSSES[call.name].noised:
        settings["noise"] = draws
    return LOSSES[call.name].formula(row.copy(), label, **settings)


def _magnitude(call: Call, row: Row, label: int) -> Any:
    """Size of the numbers whose rounding affects the loss of this row."""
    with np.errstate(all="ignore"):
        arguments, name = call.arguments, call.name
        if name == "topk_error":
            return np.longdouble(0)
        top, own = formulas.descending(row), abs(row[label])
        if name == "convex_topk_hinge":
            return 1 + own + np.abs(top[: arguments["k"] + 1]).sum()
        if name == "smooth_topk_hinge":
            return 1 + arguments["tau"] * len(row) + own + np.abs(top[: arguments["k"] + 1]).sum()
        if name == "topk_cross_entropy":  # an integral: see the accuracy that docs/math.md states
            return _QUADRATURE / _ROUNDINGS * formulas.topk_cross_entropy(row, label, arguments["k"])
        if name in ("focal", "logit_adjusted"):
            adjusted = arguments.get("tau", 0) * math.log(10**6)
            return 1 + (1 + arguments.get("gamma", 0)) * (own + abs(top[0])) + adjusted
        if name == "ldam":
            return 1 + arguments["scale"] * (own + abs(top[0]) + arguments["max_margin"])
        ks = formulas.several(arguments["k"])
        epsilon = arguments.get("epsilon", 0) * (formulas.spread(row, ks) if arguments.get("relative") else 1)
        near = 1 + own + np.abs(top[min(ks) - 1 : max(ks) + 1]).sum() + 10 * epsilon
        if arguments.get("n_samples") == math.inf:  # an integral: see the accuracy that docs/math.md states
            near += epsilon * _QUADRATURE
        return arguments.get("scale", 1) * (near + arguments.get("margin", arguments.get("max_margin", 0)))


# Error of the integral for an expectation, in units of the working precision: about 1e-11 in float64, 1e-5 in float32.
_QUADRATURE = 2000


def _expected_operator(call: Call) -> Expected:
    arguments = call.arguments
    x, k, dim, name = arguments["x"], arguments["k"], arguments.get("dim", -1), call.name
    rows = np.moveaxis(wide(x), dim, -1)
    flat = rows.reshape(-1, rows.shape[-1])
    draws = None
    if "noise" in arguments:
        noise = np.moveaxis(wide(arguments["noise"].to(working(x))), dim % x.dim(), -2)
        draws = noise.reshape(*flat.shape, noise.shape[-1])
    epsilon, rounding = arguments.get("epsilon", 0.0), torch.finfo(working(x)).eps
    values, tolerances = [], []
    for place, row in enumerate(flat):
        top = np.abs(formulas.descending(row))
        if np.isnan(row).any():
            values.append(np.longdouble(math.nan))
        elif draws is not None and epsilon:
            smooth = formulas.smooth_top_sum if name.endswith("sum") else formulas.smooth_kth
            values.append(smooth(row, k, epsilon, draws[place]))
        elif name == "exact_topk":
            values.append(formulas.expected_kth(row, k, epsilon))
        else:
            values.append(formulas.top_sum(row, k) if name.endswith("sum") else formulas.kth(row, k))
        size = top[:k].sum() if name.endswith("sum") else top[k - 1]
        size += epsilon * (_QUADRATURE if name == "exact_topk" else 10 * k)
        tolerances.append(_ROUNDINGS * rounding * size)
    shape = rows.shape[:-1]
    return Expected(np.array(values, np.longdouble).reshape(shape), np.array(tolerances, np.longdouble).reshape(shape))


def compare(found: Tensor, want: Expected, dtype: torch.dtype) -> str:
    """What is wrong with an answer, or nothing."""
    if found.dtype != dtype:
        return f"dtype {found.dtype}, not {dtype}"
    value = np.asarray(want.value)
    if tuple(found.shape) != value.shape:
        return f"shape {tuple(found.shape)}, not {value.shape}"
    got, limits = wide(found), torch.finfo(dtype)
    with np.errstate(all="ignore"):
        # The answer is rounded to its dtype at last, and may overflow there.
        tolerance = np.asarray(want.tolerance) + 2 * limits.eps * np.abs(value) + 4 * limits.tiny
        same = (np.abs(got - value) <= tolerance) | (np.isnan(got) & np.isnan(value))
        same |= np.isinf(got) & (np.abs(value) >= limits.max * (1 - limits.eps)) & (np.sign(got) == np.sign(value))
    if same.all():
        return ""
    worst = int(np.argmin(same.reshape(-1)))
    return (
        f"got {float(got.reshape(-1)[worst])!r} where the formula gives {float(value.reshape(-1)[worst])!r}, "
        f"beyond the tolerance {float(tolerance.reshape(-1)[worst]):.2g}"
    )


def gradient_problem(call: Call, chance: Chance) -> tuple[str, int]:
    """Compare autograd with central differences of the formula; returns what is wrong, and how many were compared.

    Entries at a kink are left out: there the differences to the two sides disagree.
    """
    name = "scores" if call.name in LOSSES else "x"
    scores = call.arguments[name].detach().clone().requires_grad_()
    answer = replace(call, arguments=call.arguments | {name: scores})()
    mix = torch.from_numpy(np.asarray(chance.uniform(0.5, 1.5, size=tuple(answer.shape))))
    (gradient,) = torch.autograd.grad((answer * mix).sum(), scores)
    if not torch.isfinite(gradient).all():
        return f"a gradient that is not finite: {gradient.tolist()}", 1
    step = 1e-6 * min(_smallest_scale(call), float(scores.detach().abs().max()) or 1.0)
    if np.finfo(np.longdouble).eps * float(scores.detach().abs().max()) > 1e-6 * step:
        return "", 0  # for such large scores the differences would be rounding errors
    largest = float(gradient.abs().max())
    compared = 0
    for place in range(scores.numel()):
        sides = []
        for move in (-step, 0.0, step):
            moved = scores.detach().clone()
            moved.view(-1)[place] += move
            value = expected(replace(call, arguments=call.arguments | {name: moved})).value
            sides.append((value * mix.numpy()).sum())
        taken = float(moved.view(-1)[place]) - float(scores.detach().view(-1)[place])
        left, right = float((sides[1] - sides[0]) / step), float((sides[2] - sides[1]) / step)
        # Scores near 1e10 are too coarse for such a step.
        if abs(left - right) > 1e-3 * (1e-3 + largest) or abs(taken - step) > 1e-4 * step:
            continue
        compared += 1
        got, want = float(gradient.reshape(-1)[place]), (left + right) / 2
        if abs(got - want) > 2e-3 * (largest + 1e-3):
            return f"the gradient at entry {place} is {got!r}, and by central differences {want!r}", compared
    return "", compared


def _smallest_scale(call: Call) -> float:
    """The shortest distance over which the formula is curved."""
    arguments = call.arguments
    bends = [arguments.get("epsilon") or 1.0, arguments.get("tau") or 1.0]
    if call.name == "ldam":
        bends.append(1 / arguments["scale"])
    return min(bends)


class Calls(Part):
    name = "calls"
    promise = "every loss and operator gives the number of its formula, and its gradient, for whatever it accepts"

    def __init__(self, seed: int, work: Path, *, count: int = 12_000) -> None:
        self.seed, self.count = seed, count

    def __len__(self) -> int:
        return self.count

    def run(self, case: int) -> Outcome:
        chance = np.random.default_rng([self.seed, 1, case])
        call = random_call(chance, NAMES[case % len(NAMES)])
        counts, problems = {"values": 1}, []
        try:
            with time_limit(_SECONDS), torch.random.fork_rng(devices=[]):
                if problem := value_problem(call):
                    problems.append(problem)
                elif chance.random() < _GRADIENT_SHARE and self._has_gradient(call):
                    problem, compared = gradient_problem(call, chance)
                    counts["partial derivatives"] = compared
                    problems += [problem] if problem else []
        except TooSlowError as error:
            problems.append(str(error))
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
        return Outcome(case, str(call), tuple(problems), counts)

    @staticmethod
    def _has_gradient(call: Call) -> bool:
        arguments = call.arguments
        differentiable = call.name in OPERATORS or (call.name in LOSSES and call.name != "topk_error")
        # Relative noise follows the scores without a gradient, so differences say something else.
        if not differentiable or arguments.get("relative"):
            return False
        small = next(0 < arguments[name].numel() <= 40 for name in ("scores", "x") if name in arguments)
        # A mean over ignored rows, or rows without weight, is NaN by design.
        defined = arguments.get("reduction") != "mean" or not {"ignore_index", "weight"} & arguments.keys()
        return small and defined and call.generic


def value_problem(call: Call) -> str:
    found = call()
    if call.name == "TopKMetrics":
        scores, target = call.arguments["scores"], call.arguments["target"]
        want = formulas.accuracies(wide(scores), target.numpy(), call.arguments["ks"])
        wrong = {name: float(found[name]) for name, value in want.items() if abs(found[name] - value) > 1e-6}
        return f"got {wrong}, and counting gives {want}" if wrong else ""
    like = next((call.arguments[name] for name in ("scores", "x", "features") if name in call.arguments), found)
    return compare(found, expected(call), like.dtype)
