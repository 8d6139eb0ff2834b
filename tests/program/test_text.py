"""Text for people: no message or file repeats a password, and names of classes and files cannot do harm."""

import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from shortlist.program.cli import main as cli
from shortlist.program.config import TrainConfig
from shortlist.program.reproduce.results import Result, read_results, write_results
from shortlist.program.runs.folder import RunFolder, file_digest
from shortlist.program.text import hide_passwords, hide_passwords_of_word, printable, spreadsheet_cell
from shortlist.program.training.loop import train
from tests.support.pictures import put_classes
from tests.support.small_runs import small_config, write_embeddings

PASSWORD = "hunter2"
URLS = (
    f"postgresql://me:{PASSWORD}@host/db",
    f"postgresql://me:{PASSWORD}@host:port/db",
    f"postgresql://me:{PASSWORD}@ @host/db",
    f"postgresql://me:a@{PASSWORD}@host/db",
    f"redis://:{PASSWORD}@host",
    "sqlite:///",
    "sqlite://",
    f"nonsense://me:{PASSWORD}@::/",
    f"sqlite:////nowhere/study.db?password={PASSWORD}&timeout=1",
)


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("form", ["--storage={}", "--storage {}"])
@pytest.mark.filterwarnings("ignore")  # a driver may not know a parameter
def test_a_storage_that_cannot_be_used_is_named_without_its_password(
    url: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    option = [form.format(url)] if "=" in form else ["--storage", url]
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(sys, "argv", ["shortlist", "tune", "smoke", *option])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capfd.readouterr()
    assert ended.value.code == 1
    assert "cannot be used" in said.err
    assert url.partition("://")[0] in said.err
    assert PASSWORD not in said.err + said.out


@pytest.mark.parametrize("mistake", ["--storag {}", "--storag={}", "--train.epochs {}"])
def test_a_mistyped_option_is_named_without_the_password_behind_it(
    mistake: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shortlist", "tune", "smoke", *mistake.format(URLS[0]).split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capfd.readouterr()
    assert ended.value.code == 2
    assert mistake.partition("{")[0].strip(" =") in said.err
    assert PASSWORD not in said.err + said.out


@pytest.mark.filterwarnings("ignore")
def test_a_study_leaves_its_password_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_embeddings(tmp_path / "points.npz", images=60)
    monkeypatch.chdir(tmp_path)
    command = f"tune embeddings --data.root {data} --loss.name smooth_topk_hinge --loss.k 3 --model.head linear"
    command += " --train.epochs 1 --train.ks 1 3 --train.device cpu --trials 1"
    url = f"sqlite:///study.db?password={PASSWORD}"
    monkeypatch.setattr(sys, "argv", ["shortlist", *command.split(), "--storage", url])
    cli.main()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "environment.json" for path in files)
    assert not [path for path in files if PASSWORD.encode() in path.read_bytes()]


def test_the_command_is_recorded_without_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_embeddings(tmp_path / "points.npz", images=60)
    monkeypatch.setattr(sys, "argv", ["shortlist", "tune", "smoke", "--storage", *URLS, *(f"-x={url}" for url in URLS)])
    config = small_config(data, train=TrainConfig(epochs=1, batch_size=32, ks=(1, 3), device="cpu"))
    run = train(config, folder=tmp_path / "run", quiet=True)
    recorded = RunFolder(run.path).read_json("environment.json")["command"]
    assert recorded[:4] == ["shortlist", "tune", "smoke", "--storage"]
    assert PASSWORD not in " ".join(recorded)


@given(st.text(st.characters(codec="utf-8"), min_size=3).filter(lambda secret: "://" not in secret))
def test_no_password_is_left_in_a_url(password: str) -> None:
    shown = hide_passwords_of_word(f"--storage=mysql://me:{password}@host/db")
    assert shown == "--storage=mysql://me:***@host/db"
    shown = hide_passwords(f"no database {password!r} ({password})", url=f"mysql://me:{password}@host/db")
    assert f"({password})" not in shown


@pytest.mark.parametrize(
    "text",
    ["sqlite:///study.db", "https://host:80/page", "a@b.org", "loss.k = 3", "runs at 12:30", "--search a=1,2"],
)
def test_what_holds_no_password_stays_as_it_is(text: str) -> None:
    assert hide_passwords(text) == hide_passwords_of_word(text) == text


CLASSES = ("\x1b]0;owned\x07elm", "owl\nforged line", '=HYPERLINK("x")', "-2+3", "\u202eyew", "@ash", "\toak")
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]")
TRIGGERS = ("=", "+", "-", "@", "\t", "\r", "\n")
SETTINGS = (
    "--model.name glyphnet --model.no-pretrained --model.head linear --data.image-size 16 --data.workers 0 "
    "--data.val-fraction 0.2 --loss.name cross_entropy --loss.k 1 --train.ks 1 --train.epochs 1 --train.device cpu"
)

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    def called(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shortlist", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capfd.readouterr()
        return code, said.out, said.err

    return called


def test_no_command_prints_or_writes_what_would_be_obeyed(tmp_path: Path, call: Call) -> None:
    photos, run, odd = tmp_path / "photos", tmp_path / "run\x1b[2J", tmp_path / "new\x1b[31m.png"
    put_classes(photos, dict.fromkeys(CLASSES, 6))
    (photos / CLASSES[0] / "0.png").rename(odd)
    (photos / CLASSES[0] / "notes\x1b[2J.txt").touch()
    train = ["train", "folder", *SETTINGS.split(), "--data.root", photos, "--out", run]
    table = tmp_path / "classes.csv"
    calls = {
        "train": train,
        "train again": train,
        "evaluate": ["evaluate", run, "--csv", table, "--device", "cpu"],
        "predict": ["predict", run, odd, "-k", "7", "--device", "cpu"],
        "predict a folder": ["predict", run, photos, "--device", "cpu"],
        "predict nothing": ["predict", run, tmp_path / "no\x1b[2Jsuch.png"],
        "report": ["report", run, "--out", tmp_path / "page\x1b[2J.html"],
    }
    for name, arguments in calls.items():
        code, out, err = call(*arguments)
        assert not CONTROLS.findall(out + err), name
        assert "Traceback" not in err, err
        assert (code != 0) == (name in ("train again", "predict nothing")), err
        assert "forged line" not in {line.strip() for line in (out + err).splitlines()}, name
        if name == "predict":
            assert len(out.splitlines()) == 2
    for path in (table, run / "test_per_class.csv"):
        with path.open(newline="") as file:
            names = [row["name"] for row in csv.DictReader(file)]
        assert len(names) == len(CLASSES)
        assert not [name for name in names if name.startswith(TRIGGERS)]
        assert {name.lstrip("'") for name in names} == set(CLASSES)


def test_scores_that_are_no_numbers_are_null_in_json(tmp_path: Path, call: Call) -> None:
    photos, run = tmp_path / "photos", tmp_path / "run"
    put_classes(photos, {"elm": 6, "owl": 6})
    call("train", "folder", *SETTINGS.split(), "--data.root", photos, "--out", run)
    weights = safetensors.torch.load_file(run / "best.safetensors")
    odd = {name: torch.full_like(values, torch.nan) for name, values in weights.items()}
    (run / "best.safetensors").write_bytes(safetensors.torch.save(odd))
    result = json.loads((run / "final.json").read_text())
    result["best_sha256"] = file_digest(run / "best.safetensors")
    (run / "final.json").write_text(json.dumps(result))
    _, out, _ = call("predict", run, photos / "elm" / "0.png", "--json", "--device", "cpu")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert [suggestion["score"] for suggestion in json.loads(out, parse_constant=refuse)["suggestions"]] == [None]


@given(st.text())
def test_a_printed_text_is_one_line_without_orders(text: str) -> None:
    shown = printable(text)
    assert len(shown.splitlines()) <= 1
    assert not CONTROLS.findall(shown)
    shown.encode()
    assert printable(shown) == shown


@given(st.text() | st.floats() | st.integers() | st.none())
def test_a_cell_is_a_number_or_no_formula(value: object) -> None:
    cell = spreadsheet_cell(value)
    if isinstance(value, str):
        assert not str(cell).startswith(TRIGGERS) or float(str(cell)) is not None
        assert str(cell) in (value, f"'{value}")
    else:
        assert cell is value
    assert spreadsheet_cell(cell) == cell or cell != cell


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    texts = dict.fromkeys(("recipe", "experiment", "row", "column", "scale", "metric", "commit", "date", "config"), "x")
    result = Result(**texts, run="x", epochs=1, seed=0, K=5, value=-1.5, gpu="=HYPERLINK(1)")
    write_results(tmp_path / "results.csv", [result])
    (read,) = read_results(tmp_path / "results.csv")
    assert read.value == -1.5
    assert read.gpu == "'=HYPERLINK(1)"
    write_results(tmp_path / "again.csv", [read])
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "results.csv").read_bytes()
