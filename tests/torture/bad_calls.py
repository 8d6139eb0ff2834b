"""Calls with one bad argument: each must raise a ``ShortlistError``."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shortlist import ShortlistError
from tests.torture.cases import Outcome, Part
from tests.torture.random_calls import LOSSES, OPERATORS, Call, Chance, TooSlowError, random_call, time_limit

_SECONDS = 5
NAMES = (*LOSSES, *OPERATORS, "class_margins")
_REQUIRED = {"scores", "target", "x", "k", "class_counts", "epsilon", "max_margin"}
"""Arguments without a default in at least one signature."""

Bad = tuple[str, Callable[[Call], Any]]
"""What is wrong, and a function that makes the bad value."""


def _always(*values: Any) -> list[Bad]:
    return [(f"is {value!r}", partial(_constant, value)) for value in values]


def _constant(value: Any, call: Call) -> Any:
    return value


def _scores(call: Call) -> Tensor:
    scores: Tensor = call.arguments["scores" if "scores" in call.arguments else "x"]
    return scores


def _classes(call: Call) -> int:
    if call.name in OPERATORS:
        return int(_scores(call).shape[call.arguments.get("dim", -1)])
    return int(_scores(call).shape[min(1, _scores(call).dim() - 1)])


def _one_label(value: Callable[[Call], int]) -> Callable[[Call], Tensor]:
    def make(call: Call) -> Tensor:
        scores = _scores(call)
        shape = scores.shape[:1] + scores.shape[2:] if scores.dim() > 1 else ()
        return torch.full(shape, value(call))

    return make


_NOT_TENSORS = (None, "scores", 3.0, [1.0, 2.0], np.zeros((2, 3)))
_NOT_NUMBERS: tuple[Any, ...] = (None, "1", [1.0], 1j, {})
_NOT_FINITE = (math.nan, math.inf, -math.inf, -1.0)
_BAD_SCORES: list[Bad] = [
    *_always(*_NOT_TENSORS),
    ("has whole numbers", lambda call: _scores(call).nan_to_num(0, 0, 0).long()),
    ("is bool", lambda call: _scores(call) > 0),
    ("is complex", lambda call: torch.complex(_scores(call).float(), _scores(call).float())),
    ("is float8", lambda call: _scores(call).to(torch.float8_e4m3fn)),
    ("has no dimension", lambda call: torch.tensor(1.0)),
]

BAD: dict[str, list[Bad]] = {
    "scores": [
        *_BAD_SCORES,
        ("has one class", lambda call: torch.zeros(3, 1)),
        ("has one more class than fits", lambda call: torch.zeros(3, 4, 5, 6, 7)),
    ],
    "x": _BAD_SCORES,
    "target": [
        *_always(None, 0, [0], "0", np.zeros(3, np.int64)),
        ("is int32", lambda call: _one_label(lambda call: 0)(call).int()),
        ("is bool", lambda call: _one_label(lambda call: 0)(call).bool()),
        ("is complex", lambda call: _scores(call).double().to(torch.complex128)),
        ("has a further dimension", lambda call: _one_label(lambda call: 0)(call).unsqueeze(-1)),
        ("has another length", lambda call: torch.zeros(1009, dtype=torch.int64)),
        ("holds probabilities of another shape", lambda call: torch.ones(1009, 2)),
        ("holds the label L", _one_label(_classes)),
        ("holds the label -7", _one_label(lambda call: -7)),
        ("holds the label 2**62", _one_label(lambda call: 2**62)),
    ],
    "k": [
        *_always(0, -1, 2**70, 10**6, 2.5, 1.0, math.nan, "1", None, [1], torch.tensor([1, 2])),
        ("is L + 1", lambda call: _classes(call) + 1),
    ],
    "epsilon": _always(*_NOT_FINITE, *_NOT_NUMBERS),
    "margin": _always(*_NOT_FINITE, *_NOT_NUMBERS),
    "relative": _always(None, 1, "yes"),
    "tau": _always(*_NOT_FINITE, *_NOT_NUMBERS),
    "gamma": _always(*_NOT_FINITE, *_NOT_NUMBERS),
    "max_margin": _always(*_NOT_FINITE, *_NOT_NUMBERS),
    "scale": _always(0.0, *_NOT_FINITE, *_NOT_NUMBERS),
    "n_samples": _always(0, -3, 2.5, math.nan, -math.inf, "5", None, [5], 2**70),
    "noise": [
        *_always("noise", 1.0, [0.5]),
        ("lacks the dimension of draws", lambda call: torch.zeros(_scores(call).shape)),
        ("has no draws", lambda call: torch.zeros(*_scores(call).shape, 0)),
        ("has another shape", lambda call: torch.zeros(1009, 3, 2)),
        ("has whole numbers", lambda call: torch.zeros(*_scores(call).shape, 2, dtype=torch.int64)),
        ("is on another device", lambda call: torch.zeros(*_scores(call).shape, 2, device="meta")),
    ],
    "generator": [*_always("generator", 7), ("is NumPy's", lambda call: np.random.default_rng(0))],
    "weight": [
        *_always("weight", 1.0, [1.0, 2.0]),
        ("has another length", lambda call: torch.ones(_classes(call) + 1)),
        ("has two dimensions", lambda call: torch.ones(1, _classes(call))),
        ("has whole numbers", lambda call: torch.ones(_classes(call), dtype=torch.int64)),
        ("is complex", lambda call: torch.ones(_classes(call), dtype=torch.complex64)),
    ],
    "ignore_index": _always("0", None, 1.5, [0], torch.tensor([0, 1])),
    "reduction": _always("avg", "MEAN", "", None, 3, ["mean"], b"mean"),
    "class_counts": [
        *_always(None, "abc", 5, [], {}, ["a", "b"], [[1], [1, 2]], [None, 1]),
        ("is a bare object", lambda call: object()),
        ("has a zero", lambda call: [0] * _class_count(call)),
        ("has a negative number", lambda call: [-1.0] * _class_count(call)),
        ("has a NaN", lambda call: [math.nan] * _class_count(call)),
        ("has an infinity", lambda call: torch.full((_class_count(call),), math.inf)),
        ("has two dimensions", lambda call: torch.ones(_class_count(call), 1)),
        ("is bool", lambda call: torch.ones(_class_count(call), dtype=torch.bool)),
        ("is complex", lambda call: torch.ones(_class_count(call), dtype=torch.complex64)),
    ],
    "dim": [
        *_always(1009, -1009, 2**70, "0", 1.5, [0]),
        ("is the number of dimensions", lambda call: _scores(call).dim()),
    ],
}


def _class_count(call: Call) -> int:
    return len(call.arguments["class_counts"])


def bad_call(chance: Chance, name: str) -> tuple[Call, str, bool]:
    """A call with one bad argument, what is wrong with it, and True if Python itself may refuse it."""
    call = random_call(chance, name)
    kind = chance.random()
    if kind < 0.03:
        return replace(call, arguments=call.arguments | {"surprise": 1}), "an unknown argument", True
    missing = sorted(_REQUIRED & call.arguments.keys())
    if kind < 0.06:
        dropped = str(chance.choice(missing))
        arguments = {argument: value for argument, value in call.arguments.items() if argument != dropped}
        # Where the argument has a default, the call would be valid.
        if _may_miss(call, dropped):
            return replace(call, arguments=arguments), f"{dropped} is missing", True
    choices = [name for name in BAD if name in _arguments_of(call)]
    argument = str(chance.choice(choices))
    bad = BAD[argument]
    what, make = bad[int(chance.integers(len(bad)))]
    arguments = dict(call.arguments)
    if argument in ("generator", "n_samples"):  # ignored if noise is given or not needed
        arguments.pop("noise", None)
        arguments |= {"epsilon": 0.5} | ({"n_samples": 3} if argument == "generator" else {})
    if argument == "noise":
        arguments.pop("n_samples", None)
    if argument == "ignore_index" and arguments["target"].is_floating_point():
        arguments["target"] = _one_label(lambda call: 0)(call)
    if argument == "target":
        arguments.pop("ignore_index", None)
    if _scores_are_empty(call):
        return bad_call(chance, name)
    arguments[argument] = make(replace(call, arguments=arguments))
    return replace(call, arguments=arguments), f"{argument} {what}", False


def _scores_are_empty(call: Call) -> bool:
    """Without rows there are no labels that could be wrong."""
    return any(isinstance(value, Tensor) and value.numel() == 0 for value in call.arguments.values())


def _arguments_of(call: Call) -> set[str]:
    names = {*call.arguments}
    if call.name in LOSSES:
        names |= {"weight", "ignore_index"}
    if call.name in OPERATORS:
        names |= {"dim"}
    if (call.name.startswith("smooth_topk") and call.name in OPERATORS) or (
        call.name in LOSSES and LOSSES[call.name].noised
    ):
        names |= {"noise", "generator", "n_samples"}
    return names


def _may_miss(call: Call, argument: str) -> bool:
    has_default = {"epsilon", "max_margin"} if call.name in LOSSES else set()
    return argument not in has_default


class BadCalls(Part):
    name = "bad-calls"
    promise = "a call with a bad argument raises a ShortlistError, and never gives a number"

    def __init__(self, seed: int, work: Path, *, count: int = 8000) -> None:
        self.seed, self.count = seed, count

    def __len__(self) -> int:
        return self.count

    def run(self, case: int) -> Outcome:
        chance = np.random.default_rng([self.seed, 2, case])
        call, what, python_refuses = bad_call(chance, NAMES[case % len(NAMES)])
        problem = ""
        try:
            with time_limit(_SECONDS), torch.random.fork_rng(devices=[]):
                answer = call()
            problem = f"it was accepted, and gave {str(answer)[:100]}"
        except ShortlistError:
            pass
        except TooSlowError as error:
            problem = str(error)
        except Exception as error:
            if not (python_refuses and type(error) is TypeError):
                problem = f"{type(error).__name__}: {error}"
        return Outcome(case, f"{what} in {call}", (problem,) if problem else (), {"calls": 1})
