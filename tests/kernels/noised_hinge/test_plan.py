"""What the kernels are planned to do, and which rows they have room for."""

import pytest

from shortlist.kernels.noised_hinge.plan import TILE, fits, plan_for


def test_long_rows_with_thousands_of_draws_are_left_to_torch_which_needs_less_memory() -> None:
    short, long = 1000, 100_000
    assert fits(long, 6, 4096)
    assert not fits(long, 6, 10_000)
    assert fits(short, 6, 10_000), "they keep no lists"


def test_a_chunk_fits_only_if_it_is_searched_lazily() -> None:
    assert not fits(2048, 6, 5, is_chunk=True)
    assert fits(4096, 6, 5, is_chunk=True)
    assert not fits(100_000, 6, 4096 * 4, is_chunk=True)
    assert not fits(4096, 4000, 5, is_chunk=True), "the kept scores fill more than its tiles"


@pytest.mark.parametrize("num_rows", [1, 64, 4096])
@pytest.mark.parametrize("num_classes", [3, 2048, 2049, 10_000, 1_000_000])
@pytest.mark.parametrize("rank", [2, 6, 101])
def test_a_plan_has_sizes_that_the_kernels_can_take(num_rows: int, num_classes: int, rank: int) -> None:
    plan = plan_for(num_rows, num_classes, rank, 5)
    assert plan.is_lazy == (
        num_classes > 2048 and (num_classes > 16384 or num_classes / TILE >= 1.5 * plan.num_passing)
    )
    sizes = (plan.capacity, plan.hot_capacity, plan.level_lanes, plan.level_tiles, plan.hot_tiles, plan.splits)
    assert all(size > 0 and size & (size - 1) == 0 for size in sizes), "powers of two"
    assert plan.capacity > plan.num_passing > rank
    assert plan.splits == 1 or plan.splits * plan.capacity <= 2048
