"""Run folders with damaged JSON files. Every command must explain the damage.

``unexplained`` tries them. ``few_damages`` take seconds, ``many_damages`` minutes.
"""

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shortlist import ShortlistError
from shortlist.program.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from shortlist.program.losses import CrossEntropyConfig
from shortlist.program.predicting.predictor import Predictor
from shortlist.program.report.page import write_report
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.evaluate import evaluate_run
from shortlist.program.training.loop import train
from tests.support.early_ends import train_until_test
from tests.support.pictures import put_classes

FILES = (
    "config.json",
    "environment.json",
    "classes.json",
    "preprocess.json",
    "facts.json",
    "final.json",
    "correction.json",
)
_BAD_VALUES: tuple[Any, ...] = (None, [], {}, -1, 10**400, "x", True, [None], {"x": None})


@dataclass(frozen=True)
class Damage:
    """Other content for one file of a run."""

    file: str
    what: str
    content: bytes


@dataclass(frozen=True)
class Runs:
    """A finished run, and one that has only its test left, on the same images."""

    finished: Path
    unfinished: Path
    config: RunConfig
    image: Path


def make_runs(folder: Path) -> Runs:
    put_classes(folder / "photos", {"elm": 9, "owl": 6})
    config = RunConfig(
        data=DataConfig(name="folder", root=str(folder / "photos"), image_size=16, workers=0, val_fraction=0.2),
        model=ModelConfig(name="glyphnet"),
        loss=CrossEntropyConfig(k=1),
        train=TrainConfig(epochs=2, batch_size=8, ks=(1,), device="cpu"),
    )
    finished = train(config, folder=folder / "finished", quiet=True).path

    return Runs(finished, train_until_test(config, folder / "unfinished"), config, folder / "photos" / "elm" / "0.png")


def few_damages(runs: Runs) -> Iterator[Damage]:
    """Null for each file, and for each of its entries."""
    for file in FILES:
        yield Damage(file, "null", b"null")
        content = json.loads((runs.finished / file).read_text())
        yield from (Damage(file, f"{name} = null", json.dumps(content | {name: None}).encode()) for name in content)
    yield Damage("metrics.jsonl", "epoch = null", b'{"epoch": null}\n')


def many_damages(runs: Runs) -> Iterator[Damage]:
    """Every kind of content for each file, and every bad value for each entry and each entry of an entry."""
    for file in (*FILES, "metrics.jsonl"):
        text = (runs.finished / file).read_text()
        for content in ("null", "[]", "{}", "1", '"x"', "true", "", text[: len(text) // 2], "[" * 100_000, "\udcff"):
            yield Damage(file, content[:20], content.encode(errors="surrogateescape"))
    for file in FILES:
        content = json.loads((runs.finished / file).read_text())
        yield from _replaced_entries(file, content, _BAD_VALUES)
        for name, inner in content.items():
            for damage in _replaced_entries(file, inner, _BAD_VALUES) if isinstance(inner, dict) else ():
                entry = content | {name: json.loads(damage.content)}
                yield Damage(file, f"{name}.{damage.what}", json.dumps(entry).encode())
    for line in (runs.finished / "metrics.jsonl").read_text().splitlines()[:1]:
        yield from _replaced_entries("metrics.jsonl", json.loads(line), _BAD_VALUES)


def _replaced_entries(file: str, content: dict[str, Any], values: Iterable[Any]) -> Iterator[Damage]:
    for name in content:
        for value in values:
            yield Damage(file, f"{name} = {value!r:.20}", json.dumps(content | {name: value}).encode())
        yield Damage(file, f"no {name}", json.dumps({n: v for n, v in content.items() if n != name}).encode())


COMMANDS = ("evaluate", "predict", "report", "train --resume")


def unexplained(
    runs: Runs, damages: Iterable[Damage], scratch: Path, commands: Collection[str] = COMMANDS
) -> list[str]:
    """Failures that are not explained by a message. A message about a file of another kind must name the file.

    Args:
        runs: From ``make_runs``; they are not changed.
        damages: Tried one by one, with each command.
        scratch: A folder for copies.
        commands: The commands to try.
    """

    calls: dict[str, Callable[[Path], object]] = {
        "evaluate": lambda folder: evaluate_run(RunFolder.existing(folder), device="cpu"),
        "predict": lambda folder: Predictor(RunFolder.existing(folder), "cpu").suggest([runs.image], 1),
        "report": lambda folder: write_report([RunFolder(folder)], scratch / "report.html"),
        "train --resume": lambda folder: train(runs.config, folder=folder, resume=True, quiet=True),
    }
    found = []
    for damage in damages:
        for name in commands:
            source = runs.unfinished if name == "train --resume" else runs.finished
            folder = Path(shutil.copytree(source, scratch / "copy"))
            try:
                (folder / damage.file).write_bytes(damage.content)
                calls[name](folder)
            except ShortlistError as told:
                if not str(told):
                    found.append(f"{name}, {damage.file} {damage.what}: an error without a message")
                elif (
                    _is_of_another_kind(damage.content) and damage.file not in str(told) and "finished" not in str(told)
                ):
                    found.append(f"{name}, {damage.file} {damage.what}: not named in {told}")
            except Exception as error:
                found.append(f"{name}, {damage.file} {damage.what}: {type(error).__name__}: {error}"[:300])
            finally:
                shutil.rmtree(folder)
    return found


def _is_of_another_kind(content: bytes) -> bool:
    try:
        return not isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return True
