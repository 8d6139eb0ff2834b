"""Prediction sets keep their promises, and are those of the methods' authors."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shortlist as sl
from shortlist.sets import group_thresholds, macro_threshold

REFERENCE = json.loads(Path(__file__).with_name("conformal_reference.json").read_text())
TORCHCP = json.loads(Path(__file__).with_name("torchcp_reference.json").read_text())
METHODS = ("marginal", "pas", "interp_q", "classwise", "clustered", "macro")
CLASSES = 8


def problem(images: int, seed: int = 0, classes: int = CLASSES) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, labels drawn by their softmax, so that it is true, and class sizes; a long tail."""
    generator = torch.Generator().manual_seed(seed)
    prior = 20.0 ** -torch.linspace(0, 1, classes, dtype=torch.float64)
    scores = 2 * torch.randn(images, classes, generator=generator, dtype=torch.float64) + prior.log()
    labels = torch.multinomial(scores.softmax(1), 1, generator=generator).squeeze(1)
    return scores, labels, (prior * 400).round().long()


def calibrated(method: Any, images: int = 400, coverage: float = 0.8, **settings: Any) -> sl.PredictionSets:
    scores, labels, counts = problem(images)
    return sl.PredictionSets(coverage, method, **settings).calibrate(scores, labels, counts)


# The authors' own programs


every_problem = pytest.mark.parametrize("case", range(len(REFERENCE)))
both_coverages = pytest.mark.parametrize("coverage", ["0.9", "0.8"])


def assert_like_theirs(stored: dict[str, Any], sets: sl.PredictionSets, theirs: dict[str, list[str]]) -> None:
    """The thresholds of calibrated sets, and what they say about the test images of a stored problem."""
    scores, tested = (torch.tensor(stored[part], dtype=torch.float64).log() for part in ("cal", "test"))
    sets.calibrate(scores, torch.tensor(stored["labels"]), stored["class_counts"])
    # Theirs are limits on 1 - confidence; none is infinity.
    limits = torch.tensor([float(limit) for limit in theirs["limits"]], dtype=torch.float64)
    ours = torch.where(sets.thresholds.isinf(), math.inf, 1 - sets.thresholds.exp())
    torch.testing.assert_close(ours, limits, rtol=1e-9, atol=1e-9)
    found = ["".join("01"[inside] for inside in row) for row in sets(tested).int().tolist()]
    # A class exactly at its limit may fall to either side by rounding; the calibration images are not tested here.
    assert found == theirs["sets"]


@every_problem
@both_coverages
@pytest.mark.parametrize("name", ["marginal", "classwise", "pas", "macro", "interp_q 0.5", "interp_q 0.999"])
def test_thresholds_and_sets_are_those_of_the_authors(case: int, coverage: str, name: str) -> None:
    method: Any = name.partition(" ")[0]
    weight = name.partition(" ")[2]
    sets = sl.PredictionSets(float(coverage), method, interpolation=float(weight or 1))
    assert_like_theirs(REFERENCE[case], sets, REFERENCE[case]["found"][coverage][name])


@every_problem
@both_coverages
@pytest.mark.parametrize("method", ["marginal", "classwise"])
def test_thresholds_and_sets_are_those_of_torchcp(case: int, coverage: str, method: Any) -> None:
    sets = sl.PredictionSets(float(coverage), method)
    assert_like_theirs(REFERENCE[case], sets, TORCHCP[case][coverage][method])


# Promises


def mean_coverage(method: Any, coverage: float, images: int, repeats: int = 300) -> tuple[float, float, float]:
    """Over many draws of calibration and test images: coverage as promised, its standard error, the promise's slack."""
    values, slack = [], []
    for seed in range(repeats):
        scores, labels, counts = problem(images + 300, seed)
        sets = sl.PredictionSets(coverage, method).calibrate(scores[:images], labels[:images], counts)
        seen = labels[:images].bincount(minlength=CLASSES)
        metrics = sl.SetMetrics(CLASSES)
        metrics.update(sets(scores[images:]), labels[images:])
        if method == "macro":
            both = (seen > 0) & (metrics.seen > 0)
            values.append(metrics.per_class()[both].mean().item())
            slack.append(1 / (int((seen > 0).sum()) * int(seen[seen > 0].min())))
        else:
            values.append(metrics.compute()["micro_coverage"].item())
            slack.append(1 / (images + 1))
    return float(np.mean(values)), float(np.std(values) / math.sqrt(repeats)), float(np.mean(slack))


@pytest.mark.parametrize("method", ["marginal", "pas"])
@pytest.mark.parametrize("coverage", [0.8, 0.9])
def test_the_coverage_of_images_is_as_promised(method: Any, coverage: float) -> None:
    mean, error, slack = mean_coverage(method, coverage, images=60)
    assert coverage - 4 * error <= mean <= coverage + slack + 4 * error


def test_the_coverage_averaged_over_classes_is_as_promised() -> None:
    mean, error, slack = mean_coverage("macro", 0.8, images=200)
    assert 0.8 - 4 * error <= mean <= 0.8 + slack + 4 * error
    assert error < 0.01


def test_a_class_with_enough_images_is_covered_class_by_class() -> None:
    covered = torch.zeros(CLASSES)
    seen = torch.zeros(CLASSES)
    for seed in range(200):
        scores, labels, _ = problem(900, seed)
        sets = sl.PredictionSets(0.8, "classwise").calibrate(scores[:600], labels[:600])
        metrics = sl.SetMetrics(CLASSES)
        metrics.update(sets(scores[600:]), labels[600:])
        covered, seen = covered + metrics.covered, seen + metrics.seen
    coverage = covered / seen
    assert (coverage > 0.8 - 4 * (0.16 / seen).sqrt() - 0.005).all()
    assert (coverage < 0.8 + 0.1).all()


@pytest.mark.parametrize("average_k", [0.5, 1, 2.5, 3])
@pytest.mark.parametrize("method", ["marginal", "macro"])
def test_sets_have_the_mean_size_that_was_asked_for(average_k: float, method: Any) -> None:
    scores, labels, counts = problem(400)
    sets = sl.PredictionSets(method=method, average_k=average_k).calibrate(scores, labels, counts)
    assert sets(scores).sum().item() == round(average_k * 400)
    assert sets(problem(4000, seed=1)[0]).sum(1).double().mean().item() == pytest.approx(average_k, abs=0.2)


def test_the_mean_size_does_not_depend_on_working_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = calibrated("macro", average_k=2)
    macro = calibrated("macro")
    monkeypatch.setattr("shortlist.sets._AT_ONCE", 7 * CLASSES)
    assert torch.equal(calibrated("macro", average_k=2).thresholds, whole.thresholds)
    assert torch.equal(calibrated("macro").thresholds, macro.thresholds)


# Laws


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60),
    st.sampled_from([0.1, 0.5, 0.8, 0.9, 0.99]),
    st.randoms(use_true_random=False),
)
def test_a_threshold_is_the_rank_that_it_should_be(values: list[int], coverage: float, random: Any) -> None:
    groups = [random.randrange(3) for _ in values]
    own = torch.tensor(values, dtype=torch.float64)
    found = group_thresholds(own, torch.tensor(groups), 3, coverage).tolist()
    for group, threshold in enumerate(found):
        members = sorted((value for value, of in zip(values, groups, strict=True) if of == group), reverse=True)
        rank = math.ceil(round((len(members) + 1) * coverage, 6))
        assert threshold == (members[rank - 1] if rank <= len(members) else -math.inf)


def test_a_rank_that_is_whole_but_for_rounding_is_not_rounded_up() -> None:
    assert 100 * 0.55 > 55
    own = torch.arange(99, dtype=torch.float64)
    assert group_thresholds(own, torch.zeros(99, dtype=torch.int64), 1, 0.55).item() == 44, "the 55th largest"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=60), st.floats(0.05, 0.95))
def test_the_macro_threshold_is_the_highest_that_keeps_its_promise(
    pairs: list[tuple[int, int]], coverage: float
) -> None:
    own, target = (torch.tensor(column) for column in zip(*pairs, strict=True))
    threshold = macro_threshold(own.double(), target, coverage).item()
    counts = {label: [of for _, of in pairs].count(label) for _, label in pairs}

    def reached(limit: float) -> float:
        return sum(1 / (len(counts) * counts[label]) for value, label in pairs if value >= limit)

    needed = coverage + max(1 / (len(counts) * count) for count in counts.values())
    higher = [value for value, _ in pairs if value > threshold]
    if threshold == -math.inf:
        assert needed > 1 - 1e-6
    else:
        assert reached(threshold) >= needed - 1e-6
    assert not higher or reached(min(higher)) <= needed + 1e-6 or needed > 1 - 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_more_coverage_means_larger_sets(method: Any) -> None:
    scores = problem(200, seed=5)[0]
    small, large = (calibrated(method, images=1500, coverage=coverage)(scores) for coverage in (0.6, 0.9))
    if method != "clustered":  # other clusters may form
        assert (small <= large).all()
    assert small.sum() < large.sum()


@pytest.mark.parametrize("method", METHODS)
def test_a_shift_of_all_scores_changes_nothing_and_classes_may_be_renumbered(method: Any) -> None:
    scores, labels, counts = problem(600)
    tested = problem(100, seed=3)[0]
    sets = calibrated(method, images=600)(tested)
    order = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(0))
    renumbered = sl.PredictionSets(0.8, method).calibrate(scores[:, order] + 7, order.argsort()[labels], counts[order])
    assert torch.equal(renumbered(tested[:, order] - 3), sets[:, order])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["marginal", "pas", "macro"])
def test_the_label_that_gave_the_threshold_is_inside(method: Any, dtype: torch.dtype) -> None:
    scores, labels, counts = problem(700)
    for seed in range(20):
        some = torch.randperm(700, generator=torch.Generator().manual_seed(seed))[:60]
        given = scores[some].to(dtype)
        sets = sl.PredictionSets(0.7, method).calibrate(given, labels[some], counts)
        own = given.to(max(dtype, torch.float32, key=lambda kind: kind.itemsize)).log_softmax(1).double()
        own = (own - sets.log_prior).gather(1, labels[some].unsqueeze(1)).squeeze(1)
        at_threshold = own == sets.thresholds[0]
        assert at_threshold.any()
        assert sets(given).gather(1, labels[some].unsqueeze(1)).squeeze(1)[at_threshold].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_many_scores_and_any_shape_give_the_same_sets(dtype: torch.dtype) -> None:
    classes = 1000
    generator = torch.Generator().manual_seed(0)
    scores = (3 * torch.randn(1200, classes, generator=generator)).to(dtype)  # more than a CPU looks at in one go
    labels = torch.randint(classes, (1200,), generator=generator)
    sets = sl.PredictionSets(0.8, "macro").calibrate(scores, labels, 1 + torch.arange(classes))
    lead = scores.double().log_softmax(1) - sets.log_prior - sets.thresholds
    found = sets(scores)
    assert torch.equal(found | (lead.abs() < 1e-4), (lead > 0) | (lead.abs() < 1e-4))
    assert torch.equal(sets(scores.view(3, 400, classes)), found.view(3, 400, classes))
    assert torch.equal(sets(scores[7]), found[7])
    assert sets(scores[:0]).shape == (0, classes)
    assert torch.equal(torch.func.vmap(sets)(scores[:5]), found[:5])


def test_rare_classes_gain_by_the_prior_at_the_same_mean_size() -> None:
    scores, labels, counts = problem(3000)
    tested, true, _ = problem(3000, seed=1)
    found = {}
    for method in ("marginal", "macro"):
        sets = sl.PredictionSets(method=method, average_k=2).calibrate(scores, labels, counts)
        metrics = sl.SetMetrics(CLASSES)
        metrics.update(sets(tested), true)
        found[method] = metrics.compute()
    assert found["macro"]["macro_coverage"] > found["marginal"]["macro_coverage"] + 0.01
    assert found["macro"]["micro_coverage"] < found["marginal"]["micro_coverage"]


def test_a_largest_size_keeps_the_most_confident_classes() -> None:
    scores = problem(300, seed=2)[0]
    sets = calibrated("marginal", coverage=0.95)
    whole, capped = sets(scores), sets(scores, max_k=2)
    assert (capped.sum(1) == whole.sum(1).clamp(max=2)).all()
    top = torch.zeros_like(whole).scatter_(1, scores.topk(2).indices, True)
    assert torch.equal(capped, whole & top)


def two_kinds(images: int, seed: int = 0, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Scores and labels: half of the classes are easy, half are hard. Every class has ``images`` images."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat(images)
    ease = torch.where(torch.arange(classes) < classes // 2, 6.0, 1.0)
    scores = torch.randn(len(labels), classes, generator=generator)
    return scores.scatter_add(1, labels.unsqueeze(1), ease[labels].unsqueeze(1)), labels


def test_clusters_separate_classes_with_other_confidences() -> None:
    sets = sl.PredictionSets(0.9, "clustered", clusters=2).calibrate(*two_kinds(400))
    easy, hard = sets.thresholds[:5].unique(), sets.thresholds[5:].unique()
    assert (len(easy), len(hard)) == (1, 1)
    assert easy > hard


def test_classes_with_few_images_have_the_common_threshold() -> None:
    scores, labels = two_kinds(400)
    rare = labels.ne(3) | (torch.arange(len(labels)) < 40)  # four images of class 3 are left
    scores, labels = scores[rare], labels[rare]
    clustered, common = (
        sl.PredictionSets(0.9, method, clusters=2).calibrate(scores, labels).thresholds
        for method in ("clustered", "marginal")
    )
    assert clustered[3] == common[3]
    assert len(clustered.unique()) == 3
    few = sl.PredictionSets(0.9, "clustered", clusters=2).calibrate(scores[:40], labels[:40])
    assert len(few.thresholds.unique()) == 1


def test_images_that_find_the_clusters_give_no_threshold() -> None:
    share = (400 * 10 // 85) / 400  # the authors' rule, for 10 classes of 400 images
    place = torch.arange(400).repeat_interleave(10)
    finds = ((place + 1) * share).floor() > (place * share).floor()
    for seed in range(20):
        scores, labels = two_kinds(400, seed)
        sets = sl.PredictionSets(0.9, "clustered", clusters=2).calibrate(scores, labels)
        own = scores.log_softmax(1)[torch.arange(len(labels)), labels].double()
        assert torch.isin(sets.thresholds, own[~finds]).all()


# As a module


@pytest.mark.parametrize("method", METHODS)
def test_the_state_can_be_saved_and_loaded(method: Any) -> None:
    sets = calibrated(method)
    fresh = sl.PredictionSets(0.8, method)
    fresh.load_state_dict(sets.state_dict())
    scores = problem(50, seed=9)[0]
    assert torch.equal(fresh(scores), sets(scores))
    assert fresh.half().thresholds.dtype == torch.float64
    assert int(fresh.images) == int(fresh.class_images.sum()) == 400
    assert "images=400" in repr(fresh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_calibration_images_at_the_threshold_are_inside(dtype: torch.dtype) -> None:
    scores, labels, counts = problem(400)
    scores = scores.to(dtype)
    for method in ("marginal", "macro"):
        sets = sl.PredictionSets(0.8, method).calibrate(scores, labels, counts)
        covered = sets(scores)[torch.arange(400), labels].double()
        weight = torch.ones(400) / 400 if method == "marginal" else 1 / (CLASSES * labels.bincount()[labels])
        assert (covered * weight).sum() >= 0.8 - 1e-6


def test_any_batch_shape_is_taken() -> None:
    sets, scores = calibrated("pas"), problem(24)[0]
    assert torch.equal(sets(scores.view(2, 3, 4, CLASSES)).view(24, CLASSES), sets(scores))
    assert torch.equal(sets(scores[0]), sets(scores)[0])


def test_bad_arguments_are_named() -> None:
    scores, labels, counts = problem(50)
    for coverage in (0, 1, 1.5, -0.1, True, "0.9", math.nan):
        with pytest.raises(sl.ShortlistError, match="coverage"):
            sl.PredictionSets(coverage)  # type: ignore[arg-type]
    with pytest.raises(sl.ShortlistError, match=r"method .*'nonsense'"):
        sl.PredictionSets(0.9, "nonsense")  # type: ignore[arg-type]
    with pytest.raises(sl.ShortlistError, match="average_k"):
        sl.PredictionSets(average_k=0)
    with pytest.raises(sl.ShortlistError, match="classwise"):
        sl.PredictionSets(method="classwise", average_k=2)
    with pytest.raises(sl.ShortlistError, match=r"interpolation .*2"):
        sl.PredictionSets(method="interp_q", interpolation=2)
    with pytest.raises(sl.ShortlistError, match="clusters"):
        sl.PredictionSets(method="clustered", clusters=0)
    with pytest.raises(sl.ShortlistError, match="calibrate"):
        sl.PredictionSets()(scores)
    with pytest.raises(sl.ShortlistError, match=r"class_counts .*macro"):
        sl.PredictionSets().calibrate(scores, labels)
    with pytest.raises(sl.ShortlistError, match=r"class_counts .*8.* 3"):
        sl.PredictionSets().calibrate(scores, labels, counts[:3])
    with pytest.raises(sl.ShortlistError, match="target"):
        sl.PredictionSets(method="marginal").calibrate(scores, labels[:3])
    with pytest.raises(sl.ShortlistError, match="none"):
        sl.PredictionSets(method="marginal").calibrate(scores[:0], labels[:0])
    with pytest.raises(sl.ShortlistError, match="finite"):
        sl.PredictionSets(method="marginal").calibrate(scores * math.inf, labels)
    with pytest.raises(sl.ShortlistError, match=r"average_k .*8.* 8\.5"):
        sl.PredictionSets(average_k=8.5).calibrate(scores, labels, counts)
    sets = calibrated("marginal")
    with pytest.raises(sl.ShortlistError, match=r"\(\.\.\., 8\).*\(5, 7\)"):
        sets(torch.zeros(5, 7))
    with pytest.raises(sl.ShortlistError, match=r"k .*9"):
        sets(scores, max_k=9)


# Metrics


def test_metrics_count_what_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    sets = torch.rand(200, 6, generator=generator) < 0.4
    labels = torch.randint(5, (200,), generator=generator)  # class 5 does not occur
    metrics = sl.SetMetrics(6, class_counts=[5, 10, 50, 60, 500, 1])
    for part in torch.arange(200).split(33):
        metrics.update(sets[part], labels[part])
    result = {name: value.item() for name, value in metrics.compute().items()}
    covered = sets[torch.arange(200), labels].double()
    by_class = [covered[labels == label].mean().item() for label in range(5)]
    assert result["mean_size"] == pytest.approx(sets.sum().item() / 200)
    assert result["empty"] == pytest.approx((sets.sum(1) == 0).double().mean().item())
    assert result["micro_coverage"] == pytest.approx(covered.mean().item())
    assert result["macro_coverage"] == pytest.approx(np.mean(by_class))
    assert result["few_coverage"] == pytest.approx(np.mean(by_class[:2]))
    assert result["medium_coverage"] == pytest.approx(np.mean(by_class[2:4]))
    assert result["many_coverage"] == pytest.approx(by_class[4])
    assert result["classes_below_half"] == pytest.approx(np.mean([value < 0.5 for value in by_class]))
    assert result["absent_classes"] == 1
    metrics.reset()
    metrics.update(sets[:1], labels[:1])
    assert metrics.compute()["mean_size"] == sets[0].sum()


def test_metrics_refuse_scores_in_place_of_sets() -> None:
    metrics = sl.SetMetrics(4)
    with pytest.raises(sl.ShortlistError, match=r"sets .*float32"):
        metrics.update(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(sl.ShortlistError, match=r"sets .*\(2, 3\)"):
        metrics.update(torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(sl.ShortlistError, match="target"):
        metrics.update(torch.zeros(2, 4, dtype=torch.bool), torch.tensor([0, 4]))
