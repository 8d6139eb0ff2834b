"""How images are divided among steps, parts and ranks: none twice, none forgotten, the same whatever the division."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shortlist.program.data.base import evaluation_plan, training_plan
from shortlist.program.seeds import uniform_for

counts = st.integers(0, 60)
small = st.integers(1, 7)


@given(count=counts, batch_size=small, world_size=small)
def test_evaluation_counts_every_image_exactly_once(count: int, batch_size: int, world_size: int) -> None:
    plans = [evaluation_plan(count, batch_size, rank, world_size) for rank in range(world_size)]
    indices = [index for plan in plans for batch in plan for index in batch.tolist()]
    assert sorted(indices) == list(range(count))
    assert all(1 <= len(batch) <= batch_size for plan in plans for batch in plan)


@given(count=counts, batch_size=st.integers(1, 20), parts=small, world_size=small, epoch=st.integers(0, 3))
def test_a_step_takes_the_same_images_however_it_is_divided(
    count: int, batch_size: int, parts: int, world_size: int, epoch: int
) -> None:
    whole = training_plan(count, batch_size, 1, 0, epoch, 0, 1)
    ranks = [training_plan(count, batch_size, parts, 0, epoch, rank, world_size) for rank in range(world_size)]
    assert len({len(plan) for plan in ranks}) == 1, "every rank takes part in every step"
    together = [
        [index for plan in ranks for part in plan[step] for index in part.tolist()] for step in range(len(ranks[0]))
    ]
    # Only a last batch that is too small to give everyone two images, or one where there are no more, may be missing.
    least = 1 if batch_size < 2 * parts * world_size else 2
    assert together == [step[0].tolist() for step in whole][: len(together)]
    assert all(len(step[0]) < least * parts * world_size for step in whole[len(together) :])
    assert all(len(part) >= least for plan in ranks for step in plan for part in step)


def test_epochs_and_seeds_shuffle_differently_and_each_image_comes_once() -> None:
    orders = [torch.cat([step[0] for step in training_plan(50, 8, 1, *key, 0, 1)]) for key in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert sorted(order.tolist()) == list(range(50))
    assert not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


def test_numbers_for_an_image_depend_on_the_seed_and_its_index_alone() -> None:
    indices = torch.randperm(1000)
    table = uniform_for(torch.arange(1000), seed=3, columns=4)
    assert torch.equal(uniform_for(indices, seed=3, columns=4), table[indices])
    assert not torch.equal(uniform_for(indices, seed=4, columns=4), table[indices])
    assert table.min() >= 0
    assert table.max() < 1
    assert len(table.unique()) > 3990, "no two images or columns share a number, but by rare chance"
    # Means of 4000 uniform numbers, and of products of neighbours, within five standard errors.
    assert table.mean().item() == pytest.approx(0.5, abs=5 * (1 / 12 / 4000) ** 0.5)
    centred = table - 0.5
    assert (centred[:-1] * centred[1:]).mean().abs() < 5 * (1 / 12) / 3996**0.5
