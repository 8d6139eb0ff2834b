"""The tables of docs/reproduction.md are made from the results alone."""

import re
import shutil
from pathlib import Path

import pytest

import shortlist as sl
from shortlist.program.cli import research
from shortlist.program.documents import END, begin_mark
from shortlist.program.reproduce.document import write_reproduction
from shortlist.program.reproduce.registry import EXPERIMENTS
from shortlist.program.reproduce.results import read_results, write_results
from tests.support.reproducing import ROOT, made_up

BEGIN = begin_mark("shortlist reproduce --document")


def new_docs(folder: Path) -> Path:
    folder.mkdir()
    (folder / "reproduction.md").write_text(f"# Again\n\nBefore.\n\n{BEGIN}\noutdated\n{END}\n\nAfter.\n")
    return folder


def test_the_document_is_rebuilt_exactly_from_the_files(tmp_path: Path) -> None:
    results = tmp_path / "results"
    numbers = [made_up(85.25), made_up(86.5, seed=1)]
    write_results(results / "cifar100-top5.csv", numbers)
    assert read_results(results / "cifar100-top5.csv") == numbers
    first = new_docs(tmp_path / "first")
    page = write_reproduction(results, first).read_text()
    assert page.startswith(f"# Again\n\nBefore.\n\n{BEGIN}\n")
    assert page.endswith(f"{END}\n\nAfter.\n")
    assert "outdated" not in page
    assert "| 0.4 | ours, 100 epochs | 2 |  |  | 85.9\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}7.9 |" in page
    assert "| 0.3 | ours, 100 epochs |  |  |  |  |" in page, "empty if not run"
    assert "Run 2026-01-01 on Made-up GPU, commit 0123456789." in page
    assert write_reproduction(results, shutil.copytree(first, tmp_path / "second")).read_text() == page


def test_shorter_runs_move_to_the_appendix_once_longer_ones_have_replaced_them(tmp_path: Path) -> None:
    short, long = made_up(85.0), made_up(88.0, scale="paper", epochs=300, key="bbbbbbbbbb")
    for name, numbers in (("before", [short]), ("after", [short, long])):
        write_results(tmp_path / name / "cifar100-top5.csv", numbers)
    before, after = (
        write_reproduction(tmp_path / name, new_docs(tmp_path / f"docs-{name}")).read_text().partition("## Appendix")
        for name in ("before", "after")
    )
    line = "| 0.4 | ours, 100 epochs | 1 |  |  | 85.0 |"
    assert line in before[0]
    assert not before[1]
    assert line not in after[0]
    assert line in after[2]
    assert "paper" not in after[2]


def test_a_document_is_not_emptied(tmp_path: Path) -> None:
    docs = new_docs(tmp_path / "docs")
    before = (docs / "reproduction.md").read_text()
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(sl.ShortlistError, match=f"no results in {folder}"):
            write_reproduction(folder, docs)
    assert (docs / "reproduction.md").read_text() == before


def test_the_document_has_what_nobody_has_run_too(tmp_path: Path) -> None:
    write_results(tmp_path / "cifar100-top5.csv", [made_up(85.25)])
    page = write_reproduction(tmp_path, new_docs(tmp_path / "docs")).read_text()
    assert page.count("Not run yet.") == len(EXPERIMENTS) - 1
    assert all(f"`shortlist reproduce {name}`" in page for name in EXPERIMENTS)
    ours = [line for line in page.splitlines() if "| ours |" in line]
    assert ours
    assert all(not cell.strip() for line in ours for cell in line.split("|")[3:])


def test_the_document_of_an_installed_package_names_no_commit(tmp_path: Path) -> None:
    write_results(tmp_path / "cifar100-top5.csv", [made_up(85.25, commit="")])
    assert "Run 2026-01-01 on Made-up GPU.\n" in write_reproduction(tmp_path, new_docs(tmp_path / "docs")).read_text()


def test_the_document_is_made_as_a_whole() -> None:
    with pytest.raises(sl.ShortlistError, match="takes no names"):
        research.reproduce(["cifar100-top5", "--document"])


def test_a_document_without_marks_is_left_alone(tmp_path: Path) -> None:
    write_results(tmp_path / "cifar100-top5.csv", [made_up(85.25)])
    (tmp_path / "reproduction.md").write_text("mine")
    with pytest.raises(sl.ShortlistError, match=r"reproduction\.md must hold"):
        write_reproduction(tmp_path, tmp_path)
    assert (tmp_path / "reproduction.md").read_text() == "mine"


def test_the_published_document_is_that_of_the_published_results(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docs/reproduction.md", tmp_path)
    shutil.copytree(ROOT / "docs/reproduction", tmp_path / "reproduction")
    page = write_reproduction(ROOT / "results", tmp_path).read_text()
    assert page == (ROOT / "docs/reproduction.md").read_text(), "shortlist reproduce --document"


def test_the_readme_shows_what_the_document_says() -> None:
    """Its section on the paper shows lines of a table and a picture of the document."""
    section = (ROOT / "README.md").read_text().partition("## The paper, redone\n")[2].partition("\n## ")[0]
    document = (ROOT / "docs/reproduction.md").read_text().splitlines()
    table = [line for line in section.splitlines() if line.startswith("|")]
    assert any("| ours" in line for line in table)
    assert all(line in document for line in table)
    (picture,) = re.findall(r"\(docs/(reproduction/.*\.png)\)", section)
    assert any(picture in line for line in document)
