"""Laws of single steps and of the result, seen through whole but tiny runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shortlist.program.config import OptimConfig, RunConfig, TrainConfig
from shortlist.program.data.catalogue import load_problem
from shortlist.program.losses import CrossEntropyConfig
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.evaluate import evaluate_run
from shortlist.program.training.loop import Trainer, make_fabric, run_to_the_end, train
from tests.support.small_runs import small_config, write_embeddings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embeddings(tmp_path_factory.mktemp("data") / "points.npz", images=200)


def config_for(data: Path, optim: OptimConfig, **settings: int) -> RunConfig:
    usual = TrainConfig(epochs=1, batch_size=64, ks=(1, 3), device="cpu")
    loss = CrossEntropyConfig(k=3)
    return small_config(data, loss=loss, optim=optim, train=replace(usual, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_batch_that_is_not_full_takes_a_whole_step(data: Path, tmp_path: Path, parts: int) -> None:
    """The loss is the mean over the images that there are, not over those that a full batch would have."""
    images = len(load_problem(small_config(data).data).train)
    optim = OptimConfig(lr=0.5, schedule="constant", momentum=0)
    full, short = (
        train(config_for(data, optim, batch_size=size, accumulate=parts), folder=folder, quiet=True).load_best()
        for size, folder in ((images, tmp_path / "full"), (4 * images, tmp_path / "short"))
    )
    torch.testing.assert_close(short, full)


@pytest.mark.parametrize("largest", [0.01, 1000.0])
def test_no_step_is_longer_than_the_clipped_gradient(data: Path, tmp_path: Path, largest: float) -> None:
    optim = OptimConfig(lr=1.0, schedule="constant", momentum=0, weight_decay=0, clip_norm=largest)
    config = config_for(data, optim, batch_size=10_000)  # one step
    trainer = Trainer(config, make_fabric(config), RunFolder(tmp_path), quiet=True)
    before = _flat(trainer)
    run_to_the_end(trainer, resume=False)
    length = float((_flat(trainer) - before).norm())
    assert length == pytest.approx(0.01, rel=1e-3) if largest == 0.01 else 0.1 < length < 1000


def _flat(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in trainer.plain_model.parameters()])


def test_the_result_is_that_of_the_best_weights_even_if_later_ones_are_worse(data: Path, tmp_path: Path) -> None:
    optim = OptimConfig(lr=0.5, milestones=(1,), decay=0.0)  # nothing is learnt in the second epoch
    config = config_for(data, optim, epochs=2)

    @torch.no_grad()
    def turn_scores_round() -> None:
        for parameter in trainer.plain_model.parameters():
            parameter.neg_()

    trainer = Trainer(config, make_fabric(config), RunFolder(tmp_path), quiet=True, after_epoch=turn_scores_round)
    run = run_to_the_end(trainer, resume=False)
    first, second = run.metrics()
    assert first["val_macro_top3"] > second["val_macro_top3"]
    final = run.read_json("final.json")
    assert final["best_epoch"] == 0
    assert final["test"] == evaluate_run(run, device="cpu")[0].metrics
