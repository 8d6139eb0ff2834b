"""Watch what this process does to the files of a folder: count it, check it, or die in the middle of it.

An operation is an open for writing, an fsync, a rename, a removal or a new directory. Python reports all but the fsync
to audit hooks. These cannot be removed, so one hook serves whoever is watching.
"""

import hashlib
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR
# No result depends on these files: their last bytes may be lost.
_MAY_BE_LOST = (".lock", "tensorboard")


@dataclass
class Watch:
    """What happened to the folder while it was watched."""

    folder: Path
    kill_before: int = 0
    """Die by SIGKILL just before the operation with this number, counted from 1."""
    power_cut: random.Random | None = None
    """Before dying, truncate data that was written but not synced, at random places."""
    operations: list[str] = field(default_factory=list)
    unsynced: list[str] = field(default_factory=list)
    """Files that got their names while data written before was not on disk."""
    _synced: dict[Path, tuple[int, bytes]] = field(default_factory=dict)
    """For each file that this process opened for writing: size and digest when it was last synced."""

    def note(self, kind: str, path: Path, to: Path | None = None) -> None:
        self.operations.append(f"{kind} {path.relative_to(self.folder)}")
        if len(self.operations) == self.kill_before:
            self.die()
        if kind == "open":
            self._synced.setdefault(path, _state(path))
        elif kind == "rename" and to is not None:
            self._check_synced(to)
            if path in self._synced:
                self._synced[to] = self._synced.pop(path)
        elif kind == "remove":
            self._synced.pop(path, None)

    def synced(self, descriptor: int) -> None:
        """Called before an fsync counts as done: a process that dies here has not synced."""
        for path in self._synced:
            if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                self.note("sync", path)
                self._synced[path] = _state(path)
                return

    def die(self) -> None:
        if self.power_cut is not None:
            for path, (size, _) in self._synced.items():
                if path.is_file() and (now := path.stat().st_size) > size:
                    os.truncate(path, self.power_cut.randint(size, now - 1))
        os.kill(os.getpid(), signal.SIGKILL)

    def _check_synced(self, to: Path) -> None:
        for path, state in self._synced.items():
            name = path.relative_to(self.folder)
            if name.parts[0] not in _MAY_BE_LOST and path.exists() and _state(path) != state:
                self.unsynced.append(f"{name} was not synced when {to.relative_to(self.folder)} took its name")


@contextmanager
def watched(folder: Path, *, kill_before: int = 0, power_cut: random.Random | None = None) -> Iterator[Watch]:
    """Watch the folder during the block."""
    global _watching
    _install()
    watch = Watch(folder.resolve(), kill_before, power_cut)
    real_sync = os.fsync

    def sync(fd: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        with _lock:
            watch.synced(number)
        real_sync(number)

    _watching, os.fsync = watch, sync
    try:
        yield watch
    finally:
        _watching, os.fsync = None, real_sync


_watching: Watch | None = None
_installed = False
_lock = threading.RLock()  # TensorBoard writes from a thread of its own
_inside = threading.local()


def _install() -> None:
    global _installed
    if not _installed:
        sys.addaudithook(_hook)
        _installed = True


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching is None or event not in _EVENTS or getattr(_inside, "hook", False):
        return
    if event == "open" and not arguments[2] & _WRITES:
        return
    _inside.hook = True
    try:
        with _lock:
            path, to = _below(arguments[0]), _below(arguments[1]) if event == "os.rename" else None
            if path is not None:
                _watching.note(_EVENTS[event], path, to)
    finally:
        _inside.hook = False


_EVENTS = {"open": "open", "os.rename": "rename", "os.remove": "remove", "os.mkdir": "mkdir", "os.rmdir": "remove"}


def _below(name: Any) -> Path | None:
    """The path, if it is one below the watched folder."""
    assert _watching is not None
    if isinstance(name, int):  # an open descriptor
        return None
    path = Path(os.fsdecode(name))
    path = path.parent.resolve() / path.name  # the file itself may be a link: it is the link that is renamed
    return path if path == _watching.folder or _watching.folder in path.parents else None


def _state(path: Path) -> tuple[int, bytes]:
    content = path.read_bytes() if path.is_file() else b""
    return len(content), hashlib.sha256(content).digest()
