"""Storage of studies: files and databases that many processes share, some of which get killed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from sqlalchemy import NullPool, event, make_url
from sqlalchemy.exc import DBAPIError

from shortlist.errors import ShortlistError
from shortlist.program.text import hide_passwords, hide_passwords_of_word

# In bytes; more than a line of a journal has.
_LONGEST_LINE = 1 << 20


@contextmanager
def storage_explained(storage: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn these exceptions into one line about a storage that is damaged, deleted or forbidden.

    The line does not contain the password, nor is it raised ``from`` the exception, whose message may contain it.
    """
    try:
        yield
    except kinds as error:
        raise _unusable(storage, str(error.__cause__ or error).partition("\n")[0]) from None
    except OSError as error:
        if error.filename is not None:
            raise
        # Only Optuna's journal raises an error without a file name, when the disk is full.
        raise _unusable(storage, str(error.strerror)) from None


def _unusable(storage: str, reason: str) -> ShortlistError:
    where = hide_passwords_of_word(storage)
    return ShortlistError(f"the storage {where} cannot be used: {hide_passwords(reason, url=storage)}")


def open_storage(storage: str, default: Path) -> BaseStorage:
    """Open a database by its URL, or a plain file."""
    if "://" in storage:
        return _open_database(storage)
    path = Path(storage) if storage else default
    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(_Journal(path))


class _Journal(JournalFileBackend):
    """Optuna's file of studies. It removes the incomplete line that a full disk leaves, which would damage the file."""

    def __init__(self, path: Path) -> None:
        # Absolute: the lock is a link to it, which Optuna follows to see whether its holder is alive.
        self._path = path.absolute()
        self._journal_lock = JournalFileSymlinkLock(str(self._path))
        super().__init__(str(self._path), self._journal_lock)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        if self._incomplete_bytes():
            self._journal_lock.acquire()
            try:
                with self._path.open("r+b") as file:  # no other process is writing now
                    file.truncate(self._path.stat().st_size - self._incomplete_bytes())
            finally:
                self._journal_lock.release()
        super().append_logs(logs)

    def _incomplete_bytes(self) -> int:
        """Number of bytes after the last complete line."""
        size = self._path.stat().st_size
        with self._path.open("rb") as file:
            file.seek(max(0, size - _LONGEST_LINE))
            return len(file.read(_LONGEST_LINE).rpartition(b"\n")[2])


def _open_database(url: str) -> BaseStorage:
    if not url.startswith("sqlite"):
        return _with_tables(url, {})
    if make_url(url).database in (None, "", ":memory:"):
        raise ShortlistError("the URL must name a file, such as sqlite:///study.db")
    # No pool: a connection is closed after each use. Nobody would close those of a pool, and Python 3.13 warns of it.
    storage = _with_tables(url, {"connect_args": {"timeout": 60}, "poolclass": NullPool})
    # SQLite locks at the first write of a transaction. Two processes could read that a trial is waiting, and both take
    # it.
    event.listen(storage.engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return storage


def _with_tables(url: str, options: dict[str, Any]) -> RDBStorage:
    # If processes create the tables at the same moment, all but one fail. Soon after, all of them find the tables.
    for pause in (0.2, 1.0, 3.0):
        with suppress(DBAPIError, RuntimeError):
            return RDBStorage(url, engine_kwargs=options)
        time.sleep(pause)
    return RDBStorage(url, engine_kwargs=options)
