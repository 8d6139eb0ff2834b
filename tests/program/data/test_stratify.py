"""Holding images out, class by class."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shortlist.errors import ShortlistError
from shortlist.program.data.stratify import hold_out


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.lists(st.integers(3, 40), min_size=1, max_size=8), st.floats(0.01, 0.3), st.integers(1, 2))
def test_parts_are_disjoint_complete_and_stratified(sizes: list[int], fraction: float, parts: int) -> None:
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    labels = labels[torch.randperm(len(labels), generator=generator())]
    found = hold_out(labels, [str(label) for label in range(len(sizes))], fraction, parts, generator())
    assert len(found) == parts + 1
    assert torch.equal(torch.cat(found).sort().values, torch.arange(len(labels)))
    assert bool((torch.bincount(labels[found[0]], minlength=len(sizes)) >= 1).all())
    for part in found[1:]:
        counts = torch.bincount(labels[part], minlength=len(sizes)).tolist()
        for count, size in zip(counts, sizes, strict=True):
            assert count == max(1, round(size * fraction))


def test_the_seed_decides() -> None:
    labels = torch.arange(5).repeat(20)
    first, again, other = (hold_out(labels, list("abcde"), 0.2, 1, generator(seed))[1].tolist() for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_a_class_too_small_to_split_is_named() -> None:
    labels = torch.tensor([0] * 10 + [1] * 2)
    with pytest.raises(ShortlistError, match=r"at least 3 images, .* too few in 1 of 2 classes: rare \(2\)"):
        hold_out(labels, ["common", "rare"], 0.1, 2, generator())


def test_a_large_share_that_leaves_nothing_to_train_on_is_an_error() -> None:
    with pytest.raises(ShortlistError, match="too few in 2 of 2 classes"):
        hold_out(torch.arange(2).repeat(10), ["a", "b"], 0.5, 2, generator())


def test_no_share_at_all_is_an_error() -> None:
    with pytest.raises(ShortlistError, match=r"data.val_fraction must be above 0"):
        hold_out(torch.arange(2).repeat(10), ["a", "b"], 0.0, 1, generator())
