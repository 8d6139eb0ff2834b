"""The watch of file operations notices what it should."""

import os
import random
from pathlib import Path

from shortlist.program.atomic_files import write_file
from tests.support.file_operations import watched
from tests.support.forked import run_forked


def test_a_file_that_takes_its_name_unsynced_is_noticed(tmp_path: Path) -> None:
    with watched(tmp_path) as watch:
        (tmp_path / "part").write_text("something")
        (tmp_path / "part").rename(tmp_path / "whole")
        write_file(tmp_path / "other", b"something else")
    # The second one too: the first file is still not on disk.
    assert [line.partition(" ")[0] for line in watch.unsynced] == ["part", "whole"]


def test_data_that_is_changed_after_it_was_synced_is_noticed(tmp_path: Path) -> None:
    with watched(tmp_path) as watch:
        with (tmp_path / "part").open("w") as file:
            file.write("something")
            file.flush()
            os.fsync(file)
            file.write(" else")
        (tmp_path / "part").rename(tmp_path / "whole")
    assert len(watch.unsynced) == 1


def test_what_write_file_writes_is_synced(tmp_path: Path) -> None:
    with watched(tmp_path) as watch:
        write_file(tmp_path / "file", b"something")
    assert [operation.partition(" ")[0] for operation in watch.operations] == ["mkdir", "open", "sync", "rename"]
    assert not watch.unsynced


def test_a_child_dies_before_the_operation_that_it_is_told(tmp_path: Path) -> None:
    def write() -> None:
        with watched(tmp_path, kill_before=4):
            write_file(tmp_path / "file", b"something")

    assert run_forked(write, seconds=60).killed
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".writing-file-")
    assert left.read_bytes() == b"something"


def test_a_power_cut_takes_what_was_not_synced(tmp_path: Path) -> None:
    def write() -> None:
        with watched(tmp_path, kill_before=3, power_cut=random.Random(0)):
            write_file(tmp_path / "file", b"something")

    assert run_forked(write, seconds=60).killed
    (left,) = tmp_path.iterdir()
    assert len(left.read_bytes()) < len(b"something")
