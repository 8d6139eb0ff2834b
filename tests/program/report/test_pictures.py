"""A page holds the pictures of a run, and no other file of the machine on which it is made."""

import base64
import os
from pathlib import Path

import pytest

from shortlist.program.report.page import write_report
from shortlist.program.runs.folder import RunFolder
from tests.support.run_folders import make_run, small_world

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run", small_world(), "cross_entropy")


def embedded(page: Path) -> list[bytes]:
    parts = page.read_text().split("data:image/png;base64,")[1:]
    return [base64.b64decode(part.partition('"')[0]) for part in parts]


def test_a_page_embeds_no_file_through_a_link(run: RunFolder, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(PNG + b"hunter2")
    before = embedded(write_report([run], tmp_path / "before.html"))
    assert before
    assert all(content.startswith(PNG) for content in before)
    for picture in (run.path / "pictures").iterdir():
        picture.unlink()
        picture.symlink_to(secret)
    assert embedded(write_report([run], tmp_path / "page.html")) == []


def test_a_page_embeds_no_file_of_a_linked_folder(run: RunFolder, tmp_path: Path) -> None:
    (run.path / "pictures").rename(tmp_path / "elsewhere")
    (run.path / "pictures").symlink_to(tmp_path / "elsewhere")
    assert embedded(write_report([run], tmp_path / "page.html")) == []


def test_a_page_embeds_only_what_begins_as_a_picture(run: RunFolder, tmp_path: Path) -> None:
    first, second, *others = sorted((run.path / "pictures").iterdir())
    for picture in others:
        picture.write_bytes(b"hunter2")
    second.unlink()
    os.mkfifo(second)
    assert set(embedded(write_report([run], tmp_path / "page.html"))) <= {first.read_bytes()}
