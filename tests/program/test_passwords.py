"""A password on the command line stays there: no file and no message repeats it."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortlist.program.cli import main as cli
from shortlist.program.config import TrainConfig
from shortlist.program.runs.folder import RunFolder
from shortlist.program.text import hide_passwords, hide_passwords_of_word
from shortlist.program.training.loop import train
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
@pytest.mark.filterwarnings("ignore")  # a driver may say that it does not know a parameter
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
