"""Loss Modules are saved, loaded, copied, shown, and trained with on several processes."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shortlist as sl
from tests.support.drawing import normal
from tests.support.loss_cases import (
    TARGET,
    L,
    LossCase,
    N,
    every_loss,
    given_noise,
)
from tests.support.processes import run_ranks

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


# Saving, loading and copying


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
    # float16 cannot represent 2049 or 100,000, and bfloat16 cannot represent 257.
    counts = [1, 257, 2049, 100_000]
    converted = convert(module(counts, weight=torch.ones(4)))
    # torch.equal would round both sides to one dtype.
    torch.testing.assert_close(converted.get_buffer("class_counts"), torch.tensor(counts), rtol=0, atol=0)
    assert converted.get_buffer("weight").dtype != torch.float32


@pytest.mark.parametrize(
    ("module", "want"),
    [
        (sl.TopKError(3), "TopKError(k=3, reduction='mean')"),
        (sl.TopKHinge(3, reduction="sum"), "TopKHinge(k=3, reduction='sum')"),
        (sl.ConvexTopKHinge(3), "ConvexTopKHinge(k=3, reduction='mean')"),
        (sl.CalibratedTopKHinge(3, reduction="none"), "CalibratedTopKHinge(k=3, reduction='none')"),
        (sl.SmoothTopKHinge(3, tau=0.5), "SmoothTopKHinge(k=3, tau=0.5, reduction='mean')"),
        (sl.TopKCrossEntropy((1, 5)), "TopKCrossEntropy(k=(1, 5), reduction='mean')"),
        (sl.FocalLoss(gamma=1.5), "FocalLoss(gamma=1.5, reduction='mean')"),
        (sl.LDAMLoss([1, 2]), "LDAMLoss(max_margin=0.5, scale=30.0, reduction='mean')"),
        (
            sl.NoisedTopKHinge((5, 1), margin=2.0),
            "NoisedTopKHinge(k=(1, 5), epsilon=0.2, relative=False, n_samples=5, margin=2.0, reduction='mean')",
        ),
        (
            sl.ImbalancedNoisedTopKHinge([1, 2], 1, n_samples=2),
            "ImbalancedNoisedTopKHinge(k=1, epsilon=0.01, relative=False, n_samples=2, max_margin=0.2, scale=50.0, "
            "reduction='mean')",
        ),
        (sl.CosineLinear(2, 3), "CosineLinear(in_features=2, out_features=3)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_module_shows_its_settings(module: nn.Module, want: str) -> None:
    assert repr(module) == want


def test_a_module_shows_that_it_evaluates_otherwise() -> None:
    assert "eval_n_samples=inf" in repr(sl.NoisedTopKHinge(3, eval_n_samples=math.inf))
