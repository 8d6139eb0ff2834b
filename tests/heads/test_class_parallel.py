"""Classes divided over ranks give the same numbers as one process with all classes and all rows.

There are two groups of processes, of four ranks and of two. Each runs all checks: every rank computes the result of a
single process, and compares its own part with it.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.nn.parallel import DistributedDataParallel

import shortlist as sl
from tests.support.drawing import normal
from tests.support.heads import KINDS, loss_of
from tests.support.processes import run_ranks

N, D, B = 12, 4, 3
# Over four ranks: 3, 3, 3 and 1 classes, and 2, 2, 1 and none.
CLASSES = (10, 5)


@dataclass(frozen=True)
class Ranks:
    """This process in its group."""

    rank: int
    count: int
    folder: Path

    def own(self, x_N: Tensor) -> Tensor:
        """This rank's rows of the global batch."""
        return x_N.chunk(self.count)[self.rank].clone()

    def average(self, x: Tensor) -> Tensor:
        x = x.detach().clone()
        dist.all_reduce(x)
        return x / self.count

    def of_all(self, x: Tensor) -> list[Tensor]:
        everyones = [torch.empty_like(x) for _ in range(self.count)]
        dist.all_gather(everyones, x)
        return everyones


def whole_and_part(
    loss: Any, num_classes: int, **kind: Any
) -> tuple[sl.NoisedTopKHead, sl.ClassParallelNoisedTopKHead]:
    """A head with all classes, the same on every rank, and this rank's part of it."""
    torch.manual_seed(0)
    whole = sl.NoisedTopKHead(D, num_classes, loss, dtype=torch.float64, **kind)
    part = sl.ClassParallelNoisedTopKHead(D, num_classes, loss, dtype=torch.float64, **kind)
    part.load_state_dict(whole.state_dict())
    return whole, part


def labels(num_classes: int) -> Tensor:
    # Some checks ignore label 1, which the first ranks have more often than the last.
    return torch.tensor([1, 1, 0, 1, 4, 2, 3, 0, 1, 2, 4, 3]) % num_classes


def own_part(head: sl.ClassParallelNoisedTopKHead, x_L: Tensor) -> Tensor:
    return x_L[head.own_classes.start : head.own_classes.stop]


def assert_grads_are_parts(part: sl.ClassParallelNoisedTopKHead, whole: sl.NoisedTopKHead, scale: float = 1.0) -> None:
    for name, parameter in whole.named_parameters():
        got, want = part.get_parameter(name).grad, parameter.grad
        assert got is not None
        assert want is not None
        torch.testing.assert_close(got.to_dense(), scale * own_part(part, want.to_dense()))


def check_value_and_gradients(ranks: Ranks) -> None:
    features, upstream = normal(N, D), normal(N, seed=2)
    for num_classes in CLASSES:
        target, noise = labels(num_classes), normal(N, num_classes, B, seed=1)
        weight = torch.linspace(0.5, 2, num_classes, dtype=torch.float64)
        settings: list[dict[str, Any]] = [
            {"weight": weight, "ignore_index": 1},
            {"k": num_classes - 1},
            {"epsilon": 0.0},
        ]
        for kind in KINDS.values():
            for imbalanced in (False, True):
                for reduction, sparse_grad, extra in (
                    ("mean", False, settings[0]),
                    ("sum", True, settings[1]),
                    ("none", False, settings[2]),
                ):
                    loss = loss_of(imbalanced, num_classes=num_classes, reduction=reduction, **extra)
                    whole, part = whole_and_part(loss, num_classes, sparse_grad=sparse_grad, **kind)
                    here, there = ranks.own(features).requires_grad_(), features.clone().requires_grad_()
                    got = part(here, ranks.own(target), noise=noise[:, part.own_classes.start : part.own_classes.stop])
                    want = whole(there, target, noise=noise)
                    if reduction == "none":
                        torch.testing.assert_close(got, ranks.own(want))
                        got.backward(ranks.own(upstream))
                        want.backward(upstream)
                        factor = 1.0
                    else:
                        got.backward()
                        want.backward()
                        # A mean is W times the rank's part of the global mean; a sum has no such factor.
                        factor = ranks.count if reduction == "mean" else 1.0
                        torch.testing.assert_close(ranks.average(got), want.detach() * factor / ranks.count)
                    assert there.grad is not None
                    torch.testing.assert_close(here.grad, factor * ranks.own(there.grad))
                    assert_grads_are_parts(part, whole, factor / ranks.count)


def check_the_mean_without_weights_is_that_of_own_rows(ranks: Ranks) -> None:
    whole, part = whole_and_part(loss_of(False, num_classes=10), 10)
    features, noise = normal(N, D), normal(N, 10, B)
    got = part(ranks.own(features), ranks.own(labels(10)), noise=own_part(part, noise.movedim(1, 0)).movedim(0, 1))
    want = whole(ranks.own(features), ranks.own(labels(10)), noise=ranks.own(noise))
    torch.testing.assert_close(got, want)


class Model(nn.Module):
    """A small network in front of either head."""

    def __init__(self, network: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.network, self.head = network, head

    def forward(self, x: Tensor, target: Tensor, noise: Tensor) -> Tensor:
        loss: Tensor = self.head(self.network(x), target, noise=noise)
        return loss


def steps(model: Model, batch: Callable[[int], tuple[Tensor, Tensor, Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        for part in (0, 1):  # gradients accumulate over two parts of a step
            model(*batch(2 * step + part)).backward()
        optimizer.step()


def check_a_network_under_ddp_takes_the_steps_of_one_process(ranks: Ranks) -> None:
    for num_classes, kind in zip(CLASSES, ({}, {"cosine": True}), strict=True):
        weight = torch.linspace(0.5, 2, num_classes, dtype=torch.float64)
        loss = loss_of(True, num_classes=num_classes, weight=weight, ignore_index=1)
        whole, part = whole_and_part(loss, num_classes, **kind)
        network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, D)).double()
        before = copy.deepcopy(network.state_dict())
        alone = Model(copy.deepcopy(network), copy.deepcopy(whole))
        together = Model(DistributedDataParallel(network), copy.deepcopy(part))

        def batch(step: int, num_classes: int = num_classes) -> tuple[Tensor, Tensor, Tensor]:
            return normal(N, 3, seed=step), labels(num_classes), normal(N, num_classes, B, seed=100 + step)

        def own_batch(step: int, part: Any = part, batch: Any = batch) -> tuple[Tensor, Tensor, Tensor]:
            x, target, noise = batch(step)
            return ranks.own(x), ranks.own(target), noise[:, part.own_classes.start : part.own_classes.stop]

        steps(alone, batch)
        steps(together, own_batch)
        assert any((before[name] != value).any() for name, value in alone.network.state_dict().items())
        torch.testing.assert_close(network.state_dict(), alone.network.state_dict())
        for name, parameter in alone.head.named_parameters():
            torch.testing.assert_close(together.head.get_parameter(name), own_part(part, parameter))


def check_the_whole_head_under_ddp_takes_the_steps_of_one_process(ranks: Ranks) -> None:
    whole, _ = whole_and_part(loss_of(True, num_classes=10), 10)
    network = nn.Linear(3, D).double()
    alone, together = Model(network, whole), DistributedDataParallel(copy.deepcopy(Model(network, whole)))

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        return normal(N, 3, seed=step), labels(10), normal(N, 10, B, seed=100 + step)

    steps(alone, batch)
    steps(together, lambda step: tuple(ranks.own(x) for x in batch(step)))  # type: ignore[arg-type,return-value]
    torch.testing.assert_close(together.module.state_dict(), alone.state_dict())


def check_fresh_noise_has_the_law_of_one_process(ranks: Ranks) -> None:
    n_samples = 3000
    whole, part = whole_and_part(loss_of(False, num_classes=10, n_samples=n_samples, reduction="none"), 10)
    features, target = normal(N, D), labels(10)
    torch.manual_seed(3)  # on all ranks, as training scripts do
    torch.rand(1)
    got = part(ranks.own(features), ranks.own(target))
    own = whole.scores(features).gather(1, target[:, None]).squeeze(1)
    expected = (1 + sl.exact_topk(whole.scores(features), 3, epsilon=0.5) - own).relu()
    # The standard deviation of the third largest of ten is less than that of the noise, 0.5.
    assert (got - ranks.own(expected)).abs().max() < 5 * 0.5 / math.sqrt(n_samples)
    after = ranks.of_all(torch.rand(()))
    assert all(torch.equal(other, after[0]) for other in after), "ranks consume their generators alike"


def check_ranks_draw_noise_and_weights_of_their_own(ranks: Ranks) -> None:
    size = 3 * ranks.count
    torch.manual_seed(0)
    head = sl.ClassParallelNoisedTopKHead(D, size, sl.NoisedTopKHinge(1, epsilon=1.0, n_samples=4))
    generators = [partial(head._generator_for, ranks.rank, g) for g in (None, torch.Generator().manual_seed(1))]
    values = [head._running_topk(torch.zeros(2, D), 4, 1.0, None, make()).values_RBK for make in generators]
    for mine in (*values, head.weight.detach()):
        everyones = ranks.of_all(mine)
        assert all((a != b).all() for i, a in enumerate(everyones) for b in everyones[:i])


def check_groups_share_their_first_weights_and_no_noise(ranks: Ranks) -> None:
    """Groups may hold copies of one head for different rows."""
    groups: list[Any] = [dist.new_group([rank]) for rank in range(ranks.count)]
    torch.manual_seed(0)
    loss = sl.NoisedTopKHinge(1, epsilon=1.0, n_samples=4, reduction="none")
    head = sl.ClassParallelNoisedTopKHead(D, 9, loss, process_group=groups[ranks.rank])
    weights = ranks.of_all(head.weight.detach())
    losses = ranks.of_all(head(torch.zeros(5, D), torch.zeros(5, dtype=torch.int64)).detach())
    for number, (weight, value) in enumerate(zip(weights, losses, strict=True)):
        assert torch.equal(weight, weights[0])
        assert all((value != other).all() for other in losses[:number])


def check_a_bad_score_spoils_its_row_and_no_other(ranks: Ranks) -> None:
    _, part = whole_and_part(loss_of(False, num_classes=5, reduction="none"), 5)
    features, noise = normal(N, D), normal(N, 5, B)[:, part.own_classes.start : part.own_classes.stop]
    clean = part(ranks.own(features), ranks.own(labels(5)), noise=noise)
    features[4, 1] = math.nan
    got = part(ranks.own(features), ranks.own(labels(5)), noise=noise)
    spoilt = ranks.own(torch.arange(N) == 4)
    assert got[spoilt].isnan().all()
    assert torch.equal(got[~spoilt], clean[~spoilt])


def check_evaluation(ranks: Ranks) -> None:
    for num_classes in CLASSES:
        for kind in KINDS.values():
            loss = loss_of(True, num_classes=num_classes, eval_n_samples=math.inf)
            whole, part = (head.eval() for head in whole_and_part(loss, num_classes, **kind))
            features, target = normal(N, D).view(N, 1, D), labels(num_classes).view(N, 1)
            torch.testing.assert_close(part.scores(ranks.own(features)), ranks.own(whole.scores(features)))
            got = ranks.average(part(ranks.own(features), ranks.own(target)))
            torch.testing.assert_close(got, whole(features, target).detach())


def known_state(num_classes: int) -> dict[str, Tensor]:
    return {"weight": normal(num_classes, D, seed=7), "bias": normal(num_classes, seed=8)}


def check_a_checkpoint_of_more_ranks_loads(ranks: Ranks) -> None:
    """Four ranks save what two load and save again, for one process to load."""
    for num_classes in CLASSES:
        loss = sl.NoisedTopKHinge(2)
        head = sl.ClassParallelNoisedTopKHead(D, num_classes, loss, dtype=torch.float64)
        known = known_state(num_classes)
        if ranks.count == 4:
            head.load_state_dict(known)
        else:
            state = head.state_dict()
            state_dict_loader.load(state, checkpoint_id=ranks.folder / f"{num_classes} classes on 4")
            head.load_state_dict(state)
        for name, value in known.items():
            assert torch.equal(head.get_parameter(name), own_part(head, value))
        state_dict_saver.save(head.state_dict(), checkpoint_id=ranks.folder / f"{num_classes} classes on {ranks.count}")


def check_a_state_of_other_classes_is_refused(ranks: Ranks) -> None:
    head = sl.ClassParallelNoisedTopKHead(D, 5, sl.NoisedTopKHinge(2), dtype=torch.float64)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        head.load_state_dict(known_state(11))


CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]


def run_checks(rank: int, count: int, folder: Path) -> None:
    for check in CHECKS:
        try:
            check(Ranks(rank, count, folder))
        except Exception as error:
            error.add_note(f"in {check.__name__}, rank {rank} of {count}")
            raise


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which four ranks, then two, have run all checks."""
    folder = tmp_path_factory.mktemp("ranks")
    for count in (4, 2):
        run_ranks(run_checks, count, folder)
    return folder


def test_scores_of_no_features_have_their_shape() -> None:
    head = sl.ClassParallelNoisedTopKHead(4, 7, sl.NoisedTopKHinge(2))
    assert head.scores(torch.empty(0, 4)).shape == (0, 7)


def test_two_and_four_ranks_are_one_process(checked: Path) -> None:
    assert checked.is_dir()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("count", [4, 2])
def test_a_checkpoint_of_many_ranks_loads_into_a_whole_head(checked: Path, count: int) -> None:
    for num_classes in CLASSES:
        head = sl.NoisedTopKHead(D, num_classes, sl.NoisedTopKHinge(2), dtype=torch.float64)
        state = head.state_dict()
        state_dict_loader.load(state, checkpoint_id=checked / f"{num_classes} classes on {count}")
        head.load_state_dict(state)
        torch.testing.assert_close(head.state_dict(), known_state(num_classes), rtol=0, atol=0)


def test_without_a_group_it_is_the_whole_head() -> None:
    whole, part = whole_and_part(loss_of(True, num_classes=10), 10)
    features, noise = normal(N, D), normal(N, 10, B)
    before = torch.get_rng_state()
    torch.testing.assert_close(part(features, labels(10), noise=noise), whole(features, labels(10), noise=noise))
    assert torch.equal(torch.get_rng_state(), before), "given noise, nothing is drawn"
    assert torch.equal(part.scores(features), whole.scores(features))
    assert part.own_classes == range(10)
    torch.testing.assert_close(part.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_bad_calls_are_told_why() -> None:
    head = sl.ClassParallelNoisedTopKHead(D, 10, sl.NoisedTopKHinge(2))
    with pytest.raises(sl.ShortlistError, match=r"noise must have shape \(12, 10, B\)"):
        head(torch.zeros(N, D), labels(10), noise=torch.zeros(N, 9, B))
    with pytest.raises(sl.ShortlistError, match="n_samples must be finite"):
        sl.ClassParallelNoisedTopKHead(D, 10, sl.NoisedTopKHinge(2, n_samples=math.inf))
