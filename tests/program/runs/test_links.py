"""A run folder may come from a stranger: nothing is written, emptied or deleted through links in it."""

import os
import shutil
from pathlib import Path

import pytest

from shortlist import ShortlistError
from shortlist.program.atomic_files import locked
from shortlist.program.config import RunConfig, TrainConfig
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.loop import train
from shortlist.program.tuning.study import tune
from tests.support.early_ends import train_until_step
from tests.support.small_runs import small_config, write_embeddings

FILES = (
    "config.json",
    "environment.json",
    "classes.json",
    "facts.json",
    "preprocess.json",
    "metrics.jsonl",
    "best.safetensors",
    "checkpoints/best.safetensors",
    "checkpoints/000000001-0123456789abcdef.pt",
    "scores.safetensors",
    "test_predictions.safetensors",
    "test_per_class.csv",
    "pictures/0.png",
    "correction.json",
    "final.json",
    ".lock",
)
FOLDERS = ("checkpoints", "tensorboard", "pictures")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    data = write_embeddings(tmp_path_factory.mktemp("data") / "points.npz", images=100)
    return small_config(data, train=TrainConfig(epochs=3, batch_size=32, ks=(1, 3), device="cpu"))


@pytest.fixture(scope="module")
def stopped(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_until_step(config, tmp_path_factory.mktemp("stopped"), 10)


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_written_through_a_linked_file(config: RunConfig, run: Path, tmp_path: Path, name: str) -> None:
    link, precious = run / name, tmp_path / "precious"
    precious.write_bytes(link.read_bytes() if link.is_file() and name != ".lock" else b"thesis")
    before = precious.read_bytes()
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(precious)
    with pytest.raises(ShortlistError, match=f"{link} is a link|has already finished"):
        train(config, folder=run, resume=True, quiet=True)
    assert precious.read_bytes() == before
    if name != ".lock":
        with pytest.raises(ShortlistError, match=f"{link} is a link"):
            RunFolder(run).write_file(name, b"other")
    assert precious.read_bytes() == before


@pytest.mark.parametrize("name", FOLDERS)
def test_nothing_is_written_or_deleted_through_a_linked_folder(
    config: RunConfig, run: Path, tmp_path: Path, name: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (run / name).mkdir(exist_ok=True)
    (run / name).rename(elsewhere)
    (run / name).symlink_to(elsewhere)
    before = contents(elsewhere)
    with pytest.raises(ShortlistError, match=f"{run / name} is a link"):
        train(config, folder=run, resume=True, quiet=True)
    with pytest.raises(ShortlistError, match=f"{run / name} is a link"):
        RunFolder(run).save_checkpoint({}, 99) if name == "checkpoints" else RunFolder(run).write_file(f"{name}/x", b"")
    assert contents(elsewhere) == before


def test_a_run_that_the_user_reaches_through_his_own_link_goes_on(config: RunConfig, run: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(run.parent)
    assert train(config, folder=tmp_path / "runs" / run.name, resume=True, quiet=True).finished


def test_a_refused_command_leaves_the_lock_and_what_it_leads_to(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "run"
    precious.write_text("thesis")
    folder.mkdir()
    (folder / "notes.tex").touch()  # a folder that holds no run is refused
    for make in (lambda path: path.symlink_to(precious), lambda path: path.hardlink_to(precious)):
        make(folder / ".lock")
        with pytest.raises(ShortlistError), RunFolder(folder).claim(RunConfig(), resume=True):
            pass
        assert precious.read_text() == "thesis"
        (folder / ".lock").unlink()


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", ".lock"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(config: RunConfig, run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(ShortlistError, match=name):
        train(config, folder=run, resume=True, quiet=True)


def test_a_lock_that_may_not_be_written_is_no_sign_that_somebody_holds_it(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(ShortlistError, match=str(tmp_path / "lock")), locked(tmp_path / "lock", wait=False):
        pass


@pytest.mark.parametrize("name", ["workers", "studies.journal"])
def test_a_study_writes_through_no_link_in_its_own_folder(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    link = Path("runs", "tune", config.recipe, name)
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ShortlistError, match=f"{link} is a link"):
        tune(config, trials=1)
    assert not (tmp_path / "elsewhere").exists()
