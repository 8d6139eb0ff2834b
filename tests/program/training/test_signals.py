"""Signals: a training stops after a step, with a checkpoint, and all ranks after the same one."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from shortlist import ShortlistError
from shortlist.program.config import TrainConfig
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.evaluate import Evaluation
from shortlist.program.training.loop import Interrupted, Trainer, train
from shortlist.program.training.signals import StopRequests
from tests.support.processes import run_ranks
from tests.support.small_runs import config_arguments, small_config, write_embeddings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embeddings(tmp_path_factory.mktemp("data") / "points.npz")


def test_ctrl_c_stops_with_a_checkpoint_and_resuming_ends_the_same(data: Path, tmp_path: Path) -> None:
    """That a resumed run ends as an undisturbed one is tested in test_resuming."""
    settings = TrainConfig(epochs=200, batch_size=8, ks=(1, 3), device="cpu")
    config = small_config(data, train=settings)
    command = [sys.executable, "-m", "shortlist", "train", "embeddings", *config_arguments(config)]
    process = subprocess.Popen(
        [*command, "--out", tmp_path / "run"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert any("epoch 1/200" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=120)
    assert process.returncode == 130, messages
    assert "add --resume to go on" in messages
    run = RunFolder(tmp_path / "run")
    epochs_done = len(run.metrics())
    assert 1 <= epochs_done < 200
    state = run.load_checkpoint(pytest.fail)
    assert state is not None
    assert state["position"]["epoch"] in (epochs_done - 1, epochs_done)
    with pytest.raises(ShortlistError, match="interrupted; add --resume"):
        train(run.config, folder=run.path, quiet=True)


class StopInLastValidation(Callback):
    def on_validation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        if trainer.position.epoch == trainer.epochs - 1:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_stop_that_comes_after_the_last_step_is_obeyed_when_the_run_is_done(data: Path, tmp_path: Path) -> None:
    """What would come next, another seed or another cell of a table, must not begin."""
    config = small_config(data, train=TrainConfig(epochs=2, batch_size=64, ks=(1, 3), device="cpu"))
    with pytest.raises(Interrupted, match="has finished"):
        train(config, folder=tmp_path, quiet=True, callbacks=[StopInLastValidation()])
    assert RunFolder(tmp_path).finished


def agreements(rank: int, count: int, folder: Path) -> None:
    """Write down after which of 60 steps two ranks agreed, if one of them is slow."""
    fabric: Any = SimpleNamespace(world_size=count, device=torch.device("cpu"))
    now, step, steps = 0.0, 0, list[int]()
    reduce = dist.all_reduce

    def noted(*arguments: Any) -> None:
        steps.append(step)
        reduce(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", noted)
        stop = StopRequests(clock=lambda: now)
        for step in range(1, 61):
            now += 0.9 if rank else 0.01
            stop.asked = rank == 1 and step >= 30
            if stop.requested(fabric, last=step == 60):
                break
    (folder / f"{rank}.json").write_text(json.dumps(steps))


def test_ranks_agree_on_stopping_every_few_seconds_of_the_slowest(tmp_path: Path) -> None:
    run_ranks(agreements, 2, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first[-1] in (30, 31)
    assert max(after - before for before, after in itertools.pairwise(first)) * 0.9 <= 2
