"""The model card says what the files of the run say."""

from dataclasses import replace
from pathlib import Path

import pytest

from shortlist.program.config import RunConfig, changed
from shortlist.program.predicting.calibration import calibrate
from shortlist.program.runs.card import write_card
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.loop import train
from tests.support.pictures import put_classes
from tests.support.small_runs import photos_config, small_config, write_embeddings


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    data = write_embeddings(tmp_path_factory.mktemp("data") / "my_points.npz", images=200)
    return small_config(data)


@pytest.fixture(scope="module")
def run(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(config, folder=tmp_path_factory.mktemp("runs") / "my_run", quiet=True)


def card(run: RunFolder) -> str:
    return (run.path / "README.md").read_text()


def test_the_card_has_the_numbers_of_the_run(run: RunFolder, config: RunConfig) -> None:
    text, final = card(run), run.read_json("final.json")
    assert r"my\_run" in text.splitlines()[0]
    assert r"my\_points.npz" in text, "the data without the path to it"
    assert config.data.root not in text
    assert f"{sum(run.read_json('classes.json')['train_images']):,} training images" in text
    for name in ("test", "test_corrected"):
        for metric in ("micro_top1", "macro_top1"):
            assert f"{100 * final[name][metric]:.1f}" in text
    assert config.loss.label.lower() in text
    assert "predictor.suggest(vector)" in text
    assert "@inproceedings{garcin2022stochastic" in text
    assert "Not calibrated" in text


def test_calibration_is_added_to_the_card(run: RunFolder) -> None:
    found = calibrate(run)
    assert "Not calibrated" not in card(run)
    assert f"{len(found.set_images)} test images" in card(run)
    assert f"{100 * (found.error['all'] or 0):.1f} %" in card(run)


def test_a_card_can_be_made_again_from_the_files(run: RunFolder) -> None:
    before = card(run)
    (run.path / "README.md").unlink()
    write_card(run)
    assert card(run) == before


def test_names_from_elsewhere_are_no_markdown(tmp_path: Path) -> None:
    photos = tmp_path / "[click](evil)\n# birds"
    put_classes(photos, {"ash": 4, "elm": 4})
    run = train(photos_config(photos, val_fraction=0.2), folder=tmp_path / "<b>run", quiet=True)
    text = card(run)
    assert "[click](evil)" not in text
    assert "\n# birds" not in text
    assert "<b>" not in text
    assert 'predictor.suggest("photo.jpg")' in text
    assert "Held out" in text


def test_label_noise_and_thinning_are_told(config: RunConfig, tmp_path: Path) -> None:
    noisy = changed(config, {"data.label_noise": 0.4, "data.noise_groups": "consecutive", "data.imbalance": 2.0})
    text = card(train(replace(noisy, seed=1), folder=tmp_path / "run", quiet=True))
    assert "Wrong labels were added" in text
    assert "Thinned to a long tail" in text
