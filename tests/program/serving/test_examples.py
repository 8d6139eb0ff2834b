"""Example pictures: a few small ones of each class, kept once, and nothing else of the training images."""

import io
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shortlist.errors import ShortlistError
from shortlist.program.data.catalogue import load_problem
from shortlist.program.runs.folder import RunFolder
from shortlist.program.serving import examples
from shortlist.program.serving.examples import FILE, LONGEST_SIDE, OF_CLASS, examples_of
from shortlist.program.training.loop import train
from tests.support.pictures import colour_of, put_image
from tests.support.small_runs import photos_config

SIZES = {"ash": 14, "elm": 9}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos and a run on them."""
    folder = tmp_path_factory.mktemp("trained")
    for number, (name, count) in enumerate(SIZES.items()):
        for image in range(count):
            put_image(folder / "photos" / name / f"{image}.png", colour_of(number), (400, 300))
    train(photos_config(folder / "photos", epochs=1), folder=folder / "run", quiet=True)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(trained / "run", tmp_path / "run")
    return RunFolder(tmp_path / "run")


def test_pictures_are_those_of_their_class(run: RunFolder) -> None:
    found = examples_of(run)
    classes = load_problem(run.config.data).classes
    assert sorted(found) == [0, 1]
    for label, pictures in found.items():
        assert len(pictures) == OF_CLASS
        colour = colour_of(list(SIZES).index(classes[label]))
        for picture in pictures:
            image = Image.open(io.BytesIO(picture))
            assert image.format == "WEBP"
            assert max(image.size) <= LONGEST_SIDE
            assert not image.getexif()
            np.testing.assert_allclose(np.asarray(image.convert("RGB")).mean((0, 1)), colour, atol=6)


def test_they_are_made_once_and_need_no_data_then(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    found = examples_of(run, say=told.append)
    assert len(told) == 1
    content = (run.path / FILE).read_bytes()
    assert b"ash" not in content, "no names of the images"
    monkeypatch.setattr(examples, "load_run_problem", lambda *given: 1 / 0)
    assert examples_of(run, say=told.append) == found
    assert len(told) == 1


def test_the_same_run_gives_the_same_file(run: RunFolder, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "other")
    other = RunFolder(tmp_path / "other")
    examples_of(run)
    examples_of(other)
    assert (run.path / FILE).read_bytes() == (other.path / FILE).read_bytes()


def test_data_that_is_gone_is_told_with_the_remedy(run: RunFolder, trained: Path, tmp_path: Path) -> None:
    settings = run.read_json("config.json")
    settings["data"]["root"] = str(tmp_path / "gone")
    run.write_json("config.json", settings)
    with pytest.raises(ShortlistError, match="--root"):
        examples_of(run)
    assert len(examples_of(run, root=str(trained / "photos"))) == 2


def test_wrong_labels_give_no_examples(run: RunFolder) -> None:
    settings = run.read_json("config.json")
    settings["data"]["label_noise"] = 0.5
    run.write_json("config.json", settings)
    with pytest.raises(ShortlistError, match="label-noise"):
        examples_of(run)


def test_every_class_has_a_picture_before_any_has_two(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    size = len(examples_of(run)[0][0])
    (run.path / FILE).unlink()
    monkeypatch.setattr(examples, "LARGEST", int(3.5 * size))
    assert sorted(len(pictures) for pictures in examples_of(run, say=told.append).values()) == [1, 2]
    assert "fewer" in told[-1]


@pytest.mark.parametrize("damage", ["no zip", "another name", "no picture", "compressed", "too large"])
def test_a_file_of_a_stranger_is_checked(run: RunFolder, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    picture = examples_of(run)[0][0]
    path = run.path / FILE
    if damage == "no zip":
        path.write_bytes(b"nothing")
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if damage == "compressed" else zipfile.ZIP_STORED) as file:
            name = "../../0-0.webp" if damage == "another name" else "0-0.webp"
            file.writestr(name, b"<html>" if damage == "no picture" else picture)
    if damage == "too large":
        monkeypatch.setattr(examples, "LARGEST", 10)
    with pytest.raises(ShortlistError, match=r"examples\.zip is damaged"):
        examples_of(run)


def test_a_link_is_not_followed(run: RunFolder, tmp_path: Path) -> None:
    examples_of(run)
    (run.path / FILE).rename(tmp_path / "elsewhere.zip")
    (run.path / FILE).symlink_to(tmp_path / "elsewhere.zip")
    with pytest.raises(ShortlistError, match="is a link"):
        examples_of(run)
