"""Files that are there whole or not at all, whatever happens on the way, and files that are locked."""

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from shortlist.errors import ShortlistError

WRITING = ".writing-"
"""Prefix of files that have not got their names yet; one that stays behind belongs to a writer that was killed."""


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name only when the block has ended well; two processes may write it at once.

    Where a link leads elsewhere, what it leads to is written; a device or pipe takes what is written as it comes.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            yield stream
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{WRITING}{path.name}-{secrets.token_hex(8)}")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all; a disk that is full is explained."""
    with explained(path), written_whole(path) as file:
        file.write(content)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Whatever keeps the block from writing the file becomes an error that names it and says what to do."""
    try:
        yield
    except OSError as wrong:
        full = wrong.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "; make room and give the command again (shortlist train with --resume)" if full else ""
        raise ShortlistError(f"cannot write {path}: {wrong.strerror}{advice}") from wrong


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file, made with its folder if it is not there; the lock ends with the process at the latest.

    Raises:
        BlockingIOError: Somebody else has it, and ``wait`` is false.
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        _HELD.add(file)
        try:
            yield
        finally:
            _HELD.discard(file)


_HELD: set[TextIO] = set()


def _leave_locks_to_the_parent() -> None:
    """A process that outlives its parent, as those that load images may for seconds, must not keep its locks alive."""
    for file in _HELD:
        file.close()
    _HELD.clear()


os.register_at_fork(after_in_child=_leave_locks_to_the_parent)
