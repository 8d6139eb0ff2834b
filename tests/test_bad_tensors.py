"""An invalid tensor raises ``ShortlistError``, whose message names the argument, the rule and the value."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import shortlist as sl
from shortlist import functional as F
from tests.support.loss_cases import LOSSES, LossCase, every_loss, noise_for
from tests.support.rejections import (
    COUNTS,
    LAYERS,
    NOISE,
    OPERATORS_OF_DIM,
    SCORES,
    TARGET,
    L,
    N,
    every_operator,
    rejected_values,
    rejects,
)

# Class counts

NEEDS_COUNTS: dict[str, Callable[..., object]] = {
    "class_margins": lambda counts: sl.class_margins(counts, 0.5),
    "ldam": lambda counts: F.ldam(SCORES, TARGET, counts),
    "imbalanced_noised_topk_hinge": lambda counts: F.imbalanced_noised_topk_hinge(SCORES, TARGET, counts, 2),
    "LDAMLoss": sl.LDAMLoss,
    "ImbalancedNoisedTopKHinge": lambda counts: sl.ImbalancedNoisedTopKHinge(counts, 2),
}
COUNTS_FOR_METRICS: dict[str, Callable[..., object]] = {
    "TopKMetrics": lambda counts: sl.TopKMetrics(L, ks=(1,), class_counts=counts),
}
ANY_COUNTS = NEEDS_COUNTS | COUNTS_FOR_METRICS
UNREAD_COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "class_margins": lambda counts: sl.class_margins(counts, 0.5),
    "ldam": lambda counts: F.ldam(SCORES, TARGET, counts, reduction="none"),
    "logit_adjusted": lambda counts: F.logit_adjusted(SCORES, TARGET, counts, reduction="none"),
    "imbalanced_noised_topk_hinge": lambda counts: F.imbalanced_noised_topk_hinge(
        SCORES, TARGET, counts, 2, noise=NOISE, reduction="none"
    ),
}


@pytest.mark.parametrize("call", UNREAD_COUNTS.values(), ids=UNREAD_COUNTS)
@pytest.mark.parametrize("bad", [0.0, -3.0, math.nan, math.inf])
def test_a_bad_count_that_cannot_be_read_makes_everything_nan(call: Callable[[Tensor], Tensor], bad: float) -> None:
    counts = torch.tensor([COUNTS, COUNTS], dtype=torch.float32)
    counts[1, 2] = bad  # a class that is nobody's label
    good, spoilt = torch.func.vmap(call)(counts)
    torch.testing.assert_close(good, call(counts[0]))
    assert spoilt.isnan().all()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("call", UNREAD_COUNTS.values(), ids=UNREAD_COUNTS)
def test_a_bad_count_in_a_graph_makes_everything_nan(call: Callable[[Tensor], Tensor]) -> None:
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(torch.tensor(COUNTS)), call(torch.tensor(COUNTS)))
    assert compiled(torch.tensor([1, 4, 0, 16])).isnan().all()


@pytest.mark.parametrize("call", NEEDS_COUNTS.values(), ids=NEEDS_COUNTS)
@rejected_values(0, -3, -0.5, math.nan, math.inf)
def test_every_class_count_must_be_finite_and_positive(call: Callable[..., object], value: float) -> None:
    with rejects("class_counts", "finite and > 0", f"{value} for class 2"):
        call([1, 2, value, 4])


@rejected_values(-3, -0.5, math.nan, math.inf)
def test_the_metrics_take_unseen_classes_but_no_other_odd_count(value: float) -> None:
    sl.TopKMetrics(L, ks=(1,), class_counts=[1, 2, 0, 4])
    with rejects("class_counts", "finite and >= 0", f"{value} for class 2"):
        sl.TopKMetrics(L, ks=(1,), class_counts=[1, 2, value, 4])


@pytest.mark.parametrize("call", ANY_COUNTS.values(), ids=ANY_COUNTS)
@pytest.mark.parametrize(
    "counts",
    [torch.ones(L, 1), torch.ones(1, L), torch.tensor(3), torch.ones(0)],
    ids=["(L, 1)", "(1, L)", "()", "(0,)"],
)
def test_class_counts_must_be_one_dimensional_and_not_empty(call: Callable[..., object], counts: Tensor) -> None:
    with rejects("class_counts", "one entry per class", tuple(counts.shape)):
        call(counts)


@pytest.mark.parametrize("call", ANY_COUNTS.values(), ids=ANY_COUNTS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_class_counts_must_be_numbers(call: Callable[..., object], dtype: torch.dtype) -> None:
    with rejects("class_counts", "numbers", dtype):
        call(torch.ones(L, dtype=dtype))


COUNTS_BESIDE_SCORES: dict[str, Callable[..., object]] = {
    "ldam": NEEDS_COUNTS["ldam"],
    "imbalanced_noised_topk_hinge": NEEDS_COUNTS["imbalanced_noised_topk_hinge"],
    "LDAMLoss": lambda counts: sl.LDAMLoss(counts)(SCORES, TARGET),
    "ImbalancedNoisedTopKHinge": lambda counts: sl.ImbalancedNoisedTopKHinge(counts, 2)(SCORES, TARGET),
    **COUNTS_FOR_METRICS,
}


@pytest.mark.parametrize("call", COUNTS_BESIDE_SCORES.values(), ids=COUNTS_BESIDE_SCORES)
@pytest.mark.parametrize("length", [L - 1, L + 1])
def test_there_must_be_as_many_class_counts_as_classes(call: Callable[..., object], length: int) -> None:
    with rejects("class_counts", f"shape ({L},)", (length,)):
        call([5] * length)


# Scores


@every_loss
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_scores_must_be_floating_point(loss: LossCase, dtype: torch.dtype) -> None:
    with rejects("scores", "a floating-point tensor", dtype):
        loss.function(SCORES.to(dtype), TARGET)


@every_loss
@pytest.mark.parametrize("shape", [(), (0,), (1,), (N, 1), (N, 0), (N, 1, 2)], ids=str)
def test_scores_must_have_two_classes_or_more(loss: LossCase, shape: tuple[int, ...]) -> None:
    target = torch.zeros(shape[:1] + shape[2:] if len(shape) > 1 else (), dtype=torch.int64)
    with rejects("scores", "L >= 2 classes", shape):
        loss.module(L)(torch.zeros(shape), target)


@every_operator
@pytest.mark.parametrize(
    ("x", "got"), [(SCORES.long(), torch.int64), (SCORES > 0, torch.bool), ([0.0, 1.0], "list")], ids=str
)
def test_operators_take_floating_point_tensors_alone(operator: Callable[..., Tensor], x: Any, got: object) -> None:
    with rejects("x", "a floating-point tensor", got):
        operator(x, 1)


# Labels


def update_metrics(scores: Tensor, target: Tensor) -> None:
    sl.TopKMetrics(L, ks=(1,)).update(scores, target)


TAKES_LABELS: dict[str, Callable[..., object]] = {case.name: case for case in LOSSES} | {"TopKMetrics": update_metrics}
everything_that_takes_labels = pytest.mark.parametrize("call", TAKES_LABELS.values(), ids=TAKES_LABELS)


@everything_that_takes_labels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.bool, torch.complex64])
def test_labels_must_be_int64(call: Callable[..., object], dtype: torch.dtype) -> None:
    with rejects("target", "int64 labels or floating-point probabilities", dtype):
        call(SCORES, TARGET.to(dtype))


@everything_that_takes_labels
@pytest.mark.parametrize("shape", [(N,), (N, L - 1), (N, 1), (L, N), (N, L, 1)], ids=str)
def test_floating_point_targets_must_be_shaped_like_the_scores(
    call: Callable[..., object], shape: tuple[int, ...]
) -> None:
    with rejects("target", f"shaped like the scores, ({N}, {L})", f"{shape}; labels must be int64"):
        call(SCORES, torch.ones(shape))


@everything_that_takes_labels
@pytest.mark.parametrize(
    ("scores_shape", "target_shape", "want"),
    [
        ((N, L), (N + 1,), (N,)),
        ((N, L), (N, 1), (N,)),
        ((N, L), (), (N,)),
        ((N, L), (N, L), (N,)),
        ((L,), (1,), ()),
        ((N, L, 2), (N,), (N, 2)),
        ((N, L, 2), (2, N), (N, 2)),
    ],
    ids=str,
)
def test_labels_must_be_shaped_like_the_scores_without_their_classes(
    call: Callable[..., object], scores_shape: tuple[int, ...], target_shape: tuple[int, ...], want: tuple[int, ...]
) -> None:
    with rejects("target", f"shape {want} for scores of shape {scores_shape}", target_shape):
        call(torch.zeros(scores_shape), torch.zeros(target_shape, dtype=torch.int64))


@everything_that_takes_labels
def test_labels_must_be_a_tensor(call: Callable[..., object]) -> None:
    with rejects("target", "a tensor", "list"):
        call(SCORES, TARGET.tolist())


@everything_that_takes_labels
@rejected_values(L, L + 100, -1, -99)
def test_a_label_that_names_no_class_is_an_error_on_the_cpu(call: Callable[..., object], value: int) -> None:
    with rejects("target", f"in [0, {L - 1}]", value):
        call(SCORES, torch.tensor([0, value, 1]))


@every_loss
@pytest.mark.parametrize("ignore_index", [-100, -1, L + 3, 2])
def test_the_ignored_label_need_not_name_a_class_but_every_other_must(loss: LossCase, ignore_index: int) -> None:
    kept = torch.tensor([True, False, True])
    target = torch.where(kept, TARGET, ignore_index)
    noise = loss.given(noise_for(SCORES)[kept])
    torch.testing.assert_close(
        loss(SCORES, target, ignore_index=ignore_index), loss(SCORES[kept], TARGET[kept], **noise)
    )
    with rejects("target", f"or be ignore_index ({ignore_index})", -7):
        loss(SCORES, torch.tensor([0, ignore_index, -7]), ignore_index=ignore_index)


@every_loss
@rejected_values(0, 2, L)
def test_probabilities_have_no_label_to_ignore(loss: LossCase, value: int) -> None:
    with rejects("ignore_index", "negative if target holds probabilities", value):
        loss(SCORES, SCORES.softmax(-1), ignore_index=value)


# Weight and reduction


@every_loss
@pytest.mark.parametrize("shape", [(L - 1,), (L + 1,), (), (1, L), (N, L)], ids=str)
def test_there_must_be_one_weight_a_class(loss: LossCase, shape: tuple[int, ...]) -> None:
    with rejects("weight", "one entry per class", shape):
        loss(SCORES, TARGET, weight=torch.ones(shape))


@every_loss
@pytest.mark.parametrize(
    ("weight", "got"), [(torch.ones(L, dtype=torch.int64), torch.int64), ([1.0] * L, "list")], ids=str
)
def test_weights_must_be_a_floating_point_tensor(loss: LossCase, weight: Any, got: object) -> None:
    with rejects("weight", "a floating-point tensor", got):
        loss(SCORES, TARGET, weight=weight)


# Noise

TAKES_NOISE: dict[str, Callable[..., Tensor]] = {
    "smooth_topk": partial(sl.smooth_topk, SCORES, 2, epsilon=0.1),
    "smooth_topk_sum": partial(sl.smooth_topk_sum, SCORES, 2, epsilon=0.1),
    "smooth_topk_without_noise": partial(sl.smooth_topk, SCORES, 2, epsilon=0.0),
    "noised_topk_hinge": partial(F.noised_topk_hinge, SCORES, TARGET, 2),
    "noised_topk_hinge_exact": partial(F.noised_topk_hinge, SCORES, TARGET, 2, n_samples=math.inf),
    "imbalanced_noised_topk_hinge": partial(F.imbalanced_noised_topk_hinge, SCORES, TARGET, COUNTS, 2),
    "NoisedTopKHinge": partial(sl.NoisedTopKHinge(2), SCORES, TARGET),
    "ImbalancedNoisedTopKHinge": partial(sl.ImbalancedNoisedTopKHinge(COUNTS, 2), SCORES, TARGET),
}
everything_that_takes_noise = pytest.mark.parametrize("call", TAKES_NOISE.values(), ids=TAKES_NOISE)


@everything_that_takes_noise
@pytest.mark.parametrize("shape", [(N, L), (N, L, 0), (5, N, L), (L, N, 5), (N, L + 1, 5), (N, L, 5, 1), ()], ids=str)
def test_noise_must_be_shaped_like_the_scores_with_draws_last(
    call: Callable[..., Tensor], shape: tuple[int, ...]
) -> None:
    with rejects("noise", f"shape ({N}, {L}, B) with B >= 1 draws", shape):
        call(noise=torch.zeros(shape))


@everything_that_takes_noise
def test_noise_must_be_floating_point(call: Callable[..., Tensor]) -> None:
    with rejects("noise", "a floating-point tensor", torch.int64):
        call(noise=torch.zeros(N, L, 5, dtype=torch.int64))


@everything_that_takes_noise
def test_noise_must_be_where_the_scores_are(call: Callable[..., Tensor]) -> None:
    with rejects("noise", "on the device of the scores, cpu", "meta"):
        call(noise=torch.zeros(N, L, 5, device="meta"))


@everything_that_takes_noise
def test_given_noise_and_a_generator_exclude_each_other(call: Callable[..., Tensor]) -> None:
    with pytest.raises(sl.ShortlistError, match="noise and generator exclude each other"):
        call(noise=torch.zeros(N, L, 5), generator=torch.Generator())


@pytest.mark.parametrize("call", ANY_COUNTS.values(), ids=ANY_COUNTS)
@rejected_values("5", {"oak": 5}, Counter("oak"), {3}, ..., ["a"] * L, [1, 2, 3, None], [1, 2, 3, 2**70])
def test_class_counts_must_be_numbers_in_the_order_of_the_classes(call: Callable[..., object], value: Any) -> None:
    with rejects("class_counts", "numbers in the order of the classes", type(value).__name__):
        call(value)


@pytest.mark.parametrize("call", NEEDS_COUNTS.values(), ids=NEEDS_COUNTS)
def test_class_counts_are_needed(call: Callable[..., object]) -> None:
    with rejects("class_counts", "numbers in the order of the classes", "NoneType"):
        call(None)


@every_loss
@rejected_values(None, [[0.3, -1.2, 0.8, 0.1]], "scores", 2.5)
def test_scores_must_be_a_tensor(loss: LossCase, value: Any) -> None:
    with rejects("scores", "a floating-point tensor", type(value).__name__):
        loss.module(L)(value, TARGET, **loss.given(NOISE))


@rejected_values(None, SCORES.tolist())
def test_scores_must_be_a_tensor_for_losses_with_class_counts(value: Any) -> None:
    for function in (F.ldam, F.logit_adjusted, partial(F.imbalanced_noised_topk_hinge, k=2)):
        with rejects("scores", "a floating-point tensor", type(value).__name__):
            function(value, TARGET, class_counts=COUNTS)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize(
    "features", [None, [[1.0] * 5], torch.ones(3, 5, dtype=torch.int64), torch.ones(3, 4)], ids=str
)
def test_features_must_be_a_tensor_that_fits(layer: Callable[..., torch.nn.Module], features: Any) -> None:
    module: Any = layer()
    with pytest.raises(sl.ShortlistError, match=r"^features must "):
        module(features) if isinstance(module, sl.CosineLinear) else module.scores(features)


@pytest.mark.parametrize("name", ["smooth_topk", "smooth_topk_sum"])
@rejected_values(0, "seed")
def test_a_generator_is_a_generator(name: str, value: Any) -> None:
    with rejects("generator", "a torch.Generator", repr(value)):
        OPERATORS_OF_DIM[name](generator=value)
    with rejects("generator", "a torch.Generator", repr(value)):
        F.noised_topk_hinge(SCORES, TARGET, 2, generator=value)
