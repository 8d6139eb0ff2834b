"""One process of a study: which trials it takes, how it judges them, and what it does about errors."""

import errno
import fcntl
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch

from shortlist import ShortlistError
from shortlist.program.config import RunConfig, changed
from shortlist.program.losses import Range
from shortlist.program.runs.folder import RunFolder, default_folder
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.evaluate import Evaluation
from shortlist.program.training.loop import Interrupted, Trainer, train
from shortlist.program.tuning.space import Axis, search_axes
from shortlist.program.tuning.storage import open_storage
from shortlist.program.tuning.study import study_name, tune
from shortlist.program.tuning.worker import Worker, is_alive, registered_worker
from tests.support.checkpoints import rewrite_newest
from tests.support.processes import run_process
from tests.support.studies import EPOCHS, At, raising, rows_of, states

TEMPERATURES = [0.25, 0.5, 1.0, 2.0]


@pytest.mark.parametrize("values", [(0.9, 0.2), (0.2, 0.9)], ids=["falling", "rising"])
def test_a_trial_is_worth_its_best_epoch_and_not_its_last(config: RunConfig, values: tuple[float, ...]) -> None:
    for trial in tune(config).trials:

        def with_values(state: Any) -> Any:
            for line, value in zip(state["position"]["lines"], values, strict=True):
                line["val_macro_top3"] = value
            return state

        rewrite_newest(trial.folder, with_values)
    shutil.rmtree(Path("runs", "tune"))  # a new study, which takes the finished runs
    assert [trial.value for trial in tune(config).trials] == [0.9, 0.9]


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\xff\xfe\n", b'{"epoch": 0, "val_macro_top3": 1.0}\n'])
def test_a_trial_is_judged_by_its_checkpoint_and_not_by_its_metrics_file(config: RunConfig, content: bytes) -> None:
    before = tune(config)
    (before.trials[0].folder / "metrics.jsonl").write_bytes(content)
    after = tune(config, storage="another")
    assert [trial.value for trial in after.trials] == [trial.value for trial in before.trials]


def test_a_range_of_too_few_numbers_is_told(config: RunConfig) -> None:
    """Without a limit, the process would draw the same values forever."""
    axes: dict[str, Axis] = {"optim.lr": Range(0.1, 0.10000000000000002), "loss.tau": (1.0,)}
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    worker = Worker(study, config, axes, worker="elsewhere-1", workers=Path("workers"), trials=5)
    assert worker.next_trial() is not None
    with pytest.raises(ShortlistError, match="fewer than 5 "):
        [worker.next_trial() for _ in range(4)]


def test_a_run_that_somebody_else_is_at_is_left_to_them(config: RunConfig) -> None:
    busy = changed(config, {"loss.tau": 0.1})
    said: list[str] = []
    with RunFolder(default_folder(busy)).claim(busy, resume=True):
        found = tune(config, say=said.append)
    assert [trial.settings["loss.tau"] for trial in found.trials] == [1.0]
    assert any(str(default_folder(busy)) in message and "in use" in message for message in said)
    assert states(tune(config)) == ["complete"] * 2


# Data that changes


@pytest.fixture
def mine(config: RunConfig) -> RunConfig:
    """The same run on a copy of the data, which a test may change."""
    shutil.copy(config.data.root, "mine.npz")
    return replace(config, data=replace(config.data, root="mine.npz"))


def change_images(mine: RunConfig) -> None:
    arrays = dict(np.load(mine.data.root))
    np.savez(mine.data.root, **arrays | {"train_x": 2 * arrays["train_x"]})


def test_runs_on_other_data_are_not_compared(mine: RunConfig) -> None:
    tune(mine)
    change_images(mine)
    with pytest.raises(ShortlistError, match="data has changed"):
        tune(mine, search=["loss.tau=0.1,0.5,1"])


def test_a_study_does_not_go_on_with_other_images(config: RunConfig, mine: RunConfig) -> None:
    tune(mine, trials=1)
    change_images(mine)
    with pytest.raises(ShortlistError, match=r"study.* other training images"):
        tune(mine)
    second = changed(mine, {"loss.tau": 1.0})
    train(second, quiet=True)  # a run on the new images, which the study must not take
    with pytest.raises(ShortlistError, match=r"study.* other training images"):
        tune(mine)
    shutil.rmtree(default_folder(second))
    shutil.copy(config.data.root, mine.data.root)
    assert states(tune(mine)) == ["complete"] * 2


def test_a_run_on_other_images_is_no_trial_of_a_new_study(mine: RunConfig) -> None:
    train(changed(mine, {"loss.tau": 0.1}), quiet=True)
    change_images(mine)
    with pytest.raises(ShortlistError, match="training images"):
        tune(mine)


def test_a_study_that_has_measured_nothing_takes_any_images(mine: RunConfig) -> None:
    with pytest.raises(ShortlistError, match="an image cannot be read"):
        tune(mine, callbacks=[raising(ShortlistError("an image cannot be read"))])
    change_images(mine)
    assert states(tune(mine)) == ["complete"] * 2


# Errors


def test_a_loss_that_diverges_ends_its_trial_and_not_the_study(config: RunConfig) -> None:
    found = tune(config, grid="given", search=["optim.lr=0.05,1e30"])
    assert states(found) == ["complete", "pruned"]
    assert "loss" in found.trials[1].note


def test_settings_that_do_not_fit_the_data_end_their_trials_and_not_the_study(config: RunConfig) -> None:
    found = tune(config, search=["data.label_noise=0.5,0"])  # these classes have no groups within which to mix labels
    assert len(found.trials) == 4
    for trial in found.trials:
        if trial.settings["data.label_noise"] == 0:
            assert trial.state == "complete"
        else:
            assert trial.state == "pruned"
            assert "data.noise_groups" in trial.note
            assert not trial.folder.exists()


def test_data_that_gets_lost_is_not_blamed_on_a_trial(config: RunConfig) -> None:
    data = Path("here.npz")
    data.symlink_to(config.data.root)
    here = replace(config, data=replace(config.data, root=str(data)))
    with pytest.raises(ShortlistError, match=r"here\.npz"):
        tune(here, csv_path=Path("trials.csv"), callbacks=[At(end=data.unlink)])
    assert [row["state"] for row in rows_of(Path("trials.csv"))] == ["complete", "waiting"]
    data.symlink_to(config.data.root)
    assert states(tune(here)) == ["complete"] * 2


def test_what_is_wrong_with_the_data_ends_the_study_which_goes_on_when_it_is_mended(config: RunConfig) -> None:
    broken = replace(config, data=replace(config.data, root="later.npz"))
    with pytest.raises(ShortlistError, match=r"later\.npz"):
        tune(broken)
    Path("later.npz").symlink_to(config.data.root)
    assert states(tune(broken)) == ["complete"] * 2


# Processes that die


@pytest.mark.parametrize("method", ["ask", "tell"])
def test_wherever_it_is_stopped_no_trial_is_left_to_nobody(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    original = getattr(optuna.Study, method)

    def stopped(study: optuna.Study, *arguments: Any, **options: Any) -> Any:
        patch.undo()
        if method == "ask":  # the trial exists, but its worker is not recorded yet
            original(study, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, method, stopped)
        with pytest.raises(Interrupted):
            tune(config, storage="journal")
    assert states(tune(config, storage="journal", clock=lambda: time.time() + 61)) == ["complete"] * 2


def test_a_lock_that_cannot_be_tried_is_no_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_locks(file: Any, how: int) -> None:
        raise OSError(errno.EBADF, "the error of NFS")

    with pytest.raises(OSError, match="full"), registered_worker(tmp_path) as failed:
        raise OSError("the disk is full")
    assert is_alive(tmp_path / failed) is False, "it may not have given back its trial"
    with registered_worker(tmp_path) as worker:
        assert is_alive(tmp_path / worker)
        with monkeypatch.context() as patched:
            patched.setattr(fcntl, "flock", without_locks)
            assert is_alive(tmp_path / worker) is None
    (tmp_path / "dead").touch()
    assert is_alive(tmp_path / "dead") is False


def test_a_trial_of_another_machine_is_left_alone_until_it_counts_as_lost(config: RunConfig) -> None:
    axes = search_axes(config)
    storage = open_storage("journal", Path())
    study = optuna.create_study(storage=storage, study_name=study_name(config, axes), direction="maximize")
    elsewhere = Worker(study, config, axes, worker="elsewhere-1", workers=Path("workers"))
    assert elsewhere.next_trial() is not None  # takes a trial, and is never heard of again
    assert states(tune(config, storage="journal")) == ["running", "complete"]
    two_hours_later = time.time() + 2 * 3600
    for lost_after, expected in ((2.5, ["running", "complete"]), (1.5, ["complete"] * 2)):
        found = tune(config, storage="journal", lost_after=lost_after, clock=lambda: two_hours_later)
        assert states(found) == expected


def test_processes_that_share_a_storage_share_the_trials_and_take_over_those_of_the_dead(config: RunConfig) -> None:
    run_process(_share_studies, config, Path.cwd())
    for folder in ("journal", "sqlite"):
        rows = rows_of(Path(folder, "trials.csv"))
        assert sorted(float(row["loss.tau"]) for row in rows) == TEMPERATURES
        assert {(row["state"], row["epochs"]) for row in rows} == {("complete", str(EPOCHS))}
        assert len({row["worker"] for row in rows}) > 1
        begun = Path(folder, "begun").read_text().splitlines()
        assert sorted(begun) == sorted(f"{tau} {epoch}" for tau in TEMPERATURES for epoch in range(EPOCHS))


class Begun(Callback):
    """Writes down each epoch that begins, and that this process is at work."""

    def on_step(self, trainer: Trainer) -> None:
        if trainer.position.step == 1:
            with Path("begun").open("a") as file:
                file.write(f"{trainer.config.loss.settings()['tau']} {trainer.position.epoch}\n")
            Path(f"at-work-{os.getpid()}").touch()


class Die(Callback):
    """Kills its process when the first epoch is on disk."""

    def on_checkpoint(self, trainer: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class WaitForTheDead(Callback):
    """Ends no epoch until one process is dead and all three have begun."""

    def on_validation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        while not Path("dead").exists() or len(list(Path().glob("at-work-*"))) < 3:
            time.sleep(0.01)


def _share_studies(config: RunConfig, folder: Path) -> None:
    torch.set_num_threads(1)  # three processes fill the cores
    open_storage(f"sqlite:///{folder}/unused.db", folder)  # imports what a database needs once, before the forks
    for name, storage in (("journal", "study"), ("sqlite", "sqlite:///study.db")):
        (folder / name).mkdir()
        os.chdir(folder / name)
        _share_study(config, storage)


def _share_study(config: RunConfig, storage: str) -> None:
    """Three processes begin a trial each. One dies during its trial, before the others finish theirs."""
    search = ["loss.tau=" + ",".join(map(str, TEMPERATURES))]

    def child(callback: Callback) -> int:
        pid = os.fork()  # safe: this process has started no threads
        if pid == 0:
            tune(config, search=search, storage=storage, csv_path=Path("trials.csv"), callbacks=[Begun(), callback])
            os._exit(0)
        return pid

    doomed, *others = [child(callback) for callback in (Die(), WaitForTheDead(), WaitForTheDead())]
    ends = [os.waitpid(doomed, 0)[1]]
    Path("dead").touch()
    ends += [os.waitpid(pid, 0)[1] for pid in others]
    assert [os.waitstatus_to_exitcode(end) for end in ends] == [-signal.SIGKILL, 0, 0]
