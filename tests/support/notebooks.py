"""Executes the notebook of ``examples/``. As a program it stores the outputs: ``make notebook``."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.support.examples import EXAMPLES

NOTEBOOK = EXAMPLES / "from_folder_to_page.ipynb"
_SECONDS_OF_CELL = 300


def stored_notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def executed_notebook(folder: Path) -> Any:
    """The notebook with new outputs. Its files are written to the folder; an error in a cell is raised."""
    notebook = stored_notebook()
    # Times and the version of Python would differ in every stored notebook.
    client = NotebookClient(notebook, timeout=_SECONDS_OF_CELL, record_timing=False, coalesce_streams=True)
    # Commands are found as in an environment that is activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    client.execute(env=os.environ | {"PATH": path, "TMPDIR": str(folder)}, cwd=str(folder))
    notebook.metadata.language_info = {"name": "python"}
    return notebook


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(executed_notebook(Path(folder)), NOTEBOOK)
