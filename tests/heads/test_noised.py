"""A head is its layer followed by its loss: same values, same gradients, but no scores in memory."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shortlist as sl
from shortlist.heads import noised as noised_head
from shortlist.heads.noised import NoisedLoss
from shortlist.heads.sparse_linear import selected_scores
from shortlist.ops import lazy_noise as _lazy
from shortlist.ops import smoothing
from shortlist.program.bench.timing import waits_are_errors
from tests.support.drawing import normal
from tests.support.memory import LargestTensor

N, D, L, B = 6, 4, 7, 3
TARGET = torch.tensor([0, 6, 2, 2, 5, 3])

every_loss = pytest.mark.parametrize("imbalanced", [False, True], ids=["balanced", "imbalanced"])
KINDS: dict[str, dict[str, Any]] = {"linear": {}, "without bias": {"bias": False}, "cosine": {"cosine": True}}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_half_type = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def loss_of(imbalanced: bool, k: int = 2, *, num_classes: int = L, **settings: Any) -> NoisedLoss:
    settings.setdefault("epsilon", 0.5)
    if imbalanced:
        counts = torch.arange(num_classes) ** 2 + 1
        return sl.ImbalancedNoisedTopKHinge(counts, k, max_margin=0.3, scale=4.0, **settings)
    return sl.NoisedTopKHinge(k, **settings)


def head_and_layer(
    loss: NoisedLoss, dtype: torch.dtype = torch.float64, *, num_classes: int = L, **kind: Any
) -> tuple[sl.NoisedTopKHead, nn.Module]:
    """A head, and the plain layer with the same weights."""
    head = sl.NoisedTopKHead(D, num_classes, loss, dtype=dtype, **kind)
    layer: nn.Module = sl.CosineLinear(D, num_classes, dtype=dtype)
    if not head.cosine:
        layer = nn.Linear(D, num_classes, bias=head.bias is not None, dtype=dtype)
    layer.load_state_dict(head.state_dict())
    return head, layer


def value_and_grads(
    model: nn.Module, loss: Callable[..., Tensor], features: Tensor, upstream: Tensor | None = None
) -> list[Tensor]:
    """The loss of the features, and its gradient in them and in all parameters, by name."""
    features = features.detach().requires_grad_()
    model.zero_grad()
    value = loss(features)
    value.backward(torch.ones_like(value) if upstream is None else upstream)
    grads = [features.grad, *(parameter.grad for _, parameter in sorted(model.named_parameters()))]
    assert all(grad is not None for grad in grads)
    return [value.detach(), *(grad.to_dense() for grad in grads if grad is not None)]


def followed_by(loss: NoisedLoss, layer: nn.Module, target: Tensor, noise: Tensor | None) -> Callable[..., Tensor]:
    """The plain way: all scores, then the loss."""
    return lambda features: loss(layer(features), target, noise=noise)


def in_chunks_of(classes: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noised_head.NoisedHead, "scores_at_once", classes * rows)
    monkeypatch.setattr(smoothing, "_PERTURBED_AT_ONCE", classes * rows)  # one draw after the other


WEIGHT = torch.linspace(0.5, 2, L, dtype=torch.float64)
# Every reduction with every way to tell rows apart; and every K, hard and smooth.
SETTINGS: list[dict[str, Any]] = [
    {"reduction": reduction, **shared}
    for reduction in ("none", "mean", "sum")
    for shared in ({}, {"weight": WEIGHT}, {"ignore_index": 2}, {"weight": WEIGHT, "ignore_index": 2})
] + [{"k": k, "epsilon": epsilon} for k in range(1, L) for epsilon in (0.0, 0.5)]


@every_loss
@every_kind
@pytest.mark.parametrize("classes_at_once", [1, 3, L])
def test_value_and_gradients_are_those_of_layer_and_loss(
    imbalanced: bool, kind: dict[str, Any], classes_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks_of(classes_at_once, N, monkeypatch)
    features, noise, upstream = normal(N, D), normal(N, L, B, seed=1), normal(N, seed=2)
    for settings in SETTINGS:
        loss = loss_of(imbalanced, **settings)
        head, layer = head_and_layer(loss, **kind)
        along = upstream if loss.reduction == "none" else None
        ours = partial(head, target=TARGET, noise=noise)
        got = value_and_grads(head, ours, features, along)
        want = value_and_grads(layer, followed_by(loss, layer, TARGET, noise), features, along)
        torch.testing.assert_close(got, want, msg=partial("{} with {}".format, settings))
        if classes_at_once == L:  # the chunks of forward are nothing to backward
            head.sparse_grad = True
            torch.testing.assert_close(value_and_grads(head, ours, features, along), got)


@every_kind
@pytest.mark.parametrize("sparse_grad", [False, True], ids=["dense", "sparse"])
def test_chosen_scores_have_the_gradient_of_their_values(kind: dict[str, Any], sparse_grad: bool) -> None:
    features, weight, bias = (normal(*shape, seed=3).requires_grad_() for shape in ((5, D), (L, D), (L,)))
    classes = torch.tensor([[0, 0, 3], [6, 1, 3], [3, 3, 3], [2, 5, 0], [1, 2, 6]])
    cosine = kind.get("cosine", False)
    arguments = (features, weight) if cosine or "bias" in kind else (features, weight, bias)

    def scores(features: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return selected_scores(features, weight, bias, classes, cosine=cosine, sparse_grad=sparse_grad)

    layer = scores(*arguments)
    plain = features @ (nn.functional.normalize(weight) if cosine else weight).T
    plain = plain + bias if len(arguments) == 3 else plain
    torch.testing.assert_close(layer, plain.gather(1, classes))
    if sparse_grad:  # gradcheck takes no sparse gradients of dense tensors
        got, want = (torch.autograd.grad(s.square().sum(), arguments[1:]) for s in (layer, plain.gather(1, classes)))
        torch.testing.assert_close([g.to_dense() for g in got], list(want))
    else:
        assert torch.autograd.gradcheck(scores, arguments)


@pytest.mark.parametrize("size", [0.0, 1e-160, 1e-13, 1e200])
@pytest.mark.parametrize("sparse_grad", [False, True], ids=["dense", "sparse"])
def test_a_class_of_any_size_has_the_gradient_of_the_plain_layer(size: float, sparse_grad: bool) -> None:
    head, layer = head_and_layer(loss_of(False), cosine=True, sparse_grad=sparse_grad)
    for module in (head, layer):
        module.get_parameter("weight").data[2] *= size
    features, noise = normal(N, D), normal(N, L, B, seed=1)
    features[0], features[1] = 0, 1e-200 * features[1]
    got = value_and_grads(head, partial(head, target=TARGET, noise=noise), features)
    torch.testing.assert_close(got, value_and_grads(layer, followed_by(head.loss, layer, TARGET, noise), features))


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


# The last are so many that most of the noise need not be drawn.
@pytest.mark.parametrize(("num_classes", "classes_at_once"), [(L, 2), (L, L), (600, 256)])
def test_fresh_draws_have_the_right_mean(
    num_classes: int, classes_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks_of(classes_at_once, 2, monkeypatch)
    draws = 4000
    head, layer = head_and_layer(loss_of(False, n_samples=draws, reduction="none"), num_classes=num_classes)
    features, target = normal(2, D), torch.tensor([6, 0])
    monkeypatch.setattr(_lazy, "_FEWEST_CELLS", 1)
    rivals, *_ = head._perturbed_at_rank(features, None, torch.Generator().manual_seed(0))
    error = rivals.std(1) / math.sqrt(draws)
    expected = sl.exact_topk(layer(features), 3, epsilon=0.5)
    assert ((rivals.mean(1) - expected).abs() < 5 * error).all()
    same = head(features, target, generator=torch.Generator().manual_seed(0))
    own = layer(features).gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(same, (1 + rivals.mean(1) - own).relu())


def test_draws_are_fresh_by_default_and_repeat_by_generator() -> None:
    head, _ = head_and_layer(loss_of(False))
    features = normal(N, D)
    assert head(features, TARGET) != head(features, TARGET)
    first, again = (head(features, TARGET, generator=torch.Generator().manual_seed(5)) for _ in range(2))
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
def test_nothing_as_large_as_the_scores_is_ever_made(
    kind: dict[str, Any], sparse_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, num_classes = 32, 6000
    in_chunks_of(512, rows, monkeypatch)
    head = sl.NoisedTopKHead(D, num_classes, sl.NoisedTopKHinge(2), sparse_grad=sparse_grad, **kind)
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
@pytest.mark.parametrize("draws", [B, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_ignored_row_counts_for_nothing_whatever_it_holds(
    imbalanced: bool, kind: dict[str, Any], draws: float, bad: float
) -> None:
    target = torch.where(torch.arange(N) == 1, -100, TARGET)
    head, _ = head_and_layer(loss_of(imbalanced, eval_n_samples=draws), **kind)
    noise = None if draws == math.inf else normal(N, L, B, seed=1)
    clean = normal(N, D)
    spoilt = clean.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(bad, dtype=torch.float64))
    got, want = (value_and_grads(head.eval(), partial(head, target=target, noise=noise), x) for x in (spoilt, clean))
    torch.testing.assert_close(got, want)
    assert (got[1][1] == 0).all()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("cosine", [False, True], ids=["linear", "cosine"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_train(cosine: bool, optimizer: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    head = sl.NoisedTopKHead(8, 50, sl.NoisedTopKHinge(2, epsilon=0.05), cosine=cosine, sparse_grad=True)
    features, target = torch.randn(50, 8), torch.arange(50)
    steps = optimizer(head.parameters(), lr=0.1 if optimizer is torch.optim.SparseAdam else 2.0)  # type: ignore[call-arg]
    losses = []
    for _ in range(20):
        steps.zero_grad()
        loss = head(features, target)
        loss.backward()
        assert all(p.grad is not None and p.grad.is_sparse for p in head.parameters())
        steps.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


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


@every_half_type
@pytest.mark.parametrize("cosine", [False, True], ids=["linear", "cosine"])
@pytest.mark.parametrize("sparse_grad", [False, True], ids=["dense", "sparse"])
def test_gradients_of_half_types_are_rounded_once(dtype: torch.dtype, cosine: bool, sparse_grad: bool) -> None:
    # Thousands of terms of one sign in each row: added one by one in a half type they would stop growing.
    rows = 6000
    features = normal(rows, D, dtype=dtype).abs()
    weight, classes = normal(3, D, seed=1, dtype=dtype), torch.arange(2 * rows).view(rows, 2) % 2
    grads = []
    for kind in (dtype, torch.float64):
        leaves = [each.detach().to(kind).clone().requires_grad_() for each in (weight, weight[:, 0])]
        scores = selected_scores(
            features.to(kind), leaves[0], leaves[1], classes, cosine=cosine, sparse_grad=sparse_grad
        )
        found = torch.autograd.grad(scores, leaves, torch.full_like(scores, 0.01))
        grads.append([each.to_dense().double() if sparse_grad else each.double() for each in found])
    for got, want in zip(*grads, strict=True):
        assert got[2].eq(0).all()
        scale = want.abs().max().item()
        torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps * scale)


@every_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("classes_at_once", [2, L])
def test_bad_features_spoil_their_row_and_no_other(
    kind: dict[str, Any], bad: float, classes_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks_of(classes_at_once, N, monkeypatch)
    head, _ = head_and_layer(loss_of(False, reduction="none"), **kind)
    features, noise = normal(N, D), normal(N, L, B, seed=1)
    spoilt = features.clone()
    spoilt[2, 1] = bad
    got, clean = head(spoilt, TARGET, noise=noise), head(features, TARGET, noise=noise)
    others = torch.arange(N) != 2
    assert not got[2].isfinite()
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_class_spoils_every_row(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks_of(2, N, monkeypatch)
    for column in range(L):
        head, _ = head_and_layer(loss_of(False, reduction="none"))
        assert head.bias is not None
        head.bias.data[column] = bad
        assert not head(normal(N, D), TARGET, noise=normal(N, L, B)).isfinite().any()


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


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_it_is_what_it_is_on_the_cpu(
    kind: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks_of(3, N, monkeypatch)
    head, _ = head_and_layer(loss_of(True), dtype, **kind)
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
