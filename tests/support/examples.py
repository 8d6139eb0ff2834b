"""Runs the scripts of ``examples/`` as their reader does."""

import contextlib
import io
import runpy
import sys
from pathlib import Path
from unittest import mock

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str) -> str:
    """What ``python examples/NAME.py ARGUMENTS`` prints to the standard output, in this process."""
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", [name, *arguments]), contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return printed.getvalue()
