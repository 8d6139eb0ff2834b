"""The packages that a release would publish, built here, and the check that the release workflow makes of them."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import shortlist as sl

ROOT = Path(__file__).parent.parent
TAG = f"v{sl.__version__}"
WHEEL = f"shortlist-{sl.__version__}-py3-none-any.whl"
REPOSITORY = "https://github.com/shortlist-ml/shortlist/blob/"
PICTURES = "https://raw.githubusercontent.com/shortlist-ml/shortlist/"


def build(source: Path, dist: Path, *targets: str) -> None:
    """Build packages with the tools of the extra dev, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(dist), *(f"-t{target}" for target in targets)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "sdist", "wheel")
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the check reads, to be changed."""
    (tmp_path / ".github").mkdir()
    for name in (".github/check_release.py", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def check(checkout: Path, tag: str, dist: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ".github/check_release.py", tag, str(dist)]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def description_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"shortlist-{sl.__version__}.dist-info/METADATA")
    return bytes(message_from_bytes(metadata).get_payload(decode=True)).decode()


def test_the_check_passes_and_gives_the_section_of_the_changelog(dist: Path) -> None:
    done = check(ROOT, TAG, dist)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stdout.strip() in (ROOT / "CHANGELOG.md").read_text()
    assert "## [" not in done.stdout


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("CHANGELOG.md", f"## [{sl.__version__}]", "## [9.9.9]"),
        ("CITATION.cff", f"\nversion: {sl.__version__}", "\nversion: 9.9.9"),
        ("CITATION.cff", "\ndate-released: 2", "\ndate-released: 1"),
    ],
)
def test_a_document_of_another_version_or_date_is_refused(
    checkout: Path, dist: Path, file: str, old: str, new: str
) -> None:
    text = (checkout / file).read_text()
    assert old in text
    (checkout / file).write_text(text.replace(old, new))
    done = check(checkout, TAG, dist)
    assert done.returncode == 1
    assert file in done.stderr


def test_a_tag_that_is_not_the_version_is_refused(dist: Path) -> None:
    done = check(ROOT, "v9.9.9", dist)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert WHEEL in done.stderr


@pytest.mark.parametrize("link", ["[guide](docs/guide.md)", "![](docs/demo.png)", "<img src='docs/demo.png'>"])
def test_a_relative_link_in_the_description_is_refused(tmp_path: Path, dist: Path, link: str) -> None:
    for path in dist.iterdir():
        shutil.copy(path, tmp_path)
    with zipfile.ZipFile(dist / WHEEL) as built, zipfile.ZipFile(tmp_path / WHEEL, "w") as changed:
        for name in built.namelist():
            changed.writestr(name, built.read(name) + (link.encode() if name.endswith("/METADATA") else b""))
    done = check(ROOT, TAG, tmp_path)
    assert done.returncode == 1
    assert "docs/" in done.stderr


def test_links_of_the_description_lead_to_files_of_the_tag(dist: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", description_of(dist / WHEEL))
    ours = [link for link in links if link.startswith((REPOSITORY, PICTURES))]
    assert len(ours) > 10
    for link in ours:
        tag, _, path = link.removeprefix(REPOSITORY).removeprefix(PICTURES).partition("/")
        assert tag == TAG
        assert (ROOT / path.partition("#")[0]).is_file(), link
        assert path.endswith(".png") == link.startswith(PICTURES), link


def test_the_description_installs_from_the_index_and_not_from_a_clone(dist: Path) -> None:
    text = description_of(dist / WHEEL)
    assert "\npip install shortlist " in text
    assert "git clone" not in text
    assert not re.search(r"pip install '?\.|make demo", text)


def test_the_source_package_holds_what_the_wheel_is_built_from_and_no_more(dist: Path, tmp_path: Path) -> None:
    with tarfile.open(dist / f"shortlist-{sl.__version__}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"shortlist-{sl.__version__}"
    assert {path.name for path in source.iterdir()} == {
        *(".gitignore", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "src")
    }
    build(source, tmp_path / "again", "wheel")
    assert names_in(tmp_path / "again" / WHEEL) == names_in(dist / WHEEL)


def test_the_wheel_holds_every_file_of_the_package_and_no_other(dist: Path) -> None:
    package = ROOT / "src/shortlist"
    files = {
        path.relative_to(ROOT / "src").as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names_in(dist / WHEEL) if ".dist-info/" not in name} == files
