"""Comparisons: equal budgets, nothing trained twice, killed and continued, shared, and no look at the test images."""

import csv
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shortlist import ShortlistError
from shortlist.program.cli import main as cli
from shortlist.program.cli.commands import TrainArguments
from shortlist.program.cli.parsing import parse_recipe
from shortlist.program.compare import running
from shortlist.program.compare.candidates import CANDIDATES, Candidate, find_candidates
from shortlist.program.config import RunConfig, changed
from shortlist.program.runs.folder import InUseError, RunFolder, default_folder, find_runs
from shortlist.program.training.loop import Interrupted
from tests.support.comparing import (
    COMMAND,
    DATA,
    EPOCHS,
    LOSSES,
    SEEDS,
    TRIALS,
    Die,
    Trainings,
    base_config,
    run_comparison,
)
from tests.support.processes import run_process
from tests.support.small_runs import write_embeddings

USELESS = Candidate(
    name="useless", loss="cross_entropy", label="Useless", what="learns nothing", changes={"optim.lr": 1e-9}
)
WILD = Candidate(
    name="wild", loss="cross_entropy", label="Wild", what="", changes={"optim.name": "sgd", "optim.lr": 1e38}
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embeddings(tmp_path_factory.mktemp("data") / DATA, images=200)


@pytest.fixture
def place(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the data in it."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(data, DATA)
    return tmp_path


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the command has run to its end."""
    folder = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shutil.copy(data, DATA)
        patch.setattr(sys, "argv", ["shortlist", *COMMAND])
        cli.main()
    return folder


def table_of(folder: Path) -> str:
    (path,) = folder.glob("runs/compare/*/compare.csv")
    return path.read_text()


def facts_of(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("runs/compare/*/compare.json")
    return {loss["name"]: loss for loss in json.loads(path.read_text())["losses"]}


def test_every_loss_has_the_same_budget_and_every_seed(done: Path) -> None:
    losses = facts_of(done)
    assert {*losses} == {*LOSSES}
    for name, loss in losses.items():
        assert [trial["state"] for trial in loss["trials"]] == ["complete"] * TRIALS
        assert [trial["epochs"] for trial in loss["trials"]] == [EPOCHS] * TRIALS
        assert sorted(run["seed"] for run in loss["runs"]) == [*SEEDS], name
    tested = [run for run in find_runs([done / "runs"]) if run.finished]
    assert len(tested) == len(LOSSES) * len(SEEDS), "no trial was tested"
    searched = {run.config.seed for run in find_runs([done / "runs"])} - {run.config.seed for run in tested}
    assert len(searched) == 1
    assert not searched & {*SEEDS}, "the search has a seed of its own"


def test_a_trial_is_worth_its_corrected_accuracy_and_the_best_trial_is_taken(done: Path) -> None:
    for name, loss in facts_of(done).items():
        best = max(loss["trials"], key=lambda trial: trial["value"])
        for run in loss["runs"]:
            config = RunFolder(done / run["folder"]).config
            assert changed(config, best["settings"]) == config, name
            assert run["val"] == RunFolder(done / run["folder"]).read_json("correction.json")["val"]["macro_top3"]


def test_the_table_is_what_the_run_folders_say(done: Path) -> None:
    rows = list(csv.DictReader(table_of(done).splitlines()))
    for row in rows:
        finals = [
            RunFolder(done / run["folder"]).read_json("final.json") for run in facts_of(done)[row["loss"]]["runs"]
        ]
        for column, entry in (("test_macro_top3", "test"), ("test_macro_top3_corrected", "test_corrected")):
            assert float(row[column]) == pytest.approx(np.mean([final[entry]["macro_top3"] for final in finals]))
    values = [float(row["val_macro_top3"]) for row in rows]
    assert values == sorted(values, reverse=True)


def test_the_command_again_trains_nothing_and_says_the_same(
    done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = table_of(done)
    monkeypatch.chdir(done)
    trainings = Trainings()
    found = run_comparison(trainings)
    assert (trainings.begun, table_of(done)) == ([], before)
    monkeypatch.setattr(sys, "argv", ["shortlist", *COMMAND])
    cli.main()
    *_, command = capsys.readouterr().out.strip().splitlines()
    assert table_of(done) == before
    program, train, *words = shlex.split(command)
    assert (program, train) == ("shortlist", "train")
    _, config = parse_recipe(TrainArguments, words, "train")
    assert found.leader is not None
    assert RunFolder(default_folder(config)).path == found.leader.outcomes[0].folder
    assert RunFolder(default_folder(config)).config == config
    (page,) = Path().glob("runs/compare/*/report.html")
    assert "Which loss for this data?" in page.read_text()
    assert page.read_text().count(found.leader.candidate.label) > 1


# Kills and several processes


@pytest.fixture(scope="module")
def others(done: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two more: in one the command was killed three times, in the other two processes shared the work."""
    folder = tmp_path_factory.mktemp("others")
    run_process(_kill_and_share, done, folder)  # both in one process, which must import the program first
    return folder


def _kill_and_share(done: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    for name, work in (("killed", _kill_and_continue), ("shared", _share)):
        (folder / name).mkdir()
        os.chdir(folder / name)
        shutil.copy(done / DATA, DATA)
        work()


def _kill_and_continue() -> None:
    ends = [
        _end(_forked(lambda: run_comparison(Die(2, after_last=False)))),  # within a trial
        _end(_forked(lambda: run_comparison(Die(2, after_last=True)))),  # a trial is trained and not judged
        _end(_forked(lambda: run_comparison(Die(2, after_last=True)))),  # a run is trained and not tested
        _end(_forked(run_comparison)),
    ]
    assert ends == [-signal.SIGKILL] * 3 + [0]


def _share() -> None:
    def work(number: int) -> None:
        trainings = Trainings()
        run_comparison(trainings)
        Path(f"trained-{number}").write_text(str(len(trainings.begun)))

    children = [_forked(partial(work, number)) for number in (0, 1)]
    assert [_end(child) for child in children] == [0, 0]


def test_killed_at_any_time_the_same_command_ends_with_the_same_table(done: Path, others: Path) -> None:
    assert table_of(others / "killed") == table_of(done)


def test_two_processes_share_the_work_and_both_have_the_whole_table(done: Path, others: Path) -> None:
    assert table_of(others / "shared") == table_of(done)
    for run in find_runs([others / "shared" / "runs"]):
        assert "resumed" not in run.read_environment(), "trained once, from its start to its end"
    trained = [int((others / "shared" / f"trained-{number}").read_text()) for number in (0, 1)]
    assert sum(trained) == len(LOSSES) * (TRIALS + len(SEEDS))
    assert min(trained) > 0


def _forked(work: Callable[[], object]) -> int:
    pid = os.fork()  # safe: this process has started no threads
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def _end(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_run_of_another_process_is_waited_for(place: Path, is_prepared: bool) -> None:
    """Whether the other one is training it already or still reads its data."""
    config = find_candidates(["ldam"])[0].config(base_config())
    run = RunFolder(default_folder(config))
    said: list[str] = []
    with ExitStack() as elsewhere:
        elsewhere.enter_context(run.reserve() if is_prepared else run.claim(config, resume=True))
        found = run_comparison(trials=0, seeds=(0,), say=said.append, pause=elsewhere.close)
    assert any("ldam, seed 0: another process" in message for message in said)
    assert [len(entry.outcomes) for entry in found.entries] == [1, 1]


def test_a_run_is_reserved_before_its_data_is_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or processes that share a comparison would all prepare the same run, and all but one go away again."""

    def begin(config: RunConfig, *, folder: Path, **others: object) -> None:
        with pytest.raises(InUseError), RunFolder(folder).reserve():
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "train", begin)
    with pytest.raises(Interrupted):
        run_comparison(trials=0, seeds=(0,))


# Seeds in rounds


def test_a_hopeless_loss_gets_no_more_seeds_and_is_told(place: Path) -> None:
    said: list[str] = []
    base = replace(CANDIDATES["cross_entropy"], changes={"optim.lr": 0.05})
    found = run_comparison(candidates=[USELESS, base], trials=0, seeds=(3, 2, 1, 0), say=said.append)
    best, dropped = found.entries
    assert (best.candidate.name, dropped.candidate.name) == ("cross_entropy", "useless")
    assert [outcome.seed for outcome in best.outcomes] == [3, 2, 1, 0]
    assert [outcome.seed for outcome in dropped.outcomes] == [3, 2, 1]
    assert dropped.is_dropped
    assert any("useless: dropped after 3 seeds" in message for message in said)
    trainings = Trainings()
    again = run_comparison(trainings, candidates=[USELESS, base], trials=0, seeds=(3, 2, 1, 0))
    assert (again, trainings.begun) == (found, [])


def test_cross_entropy_gets_every_seed_however_far_behind_it_is(place: Path) -> None:
    useless = replace(USELESS, name="cross_entropy")
    better = Candidate(name="better", loss="cross_entropy", label="Better", what="", changes={"optim.lr": 0.05})
    found = run_comparison(candidates=[useless, better], trials=0, seeds=(0, 1, 2, 3))
    assert [entry.candidate.name for entry in found.entries] == ["better", "cross_entropy"]
    assert [len(entry.outcomes) for entry in found.entries] == [4, 4]


def test_a_loss_that_diverges_does_not_stop_the_others(place: Path) -> None:
    found = run_comparison(candidates=[WILD, *find_candidates(["cross_entropy"])], trials=0, seeds=(0,))
    best, failed = found.entries
    assert (best.candidate.name, len(best.outcomes)) == ("cross_entropy", 1)
    assert "seed 0" in failed.failure
    # Runs on other data are not compared with these.
    arrays = dict(np.load(DATA))
    np.savez(DATA, **arrays | {"train_x": 2 * arrays["train_x"]})
    with pytest.raises(ShortlistError, match="data has changed"):
        run_comparison(candidates=find_candidates(["cross_entropy", "focal"]), trials=0, seeds=(0,))
