"""Runs on the hub: what is pushed, what stays at home, and that a run from there says what the local one says."""

import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard, ModelCardData, constants, file_download

import shortlist as sl
from shortlist import ShortlistError
from shortlist.program.cli import main as cli
from shortlist.program.predicting.calibration import calibrate
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.loop import train
from tests.support.hub_server import TOKEN, Hub, Repository, hub_server
from tests.support.pictures import put_classes
from tests.support.small_runs import photos_config, small_config, write_embeddings


@pytest.fixture(scope="module")
def photos_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    home = tmp_path_factory.mktemp("home")
    put_classes(home / "photos", {"ash": 12, "elm": 12})
    (home / "photos" / "ash" / "broken.png").write_bytes(b"no image")
    config = photos_config(home / "photos", val_fraction=0.2, on_bad_image="skip")
    run = train(config, folder=home / "runs" / "trees", quiet=True)
    run.write_file("examples.zip", b"pictures of training images")
    return run


@pytest.fixture(scope="module")
def vectors_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    home = tmp_path_factory.mktemp("home")
    run = train(small_config(write_embeddings(home / "points.npz")), folder=home / "points_run", quiet=True)
    calibrate(run)
    return run


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that is reached by the user ``me``, with an empty cache."""
    with hub_server() as hub:
        files = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (constants, file_download):  # versions below 1 keep a copy of it
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", files, raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield hub


def shortlist(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["shortlist", *map(str, words)])
    cli.main()


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """What a command says that fails."""
    with pytest.raises(SystemExit, match="1"):
        shortlist(monkeypatch, *words)
    return capsys.readouterr().err


def push(monkeypatch: pytest.MonkeyPatch, run: RunFolder, *words: str) -> None:
    shortlist(monkeypatch, "push", run.path, "me/mine", *words)


def test_a_run_from_the_hub_says_what_the_local_one_says(
    hub: Hub, photos_run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    push(monkeypatch, photos_run)
    assert f"{hub.address}/me/mine" in capsys.readouterr().out
    photos = sorted(Path(photos_run.config.data.root).glob("elm/*"))
    here, there = (sl.load(place, "cpu").suggest(photos) for place in (photos_run.path, "hf://me/mine"))
    assert here == there
    answers = []
    for place in (photos_run.path, "hf://me/mine"):
        shortlist(monkeypatch, "predict", place, photos[0], "--json")
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


def test_sets_of_a_calibrated_run_travel_with_it(
    hub: Hub, vectors_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(monkeypatch, vectors_run)
    vectors = np.load(vectors_run.config.data.root)["test_x"][:20]
    here, there = (sl.load(place, "cpu") for place in (vectors_run.path, "hf://me/mine"))
    assert there.is_calibrated
    assert here.sets(vectors, 0.8) == there.sets(vectors, 0.8)
    assert here.suggest(vectors) == there.suggest(vectors)


def test_images_paths_and_names_of_files_stay_at_home(
    hub: Hub, photos_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert any((photos_run.path / "pictures").iterdir())
    assert "broken.png" in str(photos_run.read_json("final.json")["skipped_files"])
    push(monkeypatch, photos_run)
    files = hub.repositories["me/mine"].files
    assert {*files} == {
        *("config.json", "classes.json", "preprocess.json", "final.json"),
        *("best.safetensors", "correction.json", "README.md"),
    }
    for name, content in files.items():
        assert str(photos_run.path.parents[1]).encode() not in content, name
        assert b"broken.png" not in content, name


def test_pictures_are_pushed_on_demand_and_leave_with_the_next_push(
    hub: Hub, photos_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(monkeypatch, photos_run, "--pictures")
    repository = hub.repositories["me/mine"]
    repository.files["LICENSE"] = b"their own"
    assert "examples.zip" in repository.files
    assert any(name.startswith("pictures/") for name in repository.files)
    push(monkeypatch, photos_run)
    assert not any(name.startswith(("pictures/", "examples")) for name in repository.files)
    assert "LICENSE" in repository.files


def test_the_card_has_metadata_that_the_hub_reads(
    hub: Hub, photos_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(monkeypatch, photos_run)
    card = ModelCard(hub.repositories["me/mine"].files["README.md"].decode())
    assert isinstance(card.data, ModelCardData)
    assert card.data.library_name == "shortlist"
    assert card.data.pipeline_tag == "image-classification"
    assert card.data.eval_results is not None
    final = photos_run.read_json("final.json")
    measured = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert measured["top-1 accuracy, mean over classes"] == final["test_corrected"]["macro_top1"]
    assert 'sl.load("hf://me/mine")' in card.text
    assert "FOLDER" not in card.text


def test_a_repository_is_private_unless_it_is_to_be_public(
    hub: Hub, photos_run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    push(monkeypatch, photos_run)
    assert hub.repositories["me/mine"].private
    hub.repositories["me/mine"] = Repository(private=False)
    assert "--public" in said(monkeypatch, capsys, "push", photos_run.path, "me/mine")
    assert not hub.repositories["me/mine"].files
    push(monkeypatch, photos_run, "--public")
    monkeypatch.delenv("HF_TOKEN")
    assert sl.load("hf://me/mine", "cpu").classes == ("ash", "elm")


def test_a_cached_run_needs_no_hub(hub: Hub, photos_run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    push(monkeypatch, photos_run)
    sl.load("hf://me/mine", "cpu")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert sl.load("hf://me/mine", "cpu").classes == ("ash", "elm")


def test_what_cannot_be_opened_is_told_with_the_remedy(
    hub: Hub, photos_run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photo = next(Path(photos_run.config.data.root).glob("elm/*"))
    hub.repositories["me/other"] = Repository(private=False, files={"README.md": b"a poem"})
    hub.repositories["me/bert"] = Repository(private=False, files={"config.json": b"{}"})
    for place, facts in {
        "hf://me/none": ("me/none", "hf auth login"),
        "hf://me/other": ("hf://me/other", "config.json", "shortlist push"),
        "hf://me/bert": ("hf://me/bert", "best.safetensors", "shortlist push"),
        "hf://none": ("hf:/", "hf://OWNER/NAME"),
        "hf://a/b/c": ("hf:/", "hf://OWNER/NAME"),
    }.items():
        told = said(monkeypatch, capsys, "predict", place, photo)
        assert all(fact in told for fact in facts), told
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    told = said(monkeypatch, capsys, "predict", "hf://me/none", photo)
    assert "not in the cache" in told
    assert hub.address in told


def test_what_cannot_be_pushed_is_told_with_the_remedy(
    hub: Hub, photos_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "OWNER/NAME" in said(monkeypatch, capsys, "push", photos_run.path, "mine")
    unfinished = RunFolder(tmp_path / "run")
    with unfinished.claim(photos_run.config, resume=False):
        pass
    assert "--resume" in said(monkeypatch, capsys, "push", unfinished.path, "me/mine")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "hf auth login" in said(monkeypatch, capsys, "push", photos_run.path, "me/mine")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.address in said(monkeypatch, capsys, "push", photos_run.path, "me/mine")
    assert not hub.repositories


@pytest.mark.parametrize(("name", "content"), [("best.safetensors", b"0" * 100), ("calibration.json", b"{}")])
def test_a_damaged_run_is_not_pushed(
    name: str,
    content: bytes,
    hub: Hub,
    vectors_run: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = RunFolder(tmp_path / "copy")
    for path in vectors_run.path.iterdir():
        if path.is_file():
            copy.write_file(path.name, path.read_bytes())
    copy.write_file(name, content)
    told = said(monkeypatch, capsys, "push", copy.path, "me/mine")
    assert f"{copy.path}" in told
    assert "is damaged" in told
    assert not hub.repositories


def test_a_full_disk_is_told_by_the_copy_that_does_not_fit(
    hub: Hub, photos_run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        message = said(monkeypatch, capsys, "push", photos_run.path, "me/mine")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "make room" in message
    assert str(photos_run.path) not in message  # nothing is wrong with the run
    assert not hub.repositories


@pytest.mark.parametrize("name", ["best.safetensors", "classes.json"])
def test_a_damaged_download_is_told_as_a_damaged_run(
    name: str, hub: Hub, photos_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(monkeypatch, photos_run)
    files = hub.repositories["me/mine"].files
    files[name] = files[name][:-9] + b" of chance"
    with pytest.raises(ShortlistError, match=rf"{name}, from hf://me/mine, is damaged: .*; delete .*push it again"):
        sl.load("hf://me/mine", "cpu")


def test_an_export_of_a_run_from_the_hub_is_written_here(
    hub: Hub, photos_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(monkeypatch, photos_run)
    monkeypatch.chdir(tmp_path)
    shortlist(monkeypatch, "export", "hf://me/mine", "--format", "pt2")
    assert (tmp_path / "export" / "model.pt2").is_file()
    assert not [*(tmp_path / "cache").rglob("*.pt2")]


def test_config_of_the_hub_is_still_a_configuration(
    hub: Hub, vectors_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(monkeypatch, vectors_run)
    pushed = json.loads(hub.repositories["me/mine"].files["config.json"])
    assert pushed["data"]["root"] == "points.npz"
    assert pushed | {"data": {}} == vectors_run.read_json("config.json") | {"data": {}}


def test_a_run_with_added_classes_is_pushed_without_a_result(
    hub: Hub, vectors_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(monkeypatch, vectors_run)  # its result must leave with the next push
    np.save(tmp_path / "owl.npy", np.load(vectors_run.config.data.root)["train_x"][:5] + 3)
    shortlist(monkeypatch, "add-class", vectors_run.path, tmp_path / "owl.npy", "--out", tmp_path / "child")
    shortlist(monkeypatch, "push", tmp_path / "child", "me/mine")
    files = hub.repositories["me/mine"].files
    assert {*files} == {
        *("config.json", "classes.json", "added.json", "best.safetensors", "correction.json", "README.md"),
        *("calibration.json", "scores.safetensors"),
    }
    for name, content in files.items():
        for home in (tmp_path, vectors_run.path.parent):
            assert str(home).encode() not in content, name
    assert json.loads(files["added.json"])["parent"] == vectors_run.path.name
    card = ModelCard(files["README.md"].decode())
    assert isinstance(card.data, ModelCardData)
    assert not card.data.eval_results
    assert "owl" in card.text
    vectors = np.load(vectors_run.config.data.root)["test_x"][:20]
    here, there = (sl.load(place, "cpu") for place in (tmp_path / "child", "hf://me/mine"))
    assert there.unpromised == [there.classes[-1]] == ["owl"]
    assert here.suggest(vectors) == there.suggest(vectors)
    assert here.sets(vectors, 0.8) == there.sets(vectors, 0.8)
