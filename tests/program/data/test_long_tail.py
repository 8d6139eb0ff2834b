"""Class sizes of long-tailed subsets."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shortlist.errors import ShortlistError
from shortlist.program.data.long_tail import long_tailed_subset, size_profile, sizes_from_profile


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(2, 400), st.floats(1, 1000), st.sampled_from(["exponential", "step"]))
def test_profile_falls_from_one_to_one_over_imbalance(num_classes: int, imbalance: float, kind: str) -> None:
    profile = size_profile(num_classes, imbalance, kind)
    assert profile[0] == 1
    assert profile[-1].item() == pytest.approx(1 / imbalance)
    assert bool((profile.diff() <= 0).all())


@given(st.integers(2, 100), st.integers(1, 1000), st.integers(1, 500), st.sampled_from(["exponential", "step"]))
@example(2, 49, 2, "step")  # 98 / 49 comes out a little below 2
def test_sizes_fall_from_the_largest_to_exactly_the_smallest(
    num_classes: int, imbalance: int, smallest: int, kind: str
) -> None:
    largest = smallest * imbalance
    sizes = sizes_from_profile(size_profile(num_classes, imbalance, kind), largest)
    assert (int(sizes[0]), int(sizes[-1])) == (largest, smallest)
    assert bool((sizes.diff() <= 0).all())


def test_exponential_sizes_are_those_of_the_cifar_benchmarks() -> None:
    # int(500 * 0.01 ** (c / 99)) for c = 0, ..., 99, whose sum is the published 10,847
    sizes = sizes_from_profile(size_profile(100, 100, "exponential"), 500)
    assert sizes.tolist() == [int(500 * 0.01 ** (c / 99) + 1e-9) for c in range(100)]
    assert int(sizes.sum()) == 10_847


def test_step_sizes_are_large_in_the_first_half_and_small_in_the_second() -> None:
    assert sizes_from_profile(size_profile(5, 10, "step"), 50).tolist() == [50, 50, 5, 5, 5]


def test_no_class_is_left_without_images() -> None:
    assert int(sizes_from_profile(size_profile(10, 1e6, "exponential"), 5).min()) == 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.floats(1.5, 50), st.integers(0, 5))
def test_subset_has_the_sizes_of_the_profile_or_all_there_is(labels: list[int], imbalance: float, seed: int) -> None:
    given_labels = torch.tensor(labels)
    kept = long_tailed_subset(given_labels, 6, imbalance=imbalance, kind="exponential", generator=generator(seed))
    available = torch.bincount(given_labels, minlength=6)
    wanted = sizes_from_profile(size_profile(6, imbalance, "exponential"), float(available.max()))
    assert torch.equal(torch.bincount(given_labels[kept], minlength=6), torch.minimum(available, wanted))
    assert bool((kept.diff() > 0).all())  # sorted, none twice


def test_subset_is_random_but_repeatable() -> None:
    labels = torch.arange(3).repeat_interleave(100)
    first, again, other = (
        long_tailed_subset(labels, 3, imbalance=10, kind="step", generator=generator(seed)).tolist()
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_nothing_to_thin_is_an_error() -> None:
    with pytest.raises(ShortlistError, match="needs training images"):
        long_tailed_subset(torch.tensor([], dtype=torch.int64), 3, imbalance=2, kind="step", generator=generator())
