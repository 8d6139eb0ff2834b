"""The correction for class sizes: chosen after training, recorded, and used wherever a run suggests."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shortlist import PriorCorrection, ShortlistError, TopKMetrics
from shortlist.__main__ import main
from shortlist.program.config import RunConfig, TrainConfig, changed
from shortlist.program.losses import CrossEntropyConfig
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import read_correction
from shortlist.program.training import loop
from shortlist.program.training.evaluate import evaluate_run
from shortlist.program.training.loop import train
from tests.support.early_ends import train_until_step, train_until_test
from tests.support.pictures import put_classes
from tests.support.small_runs import outcome, photos_config, small_config

SIZES = [300, 200, 120, 80, 50, 30, 20, 12, 8, 5, 3, 2]


def write_long_tail(path: Path, sizes: list[int] = SIZES) -> Path:
    """Overlapping classes of very different sizes; the rarest have no validation images."""
    random = np.random.default_rng(1)
    centres = random.normal(size=(len(sizes), 6))
    splits = {
        "train": sizes,
        "val": [max(3, size // 5) if size >= 8 else 0 for size in sizes],
        "test": [20] * len(sizes),
    }
    arrays: dict[str, Any] = {}
    for name, counts in splits.items():
        labels = np.repeat(np.arange(len(sizes)), counts)
        arrays[f"{name}_x"] = (centres[labels] + 1.2 * random.normal(size=(len(labels), 6))).astype(np.float32)
        arrays[f"{name}_y"] = labels
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    data = write_long_tail(tmp_path_factory.mktemp("data") / "tail.npz")
    settings = TrainConfig(epochs=4, batch_size=32, ks=(1, 3), device="cpu")
    return small_config(data, loss=CrossEntropyConfig(k=3), train=settings)


@pytest.fixture(scope="module")
def run(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(config, folder=tmp_path_factory.mktemp("run"), quiet=True)


def shortlist(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["shortlist", *map(str, arguments)])
    main()


def test_the_record_is_the_library_s_fit_to_the_validation_scores(run: RunFolder) -> None:
    """And the metrics in it are those of the corrected scores."""
    weights = run.load_best()
    points = np.load(run.config.data.root)
    scores = torch.from_numpy(points["val_x"]) @ weights["head.weight"].T + weights["head.bias"]
    target = torch.from_numpy(points["val_y"])
    fitted = PriorCorrection(SIZES).fit(scores, target, k=(1, 3))
    recorded = run.read_json("correction.json")
    metrics = TopKMetrics(len(SIZES), ks=(3,))
    metrics.update(fitted(scores), target)
    assert recorded["tau"] == pytest.approx(fitted.tau.item(), rel=1e-3)
    assert recorded["tau"] > 0
    assert (recorded["metric"], recorded["ks"]) == ("macro_top3", [1, 3])
    assert (recorded["images"], recorded["classes"], recorded["num_classes"]) == (len(target), 9, len(SIZES))
    assert recorded["val"]["macro_top3"] == pytest.approx(metrics.compute()["macro_top3"].item())


def test_the_correction_helps_and_leaves_the_plain_result(run: RunFolder, config: RunConfig, tmp_path: Path) -> None:
    final = run.read_json("final.json")
    assert final["test_corrected"]["macro_top3"] > final["test"]["macro_top3"] + 0.02
    off = small_config(
        Path(config.data.root),
        loss=config.loss,
        train=TrainConfig(epochs=4, batch_size=32, ks=(1, 3), device="cpu", correct_prior="off"),
    )
    plain = train(off, folder=tmp_path / "off", quiet=True)
    assert not plain.has("correction.json")
    assert plain.read_json("final.json")["test"] == final["test"]
    assert "test_corrected" not in plain.read_json("final.json")


@pytest.mark.parametrize(
    ("select", "setting", "metric", "ks"),
    [
        ("auto", "auto", "macro_top3", (1, 3)),
        ("few_top1", "auto", "macro_top1", (1,)),
        ("micro_top3", "auto", None, (1, 3)),
        ("micro_top3", "on", "micro_top3", (1, 3)),
        ("macro_top3", "off", None, (1, 3)),
        ("macro_top5", "on", "macro_top5", (1, 3, 5)),
    ],
)
def test_it_is_chosen_for_what_selects_the_epochs_but_by_default_not_for_micro(
    config: RunConfig, select: str, setting: str, metric: str | None, ks: tuple[int, ...]
) -> None:
    chosen = TrainConfig(ks=(1, 3, 5, 7), select=select, correct_prior=setting)  # type: ignore[arg-type]
    settings = small_config(Path(config.data.root), train=chosen)
    assert settings.corrected_metric == metric
    assert settings.corrected_ks == ks


def by_epoch(run: RunFolder, name: str) -> list[float]:
    return [line[name] for line in run.metrics()]


def test_the_epoch_can_be_chosen_as_the_finished_run_is_corrected(config: RunConfig, tmp_path: Path) -> None:
    """By the accuracy without the correction, a loss that ignores class sizes may choose an epoch that is worse."""
    config = changed(config, {"train.epochs": 12, "optim.lr": 0.2, "optim.schedule": "constant"})
    by_plain = train(config, folder=tmp_path / "plain", quiet=True)
    run = train(changed(config, {"train.select_corrected": True}), folder=tmp_path / "corrected", quiet=True)
    plain, corrected = by_epoch(run, "val_macro_top3"), by_epoch(run, "corrected_val_macro_top3")
    best = outcome(run.path)["final"]["best_epoch"]
    assert corrected[best] == max(corrected)
    assert best != outcome(by_plain.path)["final"]["best_epoch"]
    assert plain[best] < max(plain)
    # What an epoch is chosen by is what the run records of it in the end.
    recorded = json.loads((run.path / "correction.json").read_text())
    assert recorded["val"]["macro_top3"] == pytest.approx(corrected[best], abs=1e-9)
    assert not any("corrected" in name for line in by_plain.metrics() for name in line)


def test_chosen_so_a_run_that_was_stopped_ends_as_an_undisturbed_one(config: RunConfig, tmp_path: Path) -> None:
    config = changed(config, {"train.select_corrected": True, "train.select_latest": True})
    undisturbed = train(config, folder=tmp_path / "undisturbed", quiet=True)
    train_until_step(config, tmp_path / "stopped", 40)
    train(config, folder=tmp_path / "stopped", resume=True, quiet=True)
    assert outcome(tmp_path / "stopped") == outcome(undisturbed.path)


def test_without_a_correction_the_epoch_is_chosen_by_the_plain_accuracy(tmp_path: Path) -> None:
    even = small_config(write_long_tail(tmp_path / "even.npz", [40] * 8), loss=CrossEntropyConfig(k=3))
    runs = [
        train(changed(even, {"train.select_corrected": value}), folder=tmp_path / str(value), quiet=True)
        for value in (False, True)
    ]
    assert outcome(runs[0].path)["metrics"] == outcome(runs[1].path)["metrics"]


def test_of_too_many_scores_the_epoch_is_chosen_by_the_plain_accuracy(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "MOST_TO_SELECT", 100)
    run = train(changed(config, {"train.select_corrected": True}), folder=tmp_path / "run")
    assert not any("corrected" in name for line in run.metrics() for name in line)
    assert "chosen before the correction" in capsys.readouterr().err
    assert (run.path / "correction.json").is_file()


def test_classes_of_one_size_need_no_correction(tmp_path: Path) -> None:
    data = write_long_tail(tmp_path / "even.npz", [40] * 5)
    settings = TrainConfig(epochs=1, batch_size=32, ks=(1, 3), device="cpu")
    run = train(small_config(data, train=settings), folder=tmp_path / "run", quiet=True)
    assert not run.has("correction.json")


def test_a_class_without_training_images_is_never_suggested(run: RunFolder, tmp_path: Path) -> None:
    """Label noise may take all training images of a class."""
    copy = Path(shutil.copytree(run.path, tmp_path / "copy"))
    classes = json.loads((copy / "classes.json").read_text())
    classes["train_images"][3] = 0
    (copy / "classes.json").write_text(json.dumps(classes))
    result = evaluate_run(RunFolder(copy), device="cpu")[0]
    assert result.corrected is not None
    assert 3 in result.suggestions[:, :8]
    assert 3 not in result.corrected.suggestions[:, :8]


def test_a_run_that_is_killed_at_its_test_ends_as_an_undisturbed_one(
    config: RunConfig, run: RunFolder, tmp_path: Path
) -> None:
    """Even if the correction of another training lies there, which is not used."""
    killed = train_until_test(config, tmp_path / "killed")
    other = run.read_json("correction.json") | {"tau": 3.0, "best_sha256": "of other weights"}
    (killed / "correction.json").write_text(json.dumps(other))
    assert evaluate_run(RunFolder(killed), device="cpu")[0].corrected is None
    train(config, folder=killed, resume=True, quiet=True)
    assert outcome(killed) == outcome(run.path)
    assert RunFolder(killed).read_json("correction.json") == run.read_json("correction.json")


def test_a_run_that_was_killed_before_its_result_was_written_is_corrected(run: RunFolder, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run.path, tmp_path / "copy"))
    (copy / "final.json").unlink()
    corrected = evaluate_run(RunFolder(copy), device="cpu")[0].corrected
    assert corrected is not None
    assert corrected.metrics == run.read_json("final.json")["test_corrected"]


def test_the_command_evaluates_corrected_scores_unless_told_not_to(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    final = run.read_json("final.json")
    shortlist(monkeypatch, "evaluate", run.path, "--device", "cpu")
    printed = capsys.readouterr()
    assert json.loads(printed.out) == final["test_corrected"]
    assert re.search(
        r"tau = 0\.\d+, chosen for macro top-1, 3 on 166 validation images of 9 of 12 classes", printed.err
    )
    assert "evaluated here" not in printed.err
    shortlist(monkeypatch, "evaluate", run.path, "--no-correction", "--device", "cpu")
    printed = capsys.readouterr()
    assert json.loads(printed.out) == final["test"]
    assert "tau" not in printed.err


def test_the_command_says_that_tau_was_chosen_on_the_validation_images(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shortlist(monkeypatch, "evaluate", run.path, "--split", "val", "--device", "cpu")
    printed = capsys.readouterr()
    assert json.loads(printed.out) == run.read_json("correction.json")["val"]
    assert "evaluated here" in printed.err


def test_training_prints_both_results(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--loss.name", "cross_entropy", "--loss.k", 3, "--train.ks", 1, 3, "--train.epochs", 1]
    out = tmp_path / "run"
    shortlist(monkeypatch, "train", "embeddings", "--data.root", config.data.root, *settings, "--out", out)
    final = RunFolder(out).read_json("final.json")
    plain, corrected = capsys.readouterr().out.splitlines()
    assert f"macro_top3 {100 * final['test']['macro_top3']:.2f}%" in plain
    assert f"macro_top3 {100 * final['test_corrected']['macro_top3']:.2f}%" in corrected


def test_suggestions_for_new_images_are_corrected_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every score rises by tau times the log prior of its class."""
    put_classes(tmp_path / "photos", {"elm": 24, "owl": 12})
    run = train(photos_config(tmp_path / "photos", epochs=1), folder=tmp_path / "run", quiet=True).path
    record = json.loads((run / "correction.json").read_text())
    (run / "correction.json").write_text(json.dumps(record | {"tau": 0.5}))
    sizes = torch.tensor(json.loads((run / "classes.json").read_text())["train_images"])
    offsets = dict(zip(("elm", "owl"), (-0.5 * (sizes / sizes.sum()).log()).tolist(), strict=True))
    image = next((tmp_path / "photos" / "elm").iterdir())
    scores = []
    for options in ([], ["--no-correction"]):
        shortlist(monkeypatch, "predict", run, image, "-k", 2, "--json", "--device", "cpu", *options)
        printed = capsys.readouterr()
        assert ("tau = 0.5" in printed.err) == (not options)
        scores.append({guess["name"]: guess["score"] for guess in json.loads(printed.out)["suggestions"]})
    corrected, plain = scores
    assert corrected == {name: pytest.approx(plain[name] + offsets[name], abs=1e-5) for name in offsets}


def test_a_report_shows_both_results_and_what_tau_rests_on(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortlist(monkeypatch, "report", run.path, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    final = run.read_json("final.json")
    for metrics in (final["test"], final["test_corrected"]):
        assert f'<data value="{metrics["macro_top3"]!r}">' in page
    assert "chosen on 166 validation images of 9 of 12 classes" in page
    assert "Scores are not corrected here" in page


@pytest.mark.parametrize(
    "damage",
    [
        None,
        "",
        "[]",
        '{"tau": 1, "metric": "macro_top3", "ks": ["3"]}',
        '{"tau": -1}',
        '{"tau": "x"}',
        '{"tau": 1, "metric": "macro_top3"}',
        '{"tau": 1e999}',
    ],
)
def test_a_damaged_or_missing_record_is_named(run: RunFolder, tmp_path: Path, damage: str | None) -> None:
    copy = Path(shutil.copytree(run.path, tmp_path / "copy"))
    (copy / "correction.json").unlink()
    if damage is not None:
        (copy / "correction.json").write_text(damage)
    with pytest.raises(ShortlistError, match=r"correction\.json"):
        evaluate_run(RunFolder(copy), device="cpu")


def test_a_correction_of_an_earlier_version_rests_on_the_k_of_its_metric(run: RunFolder, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run.path, tmp_path / "copy"))
    record = json.loads((copy / "correction.json").read_text())
    del record["ks"]
    (copy / "correction.json").write_text(json.dumps(record))
    correction = read_correction(RunFolder(copy))
    assert correction is not None
    assert "chosen for macro top-3 on 166" in str(correction)
    assert evaluate_run(RunFolder(copy), device="cpu")[0].corrected is not None


def test_a_result_of_an_earlier_version_is_without_correction(run: RunFolder, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run.path, tmp_path / "copy"))
    (copy / "correction.json").unlink()
    final = json.loads((copy / "final.json").read_text())
    del final["test_corrected"]
    (copy / "final.json").write_text(json.dumps(final))
    assert evaluate_run(RunFolder(copy), device="cpu")[0].corrected is None
