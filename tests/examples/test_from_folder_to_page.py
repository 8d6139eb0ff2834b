"""The notebook runs, and what is stored of its outputs fits its cells and tells nothing of the machine."""

import re
import socket
from pathlib import Path
from typing import Any

from tests.support.notebooks import NOTEBOOK, executed_notebook, stored_notebook


def kinds_of_outputs(notebook: Any) -> list[list[str]]:
    """Of each cell with code: ``stream stdout``, ``display_data image/png text/plain`` and so on."""
    return [
        [" ".join([output.output_type, *sorted(output.get("data", [output.get("name")]))]) for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_the_notebook_runs_and_its_stored_outputs_are_of_the_same_kinds(tmp_path: Path) -> None:
    executed = executed_notebook(tmp_path)  # raises the error of a cell
    assert kinds_of_outputs(executed) == kinds_of_outputs(stored_notebook())
    (answer,) = [cell.outputs[0].text for cell in executed.cells if "/api/suggest" in cell.source]
    assert answer.count('"probability"') == 3


def test_the_stored_notebook_was_executed_once_from_top_to_bottom() -> None:
    cells = [cell for cell in stored_notebook().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs) == 2


def test_nothing_of_the_machine_is_stored() -> None:
    text = re.sub(r'"image/png": ".*"', "", NOTEBOOK.read_text())
    assert socket.gethostname() not in text
    assert str(Path.home()) + "/" not in text
    assert not re.search(r"(?<![\w.])/(home|root|tmp|usr|var|opt|work|Users|private|mnt)/", text)
