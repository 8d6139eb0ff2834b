"""Damaged and hostile run folders: evaluated, reported and resumed."""

import json
import random
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shortlist.program.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from shortlist.program.losses import CrossEntropyConfig
from tests.support.forked import Ended, run_command
from tests.support.pictures import put_classes, put_image
from tests.support.small_runs import config_arguments, outcome
from tests.torture.cases import Outcome, Part
from tests.torture.damages import (
    DAMAGES,
    FOLDER_DAMAGES,
    HOSTILE_CHECKPOINTS,
    HOSTILE_ENTRIES,
    MARK,
    METRICS_DAMAGES,
    SCRIPT,
    TENSOR_DAMAGES,
    Damage,
)
from tests.torture.kills import Death, train_forked

_SECONDS = 15.0
"""No command takes a tenth of this on an idle machine."""
_COMMANDS = ("evaluate", "predict", "report", "resume")


@dataclass(frozen=True)
class Case:
    state: str
    """``finished`` or ``unfinished``."""
    file: str
    """Path below the run folder."""
    damage: Damage

    def __str__(self) -> str:
        return f"{self.state} run, {self.file}: {self.damage.name}"


class Folders(Part):
    name = "folders"
    promise = "a damaged or hostile run folder gives a sentence or the right numbers, and nothing outside it changes"

    def __init__(self, seed: int, work: Path) -> None:
        self.seed, self.work = seed, work
        put_classes(work / "photos", {"elm": 12, "owl": 8})  # of two sizes, so that scores are corrected
        self.image = put_image(work / "new" / "photo.png", size=(20, 20))
        self.config = RunConfig(
            recipe="folder",
            data=DataConfig(name="folder", root=str(work / "photos"), image_size=16, workers=0),
            model=ModelConfig(name="glyphnet"),
            loss=CrossEntropyConfig(k=1),
            train=TrainConfig(epochs=3, batch_size=8, ks=(1,), device="cpu"),
        )
        self.runs = {state: work / state for state in ("finished", "unfinished")}
        done = train_forked(self.config, self.runs["finished"])
        if done.code != 0:
            raise RuntimeError(f"the run that is to be damaged {done}")
        # Killed in the last epoch, when its line is in metrics.jsonl and its checkpoint is not.
        operations = json.loads(done.out)["operations"]
        last = max(number for number, what in enumerate(operations, 1) if what == "sync metrics.jsonl")
        train_forked(self.config, self.runs["unfinished"], Death(operation=last + 1))
        self.right = {state: self._answers(folder) for state, folder in self.runs.items()}
        self.result = outcome(self.runs["finished"])
        self.cases = list(self._all_cases())

    def _answers(self, folder: Path) -> dict[str, str]:
        """What the commands print for the undamaged run."""
        answers = {}
        for command in ("evaluate", "predict"):
            ended = self._command(command, folder, self.work)
            if ended.code != 0:
                raise RuntimeError(f"{command} of the undamaged run {ended}")
            answers[command] = ended.out
        return answers

    def _all_cases(self) -> Iterator[Case]:
        for state, folder in self.runs.items():
            files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
            files = [file for file in files if not file.startswith("pictures/")] + [
                file for file in files if file.startswith("pictures/")
            ][:1]
            for file in files:
                for damage in DAMAGES:
                    yield Case(state, file, damage)
                entries = HOSTILE_ENTRIES.get(file, ())
                entries += METRICS_DAMAGES if file == "metrics.jsonl" else ()
                entries += TENSOR_DAMAGES if file.endswith(".safetensors") else ()
                entries += HOSTILE_CHECKPOINTS if file.endswith(".pt") else ()
                for damage in entries:
                    yield Case(state, file, damage)
            for inner in sorted(path.name for path in folder.iterdir() if path.is_dir()):
                for damage in FOLDER_DAMAGES:
                    yield Case(state, inner, damage)

    def __len__(self) -> int:
        return len(self.cases)

    def run(self, case: int) -> Outcome:
        here = self.cases[case]
        problems: list[str] = []
        for command in _COMMANDS:
            with tempfile.TemporaryDirectory(dir=self.work) as place:
                problems += [f"{command}: {problem}" for problem in self._attempt(here, command, Path(place), case)]
        return Outcome(case, str(here), tuple(problems), {"commands": len(_COMMANDS)})

    def _attempt(self, case: Case, command: str, place: Path, number: int) -> list[str]:
        folder, elsewhere = place / "run", place / "elsewhere"
        shutil.copytree(self.runs[case.state], folder, symlinks=True)
        elsewhere.mkdir()
        case.damage.do(folder / case.file, elsewhere, random.Random(f"{self.seed} folders {number}"))
        before = {**_snapshot(place), **_snapshot(self.work / "photos"), **_snapshot(self.image.parent)}
        ended = self._command(command, folder, place)
        after = {**_snapshot(place), **_snapshot(self.work / "photos"), **_snapshot(self.image.parent)}
        problems = []
        if (elsewhere / MARK).exists():
            problems.append("CODE IN THE CHECKPOINT WAS RUN")
        for path in sorted({*before, *after}):
            ours = path.is_relative_to(folder) and command == "resume"
            page = path == place / "page.html" and command == "report"
            if not ours and not page and before.get(path) != after.get(path):
                problems.append(f"{path.relative_to(self.work)} was changed")
        problems += self._wrong_answer(case, command, ended, folder)
        if command == "report" and (place / "page.html").is_file() and SCRIPT in (place / "page.html").read_text():
            problems.append("the page holds a script")
        return problems

    def _wrong_answer(self, case: Case, command: str, ended: Ended, folder: Path) -> list[str]:
        said = ended.err.strip().splitlines()
        refused = ended.code == 1 and said and said[-1].startswith("shortlist ") and "Traceback" not in ended.err
        if refused:
            return []
        if ended.code != 0:
            return [str(ended)]
        right = self.right[case.state].get(command)
        # A changed setting or class name rightly gives other answers; changed weights must be noticed.
        binary = case.file.endswith((".safetensors", ".pt"))
        hidden = case.damage.silent and not binary
        if command == "predict" and case.file in ("classes.json", "preprocess.json", "config.json"):
            return []
        if right is not None and ended.out != right and not hidden:
            return [f"exit 0 with other numbers than the undamaged run: {ended.out[:200]}"]
        if command == "resume" and not hidden and outcome(folder) != self.result:
            return ["the run ended with other numbers than the undamaged run"]
        return []

    def _command(self, command: str, folder: Path, place: Path) -> Ended:
        arguments: dict[str, list[str | Path]] = {
            "evaluate": ["evaluate", folder],
            "predict": ["predict", folder, self.image, "--json"],
            "report": ["report", folder, "--out", place / "page.html"],
            "resume": ["train", "folder", *self._settings(), "--out", folder, "--resume"],
        }
        return run_command(*arguments[command], seconds=_SECONDS, inside=place)

    def _settings(self) -> list[str]:
        """The options that turn the recipe into this configuration."""
        return config_arguments(self.config)


def _snapshot(folder: Path) -> dict[Path, tuple[Any, ...]]:
    """The state of everything below a folder, to notice changes; links are not followed."""
    found: dict[Path, tuple[Any, ...]] = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            found[path] = ("file", path.read_bytes())
        elif stat.S_ISLNK(status.st_mode):
            found[path] = ("link", path.readlink())
        else:
            found[path] = (stat.S_IFMT(status.st_mode),)
    return found
