"""Storages of studies that processes were killed at, or that got damaged."""

from pathlib import Path
from typing import Any

import pytest

from shortlist import ShortlistError
from shortlist.program.config import RunConfig
from shortlist.program.tuning.storage import open_storage
from shortlist.program.tuning.study import tune
from tests.support.studies import At, outcome


def test_the_journals_lock_leads_to_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process leaves its lock. Others follow the link to see when the journal was last written."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/tune/x")
    storage: Any = open_storage("", folder / "studies.journal")
    storage._backend._lock.acquire()
    assert (folder / "studies.journal.lock").resolve(strict=True) == (folder / "studies.journal").resolve()
    storage._backend._lock.release()


def test_a_database_that_disappears_is_told_in_a_line(config: RunConfig) -> None:
    overwritten = At(start=lambda: Path("study.db").write_bytes(b"no longer a database" * 1000))
    with pytest.raises(ShortlistError, match=r"^[^\n]*sqlite:///study\.db[^\n]*$"):
        tune(config, storage="sqlite:///study.db", callbacks=[overwritten])


def test_half_a_line_in_the_journal_does_not_spoil_it(config: RunConfig) -> None:
    """A full disk leaves an incomplete line."""
    first = outcome(tune(config, trials=1, storage="journal"))
    with Path("journal").open("ab") as file:
        file.write(b'{"op_code":8,"worker_id":"x","tri')
    again = outcome(tune(config, storage="journal"))
    assert again[:1] == first
    assert outcome(tune(config, storage="journal")) == again
