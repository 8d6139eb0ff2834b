"""Whole runs: what is learnt, which epoch is the best, and what ends a run early."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from shortlist import ShortlistError
from shortlist.program.atomic_files import WRITING
from shortlist.program.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig, changed
from shortlist.program.data.catalogue import load_problem
from shortlist.program.losses import CrossEntropyConfig, LDAMConfig
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.evaluate import Evaluation, evaluate_run
from shortlist.program.training.loop import DivergedError, Trainer, train
from tests.support.file_operations import watched
from tests.support.pictures import put_classes
from tests.support.small_runs import outcome, photos_config, small_config, write_embeddings

SHORT = TrainConfig(epochs=1, batch_size=16, ks=(1, 3), device="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embeddings(tmp_path_factory.mktemp("data") / "points.npz")


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(small_config(data), folder=tmp_path_factory.mktemp("runs") / "run", quiet=True).path


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


def test_the_folder_tells_the_whole_story(data: Path, undisturbed: Path) -> None:
    run = RunFolder.existing(undisturbed)
    assert run.config == small_config(data)
    names = {path.name for path in run.path.iterdir()}
    assert {"environment.json", "classes.json", "facts.json", "tensorboard", "test_per_class.csv"} <= names
    assert run.read_json("environment.json")["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert sum(run.read_json("classes.json")["train_images"]) == 612
    assert any((run.path / "tensorboard").iterdir())


def test_the_environment_tells_where_a_run_began_and_where_it_was_resumed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for commit in ("first", "second", "third"):
        run.note_environment({"commit": commit})
    assert run.read_json("environment.json") == {
        "commit": "first",
        "resumed": [{"commit": "second"}, {"commit": "third"}],
    }


def test_whatever_was_written_is_on_the_disk_before_a_file_takes_its_name(data: Path, tmp_path: Path) -> None:
    """So a power cut loses no file that has its name, and no epoch that a checkpoint counts as done."""
    with watched(tmp_path / "run") as watch:
        train(small_config(data, train=replace(SHORT, epochs=2)), folder=tmp_path / "run", quiet=True)
    renamed = [operation for operation in watch.operations if operation.startswith("rename ")]
    assert len(renamed) >= 12  # or the watch has missed what it is for
    assert not watch.unsynced


@pytest.mark.parametrize("name", ["cross_entropy", "focal", "ldam", "topk_hinge", "convex_topk_hinge"])
def test_every_other_loss_trains(data: Path, tmp_path: Path, name: str) -> None:
    loss = changed(RunConfig(), {"loss.name": name, "loss.k": 3}).loss
    config = small_config(data, loss=loss, train=replace(SHORT, epochs=4))
    result = outcome(train(config, folder=tmp_path, quiet=True).path)
    assert result["final"]["test"]["micro_top3"] > 0.5


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
    config = replace(small_config(tmp_path, loss=loss, train=SHORT), data=noisy)
    assert train(config, folder=tmp_path / "run", quiet=True).finished


def test_every_suggestion_that_is_measured_is_kept(data: Path, tmp_path: Path) -> None:
    run = train(small_config(data, train=replace(SHORT, ks=(1, 11))), folder=tmp_path, quiet=True)
    kept = safetensors.torch.load_file(tmp_path / "test_predictions.safetensors")
    for k in (1, 3, 11):
        share = (kept["suggestions"][:, :k] == kept["labels"][:, None]).any(1).double().mean().item()
        assert run.read_json("final.json")["test"][f"micro_top{k}"] == pytest.approx(share)


class Accuracies(Callback):
    """Accuracies of each epoch as told."""

    def __init__(self, **values: Sequence[float]) -> None:
        self._values = values

    def on_validation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        evaluation.metrics.update({name: values[trainer.position.epoch] for name, values in self._values.items()})


def test_of_epochs_alike_the_one_that_is_better_at_smaller_k_is_kept(data: Path, tmp_path: Path) -> None:
    """Top-5 accuracy of few validation images is perfect long before the network has learned."""
    config = small_config(data, train=replace(SHORT, epochs=5, batch_size=64))
    accuracies = Accuracies(macro_top3=[1.0] * 5, macro_top1=[0.2, 0.9, 0.4, 0.9, 0.1])
    run = train(config, folder=tmp_path, quiet=True, callbacks=[accuracies])
    assert run.read_json("final.json")["best_epoch"] == 3, "the later one of two"


@pytest.mark.parametrize("metric", ["macro_top3", "few_top3", "micro_top3"])
@pytest.mark.parametrize(
    ("errors_below_the_best", "kept"),
    [([9, 0, 0.9, 1.1], 2), ([9, 0, 1.1, 1.1], 1), ([0.5, 9, 0, 9], 2), ([0, 0.9, 9, 0.9], 3), ([0.9, 0.8, 9, 0], 3)],
)
def test_the_latest_epoch_within_a_standard_error_of_the_best_can_be_kept(
    data: Path, tmp_path: Path, metric: str, errors_below_the_best: list[float], kept: int
) -> None:
    arrays, best = dict(np.load(data)), 0.8
    numbers_in_class = np.array([(arrays["val_y"][:row] == label).sum() for row, label in enumerate(arrays["val_y"])])
    kept_rows = numbers_in_class <= arrays["val_y"]  # one image of the first class, two of the second, ...
    arrays |= {name: arrays[name][kept_rows] for name in ("val_x", "val_y")}
    np.savez(tmp_path / "uneven.npz", **arrays)
    images = np.bincount(arrays["val_y"])
    if metric == "few_top3":
        images = images[np.bincount(arrays["train_y"]) < 20]
    images = images.sum(keepdims=True) if metric == "micro_top3" else images
    error = np.sqrt((best * (1 - best) / images).sum()) / len(images)
    values = [max(0.0, best - below * error) for below in errors_below_the_best]
    settings = replace(SHORT, epochs=4, batch_size=128, select=metric, select_latest=True)
    config = small_config(tmp_path / "uneven.npz", train=settings)
    run = train(config, folder=tmp_path / "run", quiet=True, callbacks=[Accuracies(**{metric: values})])
    assert run.read_json("final.json")["best_epoch"] == kept
    assert run.read_json("final.json")["val"][metric] == pytest.approx(values[kept])


class NegateWeightsInSecondEpoch(Callback):
    @torch.no_grad()
    def on_step(self, trainer: Trainer) -> None:
        if (trainer.position.epoch, trainer.position.step) == (1, trainer.parts.steps):
            for parameter in trainer.parts.network.parameters():
                parameter.neg_()


def test_the_result_is_that_of_the_best_weights_even_if_later_ones_are_worse(data: Path, tmp_path: Path) -> None:
    config = small_config(data, train=replace(SHORT, epochs=2))
    run = train(config, folder=tmp_path, quiet=True, callbacks=[NegateWeightsInSecondEpoch()])
    first, second = run.metrics()
    assert first["val_macro_top3"] > second["val_macro_top3"]
    final = run.read_json("final.json")
    assert final["best_epoch"] == 0
    assert final["test"] == evaluate_run(run, device="cpu")[0].metrics


def test_a_network_that_says_nothing_is_not_always_right(data: Path, tmp_path: Path) -> None:
    zeros = {name: 0 * array if name[-1] == "x" else array for name, array in np.load(data).items()}
    np.savez(tmp_path / "zeros.npz", **zeros)
    loss = LDAMConfig(k=3)
    config = small_config(tmp_path / "zeros.npz", model=ModelConfig(name="none", head="cosine"), loss=loss)
    with pytest.raises(DivergedError, match="after epoch 1 all suggestions have the same score"):
        train(config, folder=tmp_path / "run", quiet=True)


def test_a_loss_that_diverges_is_reported_and_leaves_nothing_half_written(data: Path, tmp_path: Path) -> None:
    config = small_config(data, optim=OptimConfig(lr=1e38), loss=CrossEntropyConfig(k=3))
    with pytest.raises(ShortlistError, match=r"the loss became (nan|inf) in epoch \d, at or before step \d+: try"):
        train(config, folder=tmp_path, quiet=True)
    assert not (tmp_path / "final.json").exists()
    assert not list(tmp_path.rglob(f"{WRITING}*"))


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
    with ThreadPoolExecutor() as pool:
        training = pool.submit(train, small_config(data, train=SHORT), folder=tmp_path, quiet=True)
        assert training.result().finished
