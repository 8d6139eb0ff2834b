"""Files are written whole or not at all, and locks end with their process."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import locked, write_file, written_whole


def test_a_file_takes_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with written_whole(path) as out:
        out.write(b"some")
        out.flush()
        assert not path.exists()
        out.write(b"thing")
    assert path.read_bytes() == b"something"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail_half_way() -> None:
        with written_whole(path) as out:
            out.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_half_way()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one_and_leads_to_what_was_written(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere" / "file")
    for content in (b"first", b"second"):
        write_file(link, content)
        assert link.is_symlink()
        assert (tmp_path / "elsewhere" / "file").read_bytes() == content


def test_a_pipe_stays_one_and_takes_what_is_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as threads:
        read = threads.submit(pipe.read_bytes)
        write_file(pipe, b"something")
        assert read.result(timeout=60) == b"something"
    assert pipe.is_fifo()


def test_what_a_shell_puts_in_place_of_a_file_is_written_to() -> None:
    write = "from pathlib import Path; from shortlist.program.atomic_files import write_file; import sys"
    code = f"{write}; write_file(Path(sys.argv[1]), b'something')"
    done = subprocess.run([sys.executable, "-c", code, "/dev/stdout"], capture_output=True, text=True, check=True)
    assert done.stdout == "something"


def test_links_in_a_circle_are_no_end_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with suppress(ShortlistError):
        write_file(tmp_path / "a", b"something")


def test_others_may_read_the_file_as_the_umask_says(tmp_path: Path) -> None:
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    plain.touch()
    with written_whole(whole):
        pass
    assert whole.stat().st_mode == plain.stat().st_mode


def test_a_lock_is_one_holders_and_makes_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / ".lock"
    with locked(path), pytest.raises(BlockingIOError), locked(path, wait=False):
        pass
    with locked(path, wait=False):
        pass


def test_a_lock_ends_with_its_process_whatever_that_leaves_behind(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
from pathlib import Path
from shortlist.program.atomic_files import locked
with locked(Path({str(tmp_path / "lock")!r})):
    if os.fork() == 0:  # as a process that loads images
        print("born", flush=True)
        time.sleep(20)
    sys.stdin.readline()
    os._exit(1)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"born\n"
        with pytest.raises(BlockingIOError), locked(tmp_path / "lock", wait=False):
            pass
        process.stdin.close()
        assert process.wait(timeout=30) == 1
        with locked(tmp_path / "lock", wait=False):
            pass


def test_what_cannot_be_written_or_locked_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "below"
    with pytest.raises(ShortlistError, match=f"cannot write {path}: "):
        write_file(path, b"")
    with pytest.raises(ShortlistError, match=f"cannot write {path}: "), locked(path):
        pass
