"""A run is a folder. Everything a person reads later is built from it, so it must never hold half a file.

config.json        the full configuration
environment.json   versions, machine, commit; and again for each time that it was resumed
classes.json       names, training images of each class, superclasses
preprocess.json    how an image becomes an input (absent for embeddings)
facts.json         what the data set recorded, e.g. the files of a validation split made here
metrics.jsonl      a line an epoch
tensorboard/       the same numbers as events
checkpoints/       the training state; each file carries its own checksum in its name. And the last but one
                   of the best weights
best.safetensors   weights of the best epoch
test_*             predictions and accuracy by class on the test images
final.json         the result, written last: its presence means that the run has finished
"""

import hashlib
import io
import json
import os
import platform
import re
import reprlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import UTC, datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import WRITING, explained, locked, refuse_links, write_file
from shortlist.program.config import RunConfig, differences, from_dict, identity, to_dict
from shortlist.program.text import hide_passwords_of_word

# torch is imported where it is needed: a mistyped path must not wait for it.
if TYPE_CHECKING:
    from torch import Tensor

METRIC = re.compile(r"(micro|macro|few|medium|many)_top\d{1,9}")
"""Names of accuracies."""
_CHECKPOINTS_KEPT = 2
_BEST = "best.safetensors"
_BEST_BEFORE = f"checkpoints/{_BEST}"
_EVENTS = "tensorboard"
_AGAIN = " (shortlist train with --resume)"


class InUseError(ShortlistError):
    """Another process is writing to the run."""


class FinishedError(ShortlistError):
    """The run has a result already."""


class RunFolder:
    """One run on disk.

    Writers call ``claim`` first; readers need only a path. Every file but ``metrics.jsonl`` and the events appears
    whole or not at all. The folder may be a stranger's: nothing is written, renamed or deleted through links in it.
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
        except ShortlistError as wrong:
            raise ShortlistError(f"{self.path / 'config.json'}: {wrong}") from None

    @property
    def finished(self) -> bool:
        return self.has("final.json")

    @contextmanager
    def claim(self, config: RunConfig, *, resume: bool) -> Iterator[None]:
        """Hold the folder for writing; refuse one that is in use, finished, another run's, or not to be resumed."""
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with self._lock():
            self._check_claim(config, resume=resume)
            self._refuse_links()
            for leftover in self.path.rglob(f"{WRITING}*"):  # of a writer that was killed
                if leftover.is_file():
                    leftover.unlink()
            if not self._begun:  # one that goes on stays the run that it is, wherever its data is now
                (self.path / "environment.json").unlink(missing_ok=True)
                self.write_json("config.json", to_dict(config))
            yield

    @property
    def _begun(self) -> bool:
        """Whether there is anything in it that took training: without, it may begin again, and otherwise."""
        return any((self.path / name).exists() for name in ("checkpoints", "best.safetensors", "final.json"))

    def _refuse_links(self) -> None:
        """Now, and not when a file is about to be written, which may be after all the training."""
        for folder, folders, files in os.walk(self.path):
            for name in (*folders, *files):
                refuse_links(self.path, Path(folder, name))

    def _own(self, name: str) -> Path:
        """The path of a file that is about to be written, renamed or deleted."""
        path = self.path / name
        refuse_links(self.path, path)
        if path.exists() and not path.is_file():
            raise ShortlistError(f"{path} must be a regular file, to be written anew: delete it")
        return path

    @contextmanager
    def writing_events(self) -> Iterator[Path]:
        """The folder of TensorBoard's events, for a block that writes there; what goes wrong is explained."""
        path = self.path / _EVENTS
        refuse_links(self.path, path)
        with explained(path, _AGAIN):
            yield path

    @contextmanager
    def _lock(self) -> Iterator[None]:
        try:
            with locked(self.path / ".lock", wait=False):
                yield
        except BlockingIOError:
            raise InUseError(f"{self.path} is in use by another process") from None

    def check_free(self) -> None:
        """Refuse, before any work, a folder that another process is writing to."""
        if self.path.is_dir():
            with self._lock():
                pass

    def _check_claim(self, config: RunConfig, *, resume: bool) -> None:
        if self._begun:
            if wrong := differences(self.config, config):
                raise ShortlistError(
                    f"{self.path} holds a run with another configuration ({'; '.join(wrong)}): choose another folder"
                )
            if self.finished:
                raise FinishedError(f"{self.path} has already finished; `shortlist report {self.path}` shows it")
            if not resume:
                raise ShortlistError(f"{self.path} holds a run that was interrupted; add --resume to go on with it")
        elif not self._is_ours and any(
            found.name != ".lock" and not found.name.startswith(WRITING) for found in self.path.iterdir()
        ):
            raise ShortlistError(f"{self.path} is not empty and holds no run; choose another folder")

    @property
    def _is_ours(self) -> bool:
        """Whether the ``config.json`` in it is a run's, of any version: other programs have files of that name."""
        path = self.path / "config.json"
        try:
            settings = json.loads(path.read_bytes()) if path.is_file() else {}
        except ValueError:
            return False
        return isinstance(settings, dict) and settings.keys() >= {field.name for field in fields(RunConfig)}

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def read_json(self, name: str) -> Any:
        path = self.path / name
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ShortlistError(f"{path} is damaged: it is no regular file")
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ShortlistError(f"{self.path} has no {name}") from None
        except (ValueError, RecursionError) as wrong:
            raise ShortlistError(f"{path} is damaged: {wrong}") from None

    def read_record(self, name: str, **entries: Callable[[Any], bool]) -> dict[str, Any]:
        """A JSON file of named entries.

        Args:
            name: Of the file.
            **entries: Those that the caller relies on; each, if it is there, must pass its test.
        """
        content = self.read_json(name)
        if not isinstance(content, dict):
            raise ShortlistError(f"{self.path / name} is damaged: it must hold named entries, got {_short(content)}")
        for entry, is_right in entries.items():
            if entry in content and not is_right(content[entry]):
                raise ShortlistError(
                    f"{self.path / name} is damaged: its entry {entry} cannot be {_short(content[entry])}"
                )
        return content

    def read_environment(self) -> dict[str, Any]:
        """Where the run began, and in ``resumed`` where it went on."""
        return self.read_record("environment.json", **_PROCESS, resumed=_is_list_of_processes)

    def write_json(self, name: str, content: Any) -> None:
        text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        # Names of files may hold bytes that are no text: Python has them as halves of surrogates, JSON as escapes.
        self.write_file(name, text.encode(errors="backslashreplace"))

    def write_file(self, name: str, content: bytes | memoryview) -> None:
        """Write a file of the run, whole or not at all."""
        write_file(self._own(name), content, _AGAIN)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``; one that a crash cut short, or that tells of no epoch, is left out."""
        lines = []
        path = self.path / "metrics.jsonl"
        if path.is_file():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError, RecursionError):
                    lines.append(json.loads(line))
        return [line for line in lines if is_metrics_line(line)]

    def damaged_metrics(self) -> ShortlistError:
        """To be raised where a line is missing."""
        return ShortlistError(f"{self.path / 'metrics.jsonl'} is damaged: delete the folder and give the command again")

    def epoch_seconds(self) -> list[float]:
        """Training time of each epoch but the first of each process, in which compilers and allocators settle."""
        processes = self.read_environment().get("resumed", [])
        settling = {process.get("epoch") for process in processes}
        try:
            return [
                line["train_seconds"] - before["train_seconds"]
                for before, line in pairwise(self.metrics())
                if line["epoch"] not in settling
            ]
        except (KeyError, TypeError):
            raise ShortlistError(f"{self.path / 'metrics.jsonl'} is damaged") from None

    def write_metrics(self, lines: Sequence[dict[str, Any]]) -> None:
        """Replace ``metrics.jsonl``: epochs that will be run again must not stay in it."""
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        self.write_file("metrics.jsonl", text.encode())

    def commits(self) -> list[str]:
        """The program's commits, shortened, of all processes that trained it; none where it was no checkout."""
        began = self.read_environment()
        named = [each for each in (began, *began.get("resumed", [])) if each.get("commit")]
        found = [each["commit"][:10] + ("+changes" if each.get("dirty") else "") for each in named]
        return list(dict.fromkeys(found))

    def note_environment(self, here: dict[str, Any]) -> None:
        """Where and at which epoch the run began, and behind that where it was resumed."""
        if (self.path / "environment.json").exists():
            began = self.read_environment()
            here = began | {"resumed": [*began.get("resumed", []), here]}
        self.write_json("environment.json", here)

    def append_metrics(self, line: dict[str, Any]) -> None:
        path = self._own("metrics.jsonl")
        with explained(path, _AGAIN), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def save_checkpoint(self, state: dict[str, Any], step: int) -> None:
        """Keep the training state after ``step`` steps, and the one before it in case this one gets damaged."""
        import torch

        buffer = io.BytesIO()
        torch.save(state, buffer)
        content = buffer.getbuffer()
        name = f"checkpoints/{step:09d}-{_digest(content)}.pt"
        self.write_file(name, content)
        path = self.path / name
        there = sorted(each for each in path.parent.glob("*.pt") if each.is_file())
        # Those of later steps are damaged, or training would have gone on from there.
        kept = [each for each in there if each <= path][-_CHECKPOINTS_KEPT:]
        for old in {*there} - {*kept}:
            old.unlink()

    @property
    def has_checkpoints(self) -> bool:
        return any((self.path / "checkpoints").glob("*.pt"))

    def load_checkpoint(
        self, warn: Callable[[str], None], use: Callable[[dict[str, Any]], object] = lambda state: None
    ) -> dict[str, Any] | None:
        """The newest training state that can be used, or None if there is none. Code in a checkpoint is never run.

        Args:
            warn: Is told of each checkpoint that is passed over, and why.
            use: Takes a state, and raises a ``ShortlistError`` if it cannot. The next older one is then tried.

        Raises:
            ShortlistError: A checkpoint is whole, but neither it nor an older one can be used. Training from the start
                would delete it.
        """
        refused = ""
        for path, content in self._checkpoints():
            if content is None:
                warn(f"{path} is damaged (its checksum does not match) and is left out")
                continue
            try:
                state = _unpickled(content)
                use(state)
                return state
            except ShortlistError as error:
                refused = refused or f"{path} cannot be used: {error}"
                warn(f"{path} cannot be used and is left out: {error}")
        if refused:
            raise ShortlistError(f"{refused}. No older checkpoint can be used either: train anew in another folder")
        return None

    def _checkpoints(self) -> Iterator[tuple[Path, bytes | None]]:
        """The checkpoints and their content, the newest first; None for one whose checksum does not match."""
        for path in sorted((self.path / "checkpoints").glob("*.pt"), reverse=True):
            content = b""
            with suppress(FileNotFoundError):  # deleted by the process that trains the run
                content = path.read_bytes() if path.is_file() else b""
            yield path, content if _digest(content) == path.stem.rpartition("-")[2] else None

    def save_best(self, content: bytes) -> None:
        """Keep these weights (``as_safetensors``), and those before in case the checkpoint that names these is lost."""
        best = self._own(_BEST)
        if best.is_file():
            # A copy, not a move: a process killed here leaves weights to evaluate.
            self.write_file(_BEST_BEFORE, best.read_bytes())
        self.write_file(_BEST, content)

    def restore_best(self, digest: str) -> bool:
        """Have the weights of this checksum as the best, if need be those before the last; whether they are there."""
        best = self._own(_BEST)
        for path in (best, self._own(_BEST_BEFORE)):
            if path.is_file() and file_digest(path) == digest:
                path.replace(best)
                return True
        return False

    def load_best(self) -> "dict[str, Tensor]":
        import safetensors.torch

        path = self.path / _BEST
        if not path.is_file():
            raise ShortlistError(f"{self.path} has no weights yet: no epoch has finished")
        content = path.read_bytes()  # before the checksums: a process that trains the run may replace it meanwhile
        known = {self.read_record("final.json").get("best_sha256")} if self.finished else self._best_digests()
        if known and hashlib.sha256(content).hexdigest() not in known:
            where = "in final.json" if self.finished else "of a checkpoint's best weights"
            raise ShortlistError(f"{path} is damaged: its checksum is not the one {where}")
        try:
            return safetensors.torch.load(content)
        except safetensors.SafetensorError as wrong:
            raise ShortlistError(f"{path} is damaged: {wrong}") from None

    def _best_digests(self) -> set[str]:
        """Checksums of the best weights, by the checkpoints; of a run killed between the two, by the one before."""
        digests = set()
        for _, content in self._checkpoints():
            with suppress(ShortlistError, AttributeError, KeyError, TypeError):  # another file than training writes
                digests.add(_unpickled(content or b"")["position"]["best_digest"])
        return digests - {""}


def default_folder(config: RunConfig, root: Path = Path("runs")) -> Path:
    """Where a run goes if nobody says where: the folder that holds it already, or a new one.

    The run is recognised by its configuration: the key in the name of its folder may be that of an older version.
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


def is_metrics_line(line: Any) -> bool:
    """True for what training writes of an epoch: its number, and numbers or None by name."""
    return isinstance(line, dict) and is_whole(line.get("epoch")) and are_metrics(line)


def are_metrics(values: dict[str, Any]) -> bool:
    """True for finite numbers by name, None where one is undefined; accuracies are shares."""
    if not all(value is None or is_number(value) for value in values.values()):
        return False
    accuracies = (value for name, value in values.items() if METRIC.fullmatch(name.removeprefix("val_")))
    return all(value is None or 0 <= value <= 1 for value in accuracies)


def is_number(value: Any) -> bool:
    """True for a finite number, as JSON has them; Python takes True and False for numbers too."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def is_whole(value: Any) -> bool:
    """True for 0, 1, 2 and so on."""
    return type(value) is int and 0 <= value <= sys.maxsize


def is_text(value: Any) -> bool:
    return isinstance(value, str)


_PROCESS: dict[str, Callable[[Any], bool]] = {
    "commit": lambda value: value is None or is_text(value),
    "started": is_text,
    "device": is_text,
    "versions": lambda value: isinstance(value, dict) and all(map(is_text, value.values())),
    "world_size": is_whole,
}
"""What a process notes of itself in ``environment.json``."""


def _is_list_of_processes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and all(is_right(each[name]) for name, is_right in _PROCESS.items() if name in each)
        for each in value
    )


def _short(value: Any) -> str:
    return reprlib.repr(value)


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
        raise ShortlistError("it is not a training state that can be read without running code") from None
    if not isinstance(state, dict):
        raise ShortlistError(f"it must hold a training state, got {type(state).__name__}")
    return state


def _digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def environment(device_name: str, world_size: int) -> dict[str, Any]:
    """What else than the configuration may have made a difference."""
    versions = {}
    for package in ("shortlist", "torch", "torchvision", "timm", "torchmetrics", "lightning-fabric", "triton"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": versions,
        "device": device_name,
        "world_size": world_size,
        "platform": platform.platform(),
        "command": [hide_passwords_of_word(word) for word in sys.argv],
        **_commit(),
    }


def _commit() -> dict[str, Any]:
    """The commit of the source that is running, where it is a checkout."""
    here = Path(__file__).parents[2]  # the package

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", str(here)))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
