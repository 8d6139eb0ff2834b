"""The losses inside the rest of PyTorch: compiled, vmapped, autocast, spread over processes, saved and loaded."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import shortlist as sl
from shortlist import functional as F
from tests.support.drawing import normal, value_and_grad
from tests.support.loss_cases import LOSSES, LossCase, every_differentiable_loss, every_loss, noise_for
from tests.support.processes import run_ranks

N, L = 5, 7
TARGET = torch.tensor([0, 6, 3, 3, 1])
PROBABILITIES = normal(N, L, seed=3).softmax(-1)
NOISE = normal(N, L, 3, seed=1)

labels_and_probabilities = pytest.mark.parametrize("target", [TARGET, PROBABILITIES], ids=["labels", "probabilities"])
every_noised_loss = pytest.mark.parametrize(
    "loss", [case for case in LOSSES if case.noised], ids=lambda case: case.name
)


def given_noise(loss: LossCase, scores: Tensor) -> dict[str, Tensor]:
    return loss.given(noise_for(scores))


def assert_same_value_and_gradient(
    loss: LossCase, got: Callable[[Tensor], Tensor], want: Callable[[Tensor], Tensor], scores: Tensor
) -> None:
    if loss.has_gradient:
        torch.testing.assert_close(value_and_grad(got, scores), value_and_grad(want, scores))
    else:
        torch.testing.assert_close(got(scores), want(scores))


# torch.compile


@pytest.mark.usefixtures("fresh_compiler")
@every_loss
@labels_and_probabilities
def test_every_loss_compiles_into_one_graph_with_the_same_value_and_gradient(loss: LossCase, target: Tensor) -> None:
    scores, module = normal(N, L), loss.module(L)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    noise = given_noise(loss, scores)
    assert_same_value_and_gradient(
        loss, lambda s: compiled(s, target, **noise), lambda s: module(s, target, **noise), scores
    )


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "function",
    [
        lambda s: F.noised_topk_hinge(s, TARGET, 2, epsilon=0.5, noise=NOISE),
        lambda s: F.smooth_topk_hinge(s, TARGET, 2, tau=0.5),
        lambda s: sl.exact_topk(s, 2, epsilon=0.5),
    ],
    ids=["noised_topk_hinge", "smooth_topk_hinge", "exact_topk"],
)
def test_generated_code_has_the_same_value_and_gradient(function: Callable[[Tensor], Tensor]) -> None:
    compiled = torch.compile(function, fullgraph=True)
    torch.testing.assert_close(value_and_grad(compiled, normal(N, L)), value_and_grad(function, normal(N, L)))


@pytest.mark.usefixtures("fresh_compiler")
@every_noised_loss
def test_a_compiled_loss_draws_fresh_noise_at_every_call(loss: LossCase) -> None:
    compiled = torch.compile(loss.module(L), fullgraph=True, backend="aot_eager")
    first, second = (value_and_grad(lambda s: compiled(s, TARGET), normal(N, L)) for _ in range(2))
    assert first[0].isfinite()
    assert first[0] != second[0]


@pytest.mark.usefixtures("fresh_compiler")
@every_loss
@labels_and_probabilities
def test_an_exported_loss_serves_every_batch_size(loss: LossCase, target: Tensor) -> None:
    module, scores, batch = loss.module(L), normal(N, L), {0: torch.export.Dim("batch", min=2, max=64)}
    noise = given_noise(loss, scores)
    shapes = {"scores": batch, "target": batch} | dict.fromkeys(noise, batch)
    exported = torch.export.export(module, (scores, target), noise, dynamic_shapes=shapes).module()
    scores, target = normal(3 * N, L, seed=5), target.repeat(3, *[1] * (target.dim() - 1))
    noise = given_noise(loss, scores)
    torch.testing.assert_close(exported(scores, target, **noise), module(scores, target, **noise))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("batch", [torch.export.Dim("batch"), torch.export.Dim.DYNAMIC], ids=["named", "dynamic"])
def test_an_exported_loss_of_many_classes_has_no_largest_batch(batch: Any) -> None:
    module = sl.NoisedTopKHinge(3, epsilon=1e-6)
    scores, target = normal(4, 1000), torch.arange(4)
    shapes = ({0: batch}, {0: batch})
    exported = torch.export.export(module, (scores, target), dynamic_shapes=shapes).module()
    scores, target = normal(200, 1000, seed=5), torch.arange(200)
    torch.testing.assert_close(exported(scores, target), module(scores, target), rtol=1e-4, atol=1e-4)


@every_loss
@labels_and_probabilities
def test_fake_tensors_have_a_loss_of_the_same_kind(loss: LossCase, target: Tensor) -> None:
    """As tools that trace a model, or tell its memory, hand them in."""
    scores = normal(N, L)
    want = loss.module(L)(scores, target)
    with FakeTensorMode() as mode:
        got = loss.module(L)(mode.from_tensor(scores), mode.from_tensor(target))
    assert isinstance(got, FakeTensor)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)


SETTLED_AFTER = {True: 1, None: 2}
"""Batch sizes until ``torch.compile(dynamic=...)`` knows that the size varies."""


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "found dynamic"])
@pytest.mark.parametrize("name", ["topk_hinge", "focal", "noised_topk_hinge"])
def test_one_graph_serves_every_batch_size(name: str, dynamic: bool | None) -> None:
    loss = next(case for case in LOSSES if case.name == name)
    module = loss.module(L)
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for count, size in enumerate([5, 8, 11, 3]):
        scores, target = normal(size, L), torch.arange(size) % L
        noise = given_noise(loss, scores)
        with torch.compiler.set_stance("default" if count < SETTLED_AFTER[dynamic] else "fail_on_recompile"):
            got = compiled(scores, target, **noise)
        torch.testing.assert_close(got, module(scores, target, **noise))


@pytest.mark.usefixtures("fresh_compiler")
@every_noised_loss
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "found dynamic"])
def test_fresh_noise_fits_every_batch_size(loss: LossCase, dynamic: bool | None) -> None:
    compiled = torch.compile(loss.module(L), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for size in (5, 8, 3):
        assert compiled(normal(size, L), torch.arange(size) % L).isfinite()


# torch.func


def over_rows(loss: LossCase) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The loss of one row as a function of tensors alone, and what to give it besides scores and label."""
    if loss.noised:
        return lambda s, y, noise: loss.function(s, y, noise=noise), (noise_for(normal(N, L)),)
    return loss.function, ()


@every_loss
@labels_and_probabilities
def test_vmap_over_rows_is_the_batch(loss: LossCase, target: Tensor) -> None:
    row_loss, noise = over_rows(loss)
    got = torch.func.vmap(row_loss)(normal(N, L), target, *noise)
    torch.testing.assert_close(got, loss(normal(N, L), target, reduction="none"))


@every_differentiable_loss
@labels_and_probabilities
def test_functional_gradients_are_those_of_autograd(loss: LossCase, target: Tensor) -> None:
    scores = normal(N, L)
    noise = given_noise(loss, scores)
    got = torch.func.grad(lambda s: loss.function(s, target, **noise))(scores)
    torch.testing.assert_close(got, value_and_grad(lambda s: loss(s, target), scores)[1])


@every_differentiable_loss
@labels_and_probabilities
def test_gradients_by_example_are_those_of_the_sum(loss: LossCase, target: Tensor) -> None:
    row_loss, noise = over_rows(loss)
    got = torch.func.vmap(torch.func.grad(row_loss))(normal(N, L), target, *noise)
    torch.testing.assert_close(got, value_and_grad(lambda s: loss(s, target, reduction="sum"), normal(N, L))[1])


@every_noised_loss
def test_vmap_can_draw_different_noise_for_equal_rows(loss: LossCase) -> None:
    # The label with the lowest score: the hinge is active whatever the noise.
    scores = normal(1, L).expand(N, L)
    target = scores.argmin(-1)
    different = torch.func.vmap(loss.function, randomness="different")(scores, target)
    same = torch.func.vmap(loss.function, randomness="same")(scores, target)
    assert different.isfinite().all()
    assert len(different.unique()) == N
    assert len(same.unique()) == 1


# Precision


@every_loss
@labels_and_probabilities
def test_under_autocast_the_loss_is_float32(loss: LossCase, target: Tensor) -> None:
    layer, features = nn.Linear(4, L), normal(N, 4, dtype=torch.float32)
    noise = given_noise(loss, torch.empty(N, L))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = layer(features)
        value = loss(scores, target, **noise)
    assert scores.dtype == torch.bfloat16
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(scores.float(), target, **noise))
    torch.testing.assert_close(value, loss(layer(features), target, **noise), rtol=0.02, atol=0.02)
    if loss.has_gradient:
        (got,) = torch.autograd.grad(value, layer.weight, retain_graph=True)
        (want,) = torch.autograd.grad(loss(scores.float(), target, **noise), layer.weight)
        assert got.abs().sum() > 0
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


@every_loss
@labels_and_probabilities
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_half_scores_give_the_float32_loss_rounded_once(
    loss: LossCase, reduction: str, dtype: torch.dtype, target: Tensor
) -> None:
    scores = normal(N, L, dtype=dtype)
    options: dict[str, Any] = {"reduction": reduction, **given_noise(loss, scores)}
    want = loss(scores.float(), target, **options)
    assert want.dtype == torch.float32
    got = loss(scores, target, **options)
    torch.testing.assert_close(got, want.to(dtype), rtol=0, atol=0)
    if loss.has_gradient:
        gradient = value_and_grad(lambda s: loss(s, target, **options), scores)[1]
        want_gradient = value_and_grad(lambda s: loss(s, target, **options), scores.float())[1]
        torch.testing.assert_close(gradient, want_gradient.to(dtype))


@every_differentiable_loss
@labels_and_probabilities
def test_float64_stays_float64(loss: LossCase, target: Tensor) -> None:
    value, gradient = value_and_grad(lambda s: loss(s, target), normal(N, L))
    assert value.dtype == gradient.dtype == torch.float64


# Several processes

BATCH, FEATURES, STEPS = 8, 4, 2


def train(model: nn.Module, rows: slice) -> None:
    loss = sl.NoisedTopKHinge(2, epsilon=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        features, noise = normal(BATCH, FEATURES, seed=10 + step), normal(BATCH, L, 3, seed=20 + step)
        target = torch.arange(step, step + BATCH) % L
        optimizer.zero_grad()
        loss(model(features[rows]), target[rows], noise=noise[rows]).backward()
        optimizer.step()


def linear_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, L, dtype=torch.float64)


def train_on_one_rank(rank: int, count: int, folder: Path) -> None:
    model, rows = linear_model(), BATCH // count
    train(DistributedDataParallel(model), slice(rank * rows, (rank + 1) * rows))
    torch.save(model.state_dict(), folder / f"rank{rank}.pt")


def test_two_processes_train_as_one_does_on_the_whole_batch(tmp_path: Path) -> None:
    run_ranks(train_on_one_rank, 2, tmp_path)
    want = linear_model()
    train(want, slice(None))
    assert not torch.allclose(want.weight, linear_model().weight)
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"rank{rank}.pt"), dict(want.state_dict()))


# Modules that travel


def weights(seed: int) -> Tensor:
    return normal(L, seed=seed).exp()


def loss_of(loss: LossCase, module: nn.Module) -> Tensor:
    scores = normal(N, L)
    value: Tensor = module(scores, TARGET, **given_noise(loss, scores))
    return value


WITH_COUNTS: dict[str, Callable[..., nn.Module]] = {
    "LDAMLoss": sl.LDAMLoss,
    "ImbalancedNoisedTopKHinge": lambda counts, **kw: sl.ImbalancedNoisedTopKHinge(counts, 2, **kw),
}
every_module_with_counts = pytest.mark.parametrize("module", WITH_COUNTS.values(), ids=WITH_COUNTS)


@every_loss
def test_weights_travel_in_the_state_dict(loss: LossCase) -> None:
    saved = io.BytesIO()
    module = loss.module(L, weight=weights(1))
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    loaded = loss.module(L, weight=weights(2))
    assert loss_of(loss, loaded) != loss_of(loss, module)
    loaded.load_state_dict(torch.load(saved), strict=True)
    assert torch.equal(loss_of(loss, loaded), loss_of(loss, module))


@every_module_with_counts
def test_class_counts_travel_in_the_state_dict(module: Callable[..., nn.Module]) -> None:
    for counts in ([1, 2, 3], [1.5, 2.25, 3.0]):
        saved, loaded = module(counts, weight=torch.ones(3)), module([7, 8, 9], weight=torch.zeros(3))
        assert set(saved.state_dict()) == {"class_counts", "weight"}
        loaded.load_state_dict(saved.state_dict(), strict=True)
        assert torch.equal(loaded.get_buffer("class_counts"), torch.tensor(counts))
        assert torch.equal(loaded.get_buffer("weight"), torch.ones(3))
        scores, target = normal(5, 3), torch.tensor([0, 1, 2, 2, 1])
        noise = {"noise": normal(5, 3, 4)} if isinstance(saved, sl.ImbalancedNoisedTopKHinge) else {}
        assert torch.equal(loaded(scores, target, **noise), saved(scores, target, **noise))


@every_module_with_counts
def test_strict_loading_misses_class_counts_and_weights(module: Callable[..., nn.Module]) -> None:
    with_weight, without = module([1, 2, 3], weight=torch.ones(3)), module([1, 2, 3])
    assert set(without.state_dict()) == {"class_counts"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"class_counts"'):
        without.load_state_dict({}, strict=True)
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight"'):
        with_weight.load_state_dict(without.state_dict(), strict=True)


@every_loss
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_module_has_the_same_loss(loss: LossCase, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    module = loss.module(L, weight=weights(1), reduction="none", ignore_index=3)
    copied = duplicate(module)
    assert torch.equal(loss_of(loss, copied), loss_of(loss, module))
    assert repr(copied) == repr(module)


@every_module_with_counts
@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, lambda module: module.to(torch.bfloat16)])
def test_integer_class_counts_survive_a_change_of_dtype(
    module: Callable[..., nn.Module], convert: Callable[[nn.Module], nn.Module]
) -> None:
    # 2049 is no float16, 257 no bfloat16, and 100,000 is beyond float16 altogether.
    counts = [1, 257, 2049, 100_000]
    converted = convert(module(counts, weight=torch.ones(4)))
    # Not torch.equal: it rounds both sides to the dtype of the one.
    torch.testing.assert_close(converted.get_buffer("class_counts"), torch.tensor(counts), rtol=0, atol=0)
    assert converted.get_buffer("weight").dtype != torch.float32


# Shapes and modes


@every_loss
@pytest.mark.parametrize(
    "strided",
    [
        lambda scores: scores.T.contiguous().T,
        lambda scores: torch.stack([scores, -scores], -1)[..., 0],
        lambda scores: torch.cat([scores, scores], 1)[:, :L],
    ],
    ids=["transposed", "every other column", "part of wider rows"],
)
@labels_and_probabilities
def test_scores_need_not_be_contiguous(loss: LossCase, strided: Callable[[Tensor], Tensor], target: Tensor) -> None:
    scores = normal(N, L)
    assert not strided(scores).is_contiguous()
    assert_same_value_and_gradient(loss, lambda s: loss(strided(s), target), lambda s: loss(s, target), scores)


@every_loss
@pytest.mark.parametrize("shape", [(0, L), (3, L, 0), (0, L, 2)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("probabilities", [False, True], ids=["labels", "probabilities"])
def test_an_empty_batch_does_as_for_the_cross_entropy(
    loss: LossCase, probabilities: bool, reduction: str, shape: tuple[int, ...]
) -> None:
    scores = torch.zeros(shape, requires_grad=True)
    target = torch.zeros(shape) if probabilities else torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    got = loss(scores, target, reduction=reduction)
    torch.testing.assert_close(got, cross_entropy(scores, target, reduction=reduction), equal_nan=True)
    if loss.has_gradient:
        (gradient,) = torch.autograd.grad(got.sum(), scores)
        assert gradient.shape == shape


@every_loss
@labels_and_probabilities
def test_inference_mode_changes_no_value(loss: LossCase, target: Tensor) -> None:
    scores, module = normal(N, L), loss.module(L)
    noise = given_noise(loss, scores)
    with torch.inference_mode():
        got = module(scores, target, **noise)
    assert got.is_inference()
    assert torch.equal(got, module(scores, target, **noise))


@pytest.mark.parametrize(
    ("module", "want"),
    [
        (sl.TopKError(3), "TopKError(k=3, reduction='mean')"),
        (sl.TopKHinge(3, reduction="sum"), "TopKHinge(k=3, reduction='sum')"),
        (sl.ConvexTopKHinge(3), "ConvexTopKHinge(k=3, reduction='mean')"),
        (sl.CalibratedTopKHinge(3, reduction="none"), "CalibratedTopKHinge(k=3, reduction='none')"),
        (sl.SmoothTopKHinge(3, tau=0.5), "SmoothTopKHinge(k=3, tau=0.5, reduction='mean')"),
        (sl.FocalLoss(gamma=1.5), "FocalLoss(gamma=1.5, reduction='mean')"),
        (sl.LDAMLoss([1, 2]), "LDAMLoss(max_margin=0.5, scale=30.0, reduction='mean')"),
        (sl.NoisedTopKHinge(3), "NoisedTopKHinge(k=3, epsilon=0.2, n_samples=5, reduction='mean')"),
        (
            sl.ImbalancedNoisedTopKHinge([1, 2], 1, n_samples=2),
            "ImbalancedNoisedTopKHinge(k=1, epsilon=0.01, n_samples=2, max_margin=0.2, scale=50.0, reduction='mean')",
        ),
        (sl.CosineLinear(2, 3), "CosineLinear(in_features=2, out_features=3)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_module_shows_its_settings(module: nn.Module, want: str) -> None:
    assert repr(module) == want


def test_a_module_shows_that_it_evaluates_otherwise() -> None:
    assert "eval_n_samples=inf" in repr(sl.NoisedTopKHinge(3, eval_n_samples=math.inf))
