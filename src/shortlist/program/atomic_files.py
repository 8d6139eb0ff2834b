"""Files that are there whole or not at all, whatever happens on the way, and files that are locked."""

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


def write_file(path: Path, content: bytes | memoryview, again: str = "") -> None:
    """Write a file whole or not at all; a disk that is full is explained as by ``explained``."""
    with explained(path, again), written_whole(path) as file:
        file.write(content)


def refuse_links(folder: Path, path: Path) -> None:
    """Raise an error if what is written to a path inside a folder would end up elsewhere, by a link below the folder.

    The folder may have come from a stranger. How the user reaches it, through links of his own, is his business.
    """
    for part in (path, *path.parents):
        if part == folder:
            return
        if part.is_symlink():
            raise ShortlistError(f"{part} is a link to {part.readlink()}, and nothing is written through it: delete it")


@contextmanager
def explained(path: Path, again: str = "") -> Iterator[None]:
    """Whatever keeps the block from writing the file becomes an error that names it and says what to do.

    Args:
        path: The file.
        again: What else to say about giving the command again, when there is room.
    """
    try:
        yield
    except OSError as wrong:
        full = wrong.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = f"; make room and give the command again{again}" if full else ""
        raise ShortlistError(f"cannot write {path}: {wrong.strerror}{advice}") from wrong


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file, made with its folder if it is not there; the lock ends with the process at the latest.

    The file is not changed, and a link in its place is not followed: it may be a stranger's, and lead anywhere.

    Raises:
        ShortlistError: The file cannot be made, or is no regular file.
        BlockingIOError: Somebody else has it, and ``wait`` is false.
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
    # Open for writing, because NFS locks nothing else. Non-blocking, or a pipe would wait for its other end.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ShortlistError(f"{path} is a link, and a lock must be a file of its own: delete it") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ShortlistError(f"{path} must be a regular file, to be locked: delete it")
    return os.fdopen(descriptor, "r+b")


_HELD: set[BinaryIO] = set()


def _leave_locks_to_the_parent() -> None:
    """A process that outlives its parent, as those that load images may for seconds, must not keep its locks alive."""
    for file in _HELD:
        file.close()
    _HELD.clear()


os.register_at_fork(after_in_child=_leave_locks_to_the_parent)
