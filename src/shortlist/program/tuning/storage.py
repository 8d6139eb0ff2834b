"""Where studies are kept: files and databases that many processes write to, some of which are killed on the way."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from sqlalchemy import event, make_url
from sqlalchemy.exc import DBAPIError

from shortlist.errors import ShortlistError
from shortlist.program.text import hide_passwords, hide_passwords_of_word

# Bytes of a journal's line, and more.
_LONGEST_LINE = 1 << 20


@contextmanager
def storage_explained(storage: str, *kinds: type[Exception]) -> Iterator[None]:
    """What these exceptions say, in a line, of a storage that was damaged, deleted or forbidden.

    Without its password, and not ``from`` these exceptions: their own messages may hold it.
    """
    try:
        yield
    except kinds as error:
        raise _unusable(storage, str(error.__cause__ or error).partition("\n")[0]) from None
    except OSError as error:
        if error.filename is not None:
            raise
        # All files of ours have names: it is Optuna's journal that has none, on a disk that is full.
        raise _unusable(storage, str(error.strerror)) from None


def _unusable(storage: str, reason: str) -> ShortlistError:
    where = hide_passwords_of_word(storage)
    return ShortlistError(f"the storage {where} cannot be used: {hide_passwords(reason, url=storage)}")


def open_storage(storage: str, default: Path) -> BaseStorage:
    """A database by its address, or a plain file, by default that one."""
    if "://" in storage:
        return _open_database(storage)
    path = Path(storage) if storage else default
    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(_Journal(path))


class _Journal(JournalFileBackend):
    """Optuna's file of studies; half a line that a full disk left would spoil the next, and the file for good."""

    def __init__(self, path: Path) -> None:
        # Absolute: the lock is a link to it, which Optuna follows to see whether the holder still lives.
        self._path = path.absolute()
        self._journal_lock = JournalFileSymlinkLock(str(self._path))
        super().__init__(str(self._path), self._journal_lock)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        if self._half_a_line():
            self._journal_lock.acquire()
            try:
                with self._path.open("r+b") as file:  # nobody is writing now
                    file.truncate(self._path.stat().st_size - self._half_a_line())
            finally:
                self._journal_lock.release()
        super().append_logs(logs)

    def _half_a_line(self) -> int:
        """Bytes behind the last whole line."""
        size = self._path.stat().st_size
        with self._path.open("rb") as file:
            file.seek(max(0, size - _LONGEST_LINE))
            return len(file.read(_LONGEST_LINE).rpartition(b"\n")[2])


def _open_database(url: str) -> BaseStorage:
    if not url.startswith("sqlite"):
        return _with_tables(url, {})
    if make_url(url).database in (None, "", ":memory:"):
        raise ShortlistError("it names no file, as sqlite:///study.db does")
    storage = _with_tables(url, {"connect_args": {"timeout": 60}})
    # SQLite would lock at the first write of a transaction only: two processes could both read that a trial waits, and
    # both take it.
    storage.engine.dispose()
    event.listen(storage.engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return storage


def _with_tables(url: str, options: dict[str, Any]) -> RDBStorage:
    # Of processes that create the tables at the same moment all but one fail; soon after, all of them find the tables.
    for pause in (0.2, 1.0, 3.0):
        with suppress(DBAPIError, RuntimeError):
            return RDBStorage(url, engine_kwargs=options)
        time.sleep(pause)
    return RDBStorage(url, engine_kwargs=options)
