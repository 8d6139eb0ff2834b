"""The intervals are those of Student's t, as scipy computes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from shortlist.program.compare.intervals import interval, paired_difference, t_quantile

VALUES = st.lists(st.floats(0, 1), min_size=2, max_size=12)


@pytest.mark.parametrize("freedom", [*range(1, 41), 99, 1000])
def test_the_quantile_is_that_of_scipy(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


@given(VALUES)
def test_a_mean_has_the_interval_of_scipy(values: list[float]) -> None:
    found = interval(values)
    assert found is not None
    assert found.half is not None
    if len({*values}) == 1:
        assert found.half == pytest.approx(0, abs=1e-12)
        return
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high), rel=1e-6, abs=1e-9)


def test_a_difference_is_paired_over_the_seeds_that_both_have() -> None:
    ours, theirs = {0: 0.61, 1: 0.58, 2: 0.64, 5: 0.1}, {2: 0.60, 1: 0.57, 0: 0.58, 7: 0.9}
    found = paired_difference(ours, theirs)
    low, high = stats.ttest_rel([0.61, 0.58, 0.64], [0.58, 0.57, 0.60]).confidence_interval(0.95)
    assert found is not None
    assert found.half is not None
    assert found.count == 3
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))
    assert not found.is_below_zero
    assert found.contains_zero


def test_one_seed_says_nothing_about_the_spread() -> None:
    found = paired_difference({0: 0.1}, {0: 0.9})
    assert found is not None
    assert found.half is None
    assert found.contains_zero
    assert not found.is_below_zero
    assert paired_difference({0: 0.1}, {1: 0.9}) is None
