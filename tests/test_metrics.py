"""TopKMetrics against a slow version that counts image by image."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shortlist as sl
from shortlist import functional as F
from tests.support.drawing import normal
from tests.support.metric_cases import KS, L, approximately, counted, draw_batch, numbers


def slow_metrics(
    scores: np.ndarray[Any, Any],
    labels: Sequence[int],
    ks: Sequence[int],
    class_counts: Sequence[int],
    ties: str = "correct",
) -> dict[str, float]:
    """Correct at K: fewer than K scores are above the label's (or, if ties are wrong, not below it)."""
    result: dict[str, float] = {}
    classes = sorted(set(labels))
    groups = {
        "macro": classes,
        "few": [c for c in classes if class_counts[c] < 20],
        "medium": [c for c in classes if 20 <= class_counts[c] <= 100],
        "many": [c for c in classes if class_counts[c] > 100],
    }
    for k in ks:
        rows = list(zip(scores, labels, strict=True))
        lenient = [sum(other > row[label] for other in row) < k for row, label in rows]
        strict = [sum(other >= row[label] for other in np.delete(row, label)) < k for row, label in rows]
        correct = lenient if ties == "correct" else strict
        result[f"tied_top{k}"] = sum(a and not b for a, b in zip(lenient, strict, strict=True)) / len(rows)
        result[f"micro_top{k}"] = sum(correct) / len(correct)
        by_class = {
            c: np.mean([right for right, label in zip(correct, labels, strict=True) if label == c]) for c in classes
        }
        for name, members in groups.items():
            result[f"{name}_top{k}"] = float(np.mean([by_class[c] for c in members])) if members else math.nan
    result["absent_classes"] = len(class_counts) - len(classes)
    return result


# What is counted


@given(data=st.data())
def test_the_metrics_are_those_of_the_slow_version(data: st.DataObject) -> None:
    num_classes = data.draw(st.integers(2, 6), label="num_classes")
    n = data.draw(st.integers(1, 12), label="n")
    row = st.lists(st.integers(-2, 2), min_size=num_classes, max_size=num_classes)
    rows = data.draw(st.lists(row, min_size=n, max_size=n), label="rows")
    labels = data.draw(st.lists(st.integers(0, num_classes - 1), min_size=n, max_size=n), label="labels")
    ks = data.draw(st.lists(st.integers(1, num_classes), min_size=1, unique=True), label="ks")
    count = st.sampled_from([0, 1, 19, 20, 100, 101, 1000])
    class_counts = data.draw(st.lists(count, min_size=num_classes, max_size=num_classes), label="class_counts")
    cut = data.draw(st.integers(0, n), label="cut")

    ties: Any = data.draw(st.sampled_from(["correct", "wrong"]), label="ties")

    metrics = sl.TopKMetrics(num_classes, ks=ks, class_counts=class_counts, ties=ties)
    scores, target = torch.tensor(rows, dtype=torch.float32), torch.tensor(labels)
    metrics.update(scores[:cut], target[:cut])
    metrics.update(scores[cut:], target[cut:])
    assert numbers(metrics.compute()) == approximately(slow_metrics(np.array(rows), labels, ks, class_counts, ties))


def test_a_tie_with_the_kth_counts_as_correct() -> None:
    scores = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]])
    result = counted((scores, torch.tensor([3])), ks=(1, 2)).compute()
    assert result["micro_top1"] == 0
    assert result["micro_top2"] == 1


def test_equal_scores_are_correct_at_every_k() -> None:
    result = counted((torch.zeros(4, L), torch.tensor([0, 1, 2, 4]))).compute()
    assert [result[f"micro_top{k}"] for k in KS] == [1, 1, 1]
    assert [result[f"tied_top{k}"] for k in KS] == [1, 1, 1], "and it is said that they tell nothing"
    result = counted((torch.zeros(4, L), torch.tensor([0, 1, 2, 4])), ks=(1, L), ties="wrong").compute()
    assert result["micro_top1"] == 0
    assert result["tied_top1"] == 1
    assert result[f"micro_top{L}"] == 1
    assert result[f"tied_top{L}"] == 0, "any order puts it among all classes"


@pytest.mark.parametrize("ties", ["correct", "wrong"])
def test_a_label_whose_score_is_nan_is_wrong_however_ties_count(ties: str) -> None:
    scores = torch.tensor([[1.0, math.nan, 0.0, 0.0, 0.0]])
    result = counted((scores, torch.tensor([1])), ks=(1, L), ties=ties).compute()
    assert result["micro_top1"] == result[f"micro_top{L}"] == result[f"tied_top{L}"] == 0


@pytest.mark.parametrize("ignored", [-100, 2, 255])
def test_images_with_the_ignored_label_are_not_counted(ignored: int) -> None:
    scores, target = draw_batch(20)
    target = torch.where(torch.arange(20) % 3 == 0, ignored, target)
    scores[0] = math.nan
    want = counted((scores[target != ignored], target[target != ignored]))
    got = counted((scores, target), ignore_index=ignored)
    assert numbers(got.compute()) == approximately(numbers(want.compute()))


def test_the_macro_mean_is_over_the_classes_that_occur_at_every_k_alike() -> None:
    # Class 4 is predicted but absent, class 3 is neither: both are left out.
    scores = torch.eye(L)[[0, 0, 4, 4, 2, 2]]
    target = torch.tensor([0, 0, 0, 1, 2, 2])
    result = counted((scores, target), ks=(1, 5)).compute()
    assert result["macro_top1"].item() == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert result["macro_top5"] == 1
    assert result["absent_classes"] == 2


def test_few_below_20_medium_up_to_100_many_above() -> None:
    metrics = sl.TopKMetrics(6, ks=(1,), class_counts=[0, 19, 20, 100, 101, 5000])
    # The odd classes are correct. More images of class 1 do not increase its weight.
    metrics.update(torch.eye(6)[[1, 1, 3, 3, 5, 5]], torch.arange(6))
    metrics.update(torch.eye(6)[[1, 1]], torch.tensor([1, 1]))
    result = metrics.compute()
    assert [result[f"{group}_top1"] for group in ("few", "medium", "many")] == [0.5, 0.5, 0.5]

    for count, group in [(0, "few"), (19, "few"), (20, "medium"), (100, "medium"), (101, "many")]:
        alone = sl.TopKMetrics(2, ks=(1,), class_counts=[count, 1])
        alone.update(torch.eye(2)[[0]], torch.tensor([0]))
        present = {name for name in ("few", "medium", "many") if not alone.compute()[f"{name}_top1"].isnan()}
        assert present == {group}


def test_a_group_without_images_is_nan_and_leaves_the_rest_alone() -> None:
    result = counted((torch.eye(L), torch.arange(L)), class_counts=[1, 2, 3, 4, 5]).compute()
    assert result["few_top1"] == result["macro_top1"] == 1
    assert result["medium_top1"].isnan()
    assert result["many_top1"].isnan()


def test_without_class_counts_there_are_no_groups() -> None:
    result = counted((torch.eye(L), torch.arange(L)), class_counts=None, ks=(3, 1)).compute()
    assert list(result) == [
        *("micro_top3", "macro_top3", "tied_top3"),
        *("micro_top1", "macro_top1", "tied_top1"),
        "absent_classes",
    ]


def test_the_accuracy_of_each_class_is_nan_where_it_does_not_occur() -> None:
    scores, target = torch.eye(L)[[0, 1, 2]], torch.tensor([0, 0, 2])
    by_class = counted((scores, target), ks=(1,)).per_class()
    torch.testing.assert_close(by_class, {1: torch.tensor([0.5, math.nan, 1.0, math.nan, math.nan])}, equal_nan=True)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_the_micro_accuracy_is_one_minus_the_topk_error(k: int, dtype: torch.dtype) -> None:
    scores, target = draw_batch(40)
    scores = scores.to(dtype)
    error = F.topk_error(scores, target, k, reduction="none").float().mean()
    assert 0 < error < 1
    torch.testing.assert_close(counted((scores, target)).compute()[f"micro_top{k}"], 1 - error)


# NaN and infinity


def test_a_label_whose_score_is_nan_is_wrong_at_every_k() -> None:
    scores = torch.tensor([[math.nan, 0.0, 0.0, 0.0, 0.0]])
    result = counted((scores, torch.tensor([0])), ks=(1, 5)).compute()
    assert result["micro_top1"] == result["micro_top5"] == 0


def test_a_nan_beside_the_label_counts_as_above() -> None:
    scores = torch.tensor([[9.0, math.nan, 0.0, math.nan, 0.0]])
    result = counted((scores, torch.tensor([0])), ks=(2, 3)).compute()
    assert result["micro_top2"] == 0
    assert result["micro_top3"] == 1


def test_infinite_scores_are_ranked_as_any_other() -> None:
    scores = torch.tensor([[math.inf, 0.0, -math.inf, math.inf, 1.0]]).expand(3, L)
    result = counted((scores, torch.tensor([3, 4, 2])), ks=(1, 3, 4, 5)).compute()
    assert [round(3 * result[f"micro_top{k}"].item()) for k in (1, 3, 4, 5)] == [1, 2, 2, 3]


# How the images arrive


def test_how_images_are_divided_into_batches_does_not_matter() -> None:
    scores, target = draw_batch(23)
    want = numbers(counted((scores, target)).compute())
    for sizes in ([1] * 23, [0, 5, 0, 17, 1], [22, 1]):
        batches = zip(scores.split(sizes), target.split(sizes), strict=True)
        assert numbers(counted(*batches).compute()) == approximately(want)


def test_one_row_counts_as_a_batch_of_one() -> None:
    scores, target = draw_batch(6)
    rows = counted(*zip(scores, target, strict=True))
    assert numbers(rows.compute()) == approximately(numbers(counted((scores, target)).compute()))


def test_further_dimensions_count_as_more_images() -> None:
    scores, target = draw_batch(12)
    folded = scores.unflatten(0, (3, 2, 2)).movedim(-1, 1), target.unflatten(0, (3, 2, 2))
    assert folded[0].shape == (3, L, 2, 2)
    assert numbers(counted(folded).compute()) == approximately(numbers(counted((scores, target)).compute()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_scores_count_as_what_they_are(dtype: torch.dtype) -> None:
    scores, target = normal(30, L, dtype=dtype), torch.arange(30) % L
    want = numbers(counted((scores.double(), target)).compute())
    assert numbers(counted((scores, target)).compute()) == approximately(want)


# Errors


@pytest.mark.parametrize("num_classes", [L - 1, L + 1])
def test_scores_must_have_the_number_of_classes_announced(num_classes: int) -> None:
    with pytest.raises(sl.ShortlistError, match=f"scores must have {L} classes, got {num_classes}"):
        counted((torch.zeros(3, num_classes), torch.zeros(3, dtype=torch.int64)))


def test_probabilities_are_no_labels() -> None:
    with pytest.raises(sl.ShortlistError, match=r"target must be int64 labels, got probabilities \(torch.float32\)"):
        counted((torch.zeros(3, L), torch.zeros(3, L)))


@pytest.mark.parametrize("label", [-1, L, -99])
def test_a_label_out_of_range_is_an_error_and_counts_nothing(label: int) -> None:
    metrics = counted(draw_batch(9))
    with pytest.raises(
        sl.ShortlistError, match=rf"target must be in \[0, {L - 1}\] or be ignore_index \(-100\), got {label}"
    ):
        metrics.update(torch.zeros(2, L), torch.tensor([0, label]))
    assert numbers(metrics.compute()) == approximately(numbers(counted(draw_batch(9)).compute()))


@pytest.mark.parametrize("ks", [(1, 1), (3, 1, 3)], ids=str)
def test_ks_must_be_different(ks: tuple[int, ...]) -> None:
    with pytest.raises(sl.ShortlistError, match="ks must be different values of K, got " + re.escape(str(ks))):
        sl.TopKMetrics(L, ks=ks)


@pytest.mark.parametrize("num_classes", [0, -1, 2.5])
def test_the_number_of_classes_must_be_a_positive_integer(num_classes: Any) -> None:
    with pytest.raises(sl.ShortlistError, match=f"num_classes must be .*, got {num_classes}"):
        sl.TopKMetrics(num_classes, ks=(1,))


@pytest.mark.parametrize("ks", [5, None, "1", 1.5, (), torch.tensor(2)])
def test_ks_must_be_a_list_of_numbers(ks: Any) -> None:
    with pytest.raises(sl.ShortlistError, match=r"ks must be .*such as \(1, 5\), got"):
        sl.TopKMetrics(L, ks=ks)


def test_ties_count_in_one_of_two_ways() -> None:
    with pytest.raises(sl.ShortlistError, match=r"ties must be one of .*correct.*wrong.*, got 'strict'"):
        sl.TopKMetrics(L, ties="strict")  # type: ignore[arg-type]
