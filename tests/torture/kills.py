"""Training that is killed at every file operation and at random moments, then resumed to the end."""

import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shortlist.program.atomic_files import WRITING
from shortlist.program.config import RunConfig, TrainConfig
from shortlist.program.runs.folder import RunFolder, file_digest
from tests.support.file_operations import watched
from tests.support.forked import Ended, run_command, run_forked
from tests.support.small_runs import outcome, small_config, write_embeddings
from tests.torture.cases import Outcome, Part

_SECONDS = 120.0
"""No command takes a hundredth of this on an idle machine."""


@dataclass(frozen=True)
class Death:
    """How a training process dies."""

    operation: int = 0
    """Just before the file operation of this number."""
    power_cut: bool = False
    """If data that was not synced is lost too."""
    moment: float = 0.0
    """After this share of the time that an undisturbed run takes."""

    def __str__(self) -> str:
        if self.operation:
            return f"{'power cut' if self.power_cut else 'kill'} before file operation {self.operation}"
        return f"kill after {self.moment:.2f} of the run's time"


class Kills(Part):
    name = "kills"
    promise = "a run that is killed and resumed ends as if undisturbed, and can be read at any time"

    def __init__(self, seed: int, work: Path, *, random_moments: int = 80) -> None:
        self.seed, self.work = seed, work
        data = write_embeddings(work / "points.npz", images=60)
        self.config = small_config(data, train=TrainConfig(epochs=3, batch_size=32, ks=(1, 3), device="cpu"))
        self.undisturbed = work / "undisturbed"
        done = train_forked(self.config, self.undisturbed)
        if done.code != 0:
            raise RuntimeError(f"the undisturbed run {done}")
        self.operations = len(json.loads(done.out)["operations"])
        began = time.monotonic()
        train_forked(self.config, work / "again")  # the first one also warmed the disk's cache
        self.duration = time.monotonic() - began
        self.validation = {_numbers(line) for line in outcome(self.undisturbed)["metrics"]}
        self.deaths = self._all_deaths(random_moments)

    def _all_deaths(self, random_moments: int) -> list[tuple[Death, ...]]:
        chance = random.Random(f"{self.seed} kills")
        # The last number is one too many: the process then dies when the run has just finished.
        numbers = range(1, self.operations + 2)
        deaths: list[tuple[Death, ...]] = [(Death(operation=number),) for number in numbers]
        deaths += [(Death(operation=number, power_cut=True),) for number in numbers]
        # And again while it resumes.
        deaths += [
            (Death(operation=number), Death(operation=chance.randint(1, 25), power_cut=chance.random() < 0.5))
            for number in numbers
        ]
        deaths += [tuple(Death(moment=chance.random()) for _ in range(3)) for _ in range(random_moments)]
        return deaths

    def __len__(self) -> int:
        return len(self.deaths)

    def run(self, case: int) -> Outcome:
        deaths = self.deaths[case]
        what = ", then ".join(map(str, deaths))
        with tempfile.TemporaryDirectory(dir=self.work) as place:
            folder = Path(place, "run")
            chance = random.Random(f"{self.seed} kills {case}")
            problems: list[str] = []
            kills = reads = 0
            for death in deaths:
                ended = train_forked(self.config, folder, death, self.duration, chance)
                if ended.killed:
                    kills += 1
                    reads += 2
                    problems += self._unreadable(folder, Path(place))
                elif ended.code != 0:
                    problems.append(f"training {ended}")
                else:
                    problems += json.loads(ended.out)["unsynced"]
                if RunFolder(folder).finished:
                    break
            problems += self._unlike_undisturbed(folder)
            return Outcome(case, what, tuple(problems), {"kills": kills, "reads after a kill": reads})

    def _unreadable(self, folder: Path, place: Path) -> list[str]:
        """Evaluate and report the run as the kill left it."""
        began, weights = (folder / "config.json").exists(), list(folder.rglob("best.safetensors"))
        # Without the correction for class sizes: the metrics of the epochs are those of the plain scores.
        plain = ("--split", "val", "--no-correction")
        evaluated = run_command("evaluate", folder, *plain, seconds=_SECONDS, inside=place)
        reported = run_command("report", folder, "--out", place / "page.html", seconds=_SECONDS, inside=place)
        problems = []
        for command, ended, succeeds in (("evaluate", evaluated, bool(weights)), ("report", reported, began)):
            refused = ended.code == 1 and ended.err.startswith(f"shortlist {command}: ")
            if ended.code != 0 and (succeeds or not refused):
                problems.append(f"after a kill {command} {ended}")
        if evaluated.code == 0 and _numbers(json.loads(evaluated.out)) not in self.validation:
            problems.append("after a kill evaluate prints numbers that no epoch had")
        return problems

    def _unlike_undisturbed(self, folder: Path) -> list[str]:
        if RunFolder(folder).finished:
            refused = train_forked(self.config, folder)
            if "FinishedError" not in refused.err:
                return [f"a finished run was trained again: it {refused}"]
        else:
            resumed = train_forked(self.config, folder)
            if resumed.code != 0:
                return [f"resuming {resumed}"]
            if unsynced := json.loads(resumed.out)["unsynced"]:
                return list(unsynced)
        return differences_between(folder, self.undisturbed)


def train_forked(
    config: RunConfig,
    folder: Path,
    death: Death | None = None,
    duration: float = 0.0,
    chance: random.Random | None = None,
) -> Ended:
    """Train in a child process that dies as told, or else prints its file operations as JSON."""
    death = death or Death()

    def work() -> None:
        from shortlist.program.training.loop import train

        cut = chance if death.power_cut else None
        with watched(folder, kill_before=death.operation, power_cut=cut) as watch:
            train(config, folder=folder, resume=True, quiet=True)
            if len(watch.operations) == death.operation - 1:
                watch.die()
        print(json.dumps({"operations": watch.operations, "unsynced": watch.unsynced}))

    return run_forked(work, seconds=_SECONDS, kill_after=death.moment * duration if death.moment else None)


def differences_between(folder: Path, undisturbed: Path) -> list[str]:
    """In what a finished run differs from the undisturbed one, apart from times."""
    problems = []
    if outcome(folder) != outcome(undisturbed):
        problems.append("final.json or metrics.jsonl differ from those of the undisturbed run")
    for name in (
        "best.safetensors",
        "scores.safetensors",
        "test_predictions.safetensors",
        "test_per_class.csv",
        "classes.json",
        "config.json",
    ):
        if file_digest(folder / name) != file_digest(undisturbed / name):
            problems.append(f"{name} differs from that of the undisturbed run")
    problems += [f"{left.name} was left behind" for left in folder.rglob(f"{WRITING}*")]
    return problems


def _numbers(line: dict[str, Any]) -> str:
    """The validation accuracies of an epoch or of an evaluation, in the same form."""
    return json.dumps({name.removeprefix("val_"): value for name, value in sorted(line.items()) if "top" in name})
