"""A head is its layer followed by its loss: same values, same gradients, but no scores in memory."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch

import shortlist as sl
from shortlist.program.bench.timing import waits_are_errors
from tests.support.drawing import normal, seeded
from tests.support.heads import (
    TARGET,
    WEIGHT,
    B,
    D,
    L,
    N,
    every_half_type,
    every_kind,
    every_loss,
    followed_by,
    head_and_layer,
    loss_of,
    value_and_grads,
)
from tests.support.memory import LargestTensor

# Every reduction with and without weights and ignored rows; and every K, hard and smooth.
SETTINGS: list[dict[str, Any]] = [
    {"reduction": reduction, **shared}
    for reduction in ("none", "mean", "sum")
    for shared in ({}, {"weight": WEIGHT}, {"ignore_index": 2}, {"weight": WEIGHT, "ignore_index": 2})
] + [{"k": k, "epsilon": epsilon} for k in range(1, L) for epsilon in (0.0, 0.5)]


@every_loss
@every_kind
@pytest.mark.parametrize("classes_at_once", [1, 3, L])
def test_value_and_gradients_are_those_of_layer_and_loss(
    imbalanced: bool, kind: dict[str, Any], classes_at_once: int
) -> None:
    features, noise, upstream = normal(N, D), normal(N, L, B, seed=1), normal(N, seed=2)
    for settings in SETTINGS:
        loss = loss_of(imbalanced, **settings)
        head, layer = head_and_layer(loss, classes_at_once=classes_at_once, **kind)
        along = upstream if loss.reduction == "none" else None
        ours = partial(head, target=TARGET, noise=noise)
        got = value_and_grads(head, ours, features, along)
        want = value_and_grads(layer, followed_by(loss, layer, TARGET, noise), features, along)
        torch.testing.assert_close(got, want, msg=partial("{} with {}".format, settings))
        if classes_at_once == L:  # the chunks of forward are nothing to backward
            head.sparse_grad = True
            torch.testing.assert_close(value_and_grads(head, ours, features, along), got)


@pytest.mark.parametrize("kind", [sl.NoisedTopKHead, sl.ClassParallelNoisedTopKHead])
@pytest.mark.parametrize("margin", [0.0, 0.3, 5.0])
def test_the_margin_is_that_of_the_loss(kind: type[sl.NoisedTopKHead], margin: float) -> None:
    features, noise = normal(N, D), normal(N, L, B, seed=1)
    loss = sl.NoisedTopKHinge(2, epsilon=0.5, margin=margin)
    head = kind(D, L, loss, dtype=torch.float64)
    torch.testing.assert_close(head(features, TARGET, noise=noise), loss(head.scores(features), TARGET, noise=noise))


@pytest.mark.parametrize("extra", [(), (5,), (2, 3), (0,)], ids=str)
def test_leading_dimensions_are_rows(extra: tuple[int, ...]) -> None:
    head, _ = head_and_layer(loss_of(True, reduction="none"))
    features, noise = normal(*extra, D), normal(*extra, L, B, seed=1)
    target = torch.randint(L, extra)
    got = head(features, target, noise=noise)
    flat = head(features.reshape(-1, D), target.reshape(-1), noise=noise.reshape(-1, L, B))
    assert got.shape == extra
    assert torch.equal(got.reshape(-1), flat)


def test_an_empty_batch_has_the_loss_and_gradients_of_layer_and_loss() -> None:
    for reduction in ("mean", "sum"):
        head, layer = head_and_layer(loss_of(False, reduction=reduction))
        features, target = torch.zeros(0, D, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        got = value_and_grads(head, partial(head, target=target), features)
        want = value_and_grads(layer, followed_by(head.loss, layer, target, None), features)
        torch.testing.assert_close(got, want, equal_nan=True)


def test_uint8_labels_are_labels() -> None:
    head, _ = head_and_layer(loss_of(True))
    features, noise = normal(N, D), normal(N, L, B)
    assert torch.equal(head(features, TARGET.byte(), noise=noise), head(features, TARGET, noise=noise))


@pytest.mark.parametrize(("num_classes", "classes_at_once"), [(L, 2), (L, L), (600, 256)])
def test_fresh_draws_have_the_right_mean(num_classes: int, classes_at_once: int) -> None:
    # In chunks of 256 classes, so many rows that most of the noise need not be drawn.
    rows, n_samples = 20, 1024
    loss = loss_of(False, n_samples=n_samples, reduction="none")
    head, layer = head_and_layer(loss, num_classes=num_classes, classes_at_once=classes_at_once, rows=rows)
    features, target = normal(rows, D), torch.arange(rows) % L
    smoothed, *_ = head._perturbed_at_rank(features, None, seeded(0))
    error = smoothed.std(1) / math.sqrt(n_samples)
    expected = sl.exact_topk(layer(features), 3, epsilon=0.5)
    assert ((smoothed.mean(1) - expected).abs() < 5 * error).all()
    same = head(features, target, generator=seeded(0))
    own = layer(features).gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(same, (1 + smoothed.mean(1) - own).relu())


def test_draws_are_fresh_by_default_and_repeat_by_generator() -> None:
    head, _ = head_and_layer(loss_of(False))
    features = normal(N, D)
    assert head(features, TARGET) != head(features, TARGET)
    first, again = (head(features, TARGET, generator=seeded(5)) for _ in range(2))
    assert first == again


@every_loss
def test_evaluation_may_take_the_expectation(imbalanced: bool) -> None:
    head, layer = head_and_layer(loss_of(imbalanced, eval_n_samples=math.inf))
    head.eval()
    features = normal(N, D)
    torch.testing.assert_close(head(features, TARGET), head.loss(layer(features), TARGET))
    bad = features.index_put((torch.tensor(1),), torch.tensor(math.inf, dtype=torch.float64))
    assert not head(bad, TARGET).isfinite()
    assert head(features, TARGET, noise=normal(N, L, B)) == head.train()(features, TARGET, noise=normal(N, L, B))


@every_kind
@pytest.mark.parametrize("sparse_grad", [False, True], ids=["dense", "sparse"])
def test_nothing_as_large_as_the_scores_is_ever_made(kind: dict[str, Any], sparse_grad: bool) -> None:
    rows, num_classes = 32, 12_000
    head = sl.NoisedTopKHead(D, num_classes, sl.NoisedTopKHinge(2), sparse_grad=sparse_grad, **kind)
    head.scores_at_once = 512 * rows
    features, target = torch.randn(rows, D, requires_grad=True), torch.randint(num_classes, (rows,))
    with LargestTensor() as largest:
        head(features, target).backward()
    assert largest.nbytes < rows * num_classes * head.weight.element_size() / 4


def test_gradients_accumulate_and_parameters_may_be_frozen() -> None:
    head, _ = head_and_layer(loss_of(False, reduction="sum"))
    features, noise = normal(N, D), normal(N, L, B)
    whole = value_and_grads(head, partial(head, target=TARGET, noise=noise), features)
    head.zero_grad()
    for part in (slice(0, 2), slice(2, N)):
        head(features[part], TARGET[part], noise=noise[part]).backward()
    torch.testing.assert_close([head.bias.grad, head.weight.grad], whole[2:])  # type: ignore[union-attr]
    head.requires_grad_(False)
    leaf = features.clone().requires_grad_()
    head(leaf, TARGET, noise=noise).backward()
    torch.testing.assert_close(leaf.grad, whole[1])


def test_an_ignored_row_touches_no_class_but_those_of_its_draws() -> None:
    loss = sl.NoisedTopKHinge(1, epsilon=0.0)
    head = sl.NoisedTopKHead(D, 100, loss, bias=False, sparse_grad=True)
    features, target = normal(3, D).float(), torch.tensor([50, loss.ignore_index, 70])
    head(features, target).backward()
    assert head.weight.grad is not None
    second_best = head.scores(features[::2]).topk(2).indices[:, 1].tolist()
    of_others = {50, 70, *second_best}
    touched = set(head.weight.grad.coalesce().indices()[0].tolist())
    assert touched >= of_others
    assert len(touched - of_others) <= 1, "its one draw"


@every_loss
@every_kind
@pytest.mark.parametrize("n_samples", [B, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_ignored_row_counts_for_nothing_whatever_it_holds(
    imbalanced: bool, kind: dict[str, Any], n_samples: float, bad: float
) -> None:
    target = torch.where(torch.arange(N) == 1, -100, TARGET)
    head, _ = head_and_layer(loss_of(imbalanced, eval_n_samples=n_samples), **kind)
    noise = None if n_samples == math.inf else normal(N, L, B, seed=1)
    clean = normal(N, D)
    spoilt = clean.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(bad, dtype=torch.float64))
    got, want = (value_and_grads(head.eval(), partial(head, target=target, noise=noise), x) for x in (spoilt, clean))
    torch.testing.assert_close(got, want)
    assert (got[1][1] == 0).all()


@every_kind
@every_loss
def test_under_autocast_it_is_layer_and_loss_under_autocast(kind: dict[str, Any], imbalanced: bool) -> None:
    head, layer = head_and_layer(loss_of(imbalanced), torch.float32, **kind)
    features, noise = normal(N, D, dtype=torch.float32), normal(N, L, B, dtype=torch.float32)
    for given in (features, features.bfloat16()):  # the layer before may have run under autocast too
        with torch.autocast("cpu", torch.bfloat16):
            got = value_and_grads(head, partial(head, target=TARGET, noise=noise), given)
            want = value_and_grads(layer, followed_by(head.loss, layer, TARGET, noise), given)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
        assert got[0].dtype == torch.float32


@every_kind
@every_half_type
def test_half_types_stay_as_close_to_the_truth_as_layer_and_loss(kind: dict[str, Any], dtype: torch.dtype) -> None:
    rows = 64  # many rows meet in few classes
    features, target = normal(rows, D, dtype=dtype), torch.arange(rows) % L
    noise = normal(rows, L, B, seed=1, dtype=dtype)
    head, layer = head_and_layer(loss_of(False), dtype, **kind)
    got = value_and_grads(head, partial(head, target=target, noise=noise), features)
    plain = value_and_grads(layer, followed_by(head.loss, layer, target, noise), features)
    truth = value_and_grads(layer.double(), followed_by(head.loss, layer, target, noise.double()), features.double())
    for ours, theirs, exact in zip(got, plain, truth, strict=True):
        assert ours.dtype == dtype
        allowed = 1.5 * (theirs.double() - exact).abs().max() + 2 * torch.finfo(dtype).eps * exact.abs().max()
        assert (ours.double() - exact).abs().max() <= allowed


@every_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("classes_at_once", [2, L])
def test_bad_features_spoil_their_row_and_no_other(kind: dict[str, Any], bad: float, classes_at_once: int) -> None:
    head, _ = head_and_layer(loss_of(False, reduction="none"), classes_at_once=classes_at_once, **kind)
    features, noise = normal(N, D), normal(N, L, B, seed=1)
    spoilt = features.clone()
    spoilt[2, 1] = bad
    got, clean = head(spoilt, TARGET, noise=noise), head(features, TARGET, noise=noise)
    others = torch.arange(N) != 2
    assert not got[2].isfinite()
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_class_spoils_every_row(bad: float) -> None:
    for column in range(L):
        head, _ = head_and_layer(loss_of(False, reduction="none"), classes_at_once=2)
        assert head.bias is not None
        head.bias.data[column] = bad
        assert not head(normal(N, D), TARGET, noise=normal(N, L, B)).isfinite().any()


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_it_is_what_it_is_on_the_cpu(kind: dict[str, Any], dtype: torch.dtype) -> None:
    head, _ = head_and_layer(loss_of(True), dtype, classes_at_once=3, **kind)
    features, noise = normal(N, D, dtype=dtype), normal(N, L, B, dtype=torch.float32)
    twin = copy.deepcopy(head).cuda()  # moving the head itself would move the gradients that are compared
    here = value_and_grads(head, partial(head, target=TARGET, noise=noise), features)
    there = value_and_grads(twin, partial(twin, target=TARGET.cuda(), noise=noise.cuda()), features.cuda())
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close([tensor.cpu() for tensor in there], here, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("sparse_grad", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_waits_for_the_gpu(kind: dict[str, Any], sparse_grad: bool, dtype: torch.dtype) -> None:
    head, _ = head_and_layer(loss_of(True, weight=WEIGHT), dtype, **kind)
    head.sparse_grad = sparse_grad
    features, target = normal(N, D, dtype=dtype).cuda().requires_grad_(), TARGET.cuda()
    head.cuda()
    with waits_are_errors():
        head(features, target).backward()
    assert features.grad is not None
