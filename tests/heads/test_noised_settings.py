"""The state of a head, its copy of the loss, and its error messages."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shortlist as sl
from tests.support.drawing import normal
from tests.support.heads import (
    TARGET,
    B,
    D,
    L,
    N,
    every_kind,
    head_and_layer,
    loss_of,
)


@every_kind
def test_the_state_is_that_of_the_plain_layer(kind: dict[str, Any]) -> None:
    loss = loss_of(True, weight=torch.ones(L))
    torch.manual_seed(0)
    head, layer = head_and_layer(loss, **kind)
    torch.manual_seed(0)
    again = (
        sl.CosineLinear(D, L, dtype=torch.float64)
        if head.cosine
        else nn.Linear(D, L, head.bias is not None, dtype=torch.float64)
    )
    torch.testing.assert_close(head.state_dict(), again.state_dict(), msg="the same seed draws the same weights")
    assert set(head.state_dict()) == {name for name, _ in head.named_parameters()}
    head.load_state_dict(layer.state_dict())
    features = normal(N, D)
    assert torch.equal(head.scores(features), layer(features))
    assert set(loss.state_dict()) == {"weight", "class_counts"}, "the caller's loss is left as it was"


def test_a_head_shows_its_settings_and_those_of_its_loss() -> None:
    head, _ = head_and_layer(loss_of(True, weight=torch.ones(L)))
    assert "k=2" in repr(head)
    assert "num_classes=7" in repr(head)


def test_the_loss_of_a_head_is_left_as_it_is_by_changes_of_dtype_and_loading() -> None:
    head, _ = head_and_layer(loss_of(True, weight=torch.ones(L)))
    head.loss.weight = torch.linspace(1, 9, L)  # as for re-weighting in the middle of training
    head.half().load_state_dict(head.state_dict())
    assert torch.equal(head.loss.weight, torch.linspace(1, 9, L))
    head.loss.weight = None
    head.load_state_dict(head.state_dict())
    assert head.loss.weight is None


def build_on_meta(loss: Any) -> sl.NoisedTopKHead:
    return sl.NoisedTopKHead(D, L, loss, device="meta")


def build_within_meta(loss: Any) -> sl.NoisedTopKHead:
    with torch.device("meta"):
        counts, settings = loss.class_counts.tolist(), {"weight": loss.weight, "epsilon": loss.epsilon}
        own = sl.ImbalancedNoisedTopKHinge(counts, loss.k, n_samples=loss.n_samples, **settings)
        return sl.NoisedTopKHead(D, L, own)


@pytest.mark.parametrize("build", [build_on_meta, build_within_meta, partial(sl.NoisedTopKHead, D, L)])
@pytest.mark.parametrize("fill", ["load_state_dict", "assign", "reset_parameters"])
def test_a_head_that_gets_its_memory_later_has_its_loss_all_the_same(
    build: Callable[[Any], sl.NoisedTopKHead], fill: str
) -> None:
    loss = sl.ImbalancedNoisedTopKHinge(torch.arange(1, L + 1), 2, epsilon=0.3, n_samples=B, weight=torch.rand(L))
    head = build(loss)
    state = sl.NoisedTopKHead(D, L, loss).state_dict()
    if fill == "assign":
        head.load_state_dict(state, assign=True)
    elif fill == "load_state_dict":
        head.to_empty(device="cpu").load_state_dict(state)
    else:
        head.to_empty(device="cpu").reset_parameters()
    features, noise = normal(N, D).float(), normal(N, L, B).float()
    want = loss(head.scores(features), TARGET, noise=noise)
    torch.testing.assert_close(head(features, TARGET, noise=noise), want)


def test_a_head_takes_its_loss_to_where_it_is() -> None:
    there = sl.NoisedTopKHead(D, L, loss_of(True, weight=torch.ones(L)), device="meta")
    assert there.loss.weight is not None
    assert not there.loss.weight.is_meta, "there it would have no values"
    for classes in (L - 1, L + 1):  # of the loss of a head, too
        with pytest.raises(sl.ShortlistError, match="must have one entry per class"):
            sl.NoisedTopKHead(D, classes, there.loss)
    with pytest.raises(sl.ShortlistError, match="weight of the loss must have values"):
        sl.NoisedTopKHead(D, L, loss_of(False, weight=torch.ones(L, device="meta")))


GOOD = {"features": torch.zeros(N, D), "target": TARGET}


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"features must be a floating-point tensor.*, got torch.int64", {"features": torch.zeros(N, D).long()}),
        (r"features must have shape \(\.\.\., 4\), got \(6, 5\)", {"features": torch.zeros(N, 5)}),
        (
            r"features must be torch.float32 like the weight, got torch.float64",
            {"features": torch.zeros(N, D).double()},
        ),
        (r"int64 labels .*, got torch.float32", {"target": torch.zeros(N, L)}),
        (r"int64 labels .*, got list", {"target": [0] * N}),
        (r"target must have shape \(6,\) for features of shape \(6, 4\), got \(3,\)", {"target": TARGET[:3]}),
        (r"target must be in \[0, 6\] or be ignore_index \(-100\), got 7", {"target": torch.full((N,), 7)}),
        (r"noise must have shape \(6, 7, B\) with B >= 1 draws, got \(6, 7\)", {"noise": torch.zeros(N, L)}),
        (r"noise and generator exclude", {"noise": torch.zeros(N, L, B), "generator": torch.Generator()}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_calls_are_told_why(message: str, arguments: dict[str, Any]) -> None:
    head, _ = head_and_layer(loss_of(False), torch.float32)
    with pytest.raises(sl.ShortlistError, match=message):
        head(**(GOOD | arguments))


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("n_samples must be finite", lambda: sl.NoisedTopKHead(D, L, sl.NoisedTopKHinge(2, n_samples=math.inf))),
        ("loss must be a NoisedTopKHinge or an", lambda: sl.NoisedTopKHead(D, L, sl.TopKHinge(2))),  # type: ignore[arg-type]
        (r"k must be in \[1, 6\] for 7 classes, got 7", lambda: sl.NoisedTopKHead(D, L, sl.NoisedTopKHinge(7))),
        (r"k must be one number .*, got \(1, 2\)", lambda: sl.NoisedTopKHead(D, L, sl.NoisedTopKHinge((1, 2)))),
        (
            "relative must be False in a head",
            lambda: sl.ClassParallelNoisedTopKHead(D, L, sl.NoisedTopKHinge(2, relative=True)),
        ),
        (
            r"class_counts must have one entry per class, shape \(8,\), got \(7,\)",
            lambda: sl.NoisedTopKHead(D, 8, loss_of(True)),
        ),
        (
            r"weight must have one entry per class, shape \(7,\)",
            lambda: sl.NoisedTopKHead(D, L, loss_of(False, weight=torch.ones(8))),
        ),
        ("in_features must be at least 1, got 0", lambda: sl.NoisedTopKHead(0, L, loss_of(False))),
        ("in_features must be at least 1, got 0", lambda: sl.CosineLinear(0, L)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_settings_are_told_why(message: str, make: Callable[[], object]) -> None:
    with pytest.raises(sl.ShortlistError, match=message):
        make()
