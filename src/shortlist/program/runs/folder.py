"""A run is a folder. Every table, figure and page is built from it, so no file in it may be half written.

config.json        the full configuration
environment.json   versions, machine, commit, digest of the weights it started from; and so for each time it was resumed
classes.json       names, training images of each class, superclasses
preprocess.json    how an image becomes an input (absent for embeddings)
facts.json         what the data set recorded, e.g. the files of a validation split made here
metrics.jsonl      a line an epoch
tensorboard/       the same numbers as events, and csv/ as a table, by train.logger
loggers.json       what Weights & Biases and MLflow were told, if they log the run
checkpoints/       the last two training states, each with its checksum in its name,
                   and the best weights before the last
best.safetensors   weights of the best epoch
scores.safetensors scores of all classes for the validation and test images
test_*             predictions and accuracy by class on the test images, of uncorrected scores
correction.json    the correction of the scores for the prior, and what it rests on (absent without)
calibration.json   how scores become probabilities, and what sets rest on (absent without)
examples.zip       small training images of each class, if somebody serves the run with them
added.json         which classes were added after training, and to which run (absent without; then there is no result)
README.md          the model card, made from the other files
final.json         the result, written last: its presence means that the run has finished
"""

import hashlib
import io
import json
import os
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import WRITING, explained, locked, refuse_links, write_file
from shortlist.program.config import RunConfig, differences, from_dict, identity, to_dict
from shortlist.program.runs.checks import is_metrics_line
from shortlist.program.runs.environment import PROCESS, are_processes

# torch is imported only where it is needed: a mistyped path should fail at once.
if TYPE_CHECKING:
    from torch import Tensor

BEST = "best.safetensors"
ADDED = "added.json"
_PREVIOUS_BEST = f"checkpoints/{BEST}"
_CHECKPOINTS_KEPT = 2
_RESUME = " (shortlist train with --resume)"


class InUseError(ShortlistError):
    """Another process is writing to the run."""


class FinishedError(ShortlistError):
    """The run already has a result."""


class RunFolder:
    """One run on disk.

    Writers call ``claim`` first; readers need only a path. Every file except ``metrics.jsonl`` and those of loggers is
    written whole or not at all. The folder may come from a stranger: nothing is written, renamed or deleted through
    links in it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def existing(cls, path: Path | str) -> "RunFolder":
        """A folder that holds a run, finished or not."""
        path = Path(path)
        if not path.is_dir():
            raise ShortlistError(f"there is no folder {path}")
        if not (path / "config.json").is_file():
            inside = sorted(str(found.parent) for found in path.rglob("config.json"))[:3]
            hint = f"; runs are further down, e.g. {inside[0]}" if inside else ""
            raise ShortlistError(f"{path} is not a run: it has no config.json{hint}")
        return cls(path)

    @property
    def config(self) -> RunConfig:
        settings = self.read_json("config.json")
        try:
            return from_dict(settings)
        except ShortlistError as error:
            raise ShortlistError(f"{self.path / 'config.json'}: {error}") from None

    @property
    def finished(self) -> bool:
        return self.has("final.json")

    @property
    def is_usable(self) -> bool:
        """True if its weights are final: it has finished, or has classes that were added after training."""
        return self.finished or self.has(ADDED)

    # Claims

    @contextmanager
    def claim(self, config: RunConfig, *, resume: bool) -> Iterator[None]:
        """Hold the folder for writing; refuse it if it is in use, finished, another run's, or needs ``resume``."""
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with self._lock(self.path / ".lock"):
            self._check_claim(config, resume=resume)
            self._refuse_links()
            for leftover in self.path.rglob(f"{WRITING}*"):  # of a writer that was killed
                if leftover.is_file():
                    leftover.unlink()
            if not self._has_training:  # a resumed run keeps its configuration, even if its data has moved
                (self.path / "environment.json").unlink(missing_ok=True)
                self.write_json("config.json", to_dict(config))
            yield

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Keep other processes that would reserve it out, and raise ``InUseError`` if one of any kind is there.

        A claim comes after the data has been read and the network compiled. Processes that share some runs, and see to
        this only then, all prepare the same run and go on to the next one together.
        """
        with self._lock(self.path.parent / f".{self.path.name}.lock"):
            if self.path.is_dir():
                with self._lock(self.path / ".lock"):
                    pass
            yield

    @contextmanager
    def _lock(self, file: Path) -> Iterator[None]:
        try:
            with locked(file, wait=False):
                yield
        except BlockingIOError:
            raise InUseError(f"{self.path} is in use by another process") from None

    @property
    def _has_training(self) -> bool:
        """True if the folder holds a checkpoint, weights or a result. A folder without may be reused."""
        return any((self.path / name).exists() for name in ("checkpoints", BEST, "final.json"))

    def _check_claim(self, config: RunConfig, *, resume: bool) -> None:
        if self.has(ADDED):
            raise ShortlistError(f"{self.path} has classes that were added after training: train in another folder")
        if self._has_training:
            if found := differences(self.config, config):
                raise ShortlistError(
                    f"{self.path} holds a run with another configuration ({'; '.join(found)}): choose another folder"
                )
            if self.finished:
                raise FinishedError(f"{self.path} has already finished; `shortlist report {self.path}` shows it")
            if not resume:
                raise ShortlistError(f"{self.path} holds a run that was interrupted; add --resume to go on with it")
        elif not self._has_own_config and any(
            found.name != ".lock" and not found.name.startswith(WRITING) for found in self.path.iterdir()
        ):
            raise ShortlistError(f"{self.path} is not empty and holds no run; choose another folder")

    @property
    def _has_own_config(self) -> bool:
        """True if ``config.json`` is that of a run, of any version: other programs use the same file name."""
        path = self.path / "config.json"
        try:
            settings = json.loads(path.read_bytes()) if path.is_file() else {}
        except ValueError:
            return False
        return isinstance(settings, dict) and settings.keys() >= {field.name for field in fields(RunConfig)}

    def _refuse_links(self) -> None:
        """Refuse links before training starts, not when a file is about to be written after hours of it."""
        for folder, folders, files in os.walk(self.path):
            for name in (*folders, *files):
                refuse_links(self.path, Path(folder, name))

    # Files

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def damaged(self, name: str, reason: object) -> ShortlistError:
        """The error to raise about a file that does not hold what training wrote."""
        return ShortlistError(f"{self.path / name} is damaged: {reason}; restore it, or train again in another folder")

    def read_json(self, name: str) -> Any:
        path = self.path / name
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise self.damaged(name, "it is not a regular file")
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ShortlistError(f"{self.path} has no {name}") from None
        except (ValueError, RecursionError) as error:
            raise self.damaged(name, error) from None

    def read_record(self, name: str, **checks: Callable[[Any], bool]) -> dict[str, Any]:
        """The named entries of a JSON file.

        Args:
            name: The file's.
            **checks: A check for each entry that the caller relies on; entries that are present must pass theirs.
        """
        content = self.read_json(name)
        if not isinstance(content, dict):
            raise self.damaged(name, f"it must hold named entries, got {reprlib.repr(content)}")
        for entry, is_valid in checks.items():
            if entry in content and not is_valid(content[entry]):
                raise self.damaged(name, f"its entry {entry} cannot be {reprlib.repr(content[entry])}")
        return content

    def write_json(self, name: str, content: Any) -> None:
        text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        # File names may not be valid UTF-8: Python holds such bytes as lone surrogates, which JSON writes as escapes.
        self.write_file(name, text.encode(errors="backslashreplace"))

    def write_file(self, name: str, content: bytes | memoryview) -> None:
        """Write a file of the run, whole or not at all."""
        write_file(self._own(name), content, _RESUME)

    def _own(self, name: str) -> Path:
        """The path of a file that is about to be written, renamed or deleted."""
        path = self.path / name
        refuse_links(self.path, path)
        if path.exists() and not path.is_file():
            raise ShortlistError(f"{path} must be a regular file to be overwritten: delete it")
        return path

    @contextmanager
    def writing_logs(self, name: str) -> Iterator[Path]:
        """A folder that a logger writes to, for a block that does so; a failure to write is explained."""
        path = self.path / name
        refuse_links(self.path, path)
        with explained(path, _RESUME):
            yield path

    # Processes that trained the run

    def read_environment(self) -> dict[str, Any]:
        """Where the run began, and in ``resumed`` where it continued."""
        return self.read_record("environment.json", **PROCESS, resumed=are_processes)

    def note_environment(self, here: dict[str, Any]) -> None:
        """Record where the run began, or add where it was resumed."""
        if (self.path / "environment.json").exists():
            began = self.read_environment()
            here = began | {"resumed": [*began.get("resumed", []), here]}
        self.write_json("environment.json", here)

    def commits(self) -> list[str]:
        """Shortened commits of the program, of all processes that trained the run from a checkout."""
        began = self.read_environment()
        processes = [process for process in (began, *began.get("resumed", [])) if process.get("commit")]
        found = [process["commit"][:10] + ("+changes" if process.get("dirty") else "") for process in processes]
        return list(dict.fromkeys(found))

    # Metrics

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``, without those that a crash cut short or that describe no epoch."""
        lines = []
        path = self.path / "metrics.jsonl"
        if path.is_file():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError, RecursionError):
                    lines.append(json.loads(line))
        return [line for line in lines if is_metrics_line(line)]

    def damaged_metrics(self) -> ShortlistError:
        """The error to raise if a line of ``metrics.jsonl`` is missing."""
        return self.damaged("metrics.jsonl", "a line is missing")

    def epoch_seconds(self) -> list[float]:
        """Training time of each epoch except the first of each process, which includes compilation and warm-up."""
        processes = self.read_environment().get("resumed", [])
        first_epochs = {process.get("epoch") for process in processes}
        try:
            return [
                line["train_seconds"] - before["train_seconds"]
                for before, line in pairwise(self.metrics())
                if line["epoch"] not in first_epochs
            ]
        except (KeyError, TypeError):
            raise self.damaged("metrics.jsonl", "it has no training times") from None

    def write_metrics(self, lines: Sequence[dict[str, Any]]) -> None:
        """Replace ``metrics.jsonl``: epochs that will be trained again must not stay in it."""
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        self.write_file("metrics.jsonl", text.encode())

    def append_metrics(self, line: dict[str, Any]) -> None:
        path = self._own("metrics.jsonl")
        with explained(path, _RESUME), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    # Checkpoints

    @property
    def has_checkpoints(self) -> bool:
        return any((self.path / "checkpoints").glob("*.pt"))

    @property
    def continues(self) -> bool:
        """True if training would continue from a checkpoint, or refuse to. Otherwise it starts from the beginning."""
        return any(content is not None for _, content in self._checkpoints())

    def save_checkpoint(self, state: dict[str, Any], step: int) -> None:
        """Keep the training state after ``step`` steps, and the state before it in case this file gets damaged."""
        import torch

        buffer = io.BytesIO()
        torch.save(state, buffer)
        with buffer.getbuffer() as content:  # released here, or an error would leave the buffer unable to close
            name = f"checkpoints/{step:09d}-{_digest(content)}.pt"
            self.write_file(name, content)
        path = self.path / name
        present = sorted(found for found in path.parent.glob("*.pt") if found.is_file())
        # Checkpoints of later steps are damaged, or training would have continued from there.
        kept = [found for found in present if found <= path][-_CHECKPOINTS_KEPT:]
        for old in {*present} - {*kept}:
            old.unlink()

    def load_checkpoint(
        self, warn: Callable[[str], None], use: Callable[[dict[str, Any]], object] = lambda state: None
    ) -> dict[str, Any] | None:
        """The newest usable training state, or None if there is none. Code in a checkpoint is never run.

        Args:
            warn: Called with a message for each checkpoint that is skipped.
            use: Takes a state, and raises a ``ShortlistError`` if it cannot. The next older one is then tried.

        Raises:
            ShortlistError: A checkpoint is intact, but neither it nor an older one can be used. Training from the
                start would delete it.
        """
        refused = ""
        for path, content in self._checkpoints():
            if content is None:
                warn(f"skipping {path}: it is damaged, its checksum does not match")
                continue
            try:
                state = _unpickled(content)
                use(state)
                return state
            except ShortlistError as error:
                warn(f"skipping {path}: it cannot be used, {error}")
                refused = refused or f"{path} cannot be used: {error}"
        if refused:
            raise ShortlistError(f"{refused}. No older checkpoint can be used either: train again in another folder")
        return None

    def _checkpoints(self) -> Iterator[tuple[Path, bytes | None]]:
        """The checkpoints and their content, newest first; None where the checksum does not match."""
        for path in sorted((self.path / "checkpoints").glob("*.pt"), reverse=True):
            content = b""
            with suppress(FileNotFoundError):  # deleted by the process that trains the run
                content = path.read_bytes() if path.is_file() else b""
            yield path, content if _digest(content) == path.stem.rpartition("-")[2] else None

    # The best weights

    def save_best(self, content: bytes) -> None:
        """Keep these weights (``as_safetensors``), and the previous ones in case the checkpoint of these is lost."""
        best = self._own(BEST)
        if best.is_file():
            # A copy, not a move: a process killed here leaves weights to evaluate.
            self.write_file(_PREVIOUS_BEST, best.read_bytes())
        self.write_file(BEST, content)

    def restore_best(self, digest: str) -> bool:
        """Make the weights with this checksum the best ones, if need be the previous; False if they are gone."""
        best = self._own(BEST)
        for path in (best, self._own(_PREVIOUS_BEST)):
            if path.is_file() and file_digest(path) == digest:
                path.replace(best)
                return True
        return False

    def load_best(self) -> "dict[str, Tensor]":
        import safetensors.torch

        path = self.path / BEST
        if not path.is_file():
            raise ShortlistError(f"{self.path} has no weights yet: no epoch has finished")
        content = path.read_bytes()  # before the checksums: a process that trains the run may replace it meanwhile
        record = next((name for name in ("final.json", ADDED) if self.has(name)), None)
        known = {self.read_record(record).get("best_sha256")} if record else self._best_digests()
        if known and hashlib.sha256(content).hexdigest() not in known:
            where = f"in {record}" if record else "in any checkpoint"
            raise self.damaged(BEST, f"its checksum is not the one {where}")
        try:
            return safetensors.torch.load(content)
        except safetensors.SafetensorError as error:
            raise self.damaged(BEST, error) from None

    def _best_digests(self) -> set[str]:
        """Checksums of the best weights, of all checkpoints: a kill may come between a checkpoint and its weights."""
        digests = set()
        for _, content in self._checkpoints():
            with suppress(ShortlistError, AttributeError, KeyError, TypeError):  # not a file that training wrote
                digests.add(_unpickled(content or b"")["position"]["best_digest"])
        return digests - {""}


def default_folder(config: RunConfig, root: Path = Path("runs")) -> Path:
    """Where a run goes unless the user chooses a folder: the folder that already holds it, or a new one.

    The run is recognised by its configuration, because older versions computed the key in the name differently.
    """
    new = root / config.recipe / f"{config.key()}-s{config.seed}"
    if new.exists():
        return new
    for folder in sorted(new.parent.glob(f"*-s{config.seed}")):
        with suppress(ShortlistError):
            if identity(RunFolder(folder).config) == identity(config):
                return folder
    return new


def find_runs(paths: list[Path]) -> list[RunFolder]:
    """The runs at these paths, or anywhere below them, in the order of their names."""
    found = []
    for path in paths:
        if not path.exists():
            raise ShortlistError(f"there is no folder {path}")
        below = sorted(config.parent for config in path.rglob("config.json"))
        if not below:
            raise ShortlistError(f"there is no run in {path}")
        found += [RunFolder(folder) for folder in below]
    return list({run.path.resolve(): run for run in found}.values())


def as_safetensors(weights: "dict[str, Tensor]") -> bytes:
    import safetensors.torch

    return safetensors.torch.save({name: tensor.contiguous().cpu() for name, tensor in weights.items()})


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpickled(content: bytes) -> dict[str, Any]:
    import torch

    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # a pickle can fail in every way there is; torch's own message advises to run its code
        raise ShortlistError("it cannot be read without running the code in it") from None
    if not isinstance(state, dict):
        raise ShortlistError(f"it must hold a training state, got {type(state).__name__}")
    return state


def _digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
