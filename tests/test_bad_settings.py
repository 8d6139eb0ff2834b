"""An invalid setting raises ``ShortlistError``, whose message names the argument, the rule and the value."""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import shortlist as sl
from shortlist import functional as F
from tests.support.loss_cases import LOSSES, LossCase, every_loss
from tests.support.rejections import (
    COUNTS,
    LAYERS,
    OPERATORS_OF_DIM,
    SCORES,
    TARGET,
    L,
    N,
    every_operator,
    rejected_values,
    rejects,
)


def test_the_error_is_a_value_error() -> None:
    assert issubclass(sl.ShortlistError, ValueError)


# K

LOSS_OF_K: dict[str, Callable[..., Tensor]] = {
    "topk_hinge": partial(F.topk_hinge, SCORES, TARGET),
    "convex_topk_hinge": partial(F.convex_topk_hinge, SCORES, TARGET),
    "calibrated_topk_hinge": partial(F.calibrated_topk_hinge, SCORES, TARGET),
    "smooth_topk_hinge": partial(F.smooth_topk_hinge, SCORES, TARGET),
    "smooth_topk_hinge_at_tau_0": partial(F.smooth_topk_hinge, SCORES, TARGET, tau=0.0),
    "topk_cross_entropy": partial(F.topk_cross_entropy, SCORES, TARGET),
    "topk_cross_entropy_of_several": lambda k: F.topk_cross_entropy(SCORES, TARGET, (1, k)),
    "noised_topk_hinge": partial(F.noised_topk_hinge, SCORES, TARGET),
    "noised_topk_hinge_exact": partial(F.noised_topk_hinge, SCORES, TARGET, n_samples=math.inf),
    "imbalanced_noised_topk_hinge": partial(F.imbalanced_noised_topk_hinge, SCORES, TARGET, COUNTS),
}
VALUE_OF_K: dict[str, Callable[..., object]] = {
    "topk_error": partial(F.topk_error, SCORES, TARGET),
    "topk_value": partial(sl.topk_value, SCORES),
    "topk_sum": partial(sl.topk_sum, SCORES),
    "smooth_topk": partial(sl.smooth_topk, SCORES, epsilon=0.1),
    "smooth_topk_sum": partial(sl.smooth_topk_sum, SCORES, epsilon=0.1),
    "exact_topk": partial(sl.exact_topk, SCORES, epsilon=0.1),
    "TopKMetrics": lambda k: sl.TopKMetrics(L, ks=(k,)),
}
MODULE_OF_K: dict[str, Callable[..., torch.nn.Module]] = {
    "TopKError": sl.TopKError,
    "TopKHinge": sl.TopKHinge,
    "ConvexTopKHinge": sl.ConvexTopKHinge,
    "CalibratedTopKHinge": sl.CalibratedTopKHinge,
    "SmoothTopKHinge": sl.SmoothTopKHinge,
    "TopKCrossEntropy": sl.TopKCrossEntropy,
    "NoisedTopKHinge": sl.NoisedTopKHinge,
    "ImbalancedNoisedTopKHinge": partial(sl.ImbalancedNoisedTopKHinge, COUNTS),
}


@pytest.mark.parametrize("call", LOSS_OF_K.values(), ids=LOSS_OF_K)
@rejected_values(0, -1, L, L + 1)
def test_a_surrogate_needs_k_from_1_to_one_below_the_number_of_classes(call: Callable[..., Tensor], value: int) -> None:
    assert call(L - 1).isfinite()
    with rejects("k", f"in [1, {L - 1}] for {L} classes", value):
        call(value)


@pytest.mark.parametrize("call", VALUE_OF_K.values(), ids=VALUE_OF_K)
@rejected_values(0, -1, L + 1)
def test_a_top_k_needs_k_from_1_to_the_number_of_classes(call: Callable[..., object], value: int) -> None:
    call(L)
    with rejects("k", f"in [1, {L}] for {L} classes", value):
        call(value)


@pytest.mark.parametrize(
    "call",
    [*LOSS_OF_K.values(), *VALUE_OF_K.values(), *MODULE_OF_K.values()],
    ids=[*LOSS_OF_K, *VALUE_OF_K, *MODULE_OF_K],
)
@rejected_values(1.5, 2.0, "2", None)
def test_k_must_be_an_integer(call: Callable[..., object], value: object) -> None:
    with rejects("k", "an integer", repr(value)):
        call(value)


NOISED = {name: call for name, call in (LOSS_OF_K | MODULE_OF_K).items() if "noised" in name.lower()}
SEVERAL_K = NOISED | {"topk_cross_entropy": LOSS_OF_K["topk_cross_entropy"], "TopKCrossEntropy": sl.TopKCrossEntropy}


@pytest.mark.parametrize("call", SEVERAL_K.values(), ids=SEVERAL_K)
@pytest.mark.parametrize(
    ("value", "rule", "shown"),
    [
        ((), "several, such as (1, 3, 5)", "()"),
        ((1, 2, 1), "different integers", "(1, 2, 1)"),
        ((1, 2.0), "an integer", "2.0"),
        ((1, True), "an integer", "True"),
        (("1", 2), "an integer", "'1'"),
        ([1, 2], "an integer", "[1, 2]"),
        ((2, 0), "", "0"),
    ],
)
def test_several_k_are_different_integers(call: Callable[..., object], value: object, rule: str, shown: str) -> None:
    call((2, 1))
    with rejects("k", rule, shown):
        call(value)


@pytest.mark.parametrize("call", sorted(LOSS_OF_K.keys() & SEVERAL_K.keys()))
def test_none_of_several_k_may_be_too_large(call: str) -> None:
    with rejects("k", f"in [1, {L - 1}] for {L} classes", L):
        LOSS_OF_K[call]((1, L))


@pytest.mark.parametrize("build", [F.noised_topk_hinge, sl.NoisedTopKHinge], ids=["function", "Module"])
@rejected_values(-0.1, math.inf, math.nan, "1", None, True)
def test_the_margin_is_a_finite_number_that_is_not_negative(build: Callable[..., object], value: object) -> None:
    inputs = (SCORES, TARGET) if build is F.noised_topk_hinge else ()
    with rejects("margin", ">= 0", repr(value)):
        build(*inputs, 2, margin=value)


@pytest.mark.parametrize("call", NOISED.values(), ids=NOISED)
@rejected_values(1, None, "yes")
def test_relative_is_true_or_false(call: Callable[..., object], value: object) -> None:
    with rejects("relative", "True or False", repr(value)):
        call(2, relative=value)


@pytest.mark.parametrize("module", MODULE_OF_K.values(), ids=MODULE_OF_K)
@rejected_values(0, -1)
def test_a_module_rejects_k_below_1_in_its_constructor(module: Callable[..., torch.nn.Module], value: int) -> None:
    with rejects("k", "at least 1", value):
        module(value)


# Numbers

NOT_NEGATIVE: dict[str, tuple[str, Callable[..., object]]] = {
    "smooth_topk": ("epsilon", partial(sl.smooth_topk, SCORES, 2)),
    "smooth_topk_sum": ("epsilon", partial(sl.smooth_topk_sum, SCORES, 2)),
    "exact_topk": ("epsilon", partial(sl.exact_topk, SCORES, 2)),
    "noised_topk_hinge": ("epsilon", partial(F.noised_topk_hinge, SCORES, TARGET, 2)),
    "noised_topk_hinge_exact": ("epsilon", partial(F.noised_topk_hinge, SCORES, TARGET, 2, n_samples=math.inf)),
    "imbalanced_noised_topk_hinge": ("epsilon", partial(F.imbalanced_noised_topk_hinge, SCORES, TARGET, COUNTS, 2)),
    "NoisedTopKHinge": ("epsilon", partial(sl.NoisedTopKHinge, 2)),
    "ImbalancedNoisedTopKHinge": ("epsilon", partial(sl.ImbalancedNoisedTopKHinge, COUNTS, 2)),
    "smooth_topk_hinge": ("tau", partial(F.smooth_topk_hinge, SCORES, TARGET, 2)),
    "SmoothTopKHinge": ("tau", partial(sl.SmoothTopKHinge, 2)),
    "focal": ("gamma", partial(F.focal, SCORES, TARGET)),
    "FocalLoss": ("gamma", sl.FocalLoss),
    "logit_adjusted": ("tau", partial(F.logit_adjusted, SCORES, TARGET, COUNTS)),
    "LogitAdjustedLoss": ("tau", partial(sl.LogitAdjustedLoss, COUNTS)),
    "class_margins": ("max_margin", partial(sl.class_margins, COUNTS)),
    "ldam": ("max_margin", partial(F.ldam, SCORES, TARGET, COUNTS)),
    "LDAMLoss": ("max_margin", partial(sl.LDAMLoss, COUNTS)),
    "imbalanced_margin": ("max_margin", partial(F.imbalanced_noised_topk_hinge, SCORES, TARGET, COUNTS, 2)),
    "ImbalancedMargin": ("max_margin", partial(sl.ImbalancedNoisedTopKHinge, COUNTS, 2)),
}
POSITIVE: dict[str, Callable[..., object]] = {
    "ldam": partial(F.ldam, SCORES, TARGET, COUNTS),
    "LDAMLoss": partial(sl.LDAMLoss, COUNTS),
    "imbalanced_noised_topk_hinge": partial(F.imbalanced_noised_topk_hinge, SCORES, TARGET, COUNTS, 2),
    "ImbalancedNoisedTopKHinge": partial(sl.ImbalancedNoisedTopKHinge, COUNTS, 2),
}


@pytest.mark.parametrize(("name", "call"), NOT_NEGATIVE.values(), ids=NOT_NEGATIVE)
@rejected_values(-0.1, -math.inf, math.inf, math.nan, torch.tensor(0.5))
def test_epsilon_tau_gamma_and_margin_must_be_finite_and_not_negative(
    name: str, call: Callable[..., object], value: object
) -> None:
    call(**{name: 0.0})
    with rejects(name, "a finite number >= 0", repr(value)):
        call(**{name: value})


@pytest.mark.parametrize("call", POSITIVE.values(), ids=POSITIVE)
@rejected_values(0.0, -1.0, math.inf, math.nan, torch.tensor(0.5))
def test_the_scale_must_be_finite_and_positive(call: Callable[..., object], value: object) -> None:
    with rejects("scale", "a finite number > 0", repr(value)):
        call(scale=value)


FEATURES = torch.ones(N, 5)
LARGE_FOR_FLOAT32: dict[str, tuple[str, Callable[..., object]]] = {
    name: case for name, case in NOT_NEGATIVE.items() if name.islower() and name != "class_margins"
} | {
    "ldam_scale": ("scale", partial(F.ldam, SCORES, TARGET, COUNTS)),
    "imbalanced_scale": ("scale", partial(F.imbalanced_noised_topk_hinge, SCORES, TARGET, COUNTS, 2)),
    "LDAMLoss_scale": ("scale", lambda scale: sl.LDAMLoss(COUNTS, scale=scale)(SCORES, TARGET)),
    "NoisedTopKHinge": ("epsilon", lambda epsilon: sl.NoisedTopKHinge(2, epsilon=epsilon)(SCORES, TARGET)),
    "ImbalancedNoisedTopKHinge": (
        "max_margin",
        lambda max_margin: sl.ImbalancedNoisedTopKHinge(COUNTS, 2, max_margin=max_margin)(SCORES, TARGET),
    ),
    "NoisedTopKHead": (
        "epsilon",
        lambda epsilon: sl.NoisedTopKHead(5, L, sl.NoisedTopKHinge(2, epsilon=epsilon))(FEATURES, TARGET),
    ),
    "NoisedTopKHead_scale": (
        "scale",
        lambda scale: sl.NoisedTopKHead(5, L, sl.ImbalancedNoisedTopKHinge(COUNTS, 2, scale=scale))(FEATURES, TARGET),
    ),
}


@pytest.mark.parametrize(("name", "call"), LARGE_FOR_FLOAT32.values(), ids=LARGE_FOR_FLOAT32)
def test_a_number_that_is_infinite_in_the_dtype_of_the_arithmetic_is_rejected(
    name: str, call: Callable[..., object]
) -> None:
    call(**{name: 1e30})
    with rejects(name, "for arithmetic in torch.float32", 1e300):
        call(**{name: 1e300})


def test_the_margins_of_integer_counts_are_float32() -> None:
    with rejects("max_margin", "for arithmetic in torch.float32", 1e300):
        sl.class_margins(COUNTS, 1e300)
    assert sl.class_margins(torch.tensor(COUNTS, dtype=torch.float64), 1e300).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_take_what_float32_can_hold(dtype: torch.dtype) -> None:
    assert sl.exact_topk(SCORES.to(dtype), 1, epsilon=1e6).gt(0).all()
    with rejects("epsilon", "for arithmetic in torch.float32", 1e39):
        sl.exact_topk(SCORES.to(dtype), 1, epsilon=1e39)


def test_an_integer_beyond_all_floats_is_rejected_in_the_constructor() -> None:
    with rejects("epsilon", "at most", f"an integer of {(10**5000).bit_length()} bits"):
        sl.NoisedTopKHinge(2, epsilon=10**5000)


@rejected_values(None, "0.5", True)
def test_what_is_no_number_at_all_is_rejected_by_name(value: Any) -> None:
    with rejects("epsilon", "a finite number >= 0", repr(value)):
        sl.NoisedTopKHinge(2, epsilon=value)
    with rejects("scale", "a finite number > 0", repr(value)):
        sl.LDAMLoss(COUNTS, scale=value)


DRAWING: dict[str, tuple[str, Callable[..., object]]] = {
    "smooth_topk": ("n_samples", partial(sl.smooth_topk, SCORES, 2, epsilon=0.1)),
    "smooth_topk_sum": ("n_samples", partial(sl.smooth_topk_sum, SCORES, 2, epsilon=0.1)),
    "noised_topk_hinge": ("n_samples", partial(F.noised_topk_hinge, SCORES, TARGET, 2)),
    "imbalanced_noised_topk_hinge": ("n_samples", partial(F.imbalanced_noised_topk_hinge, SCORES, TARGET, COUNTS, 2)),
    "NoisedTopKHinge": ("n_samples", partial(sl.NoisedTopKHinge, 2)),
    "ImbalancedNoisedTopKHinge": ("n_samples", partial(sl.ImbalancedNoisedTopKHinge, COUNTS, 2)),
    "NoisedTopKHinge_in_evaluation": ("eval_n_samples", partial(sl.NoisedTopKHinge, 2)),
    "ImbalancedNoisedTopKHinge_in_evaluation": ("eval_n_samples", partial(sl.ImbalancedNoisedTopKHinge, COUNTS, 2)),
}


@pytest.mark.parametrize(("name", "call"), DRAWING.values(), ids=DRAWING)
@rejected_values(0, -1, 2.5, math.nan, -math.inf, "5")
def test_the_number_of_draws_must_be_a_positive_integer(name: str, call: Callable[..., object], value: object) -> None:
    call(**{name: 1})
    with rejects(name, "an integer >= 1", repr(value)):
        call(**{name: value})


@pytest.mark.parametrize("operator", [sl.smooth_topk, sl.smooth_topk_sum])
def test_an_estimate_from_infinitely_many_draws_points_to_the_exact_operator(operator: Callable[..., Tensor]) -> None:
    with pytest.raises(sl.ShortlistError, match="n_samples must be finite here: exact_topk"):
        operator(SCORES, 2, epsilon=0.1, n_samples=math.inf)


@every_operator
@rejected_values(2, -3, 7)
def test_dim_must_be_a_dimension_of_the_operand(operator: Callable[..., Tensor], value: int) -> None:
    with rejects("dim", "one of the 2 dimensions of x", value):
        operator(SCORES, 1, dim=value)


@every_operator
def test_a_number_has_no_dimension_to_rank(operator: Callable[..., Tensor]) -> None:
    with rejects("dim", "one of the 0 dimensions of x", -1):
        operator(torch.tensor(1.0), 1)


@every_loss
@rejected_values("average", "", None, "Mean", 1, torch.ones(3))
def test_the_reduction_must_be_one_that_exists(loss: LossCase, value: Any) -> None:
    with rejects("reduction", "one of ('none', 'mean', 'sum')", repr(value)):
        loss(SCORES, TARGET, reduction=value)
    with rejects("reduction", "one of ('none', 'mean', 'sum')", repr(value)):
        loss.module(L, reduction=value)


# When the checks run


@pytest.mark.parametrize(
    ("construct", "name", "rule", "value"),
    [
        (lambda: sl.TopKHinge(2, weight=torch.ones(L, dtype=torch.int64)), "weight", "floating-point", torch.int64),
        (lambda: sl.TopKHinge(2, weight=torch.ones(L, 1)), "weight", "one entry per class", (L, 1)),
        (lambda: sl.LDAMLoss(COUNTS, weight=torch.ones(L + 1)), "weight", f"shape ({L},)", (L + 1,)),
        (lambda: sl.ImbalancedNoisedTopKHinge(COUNTS, k=L), "k", f"in [1, {L - 1}] for {L} classes", L),
    ],
    ids=["integer weight", "2-D weight", "weight beside class counts", "k beside class counts"],
)
def test_a_module_rejects_in_its_constructor_what_can_be_known_there(
    construct: Callable[[], object], name: str, rule: str, value: object
) -> None:
    with rejects(name, rule, value):
        construct()


@pytest.mark.parametrize(
    "invalid",
    [
        {"k": L},
        {"epsilon": -1.0},
        {"n_samples": 2.5},
        {"max_margin": -1.0},
        {"scale": 0.0},
        {"class_counts": [1, 2, 3]},
        {"weight": torch.ones(L + 1)},
        {"reduction": "average"},
        {"target": torch.tensor([0, L, 1])},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_a_rejected_call_draws_no_noise(invalid: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"scores": SCORES, "target": TARGET, "class_counts": COUNTS, "k": 2}
    before = torch.get_rng_state()
    with pytest.raises(sl.ShortlistError, match=next(iter(invalid))):
        F.imbalanced_noised_topk_hinge(**arguments | invalid)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["TopKMetric", "no_such_loss", "_hidden"])
def test_an_unknown_name_is_an_attribute_error_that_says_it(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'shortlist' has no attribute '{name}'"):
        getattr(sl, name)


INTEGERS: dict[str, tuple[str, Callable[..., object]]] = (
    {f"{name}_k": ("k", call) for name, call in (LOSS_OF_K | VALUE_OF_K | MODULE_OF_K).items()}
    | {
        f"{name}_draws": (argument, lambda n, a=argument, c=call: c(**{a: n}))
        for name, (argument, call) in DRAWING.items()
        if argument == "n_samples"
    }
    | {f"{name}_dim": ("dim", lambda dim, c=call: c(dim=dim)) for name, call in OPERATORS_OF_DIM.items()}
    | {f"{name}_in_features": ("in_features", call) for name, call in LAYERS.items()}
    | {
        f"{name}_classes": ("(num_classes|out_features)", lambda n, c=call: c(num_classes=n))
        for name, call in LAYERS.items()
    }
    | {f"{case.name}_ignore": ("ignore_index", lambda i, c=case: c(SCORES, TARGET, ignore_index=i)) for case in LOSSES}
    | {
        "metrics_classes": ("num_classes", sl.TopKMetrics),
        "metrics_ignore": ("ignore_index", lambda i: sl.TopKMetrics(L, ks=(1,), ignore_index=i)),
        "module_ignore": ("ignore_index", lambda i: sl.TopKHinge(2, ignore_index=i)),
    }
)


@pytest.mark.parametrize(("name", "call"), INTEGERS.values(), ids=INTEGERS)
@rejected_values(True, torch.tensor(True), 1.5, None, "2", [1])
def test_an_integer_is_no_bool_and_nothing_else(name: str, call: Callable[..., object], value: object) -> None:
    with pytest.raises(sl.ShortlistError, match=f"^{name} must be an integer.*, got {re.escape(repr(value))}"):
        call(value)


@pytest.mark.parametrize(("name", "call"), INTEGERS.values(), ids=INTEGERS)
def test_an_integer_that_no_tensor_could_hold_is_rejected(name: str, call: Callable[..., object]) -> None:
    with pytest.raises(
        sl.ShortlistError, match=f"^{name} must be .*, got an integer of {(10**5000).bit_length()} bits"
    ):
        call(10**5000)


def test_a_fraction_is_no_number_that_torch_calculates_with() -> None:
    with rejects("epsilon", "a finite number >= 0", repr(Fraction(1, 2))):
        sl.NoisedTopKHinge(2, epsilon=Fraction(1, 2))  # type: ignore[arg-type]
