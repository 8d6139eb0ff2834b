"""A resumed run ends as an undisturbed one, and takes nothing from a file that it cannot trust."""

import json
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shortlist import ShortlistError
from shortlist.program.cli import commands
from shortlist.program.config import OptimConfig, RunConfig, TrainConfig
from shortlist.program.runs.folder import RunFolder, as_safetensors, file_digest
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.evaluate import Evaluation, evaluate_run
from shortlist.program.training.loop import Trainer, train
from tests.support.checkpoints import newest_checkpoint, rewrite_newest
from tests.support.early_ends import train_until_step, train_until_test
from tests.support.small_runs import config_arguments, outcome, small_config, write_embeddings

EPOCHS = 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    data = write_embeddings(tmp_path_factory.mktemp("data") / "points.npz", images=100)
    settings = TrainConfig(epochs=EPOCHS, batch_size=32, ks=(1, 3), device="cpu")
    return small_config(data, train=settings, optim=OptimConfig(name="adamw", lr=0.01, schedule="cosine"))


@pytest.fixture(scope="module")
def finished(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config, folder=tmp_path_factory.mktemp("finished"), quiet=True).path


@pytest.fixture(scope="module")
def killed_before_its_test(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_until_test(config, tmp_path_factory.mktemp("killed"))


@pytest.fixture
def unfinished(killed_before_its_test: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed_before_its_test, tmp_path / "run"))


@pytest.mark.parametrize("step", [1, 4, 6])
def test_stopped_after_any_step_it_ends_as_if_undisturbed(
    config: RunConfig, finished: Path, tmp_path: Path, step: int
) -> None:
    """Of four steps an epoch."""
    train(config, folder=train_until_step(config, tmp_path / "run", step), resume=True, quiet=True)
    assert outcome(tmp_path / "run") == outcome(finished)


def without_lines(state: Any) -> Any:
    """As older versions wrote it."""
    del state["position"]["lines"]
    return state


@pytest.mark.parametrize("content", ["", "{}\n", "5\n", '{"epoch": null}\n', "altered"])
def test_the_result_does_not_come_from_the_metrics_file(
    config: RunConfig, finished: Path, unfinished: Path, content: str
) -> None:
    path = unfinished / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    altered = "".join(json.dumps(line | {"val_macro_top3": 0.999, "val_micro_top1": 0.1}) + "\n" for line in lines)
    path.write_text(altered if content == "altered" else content)
    train(config, folder=unfinished, resume=True, quiet=True)
    assert outcome(unfinished) == outcome(finished)


def test_a_checkpoint_of_an_older_version_goes_on_with_the_metrics_file(
    config: RunConfig, finished: Path, unfinished: Path
) -> None:
    rewrite_newest(unfinished, without_lines)
    train(config, folder=unfinished, resume=True, quiet=True)
    assert outcome(unfinished) == outcome(finished)


@pytest.mark.parametrize("content", ["", "{}\n", "5\n", '{"epoch": null}\n'])
def test_an_older_run_that_lost_its_best_epoch_says_so(config: RunConfig, unfinished: Path, content: str) -> None:
    rewrite_newest(unfinished, without_lines)
    (unfinished / "metrics.jsonl").write_text(content)
    with pytest.raises(ShortlistError, match=r"metrics\.jsonl is damaged: a line is missing"):
        train(config, folder=unfinished, resume=True, quiet=True)


def in_position(**entries: Any) -> Callable[[Any], Any]:
    return lambda state: state | {"position": state["position"] | entries}


def with_first_moment(value: Any) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        state["optimizer"]["state"][0]["exp_avg"] = value
        return state

    return change


def without_first_moment(state: Any) -> Any:
    del state["optimizer"]["state"][0]["exp_avg"]
    return state


def with_odd_line(state: Any) -> Any:
    state["position"]["lines"][0]["val_macro_top3"] = float("nan")
    return state


MADE_UP: dict[str, Callable[[Any], Any]] = {
    "a list": lambda state: [state],
    "nothing": lambda state: None,
    "no entries": lambda state: {},
    "no position": lambda state: {name: value for name, value in state.items() if name != "position"},
    "no weights": lambda state: state | {"model": None},
    "weights that are none": lambda state: state | {"model": dict.fromkeys(state["model"], "x")},
    "weights of other layers": lambda state: state | {"model": {f"x.{n}": w for n, w in state["model"].items()}},
    "weights of another shape": lambda state: state | {"model": {n: torch.zeros(2, 2) for n in state["model"]}},
    "no optimizer": lambda state: state | {"optimizer": 1},
    "moments of another shape": with_first_moment(torch.zeros(1, 3)),
    "moments that are none": with_first_moment("x"),
    "no moments": without_first_moment,
    "another position": lambda state: state | {"position": [1, 2]},
    "a position with other entries": in_position(colour="red"),
    "an epoch that is none": in_position(epoch=float("nan")),
    "an epoch too many": in_position(epoch=EPOCHS + 1),
    "a step too many": in_position(step=10**6),
    "seconds that are none": in_position(seconds=float("nan")),
    "no loss": in_position(loss_sum=None),
    "a best epoch to come": in_position(best_epoch=EPOCHS),
    "a line too few": lambda state: in_position(lines=state["position"]["lines"][1:])(state),
    "a line that is none": with_odd_line,
}


@pytest.mark.parametrize("change", MADE_UP.values(), ids=MADE_UP)
def test_a_checkpoint_with_a_right_checksum_and_wrong_content_is_passed_over(
    config: RunConfig, finished: Path, unfinished: Path, change: Callable[[Any], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    made_up = rewrite_newest(unfinished, change)
    train(config, folder=unfinished, resume=True)
    assert str(made_up) in capfd.readouterr().err
    assert outcome(unfinished) == outcome(finished)


@pytest.mark.parametrize("change", [MADE_UP["nothing"], MADE_UP["weights of another shape"]])
def test_checkpoints_that_cannot_be_used_are_not_trained_over(
    config: RunConfig, unfinished: Path, change: Callable[[Any], Any]
) -> None:
    newest_checkpoint(unfinished).unlink()
    made_up = rewrite_newest(unfinished, change)
    with pytest.raises(ShortlistError, match=f"{made_up.name} cannot be used"):
        train(config, folder=unfinished, resume=True, quiet=True)
    assert made_up.exists()


@pytest.mark.parametrize("weights", [{"other": torch.zeros(3)}, {"head.weight": torch.zeros(1, 2)}])
def test_best_weights_of_another_network_are_named(
    config: RunConfig, unfinished: Path, weights: dict[str, torch.Tensor]
) -> None:
    RunFolder(unfinished).save_best(as_safetensors(weights))
    digest = file_digest(unfinished / "best.safetensors")
    rewrite_newest(unfinished, in_position(best_digest=digest))
    with pytest.raises(ShortlistError, match=r"best\.safetensors does not fit"):
        evaluate_run(RunFolder(unfinished))
    with pytest.raises(ShortlistError, match=r"best\.safetensors does not fit"):
        train(config, folder=unfinished, resume=True, quiet=True)


def test_best_weights_that_no_checkpoint_names_are_refused(unfinished: Path) -> None:
    run = RunFolder(unfinished)
    other = {name: 2 * tensor for name, tensor in run.load_best().items()}
    (unfinished / "best.safetensors").write_bytes(as_safetensors(other))
    with pytest.raises(ShortlistError, match=r"best\.safetensors is damaged"):
        run.load_best()


def test_best_weights_of_the_checkpoint_before_are_used(unfinished: Path) -> None:
    """A process may be killed after a checkpoint and before the weights that it names are written."""
    shutil.copy(unfinished / "checkpoints" / "best.safetensors", unfinished / "best.safetensors")
    assert RunFolder(unfinished).load_best()


@pytest.mark.parametrize("entry", ["epoch", "step", "best_epoch", "best_digest"])
def test_a_position_without_an_entry_is_not_taken_for_the_beginning(
    entry: str, config: RunConfig, finished: Path, unfinished: Path
) -> None:
    def without_entry(state: Any) -> Any:
        del state["position"][entry]
        return state

    rewrite_newest(unfinished, without_entry)
    train(config, folder=unfinished, resume=True, quiet=True)
    assert outcome(unfinished) == outcome(finished)


class Accuracies(Callback):
    """These values of the selected metric, one for each epoch; keeps the weights of the first."""

    def __init__(self, *values: float) -> None:
        self._values, self.first_weights = values, dict[str, Tensor]()

    def on_validation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        if trainer.position.epoch == 0:
            self.first_weights = {name: w.clone() for name, w in trainer.parts.network.state_dict().items()}
        evaluation.metrics["macro_top3"] = self._values[trainer.position.epoch]


def test_after_a_damaged_checkpoint_the_best_weights_are_those_that_the_result_names(
    config: RunConfig, tmp_path: Path
) -> None:
    """An epoch that is trained again need not be the best again: on a GPU, or on other ranks, it may differ."""
    accuracies = Accuracies(0.5, 0.4, 0.6)
    train_until_test(config, tmp_path, accuracies)
    newest_checkpoint(tmp_path).write_bytes(b"damaged")
    run = train(config, folder=tmp_path, resume=True, quiet=True, callbacks=[Accuracies(0.5, 0.4, 0.1)])
    assert run.read_json("final.json")["best_epoch"] == 0
    torch.testing.assert_close(run.load_best(), accuracies.first_weights, rtol=0, atol=0)


def test_best_weights_that_are_lost_are_said_to_be(config: RunConfig, tmp_path: Path) -> None:
    train_until_step(config, tmp_path, 6)
    (tmp_path / "best.safetensors").unlink()
    with pytest.raises(ShortlistError, match="the best weights so far, of epoch 1, are lost"):
        train(config, folder=tmp_path, resume=True, quiet=True)


@pytest.mark.parametrize("written", [True, False])
def test_the_best_weights_are_those_of_the_epoch_that_the_checkpoint_names(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """Killed when they have just been written, or are about to be."""
    original, epochs = RunFolder.save_best, 0

    def dying(folder: RunFolder, weights: bytes) -> None:
        nonlocal epochs
        epochs += 1
        if written or epochs < EPOCHS:
            original(folder, weights)
        if epochs == EPOCHS:
            raise SystemExit

    better = Accuracies(0.1, 0.2, 0.3)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_best", dying)
        with pytest.raises(SystemExit):
            train(config, folder=tmp_path, quiet=True, callbacks=[better])
    state = RunFolder(tmp_path).load_checkpoint(pytest.fail)
    assert state is not None
    assert (state["position"]["epoch"], state["position"]["best_epoch"]) == (EPOCHS, EPOCHS - 1)
    run = train(config, folder=tmp_path, resume=True, quiet=True)
    torch.testing.assert_close(run.load_best(), state["model"], rtol=0, atol=0)


def test_a_full_disk_ends_the_run_with_a_message_and_it_can_go_on(
    config: RunConfig, finished: Path, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(ShortlistError, match=r"cannot write .*make room and give the command again"):
            train(config, folder=tmp_path, quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    train(config, folder=tmp_path, resume=True, quiet=True)
    assert outcome(tmp_path) == outcome(finished)


def test_several_seeds_go_on_where_they_stopped(
    config: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["embeddings", *config_arguments(config), "--out", str(tmp_path)]
    commands.train([*arguments, "--seeds", "0"])
    commands.train([*arguments, "--seeds", "0", "1", "--resume"])
    assert re.search(f"{tmp_path / 's0'} .*finished", capfd.readouterr().err)
    assert outcome(tmp_path / "s0") != outcome(tmp_path / "s1")


def test_a_seed_that_has_finished_is_not_repeated_for_other_workers(
    config: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = ["embeddings", *config_arguments(config), "--out", str(tmp_path)]
    commands.train([*settings, "--seeds", "0"])
    shutil.copy(config.data.root, tmp_path / "moved.npz")
    moved = ["--data.root", str(tmp_path / "moved.npz"), "--data.workers", "1"]
    commands.train([*settings, "--seeds", "0", "1", "--resume", *moved])
    assert re.search(f"{tmp_path / 's0'} .*finished", capfd.readouterr().err)
    assert RunFolder(tmp_path / "s1").finished
