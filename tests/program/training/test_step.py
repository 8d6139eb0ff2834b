"""Single steps, seen through whole but tiny runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shortlist.program.config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from shortlist.program.data.catalogue import load_problem
from shortlist.program.data.image_folder import FileSplit
from shortlist.program.losses import CrossEntropyConfig
from shortlist.program.training.build import build_optimizer
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.cuda_graph import undone
from shortlist.program.training.loop import Trainer, train
from tests.support.pictures import put_classes
from tests.support.small_runs import assert_close, outcome, photos_config, small_config, write_embeddings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embeddings(tmp_path_factory.mktemp("data") / "points.npz", images=200)


def config_for(data: Path, optim: OptimConfig, **settings: int) -> RunConfig:
    usual = TrainConfig(epochs=1, batch_size=64, ks=(1, 3), device="cpu")
    loss = CrossEntropyConfig(k=3)
    return small_config(data, loss=loss, optim=optim, train=replace(usual, **settings))  # type: ignore[arg-type]


class Draws(Callback):
    """The first number that a loss with noise would draw in each call."""

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.parts.loss.register_forward_pre_hook(lambda *_: self.numbers.append(torch.rand(()).item()))


def test_every_part_of_every_step_of_every_epoch_has_draws_of_its_own(data: Path, tmp_path: Path) -> None:
    settings = TrainConfig(epochs=3, batch_size=72, accumulate=2, ks=(1, 3), device="cpu")  # three steps an epoch
    draws = {}
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        config = small_config(data, train=settings, loss=CrossEntropyConfig(k=3))
        callback = Draws()
        train(replace(config, seed=seed), folder=tmp_path / name, quiet=True, callbacks=[callback])
        draws[name] = callback.numbers
    assert draws["first"] == draws["again"]
    assert len(set(draws["first"] + draws["other"])) == 2 * 3 * 3 * 2


def test_a_batch_in_parts_is_the_whole_batch(data: Path, tmp_path: Path) -> None:
    results = []
    for parts in (1, 4):
        config = config_for(data, OptimConfig(lr=0.05), epochs=2, batch_size=36, accumulate=parts)
        results.append(outcome(train(config, folder=tmp_path / str(parts), quiet=True).path))
    for whole, cut in zip(results[0]["metrics"], results[1]["metrics"], strict=True):
        assert_close(whole, cut, rel=1e-3)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_batch_that_is_not_full_takes_a_whole_step(data: Path, tmp_path: Path, parts: int) -> None:
    """The loss is the mean over the images that there are, not over those of a full batch."""
    images = len(load_problem(small_config(data).data).train)
    optim = OptimConfig(lr=0.5, schedule="constant", momentum=0)
    full, short = (
        train(config_for(data, optim, batch_size=size, accumulate=parts), folder=folder, quiet=True).load_best()
        for size, folder in ((images, tmp_path / "full"), (4 * images, tmp_path / "short"))
    )
    torch.testing.assert_close(short, full)


class StepLength(Callback):
    """How far the parameters move in training."""

    def on_fit_start(self, trainer: Trainer) -> None:
        self._before = self._parameters(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        self.length = float((self._parameters(trainer) - self._before).norm())

    def _parameters(self, trainer: Trainer) -> Tensor:
        return torch.cat([parameter.detach().flatten().clone() for parameter in trainer.parts.network.parameters()])


@pytest.mark.parametrize("largest", [0.01, 1000.0])
def test_no_step_is_longer_than_the_clipped_gradient(data: Path, tmp_path: Path, largest: float) -> None:
    optim = OptimConfig(lr=1.0, schedule="constant", momentum=0, weight_decay=0, clip_norm=largest)
    config, step = config_for(data, optim, batch_size=10_000), StepLength()  # one step
    train(config, folder=tmp_path, quiet=True, callbacks=[step])
    assert step.length == pytest.approx(0.01, rel=1e-3) if largest == 0.01 else 0.1 < step.length < 1000


def test_one_image_that_is_left_of_a_batch_is_left_out(tmp_path: Path) -> None:
    """It has no batch statistics."""
    put_classes(tmp_path / "photos", {"elm": 10, "owl": 10})
    config = photos_config(tmp_path / "photos", epochs=1, on_bad_image="skip", image_size=4)  # one place at the end
    problem = load_problem(config.data)
    assert isinstance(problem.train, FileSplit)
    (tmp_path / "photos" / problem.train.files[3]).write_bytes(b"no picture")
    config = replace(config, model=ModelConfig(name="resnet32"), train=replace(config.train, batch_size=2))
    run = train(config, folder=tmp_path / "run", quiet=True)
    assert run.read_json("final.json")["skipped_images"] == 1


def test_mixed_precision_and_adamw_train_too(data: Path, tmp_path: Path) -> None:
    settings = TrainConfig(epochs=6, batch_size=32, ks=(1, 3), device="cpu", precision="bf16-mixed")
    optim = OptimConfig(name="adamw", lr=0.02, schedule="cosine", warmup_epochs=0.5, clip_norm=1.0)
    result = outcome(train(small_config(data, train=settings, optim=optim), folder=tmp_path, quiet=True).path)
    assert result["final"]["test"]["micro_top3"] > 0.6


def test_only_whole_batches_are_compiled(data: Path, tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = TrainConfig(epochs=2, batch_size=32, ks=(1, 3), device="cpu", compile=True)  # and a last batch of 20
    config = small_config(data, train=settings, loss=CrossEntropyConfig(k=3))
    compiled = outcome(train(config, folder=tmp_path / "compiled", quiet=True).path)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    plain = replace(config, train=replace(settings, compile=False))
    by_hand = outcome(train(plain, folder=tmp_path / "plain", quiet=True).path)
    for line, other in zip(compiled["metrics"], by_hand["metrics"], strict=True):
        assert_close(line, other, rel=1e-4)


@pytest.mark.parametrize("optim", [OptimConfig(), OptimConfig(momentum=0), OptimConfig(name="adamw", lr=0.01)])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_steps_that_are_undone_leave_no_trace(optim: OptimConfig, steps_before: int) -> None:
    """As those do that prepare a CUDA graph."""

    def weights_after(undone_steps: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        optimizer, inputs = build_optimizer(optim, model, fused=False), torch.randn(9, 4)

        def steps(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()

        steps(steps_before)
        with undone(optimizer, [*model.parameters(), *model.buffers()]):
            steps(undone_steps)
        steps(4)
        return model.state_dict()

    torch.testing.assert_close(weights_after(3), weights_after(0), rtol=0, atol=0)
