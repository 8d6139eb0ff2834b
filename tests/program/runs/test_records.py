"""Records of a run: a damaged one is an error that names the file, and changed data is noticed."""

import json
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from shortlist import ShortlistError
from shortlist.program.cli import commands
from shortlist.program.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from shortlist.program.data.base import SPLITS, Problem
from shortlist.program.data.catalogue import load_problem
from shortlist.program.data.image_io import read_image
from shortlist.program.data.safe_pickle import load_plain_pickle
from shortlist.program.data.sets import glyphs
from shortlist.program.losses import CrossEntropyConfig
from shortlist.program.predicting.inputs import image_files
from shortlist.program.predicting.predictor import Predictor
from shortlist.program.report.page import write_report
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import (
    has_other_training_images,
    read_facts,
    refuse_other_data,
    refuse_other_training_images,
    write_facts,
)
from shortlist.program.training.loop import train
from tests.support.damaged_runs import few_damages, make_runs, unexplained
from tests.support.early_ends import train_until_test
from tests.support.official_cifar import expect, make_files, official_pickle, put_folder
from tests.support.pictures import put_classes, put_image
from tests.support.run_folders import make_run, small_world
from tests.support.small_runs import write_embeddings


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
def unfinished(photos: Path, tmp_path: Path) -> Path:
    return train_until_test(photos_config(photos), tmp_path / "run")


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_a_run_does_not_go_on_with_a_replaced_image(photos: Path, unfinished: Path, part: str) -> None:
    image = photos / part / "owl" / "1.png"
    before = image.read_bytes()
    put_image(image, size=(70, 90))
    with pytest.raises(ShortlistError, match=f"the data has changed: samples of {part} were replaced"):
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


@dataclass(frozen=True)
class InMemory:
    """A small data set in memory, and how to change the rows of a split."""

    config: DataConfig
    change: Callable[[str], None]


def _embeddings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> InMemory:
    path = write_embeddings(folder / "points.npz", images=60)
    return InMemory(DataConfig(name="embeddings", root=str(path)), lambda split: change_array(path, split))


def _glyphs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> InMemory:
    monkeypatch.setattr(glyphs, "TRAIN_IMAGES_A_CLASS", 2)
    monkeypatch.setattr(glyphs, "HELD_OUT_IMAGES_A_CLASS", 1)

    def change(split: str) -> None:
        (cached,) = (folder / "glyphs").iterdir()
        change_array(cached, split)

    return InMemory(DataConfig(name="glyphs", root=str(folder)), change)


def _cifar100(folder: Path, monkeypatch: pytest.MonkeyPatch) -> InMemory:
    files = make_files()
    expect(monkeypatch, files)
    put_folder(folder, files)
    config = DataConfig(name="cifar100", root=str(folder))

    def change(split: str) -> None:
        file = "test" if split == "test" else "train"
        stored = load_plain_pickle(files[file], file)
        pixels = stored[b"data"].copy()
        (val,) = load_problem(config).facts.held_out.values()
        row = 0 if split == "test" else next(row for row in range(120) if (row in val) == (split == "val"))
        pixels[row, -1] ^= 1
        changed = files | {file: official_pickle(stored | {b"data": pixels})}
        expect(monkeypatch, changed)
        put_folder(folder, changed)

    return InMemory(config, change)


def change_array(path: Path, split: str) -> None:
    arrays = dict(np.load(path))
    inputs = arrays[f"{split}_x"]
    inputs[0] = 1 - inputs[0]
    np.savez(path, **arrays)


IN_MEMORY = {"embeddings": _embeddings, "glyphs": _glyphs, "cifar100": _cifar100}


@pytest.fixture(params=IN_MEMORY)
def in_memory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InMemory:
    return IN_MEMORY[request.param](tmp_path, monkeypatch)


def recorded(folder: Path, problem: Problem) -> RunFolder:
    """A run that has recorded its data, and no more."""
    run = RunFolder(folder)
    run.path.mkdir()
    run.write_json("classes.json", {"names": problem.classes, "train_images": problem.class_counts.tolist()})
    write_facts(run, problem)
    return run


@pytest.mark.parametrize("split", SPLITS)
def test_changed_rows_of_data_in_memory_are_noticed(in_memory: InMemory, tmp_path: Path, split: str) -> None:
    before = load_problem(in_memory.config)
    run = recorded(tmp_path / "run", before)
    refuse_other_training_images(load_problem(in_memory.config), run)
    in_memory.change(split)
    after = load_problem(in_memory.config)
    refuse_other_data(after, run)  # classes and splits are as before
    wanted = "the training images are not those" if split == "train" else f"samples of {split} were replaced"
    with pytest.raises(ShortlistError, match=f"the data has changed: {wanted}"):
        refuse_other_training_images(after, run)
    assert has_other_training_images(after, run) == (split == "train")


def test_facts_are_read_as_they_were_recorded(in_memory: InMemory, photos: Path, tmp_path: Path) -> None:
    altered = replace(in_memory.config, label_noise=0.5, noise_groups="consecutive", imbalance=2)
    (photos / "train" / "owl" / "notes.txt").touch()
    for number, config in enumerate((in_memory.config, altered, photos_config(photos).data)):
        facts = load_problem(config).facts
        read = read_facts(recorded(tmp_path / str(number), load_problem(config)))
        assert None not in (facts.train_digest, facts.test_digest)
        assert set(read.fingerprints) == set(SPLITS)
        assert replace(read, fingerprints={}) == facts


def test_a_remark_of_one_data_set_is_recorded(in_memory: InMemory, tmp_path: Path) -> None:
    problem = load_problem(in_memory.config)
    problem = replace(problem, facts=replace(problem.facts, remarks={"not_cached": "no room"}))
    run = recorded(tmp_path / "run", problem)
    assert run.read_json("facts.json")["not_cached"] == "no room"
    assert read_facts(run).remarks == {"not_cached": "no room"}


def test_what_an_older_version_did_not_record_is_no_change(in_memory: InMemory, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", load_problem(in_memory.config))
    new = {"train_digest", "test_digest", "fingerprints"}
    run.write_json("facts.json", {name: fact for name, fact in run.read_json("facts.json").items() if name not in new})
    in_memory.change("train")
    after = load_problem(in_memory.config)
    refuse_other_data(after, run)
    refuse_other_training_images(after, run)
    assert not has_other_training_images(after, run)


def test_a_run_on_images_in_memory_does_not_go_on_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _cifar100(tmp_path, monkeypatch)
    config = replace(photos_config(tmp_path), data=data.config)
    run = train_until_test(config, tmp_path / "run")
    data.change("train")
    with pytest.raises(ShortlistError, match=f"the training images are not those that {run} began with"):
        train(config, folder=run, resume=True, quiet=True)
    commands.evaluate([str(run), "--device", "cpu"])
    assert f"the training images have changed since {run} was trained" in capsys.readouterr().err


def test_a_pipe_among_images_is_named_and_not_waited_for(
    photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipe = photos / "train" / "owl" / "pipe.jpg"
    os.mkfifo(pipe)
    run = train(photos_config(photos), folder=tmp_path / "run")
    assert "not used: 1: train/owl/pipe.jpg" in capfd.readouterr().err
    found, others = image_files([photos])
    assert others == [pipe]
    assert len(Predictor(run, "cpu").suggest(found, 1)) == 24
    with pytest.raises(ShortlistError, match=f"{pipe}.* no regular file"):
        image_files([pipe])
    with pytest.raises(ShortlistError, match=f"{pipe}.* not a regular file"):
        read_image(pipe, 3)


def test_a_link_that_leads_nowhere_is_an_image_that_cannot_be_read(photos: Path, tmp_path: Path) -> None:
    """Without an error, a folder whose images were never fetched would silently be a smaller data set."""
    (photos / "train" / "owl" / "link.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ShortlistError, match=r"link\.png cannot be read"):
        train(photos_config(photos), folder=tmp_path / "run", quiet=True)
