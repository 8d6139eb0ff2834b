"""Each example has a page, and what the page quotes is in the example."""

import re
import textwrap

import pytest

from tests.support.examples import EXAMPLES
from tests.support.notebooks import NOTEBOOK, stored_notebook

PAGES = EXAMPLES.parent / "docs" / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path.stem != "long_tail")  # that one is their data
every_example = pytest.mark.parametrize("name", [path.stem for path in [*SCRIPTS, NOTEBOOK]])


def code_of(name: str) -> str:
    if name == NOTEBOOK.stem:
        return "\n\n".join(cell.source for cell in stored_notebook().cells if cell.cell_type == "code")
    return (EXAMPLES / f"{name}.py").read_text()


@every_example
def test_what_a_page_quotes_is_in_the_example(name: str) -> None:
    code = code_of(name)
    blocks = re.findall(r"^```python\n(.*?)^```$", (PAGES / f"{name}.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        as_indented = [textwrap.indent(block, " " * width) for width in range(0, 17, 4)]
        assert any(f"\n{text}" in f"\n{code}\n" for text in as_indented), block


@every_example
def test_an_example_is_in_the_list_and_its_page_names_it(name: str) -> None:
    assert f"]({name}.md)" in (PAGES / "index.md").read_text()
    suffix = "ipynb" if name == NOTEBOOK.stem else "py"
    assert f"/examples/{name}.{suffix})" in (PAGES / f"{name}.md").read_text()


def test_every_page_has_its_example() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {"index", NOTEBOOK.stem, *(path.stem for path in SCRIPTS)}
