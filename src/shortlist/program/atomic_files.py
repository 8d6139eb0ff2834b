"""Files that are written whole or not at all, even if the process is killed, and file locks."""

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from shortlist.errors import ShortlistError

WRITING = ".writing-"
"""Prefix of temporary files. One that is left behind belongs to a writer that was killed."""


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes its name only if the block succeeds; several processes may write it at once.

    The target of a link is replaced, not the link. Devices and pipes are written directly.
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


def write_file(path: Path, content: bytes | memoryview, again: str = "") -> None:
    """Write a file whole or not at all, with the errors of ``explained``."""
    with explained(path, again), written_whole(path) as file:
        file.write(content)


def refuse_links(folder: Path, path: Path) -> None:
    """Raise an error if a link below the folder makes the path lead elsewhere.

    The folder may come from a stranger. Links above it are the user's own.
    """
    for part in (path, *path.parents):
        if part == folder:
            return
        if part.is_symlink():
            raise ShortlistError(f"{part} is a link to {part.readlink()}; nothing is written through links: delete it")


@contextmanager
def explained(path: Path, again: str = "") -> Iterator[None]:
    """Turn an ``OSError`` of the block into a ``ShortlistError`` that names the file and the remedy.

    Args:
        path: The file.
        again: How to repeat the command once there is room on a full disk.
    """
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = f"; make room and give the command again{again}" if is_full else ""
        raise ShortlistError(f"cannot write {path}: {error.strerror}{advice}") from error


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file, creating it and its folder if needed. The lock ends with the process at the latest.

    The file is not changed, and a link in its place is not followed: it may lead anywhere.

    Raises:
        ShortlistError: The file cannot be created, or is not a regular file.
        BlockingIOError: Somebody else holds the lock, and ``wait`` is false.
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _open_lock(path)
    with file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        _HELD.add(file)
        try:
            yield
        finally:
            _HELD.discard(file)


def _open_lock(path: Path) -> BinaryIO:
    # For writing, because NFS locks nothing else; non-blocking, because a pipe would wait for its other end.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ShortlistError(f"{path} is a link, but a lock must be a regular file: delete it") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ShortlistError(f"{path} must be a regular file to be locked: delete it")
    return os.fdopen(descriptor, "r+b")


_HELD: set[BinaryIO] = set()


def _leave_locks_to_parent() -> None:
    """A forked process, such as one that loads images, may outlive its parent and must not keep its locks."""
    for file in _HELD:
        file.close()
    _HELD.clear()


os.register_at_fork(after_in_child=_leave_locks_to_parent)
