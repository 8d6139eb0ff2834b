"""Probabilities and sets of a run, from the scores that it kept."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shortlist as sl
from shortlist.program.cli import main as cli
from shortlist.program.predicting.calibration import (
    calibrate,
    fitted_sets,
    log_probabilities,
    read_calibration,
)
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.scores import Scores, read_scores, write_scores
from shortlist.program.training.loop import train
from tests.support.pictures import put_image
from tests.support.run_folders import untrained_run
from tests.support.scored_runs import CLASSES, COUNTS, drawn, made_run
from tests.support.small_runs import small_config, write_embeddings


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return made_run(tmp_path / "run", drawn(3000, 1), drawn(2000, 2))


@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("has_prior", [True, False])
def test_the_temperature_and_the_share_of_the_prior_are_found(tmp_path: Path, scale: float, has_prior: bool) -> None:
    val, test = (drawn(5000, seed, scale=scale, has_prior=has_prior) for seed in (1, 2))
    found = calibrate(made_run(tmp_path / "run", val, test))
    assert found.temperature == pytest.approx(scale, rel=0.05)
    assert found.prior == pytest.approx(0.0 if has_prior else 1.0, abs=0.1)
    error, before = found.error["all"], found.error_before["all"]
    assert error is not None
    assert before is not None
    assert error < 0.03
    assert error < before or (scale == 1 and has_prior)


@pytest.mark.parametrize("long_tailed", [True, False])
def test_the_imbalance_of_new_images_is_that_of_the_validation_images(tmp_path: Path, long_tailed: bool) -> None:
    val, test = (drawn(5000, seed, long_tailed=long_tailed) for seed in (1, 2))
    found = calibrate(made_run(tmp_path / "run", val, test))
    # Strong evidence blurs the tail a little: the labels are less long-tailed than the prior that they were drawn with.
    assert (0.5 < found.imbalance < 1.1) if long_tailed else abs(found.imbalance) < 0.1


def test_one_half_of_each_class_is_set_aside(run: RunFolder) -> None:
    found, test = calibrate(run), read_scores(run, "test")
    inside = torch.isin(test.images, torch.tensor(found.set_images))
    kept, every = (labels.bincount(minlength=CLASSES) for labels in (test.labels[inside], test.labels))
    assert ((2 * kept - every).abs() <= 1).all()
    assert found.set_class_images == tuple(kept.tolist())
    assert calibrate(run) == found, "the same each time"
    assert calibrate(run, seed=1).set_images != found.set_images
    assert read_calibration(run) == calibrate(run, seed=1)


def test_a_predictor_gives_probabilities_and_the_sets_of_the_library(run: RunFolder, tmp_path: Path) -> None:
    photos = [put_image(tmp_path / f"{number}.png", (40 * number, 90, 30)) for number in range(5)]
    assert not sl.load(run.path, device="cpu").is_calibrated
    found = calibrate(run)
    predictor = sl.load(run.path, device="cpu", correct=False)
    assert predictor.is_calibrated
    scores = predictor.scores(photos)
    probabilities = log_probabilities(scores, found, COUNTS).exp()
    torch.testing.assert_close(probabilities.sum(1), torch.ones(5))
    for best, of_image in zip(predictor.suggest(photos, k=CLASSES), probabilities, strict=True):
        assert [item.probability for item in best] == pytest.approx(of_image[[item.index for item in best]].tolist())
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"coverage": 0.8}, {"coverage": 0.8, "method": "macro"}),
        ({"coverage": 0.7, "of": "photos"}, {"coverage": 0.7, "method": "marginal"}),
        ({"average_k": 3}, {"average_k": 3, "method": "macro"}),
    ]
    for settings, library in cases:
        inside = fitted_sets(run, found, **library)(log_probabilities(scores, found, COUNTS))
        several = predictor.sets(photos, **settings)
        assert [{item.index for item in best} for best in several] == [
            set(row.nonzero().flatten().tolist()) for row in inside
        ]
        assert [item.index for item in predictor.sets(photos[0], **settings)] == [item.index for item in several[0]]
        assert all(best == sorted(best, key=lambda item: -item.score) for best in several)
        assert all(len(best) <= 1 for best in predictor.sets(photos, max_k=1, **settings))


def test_a_calibration_of_other_weights_is_not_used(run: RunFolder) -> None:
    calibrate(run)
    other = untrained_run(run.path.with_name("other"), [f"bird {number}" for number in range(CLASSES)])
    run.save_best((other.path / "best.safetensors").read_bytes())
    assert read_calibration(run) is None
    with pytest.raises(sl.ShortlistError, match=r"scores\.safetensors .*best\.safetensors"):
        calibrate(run)


def test_a_trained_run_keeps_its_scores(tmp_path: Path) -> None:
    data = write_embeddings(tmp_path / "points.npz", images=200)
    run = train(small_config(data), folder=tmp_path / "run", quiet=True)
    test = read_scores(run, "test")
    kept = run.read_json("final.json")["test"]
    metrics = sl.TopKMetrics(test.scores.shape[1], ks=(1,))
    metrics.update(test.scores, test.labels)
    assert metrics.compute()["micro_top1"].item() == pytest.approx(kept["micro_top1"])
    found = calibrate(run)
    assert found.val_images == len(read_scores(run, "val").labels)


def test_many_scores_are_kept_of_evenly_spaced_images(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shortlist.program.runs.scores.MOST_WRITTEN", 100 * CLASSES)
    write_scores(run, val=drawn(30, 1), test=drawn(250, 2))
    assert read_scores(run, "val").images.tolist() == list(range(30))
    assert read_scores(run, "test").images.tolist() == list(range(0, 250, 3))


# The commands


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["shortlist", *arguments])
    cli.main()


def test_the_commands_calibrate_and_suggest_sets(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photo = str(put_image(tmp_path / "photo.png"))
    call(monkeypatch, "calibrate", str(run.path))
    shown = capsys.readouterr().out
    assert "1,000 test images" in shown
    call(monkeypatch, "predict", str(run.path), photo, "--coverage", "0.8", "--json", "--device", "cpu")
    found = json.loads(capsys.readouterr().out)
    wanted = sl.load(run.path, device="cpu").sets(photo, coverage=0.8)
    assert [(item["index"], item["probability"]) for item in found["suggestions"]] == [
        (item.index, pytest.approx(item.probability)) for item in wanted
    ]
    call(monkeypatch, "predict", str(run.path), photo, "--coverage", "0.9999", "--device", "cpu")
    assert f"all {CLASSES} classes" in capsys.readouterr().out


def test_bad_requests_name_the_remedy(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photo = str(put_image(tmp_path / "photo.png"))
    predict = ("predict", str(run.path), photo, "--device", "cpu")
    for arguments, message in (
        ((*predict, "--coverage", "0.9"), "shortlist calibrate"),
        ((*predict, "--coverage", "0.9", "--average-k", "3"), "exclude"),
        ((*predict, "--coverage", "0.9", "-k", "3"), "--max-k"),
        ((*predict, "--max-k", "3"), "--coverage"),
        (("calibrate", str(run.path), "--coverage", "1.5"), "1.5"),
        (("calibrate", str(run.path), "--divisions", "1"), "--divisions must be 2 or more"),
        (("calibrate", str(tmp_path / "nowhere")), "no folder"),
    ):
        with pytest.raises(SystemExit):
            call(monkeypatch, *arguments)
        assert message in capsys.readouterr().err
    calibrate(run)
    with pytest.raises(SystemExit):
        call(monkeypatch, *predict, "--coverage", "1.5")
    assert "1.5" in capsys.readouterr().err
    with pytest.raises(sl.ShortlistError, match="of must be"):
        sl.load(run.path, device="cpu").sets(photo, of="birds")  # type: ignore[arg-type]


def test_classes_that_calibration_never_saw_are_named(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    predict = ("predict", str(run.path), str(put_image(tmp_path / "photo.png")), "--device", "cpu", "--coverage", "0.8")
    call(monkeypatch, "calibrate", str(run.path))
    call(monkeypatch, *predict)
    assert "not promised" not in capsys.readouterr().err
    test = drawn(2000, 2)
    write_scores(run, val=drawn(3000, 1), test=test.subset(test.labels != 5))
    for command in (("calibrate", str(run.path)), predict):
        call(monkeypatch, *command)
        told = capsys.readouterr().err
        assert "not promised" in told
        assert "bird 5" in told
        assert "bird 4" not in told
    assert sl.load(run.path, device="cpu").unpromised == ["bird 5"]


def test_a_run_without_scores_or_images_says_so(run: RunFolder) -> None:
    (run.path / "scores.safetensors").rename(run.path / "kept")
    with pytest.raises(sl.ShortlistError, match=r"has no scores\.safetensors.*train it again"):
        calibrate(run)
    (run.path / "scores.safetensors").write_bytes(b"nothing")
    with pytest.raises(sl.ShortlistError, match=r"scores\.safetensors is damaged"):
        calibrate(run)
    none = replace(drawn(4, 1), scores=torch.zeros(0, CLASSES), labels=torch.zeros(0, dtype=torch.int64))
    write_scores(run, val=replace(none, images=none.labels), test=drawn(10, 2))
    with pytest.raises(sl.ShortlistError, match="needs a validation image"):
        calibrate(run)
    write_scores(run, val=drawn(10, 1), test=replace(drawn(10, 2), labels=torch.full((10,), CLASSES)))
    with pytest.raises(sl.ShortlistError, match="do not fit together"):
        calibrate(run)


@pytest.mark.parametrize("entry", ["temperature", "set_images", "set_class_images", "best_sha256"])
def test_a_damaged_calibration_is_named(run: RunFolder, entry: str) -> None:
    calibrate(run)
    record = run.read_json("calibration.json")
    wrong = [-1] if entry == "temperature" else [-1, [10**30], [1]] if entry == "set_class_images" else [-1, [10**30]]
    for value in wrong:
        run.write_json("calibration.json", record | {entry: value})
        with pytest.raises(sl.ShortlistError, match=rf"calibration\.json .*{entry}"):
            read_calibration(run)


def test_of_single_images_some_are_set_aside_and_some_are_not(tmp_path: Path) -> None:
    two = drawn(2, 2)
    test = replace(two, labels=torch.tensor([0, 1]))
    run = made_run(tmp_path / "run", drawn(50, 1), test)
    for seed in range(20):
        assert len(calibrate(run, seed).set_images) == 1


def test_labels_that_are_always_right_do_not_break_the_search(tmp_path: Path) -> None:
    labels = torch.arange(CLASSES).repeat(5)
    scores: Tensor = torch.nn.functional.one_hot(labels).float()
    sure = Scores(scores, labels, torch.arange(len(labels)))
    found = calibrate(made_run(tmp_path / "run", sure, sure))
    assert 0 < found.temperature < 0.2
    assert found.error["all"] == pytest.approx(0, abs=0.01)
