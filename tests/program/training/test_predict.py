"""Suggestions for images, from run folders that were made without training."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from shortlist import ShortlistError
from shortlist.program.cli import main as cli
from shortlist.program.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from shortlist.program.data.image_io import file_preprocess
from shortlist.program.losses import CrossEntropyConfig
from shortlist.program.models.build import build_model
from shortlist.program.runs.folder import RunFolder, as_safetensors
from shortlist.program.training.predict import Predictor, image_files
from tests.support.pictures import colour_of, put_image

CLASSES = ["ash", "elm", "fir", "oak"]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """With norms over the batch, and a loss of another K than the largest that is measured."""
    config = RunConfig(
        data=DataConfig(name="folder", image_size=16),
        model=ModelConfig(name="resnet32"),
        loss=CrossEntropyConfig(k=2),
        train=TrainConfig(ks=(1, 4), device="cpu"),
    )
    run = RunFolder(tmp_path / "run")
    with run.claim(config, resume=False):
        run.write_json("classes.json", {"names": CLASSES, "train_images": [1, 1, 1, 1]})
        run.write_json("preprocess.json", asdict(file_preprocess(16)))
        run.save_best(as_safetensors(build_model(config.model, (3, 16, 16), 4).state_dict()))
    return run


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(paths):
        put_image(path, colour_of(number))
    return paths


def test_suggestions_do_not_depend_on_the_images_beside(run: RunFolder, photos: list[Path]) -> None:
    predictor = Predictor(run, device="cpu")
    together = dict(predictor.suggest(photos, 4))
    for photo in photos:
        ((_, alone),) = predictor.suggest([photo], 4)
        for suggestion, other in zip(alone, together[photo], strict=True):
            assert suggestion.name == other.name
            assert suggestion.score == pytest.approx(other.score, abs=1e-4)


def test_there_are_as_many_suggestions_as_the_loss_was_made_for(
    run: RunFolder, photos: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shortlist", "predict", str(run.path), str(photos[0]), "--json"])
    cli.main()
    assert len(json.loads(capsys.readouterr().out)["suggestions"]) == 2


def test_a_folder_without_images_is_named_whatever_else_there_is(photos: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert image_files(photos) == (photos, [])
    with pytest.raises(ShortlistError, match=r"no image in .*empty"):
        image_files([*photos, tmp_path / "empty"])
