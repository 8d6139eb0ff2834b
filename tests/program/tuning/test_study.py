"""Studies: finished, broken off, shared; and blind to the test images.

``python -m tests.program.tuning.test_study CONFIG`` runs one study in three processes at once and
kills one of them.
"""

import csv
import errno
import fcntl
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from optuna.trial import Trial

from shortlist import ShortlistError
from shortlist.program import recipes
from shortlist.program.atomic_files import locked
from shortlist.program.cli import commands
from shortlist.program.cli import main as cli
from shortlist.program.cli.parsing import parse_recipe
from shortlist.program.config import RunConfig, changed, differences, from_dict, to_dict
from shortlist.program.losses import LOSSES, CrossEntropyConfig, NoisedTopKHingeConfig, Range, SmoothTopKHingeConfig
from shortlist.program.recipes import command_line
from shortlist.program.runs.folder import RunFolder, default_folder
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.evaluate import Evaluation
from shortlist.program.training.loop import Interrupted, Trainer, train
from shortlist.program.tuning import study as tuning
from shortlist.program.tuning.findings import Findings, TrialRecord
from shortlist.program.tuning.space import grid_points, search_axes
from shortlist.program.tuning.storage import open_storage
from shortlist.program.tuning.study import tune
from tests.support.checkpoints import rewrite_newest
from tests.support.small_runs import small_config, write_embeddings

EPOCHS = 2
TEMPERATURES = [0.25, 0.5, 1.0, 2.0]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embeddings(tmp_path_factory.mktemp("data") / "points.npz", images=200)


@pytest.fixture
def config(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A small run, with a paper's grid of two trials, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    small = small_config(data, recipe="embeddings", loss=SmoothTopKHingeConfig(k=3))
    return replace(small, train=replace(small.train, epochs=EPOCHS, batch_size=64))


@pytest.fixture
def small_arguments(data: Path) -> list[str]:
    settings = f"--model.head linear --loss.name smooth_topk_hinge --loss.k 3 --train.epochs {EPOCHS}"
    settings += " --train.batch-size 64 --train.ks 1 3 --train.device cpu"
    return ["embeddings", "--data.root", str(data), *settings.split()]


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


class EpochsBegun(Callback):
    """Notes the temperature and the epoch at the first step of each epoch, or of what is left of it."""

    def __init__(self) -> None:
        self.noted: list[tuple[float, int]] = []
        self._last = (-1.0, -1)

    def on_fit_start(self, trainer: Trainer) -> None:
        self._last = (-1.0, -1)

    def on_step(self, trainer: Trainer) -> None:
        here = (trainer.config.loss.settings()["tau"], trainer.position.epoch)
        if here != self._last:
            self.noted.append(here)
        self._last = here


class At(Callback):
    """Calls a function at the start or at the end of each training."""

    def __init__(self, *, start: Callable[[], object] | None = None, end: Callable[[], object] | None = None) -> None:
        self._start, self._end = start, end

    def on_fit_start(self, trainer: Trainer) -> None:
        if self._start is not None:
            self._start()

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._end is not None:
            self._end()


def raising(error: BaseException) -> Callback:
    def fail() -> None:
        raise error

    return At(start=fail)


@pytest.fixture
def epochs_begun() -> EpochsBegun:
    return EpochsBegun()


class InterruptAt(Callback):
    """SIGINT in the validation of this epoch of the trial with this temperature."""

    def __init__(self, tau: float, epoch: int) -> None:
        self._where = (tau, epoch)

    def on_validation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        if (trainer.config.loss.settings()["tau"], trainer.position.epoch) == self._where:
            os.kill(os.getpid(), signal.SIGINT)


def outcome(findings: Findings) -> list[tuple[str, float | None, dict[str, float]]]:
    return [(trial.state, trial.value, dict(trial.settings)) for trial in findings.trials]


# What is searched


def test_the_papers_grids_are_these() -> None:
    margins = (0.2, 0.3, 0.4, 0.5)
    assert {
        "focal": {"gamma": (0.5, 1.0, 2.0, 5.0)},
        "smooth_topk_hinge": {"tau": (0.1, 1.0)},
        "ldam": {"max_margin": margins},
        "imbalanced_noised_topk_hinge": {"max_margin": margins, "epsilon": (0.01, 0.05, 0.1)},
    } == {name: loss.paper_grid for name, loss in LOSSES.items() if loss.paper_grid}
    assert len(grid_points(search_axes(recipes.build("plantnet_table5_imbalanced_k5")))) == 12


def test_given_values_join_or_replace_the_grid_and_span_what_is_sampled() -> None:
    ldam = recipes.build("plantnet_table5_ldam_k5")
    assert search_axes(ldam, search=["loss.max-margin=0.1", "optim.lr=0.01,0.1"]) == {
        "loss.max_margin": (0.1,),
        "optim.lr": (0.01, 0.1),
    }
    assert search_axes(ldam, "given", ["loss.scale=30,50"]) == {"loss.scale": (30, 50)}
    assert search_axes(ldam, "none", ["loss.scale=40", "optim.lr=0.1,0.01,0.03"]) == {
        "loss.max_margin": Range(0.0, 0.8),
        "loss.scale": (40,),
        "optim.lr": Range(0.01, 0.1, log=True),
    }
    from_zero = search_axes(ldam, "none", ["optim.weight_decay=0,0.1"])["optim.weight_decay"]
    assert from_zero == Range(0.0, 0.1), "zero has no logarithm"
    without_grid = recipes.build("plantnet_table5_noised_k5")
    assert search_axes(without_grid, search=["optim.lr=0.05,0.2"]) == {"optim.lr": (0.05, 0.2)}, "as it was typed"
    assert search_axes(without_grid) == {"loss.epsilon": LOSSES["noised_topk_hinge"].ranges["epsilon"]}


def test_what_was_set_is_not_searched_unless_asked_for() -> None:
    both = recipes.build("plantnet_table5_imbalanced_k5")
    epsilons = LOSSES["imbalanced_noised_topk_hinge"].paper_grid["epsilon"]
    with_margin = changed(both, {"loss.max_margin": 0.7})
    assert search_axes(with_margin) == search_axes(with_margin, "paper") == {"loss.epsilon": epsilons}
    assert search_axes(with_margin, "none").keys() == {"loss.epsilon", "loss.scale"}
    assert search_axes(with_margin, search=["loss.max-margin=0.7,0.8"])["loss.max_margin"] == (0.7, 0.8)
    assert search_axes(with_margin, "given", ["optim.lr=1,2"]) == {"optim.lr": (1, 2)}
    assert search_axes(both, fixed=["loss.max_margin", "train.epochs"]) == {"loss.epsilon": epsilons}
    assert search_axes(both, search=["loss.epsilon=1,2"], fixed=["loss.epsilon"])["loss.epsilon"] == (1, 2)
    other_loss = changed(both, {"loss.name": "ldam"})
    assert search_axes(other_loss) == {"loss.max_margin": LOSSES["ldam"].paper_grid["max_margin"]}
    of_no_recipe = replace(with_margin, recipe="custom")  # nobody can tell what was set
    assert search_axes(of_no_recipe).keys() == {"loss.max_margin", "loss.epsilon"}


@pytest.mark.parametrize(
    ("recipe", "setting", "message"),
    [
        ("plantnet_table5_ldam_k5", "loss.max_margin", "leaves nothing of ldam .* --search loss.max_margin=0.2,0.5"),
        ("plantnet_table5_noised_k5", "loss.epsilon", "leaves nothing of noised_.* --search loss.epsilon=0.01,10"),
    ],
)
def test_if_all_was_set_it_takes_a_search_to_have_something_to_try(recipe: str, setting: str, message: str) -> None:
    config = changed(recipes.build(recipe), {setting: 0.7})
    with pytest.raises(ShortlistError, match=f"{setting} must stay as set, which {message}"):
        search_axes(config)
    assert search_axes(config, search=["optim.lr=0.1"]) == {"optim.lr": (0.1,)}


def test_the_command_line_tells_all_that_differs_from_the_recipe() -> None:
    recipe = recipes.build("cifar100_table4_noised_p00")
    changes = {"loss.epsilon": 0.5, "loss.n_samples": math.inf, "data.root": "my data", "optim.milestones": []}
    config = changed(recipe, {**changes, "train.cuda_graph": False, "train.compile": True})
    assert command_line(replace(config, seed=3)) == (
        "shortlist train cifar100_table4_noised_p00 --seed 3 --data.root 'my data' --loss.epsilon 0.5 "
        "--loss.n-samples inf --optim.milestones --train.compile --train.no-cuda-graph"
    )


@pytest.mark.parametrize("changes", [{}, {"train.epochs": 400}, {"train.epochs": 400, "optim.milestones": [0.25, 0.5]}])
def test_the_command_line_trains_that_very_configuration(changes: dict[str, Any]) -> None:
    config = changed(recipes.build("cifar100_table4_noised_p00"), changes)
    _, _, *arguments = shlex.split(command_line(config))
    assert parse_recipe(commands.TrainArguments, arguments, "train")[1] == config


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"trials": 0}, "trials must be at least 1, got 0"),
    ({"lost_after": -1.0}, "lost_after must be a finite number of hours >= 0, got -1"),
    ({"grid": "given"}, "--grid given needs --search"),
    ({"search": ["optim.rl=3"]}, "search must name a number among the settings, .* got 'optim.rl=3'"),
    ({"search": ["loss.scael=3"]}, "search must name a setting of the loss .* got loss.scael"),
    ({"search": ["loss.name=3"]}, "loss.name does not"),
    ({"search": ["loss.nome=3"]}, "search must name a setting of the loss"),
    ({"search": ["loss.tau=3", "loss.tau=4"]}, "names loss.tau twice"),
    ({"search": ["recipe=3"]}, "search must name a number"),
    ({"search": ["loss.scale"]}, "search must name a number"),
    ({"search": ["loss.tau=3,x"]}, "search must list numbers, .* got 'loss.tau=3,x'"),
    ({"search": ["loss.tau=-1,1"]}, r"loss\.tau must be finite and >= 0, got -1"),
    ({"search": ["loss.gamma=1,2"]}, r"smooth_topk_hinge, which has loss\.k and loss\.tau, got loss\.gamma"),
    ({"csv_path": Path()}, "csv must name a file"),
    ({"storage": "nosuch://x"}, r"the storage .* cannot be used"),
    ({"storage": "/"}, r"the storage .* cannot be used"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: str(value)[:50])
def test_a_wrong_argument_is_named_before_any_work(config: RunConfig, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ShortlistError, match=message):
        tune(config, **arguments)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(("grid", "values"), [("none", "2,9"), ("given", "2.5"), ("given", "nan")])
def test_draws_are_whole_numbers(config: RunConfig, grid: Any, values: str) -> None:
    noised = replace(config, loss=NoisedTopKHingeConfig(k=3))
    with pytest.raises(ShortlistError, match=r"loss\.n_samples must be a whole number"):
        tune(noised, grid=grid, search=[f"loss.n_samples={values}"])


@pytest.mark.parametrize("option", ["--loss.max-margin {}", "--loss.max_margin {}", "--loss.max-margin={}"])
def test_what_was_typed_was_set_even_if_it_is_the_recipes_value(
    option: str, small_arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = option.format(recipes.build("embeddings").loss.settings()["max_margin"])
    with pytest.raises(ShortlistError, match=r"loss\.max_margin must stay as set, which leaves nothing of ldam"):
        commands.tune([*small_arguments, "--loss.name", "ldam", *typed.split()])


def test_every_option_of_the_command_reaches_the_search(
    small_arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def noted(config: RunConfig, **options: Any) -> Findings:
        asked.update(options)
        raise ShortlistError("seen enough")

    monkeypatch.setattr(tuning, "tune", noted)
    options = "--grid given --search optim.lr=1,2 --trials 3 --storage here.db --prune --csv a.csv --lost-after 2.5"
    with pytest.raises(ShortlistError, match="seen enough"):
        commands.tune([*small_arguments, *options.split()])
    assert {"loss.k", "train.epochs"} <= {*asked.pop("fixed")}
    del asked["say"]
    assert asked == {
        "grid": "given",
        "search": ("optim.lr=1,2",),
        "trials": 3,
        "storage": "here.db",
        "prune": True,
        "csv_path": Path("a.csv"),
        "lost_after": 2.5,
    }


def test_a_search_that_would_be_forgotten_is_refused(small_arguments: list[str]) -> None:
    with pytest.raises(ShortlistError, match="--search must be given once"):
        commands.tune([*small_arguments, "--search", "loss.tau=1,2", "--search", "optim.lr=0.1,0.2"])


def test_losses_without_a_grid_or_without_settings_say_so(config: RunConfig) -> None:
    plain = replace(config, loss=CrossEntropyConfig(k=3))
    with pytest.raises(ShortlistError, match="the paper has no grid for cross_entropy, only for focal, "):
        tune(plain, grid="paper")
    with pytest.raises(ShortlistError, match="cross_entropy has no settings to search: name some"):
        tune(plain)


def test_several_ranks_are_told_to_share_a_storage(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ShortlistError, match="start a process for each, all with the same --storage"):
        tune(config)


# How it is searched


def test_from_the_command_line_to_the_test_of_the_best(
    small_arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = [sys.executable, "-m", "shortlist", "tune", *small_arguments, "--csv", "trials.csv"]
    done = subprocess.run(typed, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    *table, _, command = done.stdout.strip().splitlines()
    rows = rows_of(Path("trials.csv"))
    assert [(row["loss.tau"], row["state"], row["epochs"]) for row in rows] == [
        ("0.1", "complete", "2"),
        ("1.0", "complete", "2"),
    ]
    best = max(rows, key=lambda row: float(row["val_macro_top3"]))
    assert f"{100 * float(best['val_macro_top3']):.2f}%" in table[1]
    run = RunFolder.existing(best["run"])
    assert run.config.loss.settings()["tau"] == float(best["loss.tau"])
    before = run.metrics()
    assert max(line["val_macro_top3"] for line in before) == float(best["val_macro_top3"])
    assert not list(Path("runs").rglob("final.json")), "nothing was tested"

    assert command.startswith("shortlist train embeddings ")
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    cli.main()
    assert "test micro_top1" in capsys.readouterr().out
    assert run.metrics() == before, "nothing was trained again"
    assert run.read_json("final.json")["val"]["macro_top3"] == float(best["val_macro_top3"])

    commands.tune([*small_arguments, "--csv", "trials.csv"])
    *_, command = capsys.readouterr().out.strip().splitlines()
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    cli.main()
    assert Path("report.html").is_file(), "what has been tested is shown"


def test_the_test_images_are_never_read(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: Any) -> Any:
        raise AssertionError("the test images were read")

    class Guard(Callback):
        def on_fit_start(self, trainer: Trainer) -> None:
            for method in ("batches", "thumbnail"):
                monkeypatch.setattr(trainer.problem.test, method, forbidden)

    assert [trial.state for trial in tune(config, callbacks=[Guard()]).trials] == ["complete"] * 2


def test_a_study_that_has_finished_trains_nothing_more(config: RunConfig, epochs_begun: EpochsBegun) -> None:
    first = tune(config, callbacks=[epochs_begun])
    assert len(epochs_begun.noted) == 2 * EPOCHS
    assert outcome(tune(config, callbacks=[epochs_begun])) == outcome(first)
    assert len(epochs_begun.noted) == 2 * EPOCHS


def test_a_number_typed_as_it_was_opens_the_same_study() -> None:
    """The recipe has 5 draws, the command line 5.0."""
    config = recipes.build("embeddings")
    typed = changed(config, {"loss.n_samples": float(config.loss.settings()["n_samples"])})
    assert tuning._study_name(typed, {}) == tuning._study_name(config, {})


def test_what_makes_no_other_run_makes_no_other_study() -> None:
    config = recipes.build("folder")
    slower = changed(config, {"train.eval_batch_size": 8, "train.device": "cpu", "data.on_bad_image": "skip"})
    assert not differences(slower, config)
    assert tuning._study_name(slower, {}) == tuning._study_name(config, {})
    assert tuning._study_name(changed(config, {"data.root": "there"}), {}) != tuning._study_name(config, {})


def test_another_study_takes_what_runs_there_are(config: RunConfig, epochs_begun: EpochsBegun) -> None:
    tune(config, callbacks=[epochs_begun])
    wider = tune(config, search=["loss.tau=0.1,0.5,1"], callbacks=[epochs_begun])
    assert [trial.state for trial in wider.trials] == ["complete"] * 3
    assert [tau for tau, _ in epochs_begun.noted] == [0.1] * EPOCHS + [1.0] * EPOCHS + [0.5] * EPOCHS


@pytest.mark.parametrize("values", [(0.9, 0.2), (0.2, 0.9)], ids=["falling", "rising"])
def test_a_trial_is_worth_its_best_epoch_and_not_its_last(config: RunConfig, values: tuple[float, ...]) -> None:
    for trial in tune(config).trials:

        def with_values(state: Any) -> Any:
            for line, value in zip(state["position"]["lines"], values, strict=True):
                line["val_macro_top3"] = value
            return state

        rewrite_newest(trial.folder, with_values)
    shutil.rmtree(Path("runs", "tune"))  # a new study, which takes the runs as they are
    assert [trial.value for trial in tune(config).trials] == [0.9, 0.9]


def test_runs_have_the_names_that_the_process_which_ran_them_gave_them(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [trial.folder for trial in tune(config).trials]
    found = tune(replace(config, data=replace(config.data, workers=0)))  # the same study, but other names
    assert [trial.folder for trial in found.trials] == folders
    assert [Path(row["run"]) for row in rows_of(found.csv_path)] == folders
    monkeypatch.setattr(sys, "argv", shlex.split(found.command or ""))
    cli.main()
    assert f"{found.ranking[0].folder}  test micro_top1" in capsys.readouterr().out
    assert set(Path("runs", config.recipe).iterdir()) == set(folders), "nothing was trained again"


def test_of_a_study_that_notes_no_folders_the_usual_ones_are_named(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of earlier versions."""
    noted: Any = Trial.set_user_attr

    def without_folder(trial: Trial, name: str, value: Any) -> None:
        if name != tuning._FOLDER:
            noted(trial, name, value)

    monkeypatch.setattr(Trial, "set_user_attr", without_folder)
    for trial in tune(config).trials:
        assert trial.folder == default_folder(changed(config, trial.settings))


@pytest.mark.parametrize(("tau", "epoch"), [(1.0, 0), (0.1, EPOCHS - 1)], ids=["within a trial", "between trials"])
def test_after_an_interruption_it_goes_on_where_it_stopped(
    tau: float, epoch: int, config: RunConfig, epochs_begun: EpochsBegun
) -> None:
    with pytest.raises(Interrupted, match="the same command goes on"):
        tune(config, csv_path=Path("trials.csv"), callbacks=[epochs_begun, InterruptAt(tau, epoch)])
    assert [row["state"] for row in rows_of(Path("trials.csv"))] == ["complete", "waiting"]
    after = tune(config, callbacks=[epochs_begun])
    assert [(trial.state, trial.epochs) for trial in after.trials] == [("complete", EPOCHS)] * 2
    broken_off = [(1.0, 1)] if tau == 1.0 else []  # after its first step
    assert epochs_begun.noted == [(0.1, 0), (0.1, 1), (1.0, 0), *broken_off, (1.0, 1)]


def test_fewer_trials_than_were_begun_are_those_of_the_beginning(config: RunConfig) -> None:
    """It once asked for the same trial for ever, as another one had come before it."""
    with pytest.raises(Interrupted):
        tune(config, callbacks=[raising(Interrupted())])  # its first trial is given back, to the end of the queue
    found = [(trial.state, trial.settings["loss.tau"]) for trial in tune(config, trials=1).trials]
    assert found == [("complete", 0.1)]
    assert {(trial.state, trial.settings["loss.tau"]) for trial in tune(config).trials} == {
        ("complete", 0.1),
        ("complete", 1.0),
    }


def test_a_range_of_too_few_numbers_is_told(config: RunConfig) -> None:
    narrow = ["optim.lr=0.1,0.10000000000000002", "loss.tau=1"]
    with pytest.raises(ShortlistError, match="fewer than 5 different values"):
        tune(config, grid="none", search=narrow, trials=5)


def test_a_run_that_somebody_else_is_at_is_left_to_them(config: RunConfig) -> None:
    busy = changed(config, {"loss.tau": 0.1})
    said: list[str] = []
    with RunFolder(default_folder(busy)).claim(busy, resume=True):
        found = tune(config, say=said.append)
    assert [trial.settings["loss.tau"] for trial in found.trials] == [1.0]
    assert any("is in use by another process, and is left to it" in each for each in said)
    assert [trial.state for trial in tune(config).trials] == ["complete"] * 2


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\xff\xfe\n", b'{"epoch": 0, "val_macro_top3": 1.0}\n'])
def test_a_trial_is_judged_by_its_checkpoint_and_not_by_its_metrics_file(config: RunConfig, content: bytes) -> None:
    before = tune(config)
    (before.trials[0].folder / "metrics.jsonl").write_bytes(content)
    assert [trial.value for trial in tune(config, storage="another").trials] == [t.value for t in before.trials]


def test_runs_on_other_data_are_not_compared(config: RunConfig) -> None:
    arrays = dict(np.load(config.data.root))
    np.savez("mine.npz", **arrays)
    mine = replace(config, data=replace(config.data, root="mine.npz"))
    tune(mine)
    np.savez("mine.npz", **arrays | {"train_x": 2 * arrays["train_x"]})
    with pytest.raises(ShortlistError, match="the data has changed"):
        tune(mine, search=["loss.tau=0.1,0.5,1"])


def test_a_study_does_not_go_on_with_other_images(config: RunConfig) -> None:
    arrays = dict(np.load(config.data.root))
    np.savez("mine.npz", **arrays)
    mine = replace(config, data=replace(config.data, root="mine.npz"))
    tune(mine, trials=1)
    np.savez("mine.npz", **arrays | {"train_x": 2 * arrays["train_x"]})
    with pytest.raises(ShortlistError, match="the trials of this study had other training images"):
        tune(mine)
    second = changed(mine, {"loss.tau": 1.0})
    train(second, quiet=True)  # a run on the new images, which the study might take
    with pytest.raises(ShortlistError, match="the trials of this study had other training images"):
        tune(mine)
    shutil.rmtree(default_folder(second))
    np.savez("mine.npz", **arrays)
    assert [trial.state for trial in tune(mine).trials] == ["complete"] * 2


def test_a_run_on_other_images_is_no_trial_of_a_new_study(config: RunConfig) -> None:
    arrays = dict(np.load(config.data.root))
    np.savez("mine.npz", **arrays)
    mine = replace(config, data=replace(config.data, root="mine.npz"))
    train(changed(mine, {"loss.tau": 0.1}), quiet=True)
    np.savez("mine.npz", **arrays | {"train_x": 2 * arrays["train_x"]})
    with pytest.raises(ShortlistError, match="training images are not those"):
        tune(mine)


def test_a_study_that_has_measured_nothing_takes_any_images(config: RunConfig) -> None:
    arrays = dict(np.load(config.data.root))
    np.savez("mine.npz", **arrays)
    mine = replace(config, data=replace(config.data, root="mine.npz"))

    with pytest.raises(ShortlistError, match="an image cannot be read"):
        tune(mine, callbacks=[raising(ShortlistError("an image cannot be read"))])
    np.savez("mine.npz", **arrays | {"train_x": 2 * arrays["train_x"]})
    assert [trial.state for trial in tune(mine).trials] == ["complete"] * 2


def test_the_journals_lock_leads_to_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was killed leaves it, and others follow it to see since when nothing was written."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/tune/x")
    storage: Any = open_storage("", folder / "studies.journal")
    storage._backend._lock.acquire()
    assert (folder / "studies.journal.lock").resolve(strict=True) == (folder / "studies.journal").resolve()
    storage._backend._lock.release()


def test_a_database_that_disappears_is_told_in_a_line(config: RunConfig) -> None:
    deleted = At(start=lambda: Path("study.db").write_bytes(b"no database any more" * 1000))
    with pytest.raises(ShortlistError, match=r"^the storage sqlite:///study\.db cannot be used: [^\n]*$"):
        tune(config, storage="sqlite:///study.db", callbacks=[deleted])


def test_half_a_line_in_the_journal_does_not_spoil_it(config: RunConfig) -> None:
    """As a full disk leaves it."""
    first = outcome(tune(config, trials=1, storage="journal"))
    with Path("journal").open("ab") as file:
        file.write(b'{"op_code":8,"worker_id":"x","tri')
    again = outcome(tune(config, storage="journal"))
    assert again[:1] == first
    assert outcome(tune(config, storage="journal")) == again


@pytest.mark.parametrize("method", ["ask", "tell"])
def test_wherever_it_is_stopped_no_trial_is_left_to_nobody(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    original = getattr(optuna.Study, method)

    def stopped(study: optuna.Study, *arguments: Any, **options: Any) -> Any:
        patch.undo()
        if method == "ask":  # when there is a trial, of which nobody has said whose it is
            original(study, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, method, stopped)
        with pytest.raises(Interrupted):
            tune(config, storage="journal")
    monkeypatch.setattr(tuning, "_SECONDS_TO_BE_NAMED", -1)
    assert [trial.state for trial in tune(config, storage="journal").trials] == ["complete"] * 2


def test_a_lock_that_cannot_be_tried_is_no_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_locks(file: Any, how: int) -> None:
        raise OSError(errno.EBADF, "as NFS says")

    with pytest.raises(OSError, match="full"), tuning._at_work(tmp_path) as failed:
        raise OSError("the disk is full")
    assert tuning._is_alive(tmp_path / failed) is False, "whatever the storage still says of its trials"
    with tuning._at_work(tmp_path) as worker:
        assert tuning._is_alive(tmp_path / worker)
        with monkeypatch.context() as patched:
            patched.setattr(fcntl, "flock", without_locks)
            assert tuning._is_alive(tmp_path / worker) is None
    (tmp_path / "dead").touch()
    assert tuning._is_alive(tmp_path / "dead") is False


def test_processes_that_share_a_storage_share_the_trials_and_take_over_those_of_the_dead(
    config: RunConfig, tmp_path: Path
) -> None:
    Path("config.json").write_text(json.dumps(to_dict(config)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.program.tuning.test_study", str(tmp_path / "config.json")],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for folder in ("journal", "sqlite"):
        rows = rows_of(Path(folder, "trials.csv"))
        assert sorted(float(row["loss.tau"]) for row in rows) == TEMPERATURES
        assert {(row["state"], row["epochs"]) for row in rows} == {("complete", str(EPOCHS))}
        assert len({row["worker"] for row in rows}) > 1
        begun = Path(folder, "begun").read_text().splitlines()
        assert sorted(begun) == sorted(f"{tau} {epoch}" for tau in TEMPERATURES for epoch in range(EPOCHS))


def test_a_trial_of_another_machine_is_left_alone_until_it_counts_as_lost(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(tuning._Search, "_give_back", lambda *_: None)
        patched.setattr(tuning, "_host", lambda: "elsewhere-")
        with pytest.raises(SystemExit):  # stands for a death: the trial is not given back
            tune(config, callbacks=[raising(SystemExit())])
    assert [trial.state for trial in tune(config).trials] == ["running", "complete"]
    two_hours_later = time.time() + 2 * 3600
    monkeypatch.setattr(tuning, "time", SimpleNamespace(time=lambda: two_hours_later))
    assert [trial.state for trial in tune(config, lost_after=2.5).trials] == ["running", "complete"]
    assert [trial.state for trial in tune(config, lost_after=1.5).trials] == ["complete"] * 2


def test_a_loss_that_diverges_ends_its_trial_and_not_the_study(config: RunConfig) -> None:
    found = tune(config, grid="given", search=["optim.lr=0.05,1e30"])
    assert [trial.state for trial in found.trials] == ["complete", "pruned"]
    assert "the loss became" in found.trials[1].note


def test_settings_that_do_not_fit_the_data_end_their_trials_and_not_the_study(config: RunConfig) -> None:
    found = tune(config, search=["data.label_noise=0.5,0"])  # these classes have no groups within which to mix labels
    assert len(found.trials) == 4
    for trial in found.trials:
        if trial.settings["data.label_noise"] == 0:
            assert trial.state == "complete"
        else:
            assert trial.state == "pruned"
            assert trial.note.startswith("data.noise_groups must be consecutive")
            assert not trial.folder.exists()


def test_data_that_gets_lost_is_not_blamed_on_a_trial(config: RunConfig) -> None:
    data = Path("here.npz")
    data.symlink_to(config.data.root)
    here = replace(config, data=replace(config.data, root=str(data)))
    with pytest.raises(ShortlistError, match=r"there is no file here\.npz"):
        tune(here, csv_path=Path("trials.csv"), callbacks=[At(end=data.unlink)])
    assert [row["state"] for row in rows_of(Path("trials.csv"))] == ["complete", "waiting"]
    data.symlink_to(config.data.root)
    assert [trial.state for trial in tune(here).trials] == ["complete"] * 2


def test_what_is_wrong_with_the_data_ends_the_study_which_goes_on_when_it_is_mended(config: RunConfig) -> None:
    broken = replace(config, data=replace(config.data, root="later.npz"))
    with pytest.raises(ShortlistError, match=r"there is no file later\.npz"):
        tune(broken)
    Path("later.npz").symlink_to(config.data.root)
    assert [trial.state for trial in tune(broken).trials] == ["complete"] * 2


def test_samples_depend_on_the_seed_alone_and_not_on_interruptions(config: RunConfig) -> None:
    noised = replace(config, loss=NoisedTopKHingeConfig(k=3))
    at_once = [trial.settings for trial in tune(noised, trials=3, storage="one").trials]
    for trials in (1, 2, 3):
        in_steps = [trial.settings for trial in tune(noised, trials=trials, storage="two").trials]
    assert in_steps == at_once
    assert len({settings["loss.epsilon"] for settings in at_once}) == 3
    other = tune(replace(noised, seed=1), trials=1).trials[0]
    assert other.settings != at_once[0]


def test_settings_of_a_sample_are_drawn_independently(config: RunConfig) -> None:
    found = tune(config, grid="none", search=["loss.tau=1,2", "optim.lr=1,2", "optim.weight_decay=1,2"], trials=1)
    assert len(set(found.trials[0].settings.values())) == 3


def test_pruning_ends_what_is_worse_than_the_median(config: RunConfig, epochs_begun: EpochsBegun) -> None:
    longer = replace(config, train=replace(config.train, epochs=4))
    rates = "optim.lr=0.05,0.04,0.03,0.02,0"  # the last cannot learn
    found = tune(longer, grid="given", search=[rates], prune=True, callbacks=[epochs_begun])
    assert [trial.state for trial in found.trials] == ["complete"] * 4 + ["pruned"]
    assert found.trials[-1].note == "pruned after epoch 2"
    assert found.ranking[-1].number < 4
    assert len(epochs_begun.noted) == 4 * 4 + 2


def test_what_is_listed_is_not_overwritten_by_older_news(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    original = tuning._records

    def nobody_else_writes(*arguments: Any) -> Any:
        with pytest.raises(BlockingIOError), locked(Path(".trials.csv.lock"), wait=False):
            pass
        looked.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(tuning, "_records", nobody_else_writes)
    tune(config, csv_path=Path("trials.csv"))
    assert looked


def test_of_trials_that_differ_by_rounding_the_first_is_ahead(config: RunConfig, tmp_path: Path) -> None:
    values = (0.59999996, 0.60000002, 0.61, 0.6001)
    trials = tuple(
        TrialRecord(number, "complete", value, {}, 1, tmp_path, "", "") for number, value in enumerate(values)
    )
    assert [trial.number for trial in Findings(config, (), trials, tmp_path).ranking] == [2, 3, 0, 1]


class Begun(Callback):
    """Writes down each epoch that is begun, and that this process is at work."""

    def on_step(self, trainer: Trainer) -> None:
        if trainer.position.step == 1:
            with Path("begun").open("a") as file:
                file.write(f"{trainer.config.loss.settings()['tau']} {trainer.position.epoch}\n")
            Path(f"at-work-{os.getpid()}").touch()


class Die(Callback):
    """By a kill, when the first epoch is on disk."""

    def on_checkpoint(self, trainer: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class WaitForTheDead(Callback):
    """Ends no epoch before one process is dead and all three have begun."""

    def on_validation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        while not Path("dead").exists() or len(list(Path().glob("at-work-*"))) < 3:
            time.sleep(0.01)


def _work_together(config: RunConfig, storage: str) -> None:
    """Three processes, each with a trial of its own at first; one dies in it, before the others end theirs."""
    search, dead = ["loss.tau=" + ",".join(map(str, TEMPERATURES))], Path("dead")

    def child(callback: Callback) -> int:
        # Forking before torch has started any thread is safe, and saves an import for each process.
        pid = os.fork()
        if pid == 0:
            tune(config, search=search, storage=storage, csv_path=Path("trials.csv"), callbacks=[Begun(), callback])
            os._exit(0)
        return pid

    doomed, *others = [child(callback) for callback in (Die(), WaitForTheDead(), WaitForTheDead())]
    ends = [os.waitpid(doomed, 0)[1]]
    dead.touch()
    ends += [os.waitpid(pid, 0)[1] for pid in others]
    assert [os.waitstatus_to_exitcode(end) for end in ends] == [-signal.SIGKILL, 0, 0]


def _main(file: Path) -> None:
    torch.set_num_threads(1)  # three processes fill the cores
    config = from_dict(json.loads(file.read_text()))
    for name, storage in (("journal", "study"), ("sqlite", "sqlite:///study.db")):
        (file.parent / name).mkdir()
        os.chdir(file.parent / name)
        _work_together(config, storage)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
