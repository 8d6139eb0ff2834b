"""Where data is kept, and files that are whole or absent."""

import sys
from pathlib import Path

import pytest

from shortlist.config import DataConfig
from shortlist.data.storage import data_root, user_cache, written_whole


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
        ("win32", "LOCALAPPDATA", "/local", "/local/shortlist"),
    ],
)
def test_each_system_has_its_cache_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, variable: str, value: str, wanted: str
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert user_cache() == Path(wanted)


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


def test_others_may_read_the_file_as_the_umask_says(tmp_path: Path) -> None:
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    plain.touch()
    with written_whole(whole):
        pass
    assert whole.stat().st_mode == plain.stat().st_mode
