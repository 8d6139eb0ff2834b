"""What a study has found: its trials, their table and CSV file, and the command that trains the best one."""

import csv
import io
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.table import Table

from shortlist.program import recipes
from shortlist.program.atomic_files import locked, write_file
from shortlist.program.config import RunConfig, changed
from shortlist.program.runs.folder import RunFolder, default_folder
from shortlist.program.text import spreadsheet_cell
from shortlist.program.tuning.space import Axis, Settings

# Names under which a trial keeps more than its parameters in the storage.
SETTINGS, WORKER, HEARD, FOLDER, NOTE = "settings", "worker", "heard", "folder", "note"
_BEST_SHOWN = 10


@dataclass(frozen=True)
class TrialRecord:
    """One trial of a study, as the storage knows it."""

    number: int
    state: str
    """complete, pruned, running or waiting."""
    value: float | None
    """Best validation value over the epochs; for a pruned trial, the last value."""
    settings: Settings
    epochs: int
    """Number of epochs reported so far."""
    folder: Path
    """Folder of its run, on the machine that ran it. For a waiting trial: where this process would run it."""
    worker: str
    note: str


def best_first(trials: Iterable[TrialRecord]) -> list[TrialRecord]:
    """The complete ones among them. Ties go to the lower number."""
    complete = [trial for trial in trials if trial.state == "complete"]
    # Rounded, because float32 means of the same accuracies depend on the order of summation.
    return sorted(complete, key=lambda trial: (-round(trial.value or 0, 6), trial.number))


@dataclass(frozen=True)
class Findings:
    """What a study has found so far."""

    config: RunConfig
    """The settings that all trials share."""
    names: tuple[str, ...]
    """Names of the settings in which trials differ."""
    trials: tuple[TrialRecord, ...]
    """In the order of their numbers."""
    csv_path: Path

    @property
    def ranking(self) -> list[TrialRecord]:
        """Complete trials, the best first."""
        return best_first(self.trials)

    @property
    def table(self) -> Table:
        """The best trials."""
        table = Table("trial", f"val {self.config.select_metric}", *self.names, "run", box=None, pad_edge=False)
        for trial in self.ranking[:_BEST_SHOWN]:
            values = (f"{trial.settings[name]:.4g}" for name in self.names)
            table.add_row(str(trial.number), f"{100 * (trial.value or 0):.2f}%", *values, str(trial.folder))
        return table

    @property
    def command(self) -> str | None:
        """The command that finishes the best trial: its epochs are done, and the test is left.

        If the run was finished before the search, the command reports it.
        """
        if not (ranking := self.ranking):
            return None
        best = ranking[0]
        if RunFolder(best.folder).finished:
            return shlex.join(["shortlist", "report", str(best.folder)])
        config = changed(self.config, best.settings)
        place = [] if best.folder == default_folder(config) else ["--out", str(best.folder)]
        return f"{recipes.command_line(config)} {shlex.join([*place, '--resume'])}"

    def csv_text(self) -> str:
        """A line for each trial."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        metric = f"val_{self.config.select_metric}"
        writer.writerow(["trial", "state", metric, *self.names, "epochs", "run", "worker", "note"])
        for trial in self.trials:
            chosen = [trial.settings[name] for name in self.names]
            outcome = [trial.epochs, trial.folder, trial.worker, trial.note]
            writer.writerow(map(spreadsheet_cell, [trial.number, trial.state, trial.value, *chosen, *outcome]))
        return text.getvalue()


def write_findings(study: optuna.Study, config: RunConfig, axes: Mapping[str, Axis], path: Path) -> Findings:
    with locked(
        path.with_name(f".{path.name}.lock")
    ):  # otherwise a process could overwrite the file with older findings
        findings = Findings(config, tuple(axes), _records(study, config, axes), path)
        write_file(path, findings.csv_text().encode())
    return findings


def _records(study: optuna.Study, config: RunConfig, axes: Mapping[str, Axis]) -> tuple[TrialRecord, ...]:
    return tuple(
        TrialRecord(
            number=trial.number,
            state=trial.state.name.lower(),
            value=trial.value,
            settings=settings_of(trial),
            epochs=len(trial.intermediate_values),
            folder=Path(trial.user_attrs.get(FOLDER) or default_folder(changed(config, settings_of(trial)))),
            worker=trial.user_attrs.get(WORKER, ""),
            note=trial.user_attrs.get(NOTE, ""),
        )
        for trial in living_trials(study)
        if len(settings_of(trial)) == len(axes)  # another process may have created it and not yet set them
    )


def living_trials(study: optuna.Study) -> list[FrozenTrial]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state != TrialState.FAIL]


def settings_of(trial: FrozenTrial) -> Settings:
    """The settings of a trial. A waiting trial has no parameters yet."""
    settings: Settings = trial.user_attrs.get(SETTINGS, trial.params)
    return settings
