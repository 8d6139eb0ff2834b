"""Whatever is in the files of a run, a command answers with a sentence that names the file."""

import json
import os
import resource
from pathlib import Path

import pytest

from shortlist import ShortlistError
from shortlist.program.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from shortlist.program.data.catalogue import load_problem
from shortlist.program.data.image_io import read_image
from shortlist.program.losses import CrossEntropyConfig
from shortlist.program.report.page import write_report
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import has_other_training_images
from shortlist.program.training.loop import Trainer, train
from shortlist.program.training.predict import Predictor, image_files
from tests.support.damaged_runs import few_damages, make_runs, unexplained
from tests.support.pictures import put_classes, put_image
from tests.support.run_folders import make_run, small_world


def test_no_damaged_record_ends_in_a_traceback(tmp_path: Path) -> None:
    runs = make_runs(tmp_path)
    damages = list(few_damages(runs))
    assert unexplained(runs, damages, tmp_path, ("evaluate", "predict", "report")) == []
    of_whole_files = [damage for damage in damages if damage.what in ("null", "epoch = null")]
    assert unexplained(runs, of_whole_files, tmp_path, ("train --resume",)) == []


@pytest.mark.parametrize(
    "line",
    [
        "null",
        '{"epoch": 1, "val_macro_top5": -1}',
        '{"epoch": null}',
        '{"epoch": 0, "train_loss": "x"}',
        '{"epoch": true}',
    ],
)
def test_a_page_leaves_out_what_is_no_line_of_metrics(tmp_path: Path, line: str) -> None:
    run = make_run(tmp_path / "run", small_world(), "cross_entropy")
    good = write_report([run], tmp_path / "good.html").read_bytes()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    assert write_report([run], tmp_path / "page.html").read_bytes() == good


def test_a_page_that_does_not_fit_on_the_disk_gives_no_advice_about_training(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", small_world(), "cross_entropy")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ShortlistError, match=r"page\.html.*File too large; make room") as told:
            write_report([RunFolder(run.path)], tmp_path / "page.html")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "train" not in str(told.value)


class Killed(BaseException):
    pass


def photos_config(root: Path) -> RunConfig:
    return RunConfig(
        data=DataConfig(name="folder", root=str(root), image_size=16, workers=0),
        model=ModelConfig(name="glyphnet"),
        loss=CrossEntropyConfig(k=1),
        train=TrainConfig(epochs=1, batch_size=8, ks=(1,), device="cpu"),
    )


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for part in ("train", "val", "test"):
        put_classes(tmp_path / "photos" / part, {"elm": 4, "owl": 4})
    return tmp_path / "photos"


@pytest.fixture
def unfinished(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def killed(trainer: Trainer) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "test", killed)
        with pytest.raises(Killed):
            train(photos_config(photos), folder=tmp_path / "run", quiet=True)
    return tmp_path / "run"


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_a_run_does_not_go_on_with_a_replaced_image(photos: Path, unfinished: Path, part: str) -> None:
    image = photos / part / "owl" / "1.png"
    before = image.read_bytes()
    put_image(image, size=(70, 90))
    with pytest.raises(ShortlistError, match=f"the data has changed: an image of {part} was replaced"):
        train(photos_config(photos), folder=unfinished, resume=True, quiet=True)
    replaced = has_other_training_images(load_problem(photos_config(photos).data), RunFolder(unfinished))
    assert replaced == (part == "train")
    image.write_bytes(before)
    os.utime(image, (0, 0))  # copied, from a backup say
    assert train(photos_config(photos), folder=unfinished, resume=True, quiet=True).finished


@pytest.mark.parametrize("part", ["val", "test"])
def test_a_run_goes_on_with_more_images_to_judge_it_by(photos: Path, unfinished: Path, part: str) -> None:
    put_image(photos / part / "owl" / "99.png", size=(70, 90))
    assert train(photos_config(photos), folder=unfinished, resume=True, quiet=True).finished


def test_a_run_of_an_older_version_goes_on(photos: Path, unfinished: Path) -> None:
    facts = json.loads((unfinished / "facts.json").read_text())
    del facts["fingerprints"]
    (unfinished / "facts.json").write_text(json.dumps(facts))
    put_image(photos / "train" / "owl" / "1.png", size=(70, 90))
    assert train(photos_config(photos), folder=unfinished, resume=True, quiet=True).finished


def test_a_pipe_among_images_is_named_and_not_waited_for(
    photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipe = photos / "train" / "owl" / "pipe.jpg"
    os.mkfifo(pipe)
    run = train(photos_config(photos), folder=tmp_path / "run")
    assert "not used: 1: train/owl/pipe.jpg" in capfd.readouterr().err
    found, others = image_files([photos])
    assert others == [pipe]
    assert len(list(Predictor(run, "cpu").suggest(found, 1))) == 24
    with pytest.raises(ShortlistError, match=f"{pipe}.* no regular file"):
        image_files([pipe])
    with pytest.raises(ShortlistError, match=f"{pipe}.* no regular file"):
        read_image(pipe, 3)


def test_a_link_that_leads_nowhere_is_an_image_that_cannot_be_read(photos: Path, tmp_path: Path) -> None:
    """Left out in silence, a folder whose images were never fetched would be a smaller data set."""
    (photos / "train" / "owl" / "link.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ShortlistError, match=r"link\.png cannot be read"):
        train(photos_config(photos), folder=tmp_path / "run", quiet=True)
