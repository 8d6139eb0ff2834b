"""TopKMetrics as a ``torchmetrics.Metric``: collections, copies, devices, ranks."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchmetrics import MetricCollection

import shortlist as sl
from tests.support.metric_cases import COUNTS, KS, L, approximately, counted, draw_batch, numbers, states
from tests.support.processes import run_ranks


def test_metrics_that_ignore_different_labels_do_not_become_one_in_a_collection() -> None:
    collection = MetricCollection({f"without{i}": sl.TopKMetrics(L, ks=(1,), ignore_index=i) for i in (0, -100)})
    for target in (1, 0):  # the states agree after the first batch
        collection.update(torch.eye(L)[[1]], torch.tensor([target]))
    got = collection.compute()
    assert got["without0_micro_top1"] == 1
    assert got["without-100_micro_top1"] == 0.5


def test_both_ways_to_count_ties_fit_one_collection() -> None:
    collection = MetricCollection({ties: sl.TopKMetrics(L, ks=(1,), ties=ties) for ties in ("correct", "wrong")})
    for scores in (torch.eye(L)[[1]], torch.zeros(1, L)):
        collection.update(scores, torch.tensor([1]))
    got = collection.compute()
    assert got["correct_micro_top1"] == 1
    assert got["wrong_micro_top1"] == 0.5
    assert got["wrong_tied_top1"] == 0.5


def test_reset_forgets_every_image() -> None:
    metrics = counted(draw_batch(9))
    metrics.reset()
    metrics.update(*draw_batch(11, seed=1))
    assert numbers(metrics.compute()) == approximately(numbers(counted(draw_batch(11, seed=1)).compute()))


def test_calling_it_gives_the_metrics_of_the_batch_and_counts_it() -> None:
    metrics = sl.TopKMetrics(L, ks=KS, class_counts=COUNTS)
    first, second = draw_batch(9), draw_batch(6, seed=1)
    for batch in (first, second):
        assert numbers(metrics(*batch)) == approximately(numbers(counted(batch).compute()))
    assert numbers(metrics.compute()) == approximately(numbers(counted(first, second).compute()))


def test_it_works_in_a_collection() -> None:
    collection = MetricCollection([sl.TopKMetrics(L, ks=KS, class_counts=COUNTS)], prefix="val_")
    want = {f"val_{name}": value for name, value in numbers(counted(draw_batch(9)).compute()).items()}
    assert numbers(collection(*draw_batch(9))) == approximately(want)
    assert numbers(collection.compute()) == approximately(want)


def test_two_in_a_collection_do_not_become_one() -> None:
    # A collection merges metrics whose states are equal after the first batch; here both are correct everywhere.
    collection = MetricCollection({f"at{k}": sl.TopKMetrics(L, ks=(k,)) for k in (1, 2)})
    second_best = torch.tensor([[9.0, 8.0, 0.0, 0.0, 0.0]]), torch.tensor([1])
    for batch in ((torch.eye(L), torch.arange(L)), second_best):
        collection.update(*batch)
    got = collection.compute()
    assert got["at1_micro_top1"].item() == pytest.approx(L / (L + 1))
    assert got["at2_micro_top2"] == 1


def test_moving_it_moves_all_that_it_holds() -> None:
    metrics = counted(draw_batch(9)).to("meta")
    assert metrics.class_counts is not None
    assert {tensor.device.type for tensor in (*states(metrics), metrics.class_counts)} == {"meta"}


@pytest.mark.parametrize(
    "convert",
    [
        lambda metrics: metrics.half(),
        lambda metrics: metrics.to(torch.float64),
        lambda metrics: metrics.set_dtype(torch.float64),
    ],
)
def test_a_change_of_dtype_leaves_the_counts_alone(convert: Callable[[sl.TopKMetrics], sl.TopKMetrics]) -> None:
    metrics = convert(counted(draw_batch(9)))
    assert {state.dtype for state in states(metrics)} == {torch.int64}
    assert numbers(metrics.compute()) == approximately(numbers(counted(draw_batch(9)).compute()))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda metrics: pickle.loads(pickle.dumps(metrics))])
def test_a_copy_goes_on_counting_on_its_own(duplicate: Callable[[sl.TopKMetrics], sl.TopKMetrics]) -> None:
    metrics = counted(draw_batch(9))
    copied = duplicate(metrics)
    copied.update(*draw_batch(6, seed=1))
    assert numbers(copied.compute()) == approximately(numbers(counted(draw_batch(9), draw_batch(6, seed=1)).compute()))
    assert numbers(metrics.compute()) == approximately(numbers(counted(draw_batch(9)).compute()))


def test_counts_travel_in_the_state_dict_once_persistent() -> None:
    metrics, loaded = counted(draw_batch(9)), counted()
    assert not metrics.state_dict()
    metrics.persistent(True)
    loaded.persistent(True)
    assert set(metrics.state_dict()) == set(metrics.metric_state)
    loaded.load_state_dict(metrics.state_dict(), strict=True)
    loaded.update(*draw_batch(6, seed=1))
    assert numbers(loaded.compute()) == approximately(numbers(counted(draw_batch(9), draw_batch(6, seed=1)).compute()))


def test_no_graph_is_kept() -> None:
    scores, target = draw_batch(9)
    metrics = counted((scores.requires_grad_(), target))
    assert not any(value.requires_grad for value in (*states(metrics), *metrics.compute().values()))


@pytest.mark.parametrize("use", [lambda metrics: metrics(*draw_batch(9)), lambda metrics: metrics.reset()])
def test_use_in_inference_mode_does_not_bind_later_use_to_it(use: Callable[[sl.TopKMetrics], object]) -> None:
    metrics, want = counted(), counted()
    use(want)
    want.update(*draw_batch(6, seed=1))
    with torch.inference_mode():
        use(metrics)
    metrics.update(*draw_batch(6, seed=1))
    assert numbers(metrics.compute()) == approximately(numbers(want.compute()))


def count_on_one_rank(rank: int, count: int, folder: Path) -> None:
    torch.save(counted(*rank_batches(rank)).compute(), folder / f"rank{rank}.pt")


def rank_batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    return [draw_batch(2)] if rank == 0 else [draw_batch(9, seed=1), draw_batch(4, seed=2)]


def test_ranks_with_unequal_numbers_of_images_merge_into_what_one_process_counts(tmp_path: Path) -> None:
    run_ranks(count_on_one_rank, 2, tmp_path)
    want = numbers(counted(*rank_batches(0), *rank_batches(1)).compute())
    for rank in (0, 1):
        assert numbers(torch.load(tmp_path / f"rank{rank}.pt")) == approximately(want)
