"""Weights for places or months, from a file that people write by hand."""

from pathlib import Path

import pytest

from shortlist.errors import ShortlistError
from shortlist.program.serving.priors import read_prior

CLASSES = ["ash", "elm", "fir"]


def written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_the_weights_are_in_the_order_of_the_classes(tmp_path: Path, mark: str) -> None:
    path = written(tmp_path / "prior.csv", f"{mark}class,July, north \r\nfir,1,0\r\nash,2.5,1e-3\r\n\r\nelm,0,4\r\n")
    weights, unknown = read_prior(path, CLASSES)
    assert weights == {"July": [2.5, 0.0, 1.0], "north": [0.001, 4.0, 0.0]}
    assert unknown == []


def test_names_may_hold_anything(tmp_path: Path) -> None:
    path = written(tmp_path / "prior.csv", 'class,x\n"a, ""b""\nc",2\n<i>,1\n')
    assert read_prior(path, ['a, "b"\nc', "<i>"])[0] == {"x": [2.0, 1.0]}


def test_names_that_are_no_class_are_told(tmp_path: Path) -> None:
    path = written(tmp_path / "prior.csv", "class,x\nash,1\nelm,1\nfir,1\nyew,1\noak,1\n")
    assert read_prior(path, CLASSES)[1] == ["oak", "yew"]


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", ["headings"]),
        ("class\nash\n", ["headings"]),
        ("class,\nash,1\n", ["headings"]),
        ("class,x,x\nash,1,1\n", ["headings"]),
        (f"class,{'x' * 101}\nash,1\n", ["headings", "100"]),
        ("class,x\nash,1\nelm,1\n", ["1 class", "fir", "weight of 1"]),
        ("class,x\nash,1\nelm,1\nfirr,1\n", ["fir", "did you mean firr"]),
        ("class,x\nash,1\nash,1\n", ["two lines", "ash"]),
        ("class,x\nash,1,2\n", ["line 2", "2 cells"]),
        ("class,x\nash,1\nelm,-1\nfir,1\n", ["line 3", "'x'", "-1"]),
        ("class,x\nash,\nelm,1\nfir,1\n", ["line 2", "''"]),
        ("class,x\nash,nan\n", ["nan"]),
        ("class,x\nash,inf\n", ["inf"]),
        ("class,x\nash,0\nelm,0\nfir,0\n", ["'x'", "at least one"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, facts: list[str]) -> None:
    with pytest.raises(ShortlistError) as error:
        read_prior(written(tmp_path / "prior.csv", text), CLASSES)
    for fact in facts:
        assert fact in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match=r"no file .*prior\.csv"):
        read_prior(tmp_path / "prior.csv", CLASSES)
    (tmp_path / "prior.csv").write_bytes(b"class,x\n\xff,1\n")
    with pytest.raises(ShortlistError, match="UTF-8"):
        read_prior(tmp_path / "prior.csv", CLASSES)
