"""What a study reports: the ranking, the list of trials, and the folders of their runs."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial

from shortlist.program.atomic_files import locked
from shortlist.program.cli import main as cli
from shortlist.program.config import RunConfig, changed
from shortlist.program.runs.folder import default_folder
from shortlist.program.tuning.findings import SETTINGS, Findings, TrialRecord, write_findings
from shortlist.program.tuning.study import tune
from tests.support.studies import rows_of


def test_runs_have_the_names_that_the_process_which_ran_them_gave_them(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [trial.folder for trial in tune(config).trials]
    found = tune(replace(config, data=replace(config.data, workers=0)))  # the same study with other default folders
    assert [trial.folder for trial in found.trials] == folders
    assert [Path(row["run"]) for row in rows_of(found.csv_path)] == folders
    monkeypatch.setattr(sys, "argv", shlex.split(found.command or ""))
    cli.main()
    assert f"{found.ranking[0].folder}  test micro_top1" in capsys.readouterr().out
    assert set(Path("runs", config.recipe).iterdir()) == set(folders), "nothing was trained again"


def test_of_a_study_that_notes_no_folders_the_usual_ones_are_named(config: RunConfig) -> None:
    """Studies of earlier versions do not record the folders of their runs."""
    study = optuna.create_study(direction="maximize")
    for tau in (0.1, 1.0):
        study.add_trial(optuna.create_trial(value=0.5, user_attrs={SETTINGS: {"loss.tau": tau}}))
    found = write_findings(study, config, {"loss.tau": (0.1, 1.0)}, Path("trials.csv"))
    folders = [default_folder(changed(config, {"loss.tau": tau})) for tau in (0.1, 1.0)]
    assert [trial.folder for trial in found.trials] == folders


def test_what_is_listed_is_not_overwritten_by_older_news(config: RunConfig) -> None:
    """The trials are read while the file is locked."""
    reads = []

    def get_trials(**_: Any) -> list[FrozenTrial]:
        with pytest.raises(BlockingIOError), locked(Path(".trials.csv.lock"), wait=False):
            pass
        reads.append(1)
        return []

    study: Any = SimpleNamespace(get_trials=get_trials)
    write_findings(study, config, {}, Path("trials.csv"))
    assert reads


def test_of_trials_that_differ_by_rounding_the_first_is_ahead(config: RunConfig, tmp_path: Path) -> None:
    values = (0.59999996, 0.60000002, 0.61, 0.6001)
    trials = tuple(
        TrialRecord(number, "complete", value, {}, 1, tmp_path, "", "") for number, value in enumerate(values)
    )
    assert [trial.number for trial in Findings(config, (), trials, tmp_path).ranking] == [2, 3, 0, 1]
