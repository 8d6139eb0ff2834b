"""The list of data sets, where they are kept, and downloads from a server on this machine."""

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import get_args

import pytest

from shortlist.errors import ShortlistError
from shortlist.program.cache_folder import user_cache
from shortlist.program.config import DataConfig, DataName
from shortlist.program.data import catalogue
from shortlist.program.data.catalogue import data_root, load_problem
from shortlist.program.data.download import Download, download
from shortlist.program.data.sets import cifar100
from shortlist.program.data.sets.glyph_scripts import characters
from tests.support.official_cifar import expect, make_files, put_archive
from tests.support.pictures import put_classes


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/cut-off":  # promises more than it sends
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"half")
        else:
            super().do_GET()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """An address, and the folder that is served there."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()
    thread.join()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def test_a_download_reports_progress_and_arrives_whole(served: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = served
    content = os.urandom(3_000_000)
    (folder / "file").write_bytes(content)
    seen: list[tuple[int, int | None]] = []
    path = tmp_path / "new" / "file"
    download(f"{url}/file", path, md5(content), lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == content
    assert seen[-1] == (3_000_000, 3_000_000)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    seen.clear()
    download(f"{url}/file", path, md5(content), lambda done, total: seen.append((done, total)))
    assert seen == []  # it is there already


@pytest.mark.parametrize(
    ("name", "message"),
    [("file", "must have the MD5"), ("absent", "could not be fetched .*404"), ("cut-off", "must have the MD5|fetched")],
)
def test_a_failed_download_leaves_nothing(served: tuple[str, Path], tmp_path: Path, name: str, message: str) -> None:
    url, folder = served
    (folder / "file").write_bytes(b"something else")
    path = tmp_path / "new" / "file"
    with pytest.raises(ShortlistError, match=message):
        download(f"{url}/{name}", path, md5(b"what was wanted"))
    assert not path.parent.exists() or list(path.parent.iterdir()) == []


def test_no_network_is_a_clear_error(served: tuple[str, Path], tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"  # the discard port: nobody listens
    with pytest.raises(ShortlistError, match=rf"{url}/file could not be fetched to .*refused"):
        download(f"{url}/file", tmp_path / "file", md5(b""))


def test_cifar100_is_fetched_and_can_then_be_loaded(
    served: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, folder = served
    files = make_files()
    expect(monkeypatch, files)
    archive = put_archive(folder, files, tmp_path / "scratch")
    offered = Download(f"{url}/{archive.name}", archive.name, md5(archive.read_bytes()))
    monkeypatch.setattr(cifar100, "DOWNLOAD", offered)
    root = tmp_path / "root"
    assert catalogue.fetch("cifar100", str(root)) == root / archive.name
    assert len(load_problem(DataConfig(name="cifar100", root=str(root))).classes) == 6


@pytest.mark.parametrize("name", ["imagenet", "plantnet300k", "folder"])
def test_what_cannot_be_downloaded_says_what_to_fetch(name: DataName) -> None:
    with pytest.raises(ShortlistError, match=f"{name} cannot be downloaded from here. What to fetch: "):
        catalogue.fetch(name)


def test_every_data_set_is_in_the_catalogue_and_has_a_loader() -> None:
    assert tuple(catalogue.CATALOGUE) == get_args(DataName)
    for name, entry in catalogue.CATALOGUE.items():
        assert entry.name == name
        assert all((entry.what, entry.size, entry.terms, entry.fetch, entry.put))
        assert callable(entry.source().load)
    assert catalogue.CATALOGUE["glyphs"].size.startswith(f"{len(characters())} classes")


def test_check_says_what_is_missing_and_what_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cifar100", "plantnet300k", "imagenet", "imagenet_lt", "feathers", "folder", "embeddings"):
        (problem,) = catalogue.check(name, str(tmp_path))
        assert str(tmp_path) in problem
    for part in ("train", "val", "test"):
        put_classes(tmp_path / "plants" / f"images_{part}", {"1": 2, "2": 2})
    (problem,) = catalogue.check("plantnet300k", str(tmp_path / "plants"))
    assert problem.endswith("1,000 classes and 306,087 images, got 2 classes and 12 images")
    assert catalogue.check("folder", str(tmp_path / "plants" / "images_train")) != []  # two images a class are too few
    put_classes(tmp_path / "mine", {"a": 3, "b": 3})
    assert catalogue.check("folder", str(tmp_path / "mine")) == []


def test_only_the_chosen_data_set_is_imported(tmp_path: Path) -> None:
    """The list alone does not even need torch."""
    program = (
        "import sys, shortlist, shortlist.program.data.catalogue\n"
        "heavy = {'torchvision', 'matplotlib', 'PIL'}\n"
        "print(sorted((heavy | {'torch', 'numpy'}) & set(sys.modules)))\n"
        "from shortlist.program.config import DataConfig\n"
        "try:\n"
        f"    shortlist.program.data.catalogue.load_problem(DataConfig(name='cifar100', root={str(tmp_path)!r}))\n"
        "except shortlist.ShortlistError:\n"
        "    print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"


def test_root_then_environment_then_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTLIST_DATA", "/shared/data")
    assert data_root(DataConfig(root="/mine")) == Path("/mine")
    assert data_root(DataConfig()) == Path("/shared/data")
    monkeypatch.delenv("SHORTLIST_DATA")
    assert data_root(DataConfig()) == user_cache()


def test_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert data_root(DataConfig(root="~/data")) == Path("/home/somebody/data")


@pytest.mark.parametrize(
    ("platform", "variable", "value", "wanted"),
    [
        ("linux", "XDG_CACHE_HOME", "/caches", "/caches/shortlist"),
        ("linux", "XDG_CACHE_HOME", "", "/home/somebody/.cache/shortlist"),
        ("darwin", "XDG_CACHE_HOME", "/ignored", "/home/somebody/Library/Caches/shortlist"),
    ],
)
def test_each_system_has_its_cache_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, variable: str, value: str, wanted: str
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert user_cache() == Path(wanted)
