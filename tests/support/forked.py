"""Run a function in a forked child: a real process, without the seconds of importing torch.

A parent whose children train must have no threads: it calls ``import_the_program`` first, and trains only in children.
"""

import atexit
import gc
import importlib
import os
import select
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

_FORKING = threading.Lock()  # packages prepare for a fork, and filelock refuses a second at the same time

# What commands import only when they need it.
_IMPORTED_LATE = (
    "encodings.cp437",  # by zipfile, for the first .npz
    "typeguard",  # by tyro, for the first command line
    "shortlist.program.cli.main",
    "shortlist.program.report.page",
    "shortlist.program.training.evaluate",
    "shortlist.program.training.loop",
    "shortlist.program.predicting.predictor",
)


@dataclass(frozen=True)
class Ended:
    """How a child ended, and what it printed."""

    code: int | None
    """Exit status, minus the number of the signal that killed it, or None if it ran out of time."""
    out: str
    err: str

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    def __str__(self) -> str:
        how = "ran out of time" if self.code is None else f"ended with {self.code}"
        return f"{how}: {self.err.strip()[-300:] or 'no message'}"


def import_the_program() -> None:
    """Import what the commands need, so that forked children need not."""
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    for module in _IMPORTED_LATE:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page shared with the parent
    atexit.register(gc.unfreeze)


def run_forked(work: Callable[[], object], *, seconds: float, kill_after: float | None = None) -> Ended:
    """Run ``work`` in a child of this process.

    Args:
        work: Called in the child; an exception becomes a traceback on its standard error.
        seconds: Time limit, after which the child is killed.
        kill_after: Kill the child after this many seconds, as part of the test.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # From Python 3.12 on a fork beside threads, such as those of pytest-xdist, warns.
            warnings.simplefilter("ignore", DeprecationWarning)
            with _FORKING:
                child = os.fork()
        if child == 0:
            _be_the_child(work, out, err)
        asked = kill_after is not None and not _wait(child, kill_after)
        in_time = asked or _wait(child, seconds)
        if asked or not in_time:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status) if in_time else None
        return Ended(code, _content(out), _content(err))


def run_command(*arguments: str | Path, seconds: float, inside: Path) -> Ended:
    """Run ``shortlist ARGUMENTS`` in a child whose working directory is ``inside``."""

    def work() -> None:
        from shortlist.program.cli import main as cli

        os.chdir(inside)
        sys.argv = ["shortlist", *map(str, arguments)]
        cli.main()

    return run_forked(work, seconds=seconds)


def _be_the_child(work: Callable[[], object], out: IO[bytes], err: IO[bytes]) -> None:
    code = 0
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        # New streams: under pytest, or in a worker, sys.stdout may be anything.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        work()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 70
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)  # no exit handler of the parent may run twice


def _wait(child: int, seconds: float) -> bool:
    """True if the child ended within this time."""
    handle = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(max(0, round(1000 * seconds))))
    finally:
        os.close(handle)


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="backslashreplace")
