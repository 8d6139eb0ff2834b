"""The tables and plots of docs/performance.md are made from measurements alone."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

import shortlist as sl
from shortlist.program.bench import plots
from shortlist.program.bench.document import loop_tables, write_performance
from shortlist.program.bench.measurements import NOT_CAPTURED, QUICK_NOTE, Measurement, ResultsFile, Selection
from shortlist.program.bench.plots import pushed_apart
from shortlist.program.documents import END, begin_mark
from tests.support.benching import measurement

BEGIN = begin_mark("shortlist bench --document")


def some_measurements() -> list[Measurement]:
    """Made up: cross-entropy takes 1 ms, 0.8 compiled, and ours 0.4 to 1.2."""
    found = []
    for machine, device, clocks in (
        ("Made-up GPU", "cuda", ("gpu_ms", "wall_ms")),
        ("CPU, 2 threads", "cpu", ("wall_ms",)),
    ):
        here: dict[str, Any] = {"machine": machine, "device": device}
        for num_classes in (100, 10_000):
            size = here | {"L": num_classes, "spread": 1.0}
            for entry, time in (("cross-entropy", 1.0), ("cross-entropy, compiled", 0.8)):
                found.append(measurement(entry, **size | dict.fromkeys(clocks, time)))
            settings = size | {"K": 5, "B": 10, "epsilon": 0.2}
            found.append(measurement("pytopk", **settings | dict.fromkeys(clocks, 20.0)))
            for spread, time in ((0.1, 0.4), (1.0, 0.6), (3.0, 1.2)):
                found.append(measurement(**settings | {"spread": spread} | dict.fromkeys(clocks, time)))
    head: dict[str, Any] = {
        "suite": "head",
        "machine": "Made-up GPU",
        "device": "cuda",
        "d": 512,
        "N": 1024,
        "L": 10**6,
    }
    found += [
        measurement("linear + cross-entropy", **head, gpu_ms=8.0, wall_ms=8.1, peak_mib=1000.0),
        measurement("Liger", **head, wall_ms=99.0, note=f"{NOT_CAPTURED}: it waits"),
        measurement(**head, K=5, B=5, gpu_ms=3.0, wall_ms=3.1, peak_mib=1.0),
    ]
    return found


def write_csv(path: Path, measurements: list[Measurement]) -> Path:
    file = ResultsFile(path)
    for row in measurements:
        file.append(row)
    return path


def new_docs(folder: Path) -> Path:
    folder.mkdir()
    (folder / "performance.md").write_text(f"# Speed\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_document_is_rebuilt_exactly_from_the_file(tmp_path: Path) -> None:
    csv = write_csv(tmp_path / "one.csv", some_measurements())
    first = new_docs(tmp_path / "first")
    page = write_performance([csv], first).read_text()
    assert page.startswith(f"# Speed\n\nBefore.\n\n{BEGIN}\n")
    assert page.endswith(f"{END}\n\nAfter.\n")
    assert "old" not in page
    made = contents(first)
    assert {name for name in made if name.endswith(".svg")} == {
        "performance/loss-made-up-gpu.svg",
        "performance/loss-cpu-2-threads.svg",
        "performance/head-made-up-gpu.svg",
    }
    for name in made:
        if name.endswith(".svg"):
            assert f"{name[:-4]}.png" in made
            assert f"({name[:-4]}.png)" in page, "every plot is shown"
    second = shutil.copytree(first, tmp_path / "second")
    write_performance([csv.rename(tmp_path / "two.csv")], second)
    assert contents(second) == made


def test_the_tables_say_what_the_file_says(tmp_path: Path) -> None:
    docs = new_docs(tmp_path / "docs")
    page = write_performance([write_csv(tmp_path / "out.csv", some_measurements())], docs).read_text()
    # Against the faster of plain and compiled: 0.6 / 0.8 in the median, 1.2 / 0.8 at worst.
    assert page.count("| 64 × 10k | 0.800 | 0.75× / 1.50× |") == 3  # noqa: RUF001
    assert "met in 4 of 6 cases" in page
    assert "| linear + cross-entropy | 8.00 (1,000) |" in page
    assert "| Liger | 99.0 (wall) |" in page
    assert "| **shortlist / fastest peer** | 0.38× |" in page  # noqa: RUF001
    assert f"- head, Liger, 1,024 × 1M: {NOT_CAPTURED}: it waits" in page  # noqa: RUF001


def test_the_faster_loop_is_faster_by_how_much_longer_the_other_takes() -> None:
    rows = [measurement("plain", suite="loop", wall_ms=3000.0), measurement("ours", suite="loop", wall_ms=1500.0)]
    (table,) = loop_tables(Selection(rows))
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[-2:]]
    assert [(entry, seconds, factor[:-1]) for entry, seconds, factor in cells] == [
        ("plain", "3.00", "1.00"),
        ("ours", "1.50", "2.00"),
    ]


def test_a_document_without_marks_is_left_alone(tmp_path: Path) -> None:
    csv = write_csv(tmp_path / "out.csv", [measurement(wall_ms=1.0)])
    (tmp_path / "performance.md").write_text("mine")
    with pytest.raises(sl.ShortlistError, match=r"performance\.md must hold"):
        write_performance([csv], tmp_path)
    assert (tmp_path / "performance.md").read_text() == "mine"


def test_a_document_is_not_emptied(tmp_path: Path) -> None:
    docs = new_docs(tmp_path / "docs")
    before = (docs / "performance.md").read_text()
    csv = write_csv(tmp_path / "out.csv", [measurement(wall_ms=1.0, note=QUICK_NOTE)])
    with pytest.raises(sl.ShortlistError, match=r"nothing to show in .*out\.csv"):
        write_performance([csv], docs)
    assert (docs / "performance.md").read_text() == before
    with pytest.raises(sl.ShortlistError, match=r"nowhere\.csv"):
        write_performance([tmp_path / "nowhere.csv"], docs)


def test_the_published_document_can_be_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).parents[3] / "docs"
    monkeypatch.setattr(plots, "save", lambda figure, path: None)  # the bytes of a plot depend on the machine
    shutil.copy(docs / "performance.md", tmp_path)
    files = [docs / "performance" / name for name in ("h200.csv", "cpu.csv")]
    assert write_performance(files, tmp_path).read_text() == (docs / "performance.md").read_text()


@pytest.mark.parametrize("heights", [[], [1.0], [0.0, 0.0, 0.0], [0.0, 0.5, 5.0], [0.0, 0.9, 1.8, 2.7, 9.0]])
def test_labels_are_pushed_apart_no_further_than_it_takes(heights: list[float]) -> None:
    moved = pushed_apart(heights, 1.0)
    assert all(high - low >= 1 - 1e-9 for low, high in itertools.pairwise(moved))
    assert sum(moved) == pytest.approx(sum(heights)), "groups stay around their mean"
    if all(high - low >= 1 for low, high in itertools.pairwise(heights)):
        assert moved == heights
