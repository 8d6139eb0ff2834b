"""Where data is kept, and files that are whole or absent."""

import sys
from pathlib import Path

import pytest

from shortlist.program.config import DataConfig
from shortlist.program.data.storage import data_root, user_cache


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
