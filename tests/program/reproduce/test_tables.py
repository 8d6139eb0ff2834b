"""Our results beside the paper's numbers."""

import pytest

from shortlist.program.reproduce.registry import EXPERIMENTS
from shortlist.program.reproduce.tables import comparison, latest_setups, published, shorter_runs
from tests.support.reproducing import made_up


def test_configurations_of_a_cell_are_not_mixed() -> None:
    old = [made_up(1.0, seed=seed) for seed in range(3)]
    new = made_up(2.0, key="bbbbbbbbbb", date="2026-01-02T00:00:00+00:00")
    elsewhere = made_up(3.0, epochs=300)
    assert latest_setups([*old, new, elsewhere]) == [new, elsewhere]
    assert latest_setups([new, *old, elsewhere]) == [new, elsewhere]  # in any order of the file


def test_numbers_of_tiny_data_stand_in_no_table_beside_real_ones() -> None:
    experiment, real = EXPERIMENTS["cifar100-top5"], [made_up(85.0)]
    tiny = made_up(3.0, scale="smoke", epochs=2, seed=1)
    assert comparison(experiment, [*real, tiny]) == comparison(experiment, real)


def test_a_table_has_a_line_for_each_length() -> None:
    experiment = EXPERIMENTS["cifar100-top5"]
    results = [made_up(85.0), made_up(86.0, seed=1), made_up(88.0, scale="paper", epochs=300)]
    results.append(made_up(79.0, column="cross_entropy", recipe="cifar100_table4_cross_entropy_p40"))
    lines = [line for line in comparison(experiment, results) if line.row == "0.4"]
    assert [line.source for line in lines] == ["paper, 300 epochs", "ours, 300 epochs", "ours, 100 epochs"]
    assert [line.seeds for line in lines] == ["4", "1", "1 to 2"]
    shown = [[value.replace("\N{NO-BREAK SPACE}", " ") for value in line.values] for line in lines]
    assert shown == [["83.6 ± 0.2", "87.4 ± 0.1", "87.8 ± 0.6"], ["", "", "88.0"], ["79.0", "", "85.5 ± 6.4"]]


def test_a_length_that_a_row_was_not_run_at_has_no_line_of_it() -> None:
    """A row that was not run at all has one line, to show what is missing."""
    results = [made_up(85.0), made_up(88.0, scale="paper", epochs=300)]
    lines = comparison(EXPERIMENTS["cifar100-top5"], results)
    assert [line.source for line in lines if line.row == "0.0"] == ["paper, 300 epochs", "ours, 100 epochs"]


def test_a_line_is_replaced_once_all_its_cells_were_run_longer() -> None:
    short = [made_up(85.0), made_up(79.0, column="cross_entropy"), made_up(86.0, seed=1)]
    in_other_row = made_up(92.0, row="0.0")
    one_longer = [*short, in_other_row, made_up(88.0, scale="paper", epochs=300)]
    assert shorter_runs(one_longer) == []
    both_longer = [*one_longer, made_up(83.0, column="cross_entropy", scale="paper", epochs=300)]
    assert shorter_runs(both_longer) == short


@pytest.mark.parametrize(
    ("source", "row", "column", "metric", "value", "interval"),
    [
        ("tab:tab-epsilon", "noised", "0.001", "val_micro", "11.4", ""),
        ("tab:tab-B", "noised", "50", "val_micro", "94.64", ""),
        ("fig:epoch-time", "5", "smooth", "epoch_seconds", "81", ""),
        ("table:cifar100-top5-acc", "0.1", "smooth", "test_micro", "92.2", "0.3"),
        ("table:cifar100-top5-acc", "0.4", "noised", "test_micro", "87.8", "0.6"),
        ("table:cifar100-acc", "0.0", "cross_entropy", "test_micro", "76.6", "0.1"),
        ("table:plantnet-300k", "5", "imbalanced", "test_macro", "73.2", "0.5"),
        ("table:plantnet-300k", "1", "imbalanced", "test_few", "23.9", ""),
        ("table:plantnet-300k_appendix", "10", "focal", "test_micro", "97.7", "0.0"),
        ("table:imagenet-lt", "1", "ldam", "test_micro", "39.3", "0.2"),
        ("table:imagenet-lt", "3", "smooth", "test_few", "0.0", ""),
        ("table:imagenet-appendix", "5", "smooth", "test_micro", "90.71", "0.06"),
    ],
)
def test_the_paper_says_so(source: str, row: str, column: str, metric: str, value: str, interval: str) -> None:
    number = published()[source, row, column, metric]
    assert (number.value, number.interval) == (value, interval)


def test_every_number_of_the_paper_has_its_place() -> None:
    places = {
        (experiment.source, cell.row, cell.column, metric): cell.k
        for experiment in EXPERIMENTS.values()
        for cell in experiment.cells
        for metric in experiment.metrics
    }
    assert {key: int(number.K) for key, number in published().items()}.items() <= places.items()
    for number in published().values():
        assert 0 <= float(number.value) <= 100
        assert 0 <= float(number.interval or 0) < 1
