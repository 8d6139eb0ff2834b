"""A pickle must not be able to run anything."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortlist.errors import ShortlistError
from shortlist.program.data.safe_pickle import load_plain_pickle
from tests.support.official_cifar import official_pickle


def test_containers_and_arrays_come_back() -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    got = load_plain_pickle(official_pickle({"data": array, "labels": [1, 2], "name": "x"}), "file")
    assert got[b"labels"] == [1, 2]
    assert got[b"name"] == b"x"
    np.testing.assert_array_equal(got[b"data"], array)


class Malicious:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "trace"
    content = pickle.dumps({"data": Malicious(os.system, f"touch {trace}")}, protocol)
    with pytest.raises(ShortlistError, match=r"train asks for \w+.system, which plain data does not need: refused"):
        load_plain_pickle(content, "train")
    assert not trace.exists()


@pytest.mark.parametrize("name", ["eval", "exec", "getattr", "__import__", "open"])
def test_no_builtin_can_be_reached(name: str) -> None:
    with pytest.raises(ShortlistError, match=f"asks for builtins.{name}"):
        load_plain_pickle(f"cbuiltins\n{name}\n.".encode(), "train")


def test_numpy_names_other_than_the_three_are_refused() -> None:
    with pytest.raises(ShortlistError, match=r"asks for numpy.load"):
        load_plain_pickle(b"cnumpy\nload\n.", "train")


def test_an_array_of_objects_is_refused() -> None:
    wrong = official_pickle({"data": np.zeros(3, dtype=np.int32)})
    with pytest.raises(ShortlistError, match="train holds an array that is not of plain bytes"):
        load_plain_pickle(wrong, "train")


@pytest.mark.parametrize("content", [b"", b"\x80\x02", b"hello", b"\x80\x02}q\x01(U\x10fine"])
def test_a_broken_pickle_is_an_error_that_names_the_file(content: bytes) -> None:
    with pytest.raises(ShortlistError, match="train is damaged"):
        load_plain_pickle(content, "train")
