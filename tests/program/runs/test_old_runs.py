"""Run folders written by earlier versions of the program still open, and interrupted ones still finish.

``old_runs`` holds two runs of commit d7b1a7a, whose ``config.json`` has no format number: ``finished`` on three colours
of photographs (its weights rounded while training, so that they compress), and ``interrupted`` in its second epoch, on
embeddings. ``expected.json`` is what that version answered.
"""

import json
import lzma
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortlist.__main__ import main
from tests.support.pictures import put_image
from tests.support.small_runs import outcome

OLD_RUNS = Path(__file__).parent / "old_runs"
EXPECTED = json.loads((OLD_RUNS / "expected.json").read_text())
COLOURS = {"ash": (230, 30, 30), "elm": (30, 230, 30), "fir": (30, 30, 230)}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with copies of the runs, and with their data made again."""
    shutil.copytree(OLD_RUNS, tmp_path, dirs_exist_ok=True)
    packed = tmp_path / "finished" / "best.safetensors.xz"
    packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
    packed.unlink()
    for name, colour in COLOURS.items():
        for number in range(12):
            put_image(tmp_path / "photos" / name / f"{number}.png", colour)
    write_points(tmp_path / "points.npz")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_points(path: Path) -> None:
    """By a generator whose numbers are the same in every version of Python; NumPy's may change."""
    chance = random.Random(0)
    centres = [[4 * chance.random() - 2 for _ in range(6)] for _ in range(4)]
    arrays: dict[str, Any] = {}
    for split, count in (("train", 60), ("val", 40), ("test", 40)):
        labels = [number % 4 for number in range(count)]
        points = [[centre + 2 * chance.random() - 1 for centre in centres[label]] for label in labels]
        arrays[f"{split}_x"], arrays[f"{split}_y"] = np.array(points, np.float32), np.array(labels)
    np.savez(path, **arrays)


def shortlist(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["shortlist", *command.split()])
    main()


def close_to(expected: Any) -> Any:
    """The same structure, with numbers that may differ by rounding."""
    if isinstance(expected, dict):
        return {name: close_to(value) for name, value in expected.items()}
    if isinstance(expected, list):
        return [close_to(value) for value in expected]
    return pytest.approx(expected, rel=1e-4, abs=1e-6) if isinstance(expected, float) else expected


def test_an_old_run_is_evaluated_as_before(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shortlist("evaluate finished --device cpu", monkeypatch)
    assert json.loads(capsys.readouterr().out) == close_to(EXPECTED["evaluate"])


def test_an_old_run_suggests_as_before(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images = " ".join(f"photos/{name}/0.png" for name in COLOURS)
    shortlist(f"predict finished {images} --json --device cpu", monkeypatch)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line in found:
        for suggestion in line["suggestions"]:
            del suggestion["index"]  # which that version did not print
    assert found == close_to(EXPECTED["predict"])


def test_an_old_run_is_reported(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shortlist("report finished interrupted", monkeypatch)
    page = (place / "report.html").read_text()
    assert "66.7" in page  # top-1 accuracy on the test images
    assert "d7b1a7a155" in page


def test_an_old_run_that_was_interrupted_ends_with_the_numbers_of_the_old_program(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = "--loss.name imbalanced_noised_topk_hinge --loss.k 2 --loss.epsilon 0.01 --loss.scale 50"
    steps = "--optim.weight-decay 0.0001 --optim.no-standardise"
    epochs = "--train.epochs 4 --train.no-select-corrected --train.no-select-latest"
    settings = f"--data.root points.npz {loss} {steps} {epochs} --train.batch-size 16 --train.ks 1 2"
    shortlist(f"train embeddings {settings} --train.device cpu --out interrupted --resume", monkeypatch)
    found, expected = outcome(place / "interrupted"), EXPECTED["resumed"]
    del found["final"]["best_sha256"], expected["final"]["best_sha256"]  # of bytes that may differ by rounding
    assert found == close_to(expected)
