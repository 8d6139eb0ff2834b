"""A training step as a CUDA graph: the same numbers as step by step, reproducible noise, and no waits.

Run with ``make test-gpu``. The tests of whole runs need what ``shortlist[train]`` installs, and are skipped without.
"""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import shortlist as sl
from shortlist.program.bench.timing import waits_are_errors
from shortlist.program.config import OptimConfig, RunConfig, TrainConfig
from shortlist.program.models.cifar import DenseNetBC, ResNet
from shortlist.program.training.cuda_graph import CapturedStep
from tests.support.loss_cases import LossCase, every_differentiable_loss
from tests.support.small_runs import outcome, small_config, write_embeddings

pytestmark = pytest.mark.gpu

BATCH, NUM_CLASSES = 16, 12


@pytest.fixture(autouse=True)
def _the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make convolutions reproducible, in full precision."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def nesterov(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return SGD(parameters, momentum=0.9, nesterov=True, weight_decay=1e-2, fused=True)


def plain_sgd(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return SGD(parameters, fused=True)


def two_groups(parameters: Iterator[nn.Parameter]) -> Optimizer:
    """With a learning rate of their own for all parameters but the first."""
    first, *others = parameters
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": others, "lr": 0.02}]
    return SGD(groups, momentum=0.9, fused=True)


def adamw(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, weight_decay=1e-2, fused=True)


class Learner:
    """A small network with batch statistics, and its step."""

    def __init__(
        self,
        criterion: nn.Module,
        make_optimizer: Callable[[Iterator[nn.Parameter]], Optimizer] = nesterov,
        *,
        clip_norm: float = 0.0,
        residual: bool = False,
        compiled: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        features = ResNet(depth=8) if residual else DenseNetBC(depth=10, growth=4)
        self.plain = nn.Sequential(features, nn.Linear(features.num_features, NUM_CLASSES)).to("cuda", dtype)
        self.model: Callable[[Tensor], Tensor] = torch.compile(self.plain) if compiled else self.plain
        self.criterion, self.clip_norm, self.dtype = criterion.cuda(), clip_norm, dtype
        self.optimizer = make_optimizer(self.plain.parameters())
        self.loss_sum = torch.zeros((), dtype=torch.float64, device="cuda")

    def update(self, inputs: Tensor, target: Tensor) -> None:
        loss = self.criterion(self.model(inputs.to(self.dtype)), target)
        loss.backward()
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.plain.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum.add_(loss.detach(), alpha=len(target))

    def captured(self) -> CapturedStep:
        state = [*self.plain.parameters(), *self.plain.buffers(), self.loss_sum]
        return CapturedStep(self.update, self.optimizer, state)

    def learned(self, *, captured: bool, steps: int = 6) -> dict[str, Tensor]:
        """All tensors that training changes, with a falling rate, seeded noise and a smaller last batch."""
        step = self.captured() if captured else self.update
        for number, (inputs, target) in enumerate(batches(steps)):
            self.optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            torch.cuda.manual_seed(number)
            (step if len(target) == BATCH else self.update)(inputs, target)
        return {**self.plain.state_dict(), "loss_sum": self.loss_sum}


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for number in range(steps):
        size = BATCH if number < steps - 1 else 5
        target = torch.randint(NUM_CLASSES, (size,), generator=generator)
        yield torch.randn(size, 3, 8, 8, generator=generator).cuda(), target.cuda()


@every_differentiable_loss
def test_every_loss_trains_as_it_does_step_by_step(loss: LossCase) -> None:
    # With noise too: a replay draws what the step itself would draw from the same seed.
    want, got = (Learner(loss.module(NUM_CLASSES)).learned(captured=captured) for captured in (False, True))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_the_expectation_trains_as_it_does_step_by_step() -> None:
    want, got = (
        Learner(sl.NoisedTopKHinge(2, n_samples=math.inf)).learned(captured=captured) for captured in (False, True)
    )
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
@pytest.mark.parametrize("make_optimizer", [nesterov, plain_sgd, adamw, two_groups])
def test_every_optimiser_steps_as_it_does_step_by_step(
    make_optimizer: Callable[[Iterator[nn.Parameter]], Optimizer], clip_norm: float
) -> None:
    plain, captured = (Learner(nn.CrossEntropyLoss(), make_optimizer, clip_norm=clip_norm) for _ in range(2))
    want, got = plain.learned(captured=False), captured.learned(captured=True)
    # AdamW divides by the size of a gradient: where that is almost nothing, its rounding shows.
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)
    # A checkpoint shows no trace of the graph.
    assert captured.optimizer.state_dict()["param_groups"] == plain.optimizer.state_dict()["param_groups"]


@pytest.mark.filterwarnings("ignore")  # torch's compiler remarks on the precision of products
def test_a_compiled_network_is_captured_too() -> None:
    # The DenseNet has kernels of its own, which leave nothing to compile. In float64, because the compiler rounds
    # differently: in float32 that is enough to move an activation across the kink of its ReLU, and the weights with it.
    want = Learner(nn.CrossEntropyLoss(), residual=True, dtype=torch.float64).learned(captured=False)
    got = Learner(nn.CrossEntropyLoss(), residual=True, compiled=True, dtype=torch.float64).learned(captured=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_noise_differs_from_step_to_step_and_comes_again_with_its_seed() -> None:
    learner = Learner(sl.NoisedTopKHinge(2, epsilon=5.0))
    step = learner.captured()
    learner.optimizer.param_groups[0]["lr"] = 0.0  # the same weights at each step: what differs is the noise
    inputs, target = next(batches(2))
    losses = []
    for seed in (1, 2, 3, 1):
        learner.loss_sum.zero_()
        torch.cuda.manual_seed(seed)
        step(inputs, target)
        losses.append(learner.loss_sum.item())
    assert len(set(losses)) == 3
    assert losses[0] == losses[3]


def test_a_captured_step_never_waits_for_the_gpu() -> None:
    learner = Learner(sl.NoisedTopKHinge(2), adamw, clip_norm=1.0)
    step = learner.captured()
    whole = list(batches(4))[:3]
    step(*whole[0])
    with waits_are_errors():
        for number, (inputs, target) in enumerate(whole):
            torch.cuda.default_generators[0].manual_seed(number)
            learner.optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            step(inputs, target)


# A failed capture may break its process, so it has its own.
_WAITING = """
from torch import nn
from shortlist.program.training.cuda_graph import CapturedStep
from tests.program.training.test_gpu import Learner, batches

learner = Learner(nn.CrossEntropyLoss())
CapturedStep(lambda *batch: (learner.update(*batch), learner.loss_sum.item()), learner.optimizer, [])(*next(batches(2)))
"""


def test_a_step_that_waits_is_refused_with_the_remedy() -> None:
    done = subprocess.run([sys.executable, "-c", _WAITING], capture_output=True, text=True, check=False)
    assert "ShortlistError: this step cannot be a CUDA graph, use --train.no-cuda-graph" in done.stderr


# Whole runs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lightning_fabric")
    return write_embeddings(tmp_path_factory.mktemp("data") / "points.npz")


def config_for(data: Path, **settings: Any) -> RunConfig:
    options: dict[str, Any] = {"epochs": 3, "batch_size": 16, "ks": (1, 3), "device": "cuda"}
    return small_config(data, train=TrainConfig(**(options | settings)))


def train_losses(config: RunConfig, folder: Path, *, resume: bool = False) -> list[float]:
    from shortlist.program.training.loop import train

    run = train(config, folder=folder, resume=resume, quiet=True)
    return [line["train_loss"] for line in outcome(run.path)["metrics"]]


OPTIMISERS = [
    OptimConfig(lr=0.05),
    OptimConfig(name="adamw", lr=0.02, clip_norm=1.0),
    OptimConfig(name="adamw", lr=0.02, standardise=True),
]


@pytest.mark.parametrize("optim", OPTIMISERS)
def test_a_run_has_the_losses_that_it_has_step_by_step(data: Path, tmp_path: Path, optim: OptimConfig) -> None:
    config = replace(config_for(data), optim=optim)
    by_step = replace(config, train=replace(config.train, cuda_graph=False))
    want = train_losses(by_step, tmp_path / "by_step")
    assert train_losses(config, tmp_path / "captured") == pytest.approx(want, rel=1e-4)


def test_stopped_within_an_epoch_it_ends_as_if_undisturbed(data: Path, tmp_path: Path) -> None:
    from tests.support.early_ends import train_until_step

    config = config_for(data)
    want = train_losses(config, tmp_path / "undisturbed")
    train_until_step(config, tmp_path / "stopped", 7)
    assert train_losses(config, tmp_path / "stopped", resume=True) == pytest.approx(want, rel=1e-4)


def test_steps_of_a_run_do_not_wait_for_the_gpu(data: Path, tmp_path: Path) -> None:
    from shortlist.program.training.build import build

    parts = build(config_for(data), tmp_path)
    batches = parts.batches(epoch=0)
    parts.step(batches, 0, 0)
    with waits_are_errors():
        for number in range(1, parts.steps - 1):
            parts.step(batches, 0, number)


@pytest.mark.parametrize(
    "settings", [{"accumulate": 2}, {"precision": "16-mixed"}, {"cuda_graph": False}, {"device": "cpu"}]
)
def test_where_it_cannot_be_captured_a_run_goes_step_by_step(data: Path, tmp_path: Path, settings: Any) -> None:
    from shortlist.program.training.build import build

    for config, captured in ((config_for(data), True), (config_for(data, **settings), False)):
        assert isinstance(build(config, tmp_path).step.update, CapturedStep) == captured
    assert len(train_losses(config, tmp_path / "run")) == 3


def test_a_run_with_mixed_inputs_goes_step_by_step(data: Path, tmp_path: Path) -> None:
    from shortlist.program.training.build import build

    config = config_for(data)
    config = replace(config, data=replace(config.data, mixup=0.5))
    assert not isinstance(build(config, tmp_path).step.update, CapturedStep)
    assert len(train_losses(config, tmp_path / "run")) == 3
