"""What the probabilities and sets of a run are worth: numbers of the images that the sets do not rest on."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shortlist as sl
from shortlist.program.cli import main as cli
from shortlist.program.predicting.calibration import (
    METHODS,
    calibrate,
    fitted_sets,
    log_probabilities,
    read_calibration,
)
from shortlist.program.predicting.certainty import COVERAGES, kept_promises, measured_certainty
from shortlist.program.predicting.reliability import BINS, calibration_error, reliability
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.scores import read_scores, write_scores
from shortlist.program.training.loop import train
from tests.support.scored_runs import CLASSES, COUNTS, drawn, made_run
from tests.support.small_runs import small_config, write_embeddings


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return made_run(tmp_path / "run", drawn(2000, 1), drawn(1500, 2))


def test_every_image_is_in_the_bin_of_its_confidence() -> None:
    probabilities = torch.randn(500, 6, generator=torch.Generator().manual_seed(0)).mul(2).softmax(1)
    labels = torch.randint(6, (500,), generator=torch.Generator().manual_seed(1))
    bins = reliability(probabilities, labels)
    assert sum(found.images for found in bins) == 500
    assert [found.place for found in bins] == sorted({found.place for found in bins})
    right = sum(found.images * found.accuracy for found in bins)
    assert right == pytest.approx((probabilities.argmax(1) == labels).sum().item())
    assert all(found.place / BINS <= found.confidence <= (found.place + 1) / BINS for found in bins)


def test_the_calibration_error_is_the_gap_between_confidence_and_accuracy() -> None:
    def error(confidence: float, correct: int, images: int = 10) -> float | None:
        labels = torch.tensor([0] * correct + [1] * (images - correct))
        return calibration_error(reliability(torch.tensor([[confidence, 1 - confidence]] * images), labels))

    assert error(0.8, 8) == pytest.approx(0, abs=1e-6)
    assert error(0.8, 5) == pytest.approx(0.3, abs=1e-6)
    assert error(1.0, 10) == pytest.approx(0, abs=1e-6)
    assert calibration_error(reliability(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))) is None


def test_gaps_of_different_bins_do_not_cancel() -> None:
    # Half of the images too sure by 0.3, half too unsure by 0.3: right on average, and wrong everywhere.
    probabilities = torch.tensor([[0.9, 0.1]] * 10 + [[0.6, 0.4]] * 10)
    labels = torch.tensor([0] * 6 + [1] * 4 + [0] * 9 + [1])
    assert calibration_error(reliability(probabilities, labels)) == pytest.approx(0.3)


def test_images_that_the_sets_rest_on_are_not_measured(run: RunFolder) -> None:
    found, test = calibrate(run), read_scores(run, "test")
    rest = test.subset(~torch.isin(test.images, torch.tensor(found.set_images)))
    measured = measured_certainty(run, found)
    assert measured.images == len(rest.labels) < len(test.labels)
    log_p = log_probabilities(rest.scores, found, COUNTS)
    for sets in measured.sets:
        metrics = sl.SetMetrics(CLASSES, COUNTS)
        library = fitted_sets(run, found, coverage=sets.coverage, method=METHODS[sets.of])
        metrics.update(library(log_p), rest.labels)
        assert sets.metrics == {name: pytest.approx(value.item()) for name, value in metrics.compute().items()}
    assert [(sets.of, sets.coverage) for sets in measured.sets] == [(of, at) for of in METHODS for at in COVERAGES]
    assert measured.error == found.error, "what calibrate recorded"


@pytest.mark.parametrize("set_images", [[], list(range(1500))])
def test_sets_that_rest_on_all_images_or_none_are_refused(run: RunFolder, set_images: list[int]) -> None:
    calibrate(run)
    run.write_json("calibration.json", run.read_json("calibration.json") | {"set_images": set_images})
    found = read_calibration(run)
    assert found is not None
    with pytest.raises(sl.ShortlistError, match=r"calibration\.json .*set_images"):
        measured_certainty(run, found)


def test_plain_suggestions_have_the_accuracy_of_topk_metrics(run: RunFolder) -> None:
    found, test = calibrate(run), read_scores(run, "test")
    rest = test.subset(~torch.isin(test.images, torch.tensor(found.set_images)))
    metrics = sl.TopKMetrics(CLASSES, ks=tuple(range(1, CLASSES + 1)), class_counts=COUNTS)
    metrics.update(rest.scores, rest.labels)
    accuracy = metrics.compute()
    for sets in measured_certainty(run, found).sets:
        size = sets.metrics["mean_size"]
        assert size is not None
        lower, share = int(size), size - int(size)
        for name in ("micro", "macro", "few", "medium", "many"):
            at = [0.0, *(accuracy[f"{name}_top{k}"].item() for k in range(1, CLASSES + 1)), 1.0]
            between = (1 - share) * at[lower] + share * at[lower + 1]
            assert sets.top_k[f"{name}_coverage"] == pytest.approx(between, abs=1e-6)


def test_sets_beat_plain_suggestions_where_probabilities_are_right(run: RunFolder) -> None:
    for sets in measured_certainty(run, calibrate(run), [0.7, 0.8]).sets:
        name = "macro_coverage" if sets.of == "classes" else "micro_coverage"
        covered, plain = sets.metrics[name], sets.top_k[name]
        assert covered is not None
        assert plain is not None
        assert covered > plain + 0.01


@pytest.mark.parametrize("coverage", [0.7, 0.9])
def test_promises_are_kept_over_many_divisions(run: RunFolder, coverage: float) -> None:
    found = {promise.of: promise for promise in kept_promises(run, calibrate(run), coverage, divisions=60)}
    assert {*found} == {*METHODS}
    rarest = int(read_scores(run, "test").labels.bincount().min()) // 2
    assert found["classes"].highest == pytest.approx(coverage + 1 / rarest / CLASSES, abs=0.01)
    for promise in found.values():
        assert promise.lowest == coverage
        assert promise.is_kept
        assert not replace(promise, coverage=coverage - 3 * promise.standard_error).is_kept
        assert not replace(promise, coverage=promise.highest + 3 * promise.standard_error).is_kept


def test_only_classes_that_can_be_divided_are_promised_anything(tmp_path: Path) -> None:
    test = drawn(400, 2)
    one_each = torch.tensor([int((test.labels == label).nonzero()[0]) for label in range(CLASSES)])
    several = (test.labels != 0).nonzero().flatten()
    lone = test.subset(torch.cat([one_each[:1], several]))
    run = made_run(tmp_path / "run", drawn(500, 1), lone)
    without = made_run(tmp_path / "without", drawn(500, 1), test.subset(several))
    ours, theirs = (kept_promises(folder, calibrate(folder), 0.8, 10) for folder in (run, without))
    assert [promise.highest for promise in ours] == [promise.highest for promise in theirs]
    write_scores(run, val=drawn(500, 1), test=test.subset(one_each))
    with pytest.raises(sl.ShortlistError, match="no class with two test images"):
        kept_promises(run, calibrate(run), 0.8, 10)


def test_calibrate_tells_whether_promises_are_kept(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shortlist", "calibrate", str(run.path), "--divisions", "20"])
    cli.main()
    told = capsys.readouterr().out.partition("over 20 divisions")[2].splitlines()[1:]
    for line, promise in zip(told, kept_promises(run, calibrate(run), 0.9, 20), strict=True):
        assert f"{100 * promise.coverage:.2f}" in line
        assert line.rstrip().endswith("yes" if promise.is_kept else "no")


def test_evaluate_tells_what_probabilities_and_sets_are_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_embeddings(tmp_path / "points.npz", images=200)
    run = train(small_config(data), folder=tmp_path / "run", quiet=True)

    def evaluated(*arguments: str) -> dict[str, object]:
        monkeypatch.setattr(sys, "argv", ["shortlist", "evaluate", str(run.path), *arguments])
        cli.main()
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    before = evaluated()
    measured = measured_certainty(run, calibrate(run))
    after = evaluated()
    assert {name: after[name] for name in before} == before
    assert after["calibration_error"] == measured.error
    assert [sets["metrics"] for sets in after["sets"]] == [sets.metrics for sets in measured.sets]  # type: ignore[attr-defined]
    assert "sets" not in evaluated("--split", "val"), "the calibration was chosen on these images"
    (run.path / "scores.safetensors").unlink()
    assert evaluated() == before, "a copy without scores has its accuracies"
