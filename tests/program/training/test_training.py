"""Training with real processes: killed, interrupted, spread over ranks, fed bad data."""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.utils.tensorboard import SummaryWriter

from shortlist import ShortlistError
from shortlist.program.atomic_files import WRITING
from shortlist.program.cli import commands
from shortlist.program.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig, changed
from shortlist.program.data.catalogue import load_problem
from shortlist.program.data.image_folder import FileSplit
from shortlist.program.losses import CrossEntropyConfig, LDAMConfig, NoisedTopKHingeConfig
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import read_classes
from shortlist.program.training import loop as training
from shortlist.program.training import signals as stopping
from shortlist.program.training.cuda_graph import undone
from shortlist.program.training.evaluate import Evaluation, evaluate_run
from shortlist.program.training.loop import DivergedError, Interrupted, Trainer, make_fabric, run_to_the_end, train
from shortlist.program.training.signals import StopRequests
from tests.support.file_operations import watched
from tests.support.pictures import put_classes
from tests.support.small_runs import NUM_CLASSES, config_arguments, outcome, small_config, write_embeddings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embeddings(tmp_path_factory.mktemp("data") / "points.npz")


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(small_config(data), folder=tmp_path_factory.mktemp("runs") / "run", quiet=True).path


def shortlist(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shortlist", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def assert_close(one: dict[str, float | None], other: dict[str, float | None], rel: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert other[name] == (None if value is None else pytest.approx(value, rel=rel)), name


def test_it_learns(undisturbed: Path) -> None:
    result = outcome(undisturbed)
    assert result["final"]["test"]["micro_top3"] > 0.75  # 0.25 by chance
    losses = [line["train_loss"] for line in result["metrics"]]
    assert losses[-1] < losses[0]


def test_the_best_epoch_by_validation_is_the_one_tested(undisturbed: Path) -> None:
    result = outcome(undisturbed)
    values = [line["val_macro_top3"] for line in result["metrics"]]
    best = values.index(max(values))
    assert result["final"]["best_epoch"] == best
    assert result["final"]["val"]["macro_top3"] == values[best]


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(
    data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    again = train(small_config(data), folder=tmp_path / "again", quiet=True).path
    assert outcome(again) == outcome(undisturbed)
    other = train(replace(small_config(data), seed=1), folder=tmp_path / "other", quiet=True).path
    assert outcome(other)["metrics"] != outcome(undisturbed)["metrics"]


class DrawingLoss(nn.Module):
    """Cross-entropy that notes the first number that a loss with noise would draw in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[float] = []

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        self.draws.append(torch.rand(()).item())
        return nn.functional.cross_entropy(scores, target)


def test_every_part_of_every_step_of_every_epoch_has_draws_of_its_own(data: Path, tmp_path: Path) -> None:
    settings = TrainConfig(epochs=3, batch_size=204, accumulate=2, ks=(1, 3), device="cpu")  # three steps an epoch
    draws = {}
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        config = replace(small_config(data, train=settings), seed=seed)
        trainer = Trainer(config, make_fabric(config), RunFolder(tmp_path / name), quiet=True)
        trainer.criterion = DrawingLoss()
        run_to_the_end(trainer, resume=False)
        draws[name] = trainer.criterion.draws
    assert draws["first"] == draws["again"]
    assert len(set(draws["first"] + draws["other"])) == 2 * 3 * 3 * 2


def test_whatever_was_written_is_on_the_disk_before_a_file_takes_its_name(data: Path, tmp_path: Path) -> None:
    """So a power cut loses no file that has its name, and no epoch that a checkpoint counts as done."""
    config = small_config(data, train=TrainConfig(epochs=2, batch_size=16, ks=(1, 3), device="cpu"))
    with watched(tmp_path / "run") as watch:
        train(config, folder=tmp_path / "run", quiet=True)
    renamed = [operation for operation in watch.operations if operation.startswith("rename ")]
    assert len(renamed) >= 12  # or the watch has missed what it is for
    assert not watch.unsynced


def test_ctrl_c_stops_with_a_checkpoint_and_resuming_ends_the_same(data: Path, tmp_path: Path) -> None:
    config = small_config(data, train=TrainConfig(epochs=200, batch_size=8, ks=(1, 3), device="cpu"))
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
    epochs_done = len(RunFolder(tmp_path / "run").metrics())
    assert 1 <= epochs_done < 200
    # What is there must be a beginning of the undisturbed run: compare with a run of the same configuration.
    state = RunFolder(tmp_path / "run").load_checkpoint(pytest.fail)
    assert state is not None
    assert state["position"]["epoch"] in (epochs_done - 1, epochs_done)
    refused = shortlist("train", "embeddings", *config_arguments(config), "--out", tmp_path / "run")
    assert refused.returncode == 1
    assert "interrupted; add --resume" in refused.stderr


def test_a_stop_that_comes_after_the_last_step_is_obeyed_when_the_run_is_done(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would come next, another seed or another cell of a table, must not begin."""
    end_epoch = Trainer._end_epoch

    def stopped_in_the_last_validation(trainer: Trainer) -> None:
        if trainer.at.epoch == trainer.config.train.epochs - 1:
            os.kill(os.getpid(), signal.SIGINT)
        end_epoch(trainer)

    monkeypatch.setattr(Trainer, "_end_epoch", stopped_in_the_last_validation)
    with pytest.raises(Interrupted, match="has finished"):
        train(small_config(data), folder=tmp_path, quiet=True)
    assert RunFolder(tmp_path).finished


def test_the_environment_tells_where_a_run_began_and_where_it_was_resumed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for commit in ("first", "second", "third"):
        run.note_environment({"commit": commit})
    assert run.read_json("environment.json") == {
        "commit": "first",
        "resumed": [{"commit": "second"}, {"commit": "third"}],
    }


def start_ranks(config: RunConfig, out: Path, *options: str, count: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{count}"]
    command += ["-m", "shortlist", "train", config.data.name, *config_arguments(config), "--out", str(out), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)


def run_ranks(config: RunConfig, out: Path, *options: str, count: int = 2) -> str:
    process = start_ranks(config, out, *options, count=count)
    messages = process.communicate(timeout=300)[1]
    assert process.returncode == 0, messages
    return messages


def test_two_ranks_stop_together_and_resume_with_the_same_numbers(data: Path, tmp_path: Path) -> None:
    config = small_config(data, train=TrainConfig(epochs=8, batch_size=8, ks=(1, 3), device="cpu"))
    process = start_ranks(config, tmp_path / "stopped")
    assert process.stderr is not None
    while "epoch 1/8" not in process.stderr.readline():
        assert process.poll() is None
    process.terminate()
    process.communicate(timeout=120)
    state = RunFolder(tmp_path / "stopped").load_checkpoint(pytest.fail)
    assert state is not None
    assert 1 <= state["position"]["epoch"] < 8
    run_ranks(config, tmp_path / "stopped", "--resume")
    run_ranks(config, tmp_path / "undisturbed")
    stopped, undisturbed = outcome(tmp_path / "stopped"), outcome(tmp_path / "undisturbed")
    for line, other in zip(stopped["metrics"], undisturbed["metrics"], strict=True):
        assert_close(line, other, rel=1e-6)


def test_two_ranks_give_the_metrics_of_one(data: Path, tmp_path: Path) -> None:
    # The expectation in place of draws: ranks draw noise of their own, which one process cannot repeat.
    loss = NoisedTopKHingeConfig(k=3, epsilon=0.3, n_samples=float("inf"))
    settings = TrainConfig(epochs=3, batch_size=50, accumulate=2, ks=(1, 3), device="cpu", eval_batch_size=7)
    config = small_config(data, loss=loss, train=settings)
    alone = train(replace(config, recipe="embeddings"), folder=tmp_path / "alone", quiet=True).path
    run_ranks(config, tmp_path / "both")
    one, two = outcome(alone), outcome(tmp_path / "both")
    for line, other in zip(one["metrics"], two["metrics"], strict=True):
        assert_close(line, other, rel=1e-4)
    assert_close(one["final"]["test"], two["final"]["test"], rel=1e-4)
    environment_of_two = json.loads((tmp_path / "both" / "environment.json").read_text())
    assert environment_of_two["world_size"] == 2


def test_ranks_without_a_validation_image_wait_for_nobody(tmp_path: Path) -> None:
    """And the rank whose only other image of a part cannot be read still trains with it."""
    for split, images in (("train", 8), ("val", 1), ("test", 2)):
        put_classes(tmp_path / "photos" / split, {"elm": images, "owl": images})
    (tmp_path / "photos" / "train" / "elm" / "3.png").write_bytes(b"no picture")
    config = photos_config(tmp_path / "photos", on_bad_image="skip", image_size=4)  # of which one place is left
    batches = replace(config.train, batch_size=6)  # two images a rank
    config = replace(config, model=ModelConfig(name="resnet32"), train=batches)
    messages = run_ranks(config, tmp_path / "run", count=3)
    assert "left out, as they could not be read: 1: train/elm/3.png" in messages
    assert RunFolder(tmp_path / "run").finished


def test_an_epoch_has_the_same_loss_on_however_many_ranks_it_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = CrossEntropyConfig(k=3)
    config = small_config(data, loss=loss, train=TrainConfig(epochs=1, batch_size=36, ks=(1, 3), device="cpu"))
    config = replace(config, recipe="embeddings")
    whole = outcome(train(config, folder=tmp_path / "whole", quiet=True).path)
    with monkeypatch.context() as patch:
        steps = itertools.count(1)
        patch.setattr(StopRequests, "requested", lambda self, fabric, *, last: next(steps) == 7)
        with pytest.raises(Interrupted):
            train(config, folder=tmp_path / "stopped", quiet=True)
    run_ranks(config, tmp_path / "stopped", "--resume")
    stopped = outcome(tmp_path / "stopped")
    assert_close(whole["metrics"][0], stopped["metrics"][0], rel=1e-4)


def agreements(rank: int, folder: Path) -> None:
    """After which of 60 steps two ranks agreed, if one of them takes so long."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    fabric: Any = SimpleNamespace(world_size=2, device=torch.device("cpu"))
    now, step, steps = 0.0, 0, list[int]()
    reduce = dist.all_reduce

    def noted(*arguments: Any) -> None:
        steps.append(step)
        reduce(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now))
        patch.setattr(dist, "all_reduce", noted)
        stop = StopRequests()
        for step in range(1, 61):
            now += 0.9 if rank else 0.01
            stop.asked = rank == 1 and step >= 30
            if stop.requested(fabric, last=step == 60):
                break
    (folder / f"{rank}.json").write_text(json.dumps(steps))
    dist.destroy_process_group()


def test_ranks_agree_on_stopping_every_few_seconds_of_the_slowest(tmp_path: Path) -> None:
    spawn(agreements, args=(tmp_path,), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first[-1] in (30, 31)
    assert max(after - before for before, after in itertools.pairwise(first)) * 0.9 <= 2


def test_after_a_damaged_checkpoint_the_best_weights_are_those_that_the_result_names(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch that is run again need not be the best again: on a GPU, or on other ranks, it may come out otherwise."""
    config = small_config(data, train=TrainConfig(epochs=3, batch_size=16, ks=(1, 3), device="cpu"))
    original, first = Trainer._note_if_best, dict[str, Tensor]()

    def best_but_for_the_second(trainer: Trainer, value: float, metrics: dict[str, float | None]) -> bool:
        if trainer.at.epoch == 0:
            first.update({name: values.clone() for name, values in trainer.plain_model.state_dict().items()})
        return trainer.at.epoch != 1 and original(trainer, float(trainer.at.epoch), metrics)

    def died(trainer: Trainer) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_note_if_best", best_but_for_the_second)
        patch.setattr(Trainer, "test", died)
        with pytest.raises(SystemExit):
            train(config, folder=tmp_path, quiet=True)
    max((tmp_path / "checkpoints").glob("*.pt")).write_bytes(b"damaged")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_note_if_best", lambda *arguments: False)  # this time
        run = train(config, folder=tmp_path, resume=True, quiet=True)
    assert run.read_json("final.json")["best_epoch"] == 0
    torch.testing.assert_close(run.load_best(), first, rtol=0, atol=0)


def test_best_weights_that_are_lost_are_said_to_be(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(data, train=TrainConfig(epochs=2, batch_size=16, ks=(1, 3), device="cpu"))
    interrupt_before_the_end = itertools.count(1)
    with monkeypatch.context() as patch:
        patch.setattr(StopRequests, "requested", lambda self, fabric, *, last: next(interrupt_before_the_end) == 50)
        with pytest.raises(Interrupted, match="stopped in epoch 2"):
            train(config, folder=tmp_path, quiet=True)
    (tmp_path / "best.safetensors").unlink()
    with pytest.raises(ShortlistError, match="the best weights so far, of epoch 1, are lost"):
        train(config, folder=tmp_path, resume=True, quiet=True)


def test_a_batch_in_parts_is_the_whole_batch(data: Path, tmp_path: Path) -> None:
    loss = CrossEntropyConfig(k=3)
    results = []
    for parts in (1, 4):
        settings = TrainConfig(epochs=2, batch_size=36, accumulate=parts, ks=(1, 3), device="cpu")
        config = small_config(data, loss=loss, train=settings)
        results.append(outcome(train(config, folder=tmp_path / str(parts), quiet=True).path))
    for whole, cut in zip(results[0]["metrics"], results[1]["metrics"], strict=True):
        assert_close(whole, cut, rel=1e-3)


@pytest.mark.parametrize("name", ["cross_entropy", "focal", "ldam", "topk_hinge", "convex_topk_hinge"])
def test_every_other_loss_trains(data: Path, tmp_path: Path, name: str) -> None:
    config = small_config(data, loss=changed(RunConfig(), {"loss.name": name, "loss.k": 3}).loss)
    result = outcome(train(config, folder=tmp_path, quiet=True).path)
    assert result["final"]["test"]["micro_top3"] > 0.5


def test_a_run_goes_on_with_its_own_data_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row more, and others are held out: tests would be on what was trained on."""
    arrays = np.load(write_embeddings(tmp_path / "given.npz"))
    data, x, y = tmp_path / "points.npz", arrays["train_x"], arrays["train_y"]
    np.savez(data, x=x, y=y)
    config = small_config(data, train=TrainConfig(epochs=2, batch_size=16, ks=(1, 3), device="cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "test", lambda self: sys.exit())
        with pytest.raises(SystemExit):
            train(config, folder=tmp_path / "run", quiet=True)
    np.savez(data, x=np.concatenate([x, x[:1]]), y=np.concatenate([y, y[:1]]))
    before, label = read_classes(RunFolder(tmp_path / "run")).train_images, y[0]
    now = rf"{label}: {before[label] + 1} training images, not {before[label]}"
    with pytest.raises(ShortlistError, match=rf"the data has changed \({now}\): other images would be held out"):
        train(config, folder=tmp_path / "run", resume=True, quiet=True)
    with pytest.raises(ShortlistError, match=rf"the data has changed \({now}\): other images would be held out"):
        evaluate_run(RunFolder(tmp_path / "run"), device="cpu")
    names = [f"{number:02}" for number in range(NUM_CLASSES)]
    np.savez(data, x=x, y=y, classes=np.array(names))
    with pytest.raises(ShortlistError, match="the data has changed: its classes"):
        train(config, folder=tmp_path / "run", resume=True, quiet=True)
    np.savez(data, x=x, y=y)
    assert train(config, folder=tmp_path / "run", resume=True, quiet=True).finished


def photos_config(root: Path, **settings: Any) -> RunConfig:
    usual: dict[str, Any] = {"name": "folder", "root": str(root), "image_size": 16, "workers": 0}
    return RunConfig(
        data=DataConfig(**usual | settings),
        model=ModelConfig(name="glyphnet"),
        loss=CrossEntropyConfig(k=1),
        train=TrainConfig(epochs=2, batch_size=8, ks=(1,), device="cpu"),
    )


def test_a_run_goes_on_with_the_training_images_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the splits are the user's own, and nothing is held out."""
    for part in ("train", "val", "test"):
        put_classes(tmp_path / "photos" / part, {"elm": 6, "owl": 6})
    config = photos_config(tmp_path / "photos")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "test", lambda self: sys.exit())
        with pytest.raises(SystemExit):
            train(config, folder=tmp_path / "run", quiet=True)
    moved, there = (tmp_path / "photos" / part / "elm" / "5.png" for part in ("train", "test"))
    before = there.read_bytes()
    moved.rename(there)
    with pytest.raises(ShortlistError, match="the training images are not those"):
        train(config, folder=tmp_path / "run", resume=True, quiet=True)
    commands.evaluate([str(tmp_path / "run"), "--device", "cpu"])
    assert "these may be among them" in capsys.readouterr().err
    there.rename(moved)
    there.write_bytes(before)
    assert train(config, folder=tmp_path / "run", resume=True, quiet=True).finished
    commands.evaluate([str(tmp_path / "run"), "--device", "cpu"])
    assert "these may be among them" not in capsys.readouterr().err


def test_a_run_does_not_go_on_with_other_embeddings_of_the_same_labels(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = dict(np.load(data))
    np.savez(tmp_path / "other.npz", **arrays | {"train_x": arrays["train_x"] + 1})
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "test", lambda self: sys.exit())
        with pytest.raises(SystemExit):
            train(small_config(data), folder=tmp_path / "run", quiet=True)
    with pytest.raises(ShortlistError, match="the training images are not those"):
        train(small_config(tmp_path / "other.npz"), folder=tmp_path / "run", resume=True, quiet=True)
    assert RunFolder(tmp_path / "run").config == small_config(data)


def test_a_run_goes_on_where_its_data_is_now_and_however_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_classes(tmp_path / "photos", {"elm": 12, "owl": 12})
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "test", lambda self: sys.exit())
        with pytest.raises(SystemExit):
            train(photos_config(tmp_path / "photos"), folder=tmp_path / "run", quiet=True)
    (tmp_path / "photos").rename(tmp_path / "moved")
    config = photos_config(tmp_path / "moved", on_bad_image="skip", workers=1)
    run = train(config, folder=tmp_path / "run", resume=True, quiet=True)
    assert run.finished
    assert run.config == photos_config(tmp_path / "photos"), "it is still that run"
    with pytest.raises(ShortlistError, match=r"is not at .*photos: say by --root where it is"):
        evaluate_run(run, device="cpu")
    there = evaluate_run(run, root=str(tmp_path / "moved"), device="cpu")[0]
    assert there.metrics == run.read_json("final.json")["test"]


def test_a_run_is_no_class(tmp_path: Path) -> None:
    put_classes(tmp_path / "photos", {"elm": 12, "owl": 12})
    with pytest.raises(ShortlistError, match="the folder of the run, must not be in"):
        train(photos_config(tmp_path / "photos"), folder=tmp_path / "photos" / "runs" / "first", quiet=True)
    for part in ("train", "val"):
        put_classes(tmp_path / "split" / part, {"elm": 12, "owl": 12})
    assert train(photos_config(tmp_path / "split"), folder=tmp_path / "split" / "runs", quiet=True).finished


def test_a_metric_of_no_class_is_refused_before_training(tmp_path: Path) -> None:
    settings = TrainConfig(epochs=2, batch_size=16, ks=(1, 3), device="cpu", select="many_top3")
    data = write_embeddings(tmp_path / "few.npz", images=120)
    with pytest.raises(ShortlistError, match=r"train\.select = many_top3 is undefined"):
        train(small_config(data, train=settings), folder=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_cosines_without_a_scale_are_refused(data: Path, tmp_path: Path) -> None:
    config = small_config(data, model=ModelConfig(name="none", head="cosine"), loss=CrossEntropyConfig())
    with pytest.raises(ShortlistError, match=r"model\.head must be linear for cross_entropy"):
        train(config, folder=tmp_path, quiet=True)


def test_of_epochs_alike_the_one_that_is_better_at_smaller_k_is_kept(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top-5 accuracy of few validation images is whole long before the network has learned."""
    top1 = [0.2, 0.9, 0.4, 0.9, 0.1]

    def evaluated(trainer: Trainer, split: str) -> Evaluation:
        made_up = evaluate_split(trainer, split)
        better: dict[str, float | None] = {"macro_top3": 1.0, "macro_top1": top1[min(trainer.at.epoch, 4)]}
        return replace(made_up, metrics=made_up.metrics | better)

    evaluate_split = Trainer._evaluate
    monkeypatch.setattr(Trainer, "_evaluate", evaluated)
    settings = TrainConfig(epochs=5, batch_size=16, ks=(1, 3), device="cpu")
    run = train(small_config(data, train=settings), folder=tmp_path, quiet=True)
    assert run.read_json("final.json")["best_epoch"] == 3, "the later one of two"


def test_what_was_found_is_said_before_it_is_trained_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    put_classes(tmp_path / "photos", {"elm": 12, "owl": 24})
    (tmp_path / "photos" / "elm" / "IMG:cat:1.HEIC").touch()
    train(photos_config(tmp_path / "photos"), folder=tmp_path / "run")
    said = capfd.readouterr().err.partition("epoch 1/2")[0]
    assert "2 classes, 30 training, 3 validation and 3 test images" in said
    assert "not used: 1: elm/IMG:cat:1.HEIC" in said


def test_images_whose_scores_are_all_alike_are_told_of(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = dict(np.load(data))
    arrays["test_x"][:5] = 0  # as an embedding that failed
    np.savez(tmp_path / "failed.npz", **arrays)
    run = train(small_config(tmp_path / "failed.npz"), folder=tmp_path / "run")
    assert "by a tie" not in capfd.readouterr().err, "the last layer has a bias"
    load = RunFolder.load_best

    def without_bias(folder: RunFolder) -> dict[str, Tensor]:
        return load(folder) | {"head.bias": torch.zeros(NUM_CLASSES)}

    monkeypatch.setattr(RunFolder, "load_best", without_bias)
    (run.path / "final.json").unlink()
    train(small_config(tmp_path / "failed.npz"), folder=run.path, resume=True)
    assert f"by a tie with the K-th best score: {5 / 240:.2%} at K = 1" in capfd.readouterr().err
    assert run.read_json("final.json")["test"]["tied_top1"] == pytest.approx(5 / 240)
    assert "at K = 1" in evaluate_run(run)[0].ties
    assert not evaluate_run(run, split="val")[0].ties


def test_events_that_cannot_be_written_are_named(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(writer: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SummaryWriter, "flush", full)
    with pytest.raises(ShortlistError, match=r"cannot write .*/tensorboard: No space left on device; make room"):
        train(small_config(data), folder=tmp_path, quiet=True)


def test_data_of_another_width_is_told_from_that_of_the_run(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    arrays = {name: array[:, :5] if array.ndim == 2 else array for name, array in np.load(data).items()}
    np.savez(tmp_path / "narrow.npz", **arrays)
    with pytest.raises(ShortlistError, match=r"best\.safetensors does not fit .* for inputs of 5"):
        evaluate_run(RunFolder(undisturbed), root=str(tmp_path / "narrow.npz"))


def test_a_seed_that_has_finished_is_not_repeated_for_other_workers(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = ["embeddings", *config_arguments(small_config(data)), "--out", str(tmp_path), "--train.epochs", "2"]
    commands.train([*settings, "--seeds", "0"])
    shutil.copy(data, tmp_path / "moved.npz")
    commands.train([*settings, "--seeds", "0", "1", "--resume", "--data.root", str(tmp_path / "moved.npz")])
    assert f"{tmp_path}/s0 has finished before" in capfd.readouterr().err
    assert RunFolder(tmp_path / "s1").finished


def test_one_image_that_is_left_of_a_batch_is_left_out(tmp_path: Path) -> None:
    """It has no batch statistics."""
    put_classes(tmp_path / "photos", {"elm": 10, "owl": 10})
    config = photos_config(tmp_path / "photos")
    problem = load_problem(config.data)
    assert isinstance(problem.train, FileSplit)
    (tmp_path / "photos" / problem.train.files[3]).write_bytes(b"no picture")
    config = replace(
        config,
        data=replace(config.data, on_bad_image="skip", image_size=16),
        model=ModelConfig(name="resnet18", pretrained=False),
        train=replace(config.train, batch_size=2),
    )
    run = train(config, folder=tmp_path / "run", quiet=True)
    assert run.read_json("final.json")["skipped_images"] == 1


def test_a_network_that_suggests_the_same_for_all_images_is_told_of_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def all_alike(trainer: Trainer, split: str) -> Evaluation:
        found = evaluate_split(trainer, split)
        return replace(found, suggestions=found.suggestions[:1].expand_as(found.suggestions).contiguous())

    evaluate_split = Trainer._evaluate
    monkeypatch.setattr(Trainer, "_evaluate", all_alike)
    train(small_config(data), folder=tmp_path)
    assert capfd.readouterr().err.count("all validation images have the same suggestions") == 1


def test_a_network_that_says_nothing_is_not_always_right(tmp_path: Path) -> None:
    arrays = dict(np.load(write_embeddings(tmp_path / "points.npz")))
    np.savez(tmp_path / "zeros.npz", **{name: 0 * each if name[-1] == "x" else each for name, each in arrays.items()})
    loss = LDAMConfig(k=3)
    config = small_config(tmp_path / "zeros.npz", model=ModelConfig(name="none", head="cosine"), loss=loss)
    with pytest.raises(DivergedError, match="after epoch 1 all suggestions have the same score"):
        train(config, folder=tmp_path / "run", quiet=True)


def test_validation_images_that_cannot_be_read_are_no_verdict_on_the_network(tmp_path: Path) -> None:
    put_classes(tmp_path / "photos" / "train", {"elm": 12, "owl": 12})
    put_classes(tmp_path / "photos" / "val", {"elm": 2, "owl": 2})
    config = photos_config(tmp_path / "photos", on_bad_image="skip")
    first, *others = sorted((tmp_path / "photos" / "val").rglob("*.*"))
    for file in others:
        file.write_bytes(b"no picture")
    assert train(config, folder=tmp_path / "one", quiet=True).finished
    first.write_bytes(b"no picture")
    with pytest.raises(ShortlistError, match=r"none of 4 images could be read: val/elm/0\.png; val"):
        train(config, folder=tmp_path / "none", quiet=True)


def test_a_folder_called_by_what_is_no_text_is_a_class_too(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    put_classes(tmp_path / "photos", {name: 12, "owl": 12})
    run = train(photos_config(tmp_path / "photos"), folder=tmp_path / "run", quiet=True)
    assert run.read_json("classes.json")["names"] == [name, "owl"]
    assert r"caf\udce9" in (run.path / "test_per_class.csv").read_text()


def test_a_run_need_not_be_in_the_main_thread(data: Path, tmp_path: Path) -> None:
    config = small_config(data, train=TrainConfig(epochs=1, batch_size=16, ks=(1, 3), device="cpu"))
    with ThreadPoolExecutor() as pool:
        assert pool.submit(train, config, folder=tmp_path, quiet=True).result().finished


@pytest.mark.parametrize("written", [True, False])
def test_the_best_weights_are_those_of_the_epoch_that_the_checkpoint_names(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """Killed when they have just been written, or are about to be."""
    config = small_config(data, train=TrainConfig(epochs=2, batch_size=16, ks=(1, 3), device="cpu"))
    original, epochs = RunFolder.save_best, 0

    def dying(folder: RunFolder, weights: bytes) -> None:
        nonlocal epochs
        epochs += 1
        if written or epochs == 1:
            original(folder, weights)
        if epochs == 2:
            raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_best", dying)
        with pytest.raises(SystemExit):
            train(config, folder=tmp_path, quiet=True)
    state = RunFolder(tmp_path).load_checkpoint(pytest.fail)
    assert state is not None
    assert (state["position"]["epoch"], state["position"]["best_epoch"]) == (2, 1)
    run = train(config, folder=tmp_path, resume=True, quiet=True)
    torch.testing.assert_close(run.load_best(), state["model"], rtol=0, atol=0)


def test_every_suggestion_that_is_measured_is_kept(data: Path, tmp_path: Path) -> None:
    settings = TrainConfig(epochs=1, batch_size=16, ks=(1, 11), device="cpu")
    run = train(small_config(data, train=settings), folder=tmp_path, quiet=True)
    kept = safetensors.torch.load_file(tmp_path / "test_predictions.safetensors")
    for k in (1, 3, 11):
        share = (kept["suggestions"][:, :k] == kept["labels"][:, None]).any(1).double().mean().item()
        assert run.read_json("final.json")["test"][f"micro_top{k}"] == pytest.approx(share)


@pytest.mark.parametrize("name", ["imbalanced_noised_topk_hinge", "ldam", "logit_adjusted", "balanced_softmax"])
def test_a_class_that_label_noise_empties_does_not_stop_the_losses_with_counts(tmp_path: Path, name: str) -> None:
    labels = np.arange(400) % 20
    arrays: dict[str, Any] = {f"{split}_y": labels for split in ("train", "val", "test")}
    arrays |= {f"{name[:-1]}x": np.eye(20, dtype=np.float32)[labels] for name in arrays}
    np.savez(tmp_path / "points.npz", **arrays)
    noise = {"label_noise": 0.5, "noise_groups": "consecutive"}
    noisy = DataConfig(name="embeddings", root=str(tmp_path / "points.npz"), imbalance=20, **noise)  # type: ignore[arg-type]
    assert load_problem(noisy).class_counts.min() == 0
    loss = changed(RunConfig(), {"loss.name": name, "loss.k": 3}).loss
    settings = TrainConfig(epochs=1, batch_size=16, ks=(1, 3), device="cpu")
    config = replace(small_config(tmp_path, loss=loss, train=settings), data=noisy)
    assert train(config, folder=tmp_path / "run", quiet=True).finished


def test_mixed_precision_and_adamw_train_too(data: Path, tmp_path: Path) -> None:
    settings = TrainConfig(epochs=3, batch_size=32, ks=(1, 3), device="cpu", precision="bf16-mixed")
    optim = OptimConfig(name="adamw", lr=0.02, schedule="cosine", warmup_epochs=0.5, clip_norm=1.0)
    result = outcome(train(small_config(data, train=settings, optim=optim), folder=tmp_path, quiet=True).path)
    assert result["final"]["test"]["micro_top3"] > 0.6


@pytest.mark.parametrize("optim", [OptimConfig(), OptimConfig(momentum=0), OptimConfig(name="adamw", lr=0.01)])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_steps_that_are_undone_leave_no_trace(optim: OptimConfig, steps_before: int) -> None:
    def weights_after(undone_steps: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        optimizer, inputs = training._optimizer(optim, model, fused=False), torch.randn(9, 4)

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


def test_only_whole_batches_are_compiled(data: Path, tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = TrainConfig(epochs=2, batch_size=32, ks=(1, 3), device="cpu", compile=True)  # and a last batch of 4
    config = small_config(data, train=settings, loss=CrossEntropyConfig(k=3))
    compiled = outcome(train(config, folder=tmp_path / "compiled", quiet=True).path)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    plain = replace(config, train=replace(settings, compile=False))
    by_hand = outcome(train(plain, folder=tmp_path / "plain", quiet=True).path)
    for line, other in zip(compiled["metrics"], by_hand["metrics"], strict=True):
        assert_close(line, other, rel=1e-4)


def test_a_loss_that_diverges_is_reported_and_leaves_nothing_half_written(data: Path, tmp_path: Path) -> None:
    config = small_config(data, optim=OptimConfig(lr=1e38), loss=CrossEntropyConfig(k=3))
    with pytest.raises(ShortlistError, match=r"the loss became (nan|inf) in epoch \d, at or before step \d+: try"):
        train(config, folder=tmp_path, quiet=True)
    assert not (tmp_path / "final.json").exists()
    assert not list(tmp_path.rglob(f"{WRITING}*"))


def test_a_full_disk_ends_the_run_with_a_message_and_it_can_go_on(
    data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    config = small_config(data)
    arguments = ["train", "embeddings", *config_arguments(config), "--out", str(tmp_path / "run")]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    code = f"{limit}; from shortlist.program.cli.main import main; main()"
    full = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert full.returncode == 1
    assert "cannot write" in full.stderr
    assert "make room and give the command again" in full.stderr
    resumed = shortlist(*arguments, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert outcome(tmp_path / "run")["metrics"] == outcome(undisturbed)["metrics"]


def test_several_seeds_go_on_where_they_stopped(data: Path, tmp_path: Path) -> None:
    settings = TrainConfig(epochs=1, batch_size=32, ks=(1, 3), device="cpu")
    arguments = ["train", "embeddings", *config_arguments(small_config(data, train=settings)), "--out", str(tmp_path)]
    assert shortlist(*arguments, "--seeds", "0").returncode == 0
    done = shortlist(*arguments, "--seeds", "0", "1", "--resume")
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 's0'} has finished before" in done.stderr
    assert outcome(tmp_path / "s0") != outcome(tmp_path / "s1")


def test_the_folder_tells_the_whole_story(data: Path, undisturbed: Path) -> None:
    run = RunFolder.existing(undisturbed)
    assert run.config == small_config(data)
    names = {path.name for path in run.path.iterdir()}
    assert {"environment.json", "classes.json", "facts.json", "tensorboard", "test_per_class.csv"} <= names
    assert run.read_json("environment.json")["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert sum(run.read_json("classes.json")["train_images"]) == 612
    assert any((run.path / "tensorboard").iterdir())


def test_progress_is_one_line_an_epoch_where_nobody_watches(data: Path, tmp_path: Path) -> None:
    done = shortlist("train", "embeddings", *config_arguments(small_config(data)), "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    epochs = [line for line in done.stderr.splitlines() if line.startswith("epoch ")]
    assert len(epochs) == 8
    assert "images/s" in epochs[0]
    assert "\r" not in done.stderr
    assert "macro_top3" in done.stdout
