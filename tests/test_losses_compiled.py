"""The losses under ``torch.compile``, ``torch.export`` and ``torch.func``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

import shortlist as sl
from shortlist import functional as F
from tests.support.drawing import normal, value_and_grad
from tests.support.loss_cases import (
    LOSSES,
    TARGET,
    L,
    LossCase,
    N,
    assert_same_value_and_gradient,
    every_differentiable_loss,
    every_loss,
    every_noised_loss,
    given_noise,
    labels_and_probabilities,
    noise_for,
)

NOISE = normal(N, L, 3, seed=1)


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
    """Tools that trace a model or estimate its memory use fake tensors."""
    scores = normal(N, L)
    want = loss.module(L)(scores, target)
    with FakeTensorMode() as mode:
        got = loss.module(L)(mode.from_tensor(scores), mode.from_tensor(target))
    assert isinstance(got, FakeTensor)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)


SETTLED_AFTER = {True: 1, None: 2}
"""How many batch sizes ``torch.compile(dynamic=...)`` sees before it treats the size as variable."""


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
    """The loss of one row as a function of tensors, and its arguments besides scores and label."""
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
