"""What can happen to the files of a run folder: damage, and content by somebody who means harm."""

import hashlib
import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

MARK = "PICKLE-WAS-RUN"
"""Folder that hostile code would make."""
SCRIPT = "<script>alert(1)</script>"
"""Must not reach a page as it is."""


@dataclass(frozen=True)
class Damage:
    """Something done to one file of a run folder."""

    name: str
    do: Callable[[Path, Path, random.Random], None]
    """Called with the file, a folder elsewhere that nothing else may change, and a random generator."""
    silent: bool = False
    """True if the file does not show that it was changed: other results are then no fault."""


def _overwrite(content: bytes) -> Callable[[Path, Path, random.Random], None]:
    return lambda file, elsewhere, chance: _put(file, content)


def _put(file: Path, content: bytes) -> None:
    file.unlink()
    file.write_bytes(content)


def _flip(file: Path, elsewhere: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if content:
        content[-1 - chance.randrange(min(64, len(content)))] ^= 1 << chance.randrange(8)
    _put(file, bytes(content))


def _link_to_copy(file: Path, elsewhere: Path, chance: random.Random) -> None:
    file.rename(elsewhere / "precious")
    file.symlink_to(elsewhere / "precious")


def _link_to_other(file: Path, elsewhere: Path, chance: random.Random) -> None:
    (elsewhere / "precious").write_text("not a file of this run\n")
    file.unlink()
    file.symlink_to(elsewhere / "precious")


def _link_to_nothing(file: Path, elsewhere: Path, chance: random.Random) -> None:
    file.unlink()
    file.symlink_to(elsewhere / "not-there")


def _directory(file: Path, elsewhere: Path, chance: random.Random) -> None:
    file.unlink()
    file.mkdir()
    (file / "inside").write_text("something\n")


def _fifo(file: Path, elsewhere: Path, chance: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def _truncate(file: Path, elsewhere: Path, chance: random.Random) -> None:
    _put(file, file.read_bytes()[: file.stat().st_size // 2])


def _random_bytes(file: Path, elsewhere: Path, chance: random.Random) -> None:
    _put(file, chance.randbytes(max(16, file.stat().st_size)))


DAMAGES = (
    Damage("deleted", lambda file, elsewhere, chance: file.unlink()),
    Damage("cut in half", _truncate),
    Damage("emptied", _overwrite(b"")),
    Damage("filled with random bytes", _random_bytes),
    Damage("changed by one bit", _flip, silent=True),
    Damage("replaced by the JSON null", _overwrite(b"null")),
    Damage("replaced by a JSON list", _overwrite(b'[1, "two", null]')),
    Damage("replaced by a JSON number", _overwrite(b"1e999")),
    Damage("replaced by an empty JSON object", _overwrite(b"{}")),
    Damage("replaced by deeply nested JSON", _overwrite(b"[" * 200_000)),
    Damage("replaced by a directory", _directory),
    Damage("replaced by a link to a copy elsewhere", _link_to_copy),
    Damage("replaced by a link to another file", _link_to_other),
    Damage("replaced by a link to nothing", _link_to_nothing),
    Damage("replaced by a FIFO", _fifo),
)


def _folder_for_link(folder: Path, elsewhere: Path, chance: random.Random) -> None:
    folder.rename(elsewhere / "precious")
    folder.symlink_to(elsewhere / "precious")


def _folder_for_file(folder: Path, elsewhere: Path, chance: random.Random) -> None:
    shutil.rmtree(folder)
    folder.write_text("no folder\n")


FOLDER_DAMAGES = (
    Damage("replaced by a link to a folder elsewhere", _folder_for_link),
    Damage("replaced by a file", _folder_for_file),
    Damage("deleted", lambda folder, elsewhere, chance: shutil.rmtree(folder)),
)


class _Hostile:
    """A pickle of this runs code when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def _as_checkpoint(make: Callable[[dict[str, Any], Path], bytes]) -> Callable[[Path, Path, random.Random], None]:
    """Replace a checkpoint by one with other content and the right checksum."""

    def do(file: Path, elsewhere: Path, chance: random.Random) -> None:
        state = torch.load(file, weights_only=True)
        content = make(state, elsewhere / MARK)
        file.unlink()
        step = file.stem.partition("-")[0]
        file.with_name(f"{step}-{hashlib.sha256(content).hexdigest()[:16]}.pt").write_bytes(content)

    return do


def _saved(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _with(state: dict[str, Any], section: str, **entries: Any) -> bytes:
    return _saved({**state, section: {**state[section], **entries}})


HOSTILE_CHECKPOINTS = (
    Damage("a pickle with code", _as_checkpoint(lambda state, mark: pickle.dumps(_Hostile(mark)))),
    Damage("a torch file with code", _as_checkpoint(lambda state, mark: _saved({**state, "more": _Hostile(mark)}))),
    Damage("no torch file", _as_checkpoint(lambda state, mark: b"nothing")),
    Damage("empty", _as_checkpoint(lambda state, mark: b"")),
    Damage("None", _as_checkpoint(lambda state, mark: _saved(None))),
    Damage("a list", _as_checkpoint(lambda state, mark: _saved([1, 2]))),
    Damage("without its model", _as_checkpoint(lambda state, mark: _saved({**state, "model": None}))),
    Damage("without weights", _as_checkpoint(lambda state, mark: _saved({**state, "model": {}}))),
    Damage("without its optimiser", _as_checkpoint(lambda state, mark: _saved({**state, "optimizer": {}}))),
    Damage("without its position", _as_checkpoint(lambda state, mark: _saved({**state, "position": {}}))),
    Damage("in an epoch of text", _as_checkpoint(lambda state, mark: _with(state, "position", epoch="two"))),
    Damage("in epoch -1", _as_checkpoint(lambda state, mark: _with(state, "position", epoch=-1))),
    Damage("in epoch 10**9", _as_checkpoint(lambda state, mark: _with(state, "position", epoch=10**9))),
    Damage("at a position with a further entry", _as_checkpoint(lambda state, mark: _with(state, "position", more=1))),
    Damage("whose best weights are a path", _as_checkpoint(lambda s, m: _with(s, "position", best_digest="../x"))),
)


def _json_entry(name: str, value: Any) -> Callable[[Path, Path, random.Random], None]:
    def do(file: Path, elsewhere: Path, chance: random.Random) -> None:
        content = json.loads(file.read_text())
        inner, *path = reversed(name.split("."))
        place = content
        for step in reversed(path):
            place = place[step]
        place[inner] = value
        _put(file, json.dumps(content).encode())

    return do


def _class_name(name: str) -> Callable[[Path, Path, random.Random], None]:
    def do(file: Path, elsewhere: Path, chance: random.Random) -> None:
        content = json.loads(file.read_text())
        content["names"][0] = name
        _put(file, json.dumps(content).encode())

    return do


_NAMES: tuple[str, ...] = (
    "",
    " ",
    "../../../etc/passwd",
    SCRIPT,
    '"><img src=x onerror=alert(1)>',
    "\x00",
    "\x1b]0;title\x07",
    "\n\n",
)
_NAMES += ("\udce9", "\u202eowl", "[bold red]owl[/]", "%s{0}", "=1+1", "x" * 100_000)
HOSTILE_ENTRIES: dict[str, tuple[Damage, ...]] = {
    "classes.json": (
        *(Damage(f"whose first class is called {name[:40]!r}", _class_name(name)) for name in _NAMES),
        *(Damage(f"with names {value!r}", _json_entry("names", value)) for value in (None, [], ["elm"], [1, 2], "elm")),
        *(Damage(f"with train_images {value!r}", _json_entry("train_images", value)) for value in (None, [1], [-1, 2])),
        *(Damage(f"with superclasses {value!r}", _json_entry("superclasses", value)) for value in (7, "x", [None])),
    ),
    "config.json": tuple(
        Damage(f"with {name} = {value!r:.40}", _json_entry(name, value), silent=True)
        for name, value in (
            ("seed", "x"),
            ("seed", 2**70),
            ("recipe", None),
            ("recipe", SCRIPT),
            ("model.name", "../../evil"),
            ("model.name", "__import__('os')"),
            ("model.name", SCRIPT),
            ("model", None),
            ("data.name", "evil"),
            ("data.root", "/dev/zero"),
            ("data.root", "\x00"),
            ("data.root", 7),
            ("data.image_size", 10**9),
            ("data.image_size", -1),
            ("loss.k", 10**9),
            ("loss.k", 0),
            ("loss.name", []),
            ("train.ks", []),
            ("train.ks", [10**9]),
            ("train.ks", ["1"]),
            ("train.eval_batch_size", 0),
            ("train.precision", "64-evil"),
            ("train.device", "evil"),
            ("unknown", {"a": 1}),
        )
    ),
    "final.json": tuple(
        Damage(f"with {name} = {value!r:.40}", _json_entry(name, value), silent=True)
        for name, value in (
            ("test", None),
            ("test", []),
            ("test", {}),
            ("test", {"micro_top1": SCRIPT}),
            ("test", {"micro_topx": 1}),
            ("test", {"micro_top1": float("nan")}),
            ("test", {"micro_top1": 1e308}),
            ("val", None),
            ("test_corrected", {"micro_top1": SCRIPT}),
            ("best_epoch", SCRIPT),
            ("best_epoch", -5),
            ("train_seconds", "long"),
            ("train_seconds", None),
            ("best_sha256", None),
            ("best_sha256", "0"),
            ("skipped_files", 7),
            ("skipped_images", SCRIPT),
        )
    ),
    "correction.json": tuple(
        Damage(f"with {name} = {value!r:.40}", _json_entry(name, value), silent=True)
        for name, value in (
            ("tau", None),
            ("tau", -1),
            ("tau", float("inf")),
            ("tau", 1e308),
            ("metric", SCRIPT),
            ("images", SCRIPT),
            ("best_sha256", "0"),
            ("val", {"micro_top1": SCRIPT}),
        )
    ),
    "preprocess.json": tuple(
        Damage(f"with {name} = {value!r:.40}", _json_entry(name, value), silent=True)
        for name, value in (
            ("crop", 10**9),
            ("crop", 0),
            ("resize", 10**9),
            ("channels", 4),
            ("std", [0]),
            ("mean", "x"),
            ("fit", ["pad"]),
        )
    ),
    "environment.json": tuple(
        Damage(f"with {name} = {value!r:.40}", _json_entry(name, value))
        for name, value in (
            ("commit", 7),
            ("commit", SCRIPT),
            ("resumed", None),
            ("resumed", 7),
            ("resumed", [None]),
            ("versions", []),
            ("device", {"a": SCRIPT}),
            ("command", None),
        )
    ),
    "facts.json": tuple(
        Damage(f"with {name} = {value!r:.40}", _json_entry(name, value))
        for name, value in (("train_digest", 7), ("test_digest", []), ("test_files", 7), ("val_files", [SCRIPT]))
    ),
}


def _metrics_line(line: Any) -> Callable[[Path, Path, random.Random], None]:
    def do(file: Path, elsewhere: Path, chance: random.Random) -> None:
        first, *others = file.read_text().splitlines()
        changed = line(json.loads(first)) if callable(line) else line
        _put(file, ("\n".join([json.dumps(changed), *others]) + "\n").encode())

    return do


METRICS_DAMAGES = (
    Damage("with a list for a line", _metrics_line([1, 2])),
    Damage("with an epoch of text", _metrics_line(lambda line: line | {"epoch": "zero"})),
    Damage("with the epoch null", _metrics_line(lambda line: line | {"epoch": None})),
    Damage("with the epoch 10**30", _metrics_line(lambda line: line | {"epoch": 10**30})),
    Damage("with a loss of text", _metrics_line(lambda line: line | {"train_loss": SCRIPT}), silent=True),
    Damage("without its loss", _metrics_line(lambda line: {"epoch": 0}), silent=True),
    Damage("with an infinite loss", _metrics_line(lambda line: line | {"train_loss": float("inf")}), silent=True),
    Damage("with a time of text", _metrics_line(lambda line: line | {"train_seconds": "long"}), silent=True),
)


def _weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Any:
    def do(file: Path, elsewhere: Path, chance: random.Random) -> None:
        _put(file, safetensors.torch.save(change(safetensors.torch.load_file(file))))

    return do


TENSOR_DAMAGES = (
    Damage("without tensors", _weights(lambda weights: {})),
    Damage("with NaN throughout", _weights(lambda weights: {n: t * float("nan") for n, t in weights.items()})),
    Damage("with other shapes", _weights(lambda weights: {n: t.flatten()[:1] for n, t in weights.items()})),
    Damage("with numbers out of range", _weights(lambda weights: {n: t.long() + 2**60 for n, t in weights.items()})),
    Damage("with other names", _weights(lambda weights: {f"../{n}": t for n, t in weights.items()})),
    Damage("with a header of 2**63 bytes", _overwrite((2**63 - 1).to_bytes(8, "little") + b"{}")),
)
