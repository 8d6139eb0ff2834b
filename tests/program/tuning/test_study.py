"""Studies: finished, interrupted and continued, from the command line too, and without a look at the test images."""

import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shortlist import ShortlistError
from shortlist.program import recipes
from shortlist.program.cli import commands
from shortlist.program.cli import main as cli
from shortlist.program.config import RunConfig, changed, differences
from shortlist.program.losses import LDAMConfig, NoisedTopKHingeConfig
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.evaluate import Evaluation
from shortlist.program.training.loop import Interrupted, Trainer
from shortlist.program.tuning import study as tuning
from shortlist.program.tuning.findings import Findings
from shortlist.program.tuning.study import study_name, tune
from tests.support.studies import EPOCHS, EpochsBegun, outcome, raising, rows_of, states


@pytest.fixture
def small_arguments(data: Path) -> list[str]:
    settings = f"--model.head linear --loss.name smooth_topk_hinge --loss.k 3 --train.epochs {EPOCHS}"
    settings += " --train.batch-size 64 --train.ks 1 3 --train.device cpu"
    return ["embeddings", "--data.root", str(data), *settings.split()]


@pytest.fixture
def epochs_begun() -> EpochsBegun:
    return EpochsBegun()


class InterruptAt(Callback):
    """Sends SIGINT during the validation of this epoch of the trial with this temperature."""

    def __init__(self, tau: float, epoch: int) -> None:
        self._where = (tau, epoch)

    def on_validation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        if (trainer.config.loss.settings()["tau"], trainer.position.epoch) == self._where:
            os.kill(os.getpid(), signal.SIGINT)


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"trials": 0}, "trials .*1.* got 0"),
    ({"lost_after": -1.0}, "lost_after .*>= 0, got -1"),
    ({"grid": "given"}, "--grid given .*--search"),
    ({"search": ["optim.rl=3"]}, "search .*'optim.rl=3'"),
    ({"search": ["loss.scael=3"]}, "search .*loss.scael"),
    ({"search": ["loss.name=3"]}, "search .*loss.name"),
    ({"search": ["loss.nome=3"]}, "search .*loss.nome"),
    ({"search": ["loss.tau=3", "loss.tau=4"]}, "search .*loss.tau"),
    ({"search": ["recipe=3"]}, "search .*'recipe=3'"),
    ({"search": ["loss.scale"]}, "search .*'loss.scale'"),
    ({"search": ["loss.tau=3,x"]}, "search .*'loss.tau=3,x'"),
    ({"search": ["loss.tau=-1,1"]}, r"loss\.tau .*>= 0, got -1"),
    ({"search": ["loss.gamma=1,2"]}, r"smooth_topk_hinge.* loss\.k and loss\.tau.* loss\.gamma"),
    ({"csv_path": Path()}, r"csv .*file, got \."),
    ({"storage": "nosuch://x"}, "storage nosuch://x"),
    ({"storage": "/"}, "storage /"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=lambda value: str(value)[:50])
def test_a_wrong_argument_is_named_before_any_work(config: RunConfig, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ShortlistError, match=message):
        tune(config, **arguments)
    assert list(Path().iterdir()) == []


def test_several_ranks_are_told_to_share_a_storage(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ShortlistError, match="--storage"):
        tune(config)


def test_a_search_that_would_be_forgotten_is_refused(small_arguments: list[str]) -> None:
    with pytest.raises(ShortlistError, match=r"--search .*once"):
        commands.tune([*small_arguments, "--search", "loss.tau=1,2", "--search", "optim.lr=0.1,0.2"])


@pytest.mark.parametrize("option", ["--loss.max-margin {}", "--loss.max_margin {}", "--loss.max-margin={}"])
def test_what_was_typed_was_set_even_if_it_is_the_default(
    option: str, small_arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = option.format(LDAMConfig().max_margin)
    with pytest.raises(ShortlistError, match=r"loss\.max_margin .*ldam"):
        commands.tune([*small_arguments, "--loss.name", "ldam", *typed.split()])


def test_every_option_of_the_command_reaches_the_search(
    small_arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def record(config: RunConfig, **options: Any) -> Findings:
        asked.update(options)
        raise ShortlistError("recorded")

    monkeypatch.setattr(tuning, "tune", record)
    options = "--grid given --search optim.lr=1,2 --trials 3 --storage here.db --prune --csv a.csv --lost-after 2.5"
    with pytest.raises(ShortlistError, match="recorded"):
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


def test_from_the_command_line_to_the_test_of_the_best(
    small_arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def shortlist(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["shortlist", *arguments])
        cli.main()
        return capsys.readouterr().out

    *table, _, command = shortlist("tune", *small_arguments, "--csv", "trials.csv").strip().splitlines()
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
    assert not list(Path("runs").rglob("final.json")), "no trial was tested"

    assert command.startswith("shortlist train embeddings ")
    assert "test micro_top1" in shortlist(*shlex.split(command)[1:])
    assert run.metrics() == before, "nothing was trained again"
    assert run.read_json("final.json")["val"]["macro_top3"] == float(best["val_macro_top3"])

    *_, command = shortlist("tune", *small_arguments, "--csv", "trials.csv").strip().splitlines()
    shortlist(*shlex.split(command)[1:])
    assert Path("report.html").is_file(), "a tested run is reported"


def test_the_test_images_are_never_read(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: Any) -> Any:
        raise AssertionError("the test images were read")

    class Guard(Callback):
        def on_fit_start(self, trainer: Trainer) -> None:
            for method in ("batches", "thumbnail"):
                monkeypatch.setattr(trainer.problem.test, method, forbidden)

    assert states(tune(config, callbacks=[Guard()])) == ["complete"] * 2


def test_a_trial_is_worth_what_its_best_epoch_was_chosen_by(config: RunConfig) -> None:
    longer = changed(config, {"loss.name": "cross_entropy", "train.epochs": 6, "train.select_corrected": True})
    is_other = []
    for trial in tune(longer, search=["optim.lr=0.02,0.1,0.4"], grid="given").trials:
        lines = RunFolder(trial.folder).metrics()
        assert trial.value == max(line["corrected_val_macro_top3"] for line in lines)
        is_other.append(trial.value != max(line["val_macro_top3"] for line in lines))
    assert any(is_other)


def test_a_study_that_has_finished_trains_nothing_more(config: RunConfig, epochs_begun: EpochsBegun) -> None:
    first = tune(config, callbacks=[epochs_begun])
    assert len(epochs_begun.noted) == 2 * EPOCHS
    assert outcome(tune(config, callbacks=[epochs_begun])) == outcome(first)
    assert len(epochs_begun.noted) == 2 * EPOCHS


def test_a_number_typed_as_it_was_opens_the_same_study() -> None:
    """The loss says 5 draws, and the command line 5.0."""
    config = recipes.with_loss(recipes.build("embeddings"), "noised_topk_hinge")
    typed = changed(config, {"loss.n_samples": float(config.loss.settings()["n_samples"])})
    assert study_name(typed, {}) == study_name(config, {})


def test_what_makes_no_other_run_makes_no_other_study() -> None:
    config = recipes.build("folder")
    slower = changed(config, {"train.eval_batch_size": 8, "train.device": "cpu", "data.on_bad_image": "skip"})
    assert not differences(slower, config)
    assert study_name(slower, {}) == study_name(config, {})
    assert study_name(changed(config, {"data.root": "there"}), {}) != study_name(config, {})


def test_another_study_takes_what_runs_there_are(config: RunConfig, epochs_begun: EpochsBegun) -> None:
    tune(config, callbacks=[epochs_begun])
    wider = tune(config, search=["loss.tau=0.1,0.5,1"], callbacks=[epochs_begun])
    assert states(wider) == ["complete"] * 3
    assert [tau for tau, _ in epochs_begun.noted] == [0.1] * EPOCHS + [1.0] * EPOCHS + [0.5] * EPOCHS


@pytest.mark.parametrize(("tau", "epoch"), [(1.0, 0), (0.1, EPOCHS - 1)], ids=["within a trial", "between trials"])
def test_after_an_interruption_it_goes_on_where_it_stopped(
    tau: float, epoch: int, config: RunConfig, epochs_begun: EpochsBegun
) -> None:
    with pytest.raises(Interrupted, match="repeat the command"):
        tune(config, csv_path=Path("trials.csv"), callbacks=[epochs_begun, InterruptAt(tau, epoch)])
    assert [row["state"] for row in rows_of(Path("trials.csv"))] == ["complete", "waiting"]
    after = tune(config, callbacks=[epochs_begun])
    assert [(trial.state, trial.epochs) for trial in after.trials] == [("complete", EPOCHS)] * 2
    interrupted = [(1.0, 1)] if tau == 1.0 else []  # after its first step
    assert epochs_begun.noted == [(0.1, 0), (0.1, 1), (1.0, 0), *interrupted, (1.0, 1)]


def test_fewer_trials_than_were_begun_are_those_of_the_beginning(config: RunConfig) -> None:
    """It once asked for the same trial forever, because another trial had a lower number."""
    with pytest.raises(Interrupted):
        tune(config, callbacks=[raising(Interrupted())])  # its first trial goes to the end of the queue
    found = [(trial.state, trial.settings["loss.tau"]) for trial in tune(config, trials=1).trials]
    assert found == [("complete", 0.1)]
    assert {(trial.state, trial.settings["loss.tau"]) for trial in tune(config).trials} == {
        ("complete", 0.1),
        ("complete", 1.0),
    }


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
    rates = "optim.lr=0.05,0.04,0.03,0.02,0"  # with the last rate nothing is learned
    found = tune(longer, grid="given", search=[rates], prune=True, callbacks=[epochs_begun])
    assert states(found) == ["complete"] * 4 + ["pruned"]
    assert "epoch 2" in found.trials[-1].note
    assert found.ranking[-1].number < 4
    assert len(epochs_begun.noted) == 4 * 4 + 2
