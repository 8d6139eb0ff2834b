"""Long-tailed subsets, held-out splits and label noise."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.alter import (
    add_label_noise,
    consecutive_groups,
    generator_for,
    hold_out,
    long_tailed_subset,
    redraw_within_groups,
    size_profile,
    sizes_from_profile,
    thin_classes,
    thin_validation,
)
from shortlist.program.data.base import LabelNoise, Problem, Thinning
from shortlist.program.data.catalogue import load_problem
from shortlist.program.data.in_memory import Rows, tensor_problem
from tests.support.small_runs import write_embeddings


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
    with pytest.raises(ShortlistError, match="needs images"):
        long_tailed_subset(torch.tensor([], dtype=torch.int64), 3, imbalance=2, kind="step", generator=generator())


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8).filter(lambda sizes: max(sizes) >= 3),
    st.floats(0.01, 0.49),
    st.integers(1, 2),
)
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
            if size <= parts:
                assert count == 0
            elif count < (size - 1) // parts:  # it could give more
                assert count >= 1
                assert abs(count - max(1, size * fraction)) <= 0.5 + 1e-5  # to the nearest, in float32
            else:
                assert count == (size - 1) // parts <= max(1, size * fraction) + 0.5 + 1e-5


def test_the_seed_decides() -> None:
    labels = torch.arange(5).repeat(20)
    first, again, other = (hold_out(labels, list("abcde"), 0.2, 1, generator(seed))[1].tolist() for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_a_class_too_small_to_split_changes_nothing_for_the_others() -> None:
    labels = torch.tensor([0] * 10 + [1] * 20)
    with_small = torch.cat([labels, torch.tensor([2, 2])])
    for parts in (1, 2):
        rest, *held_out = hold_out(with_small, ["a", "b", "c"], 0.1, parts, generator())
        sizes = [torch.bincount(with_small[part], minlength=3).tolist() for part in (rest, *held_out)]
        assert sizes == {1: [[9, 18, 1], [1, 2, 1]], 2: [[8, 16, 2], [1, 2, 0], [1, 2, 0]]}[parts]


def test_data_of_which_nothing_can_be_held_out_is_an_error() -> None:
    with pytest.raises(ShortlistError, match=r"no class has the 3 images .* validation and test: a \(2\), b \(1\)"):
        hold_out(torch.tensor([0, 0, 1]), ["a", "b"], 0.1, 2, generator())


@pytest.mark.parametrize(("share", "parts"), [(0.0, 1), (0.5, 2), (1.0, 1)])
def test_a_share_that_leaves_nothing_to_one_side_is_an_error(share: float, parts: int) -> None:
    with pytest.raises(ShortlistError, match=rf"data.val_fraction must be above 0 and below .*got {share:g}"):
        hold_out(torch.arange(2).repeat(10), ["a", "b"], share, parts, generator())


def redraw(labels: Tensor, groups: Tensor, p: float, seed: int = 0) -> Tensor:
    return redraw_within_groups(labels, groups, p, torch.Generator().manual_seed(seed))


def test_labels_stay_in_their_groups_and_reach_all_of_them() -> None:
    groups = torch.tensor([0, 1, 0, 2, 1, 0])  # of sizes 3, 2 and 1
    labels = torch.arange(6).repeat(500)
    changed = redraw(labels, groups, 1.0)
    assert torch.equal(groups[changed], groups[labels])
    for group in range(3):
        drawn = changed[groups[labels] == group]
        share = torch.bincount(drawn, minlength=6)[groups == group] / len(drawn)
        torch.testing.assert_close(share, torch.full_like(share, 1 / len(share)), atol=0.05, rtol=0)


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_with_groups_of_five_four_fifths_of_p_are_wrong(p: float) -> None:
    labels = torch.arange(100).repeat(500)
    wrong = (redraw(labels, consecutive_groups(100), p) != labels).double().mean()
    assert float(wrong) == pytest.approx(0.8 * p, abs=5 * (0.25 / 50_000) ** 0.5)


def test_no_probability_no_change() -> None:
    labels = torch.arange(10)
    assert torch.equal(redraw(labels, consecutive_groups(10), 0.0), labels)


def test_consecutive_is_the_released_code() -> None:
    labels = torch.arange(100).repeat(20)
    changed = redraw(labels, consecutive_groups(100), 1.0)
    start = labels - labels % 5
    assert bool(((changed >= start) & (changed < start + 5)).all())


def test_a_last_short_block_stays_in_range() -> None:
    labels = torch.arange(12).repeat(100)
    changed = redraw(labels, consecutive_groups(12), 1.0)
    assert int(changed.max()) == 11
    assert set(changed[labels >= 10].tolist()) == {10, 11}


def noisy_points(tmp_path: Path, run_seed: int = 0, **settings: Any) -> Problem:
    path = write_embeddings(tmp_path / "points.npz", images=400)
    usual: dict[str, Any] = {"label_noise": 0.5, "noise_groups": "consecutive"}
    return load_problem(DataConfig(name="embeddings", root=str(path), **usual | settings), run_seed)


def test_the_seed_of_the_data_decides_and_the_count_is_noted(tmp_path: Path) -> None:
    clean, noisy, again, other = (
        noisy_points(tmp_path, **settings) for settings in ({"label_noise": 0}, {}, {}, {"seed": 1})
    )
    assert torch.equal(noisy.train.labels, again.train.labels)
    assert not torch.equal(noisy.train.labels, other.train.labels)
    wrong = int((noisy.train.labels != clean.train.labels).sum())
    assert noisy.facts.label_noise == LabelNoise(changed=wrong, of=len(clean.train))
    assert clean.facts.label_noise is None


def test_only_noise_that_is_redrawn_depends_on_the_seed_of_the_run(tmp_path: Path) -> None:
    fixed, elsewhere = noisy_points(tmp_path), noisy_points(tmp_path, run_seed=1)
    redrawn = [noisy_points(tmp_path, run_seed=seed, redraw_noise=True) for seed in (0, 1, 2)]
    assert torch.equal(fixed.train.labels, elsewhere.train.labels)
    assert torch.equal(fixed.train.labels, redrawn[0].train.labels)
    assert not torch.equal(redrawn[0].train.labels, redrawn[1].train.labels)
    assert not torch.equal(redrawn[1].train.labels, redrawn[2].train.labels)
    for problem in redrawn:  # the same images, held out in the same way
        assert problem.facts.train_digest == fixed.facts.train_digest
        assert torch.equal(problem.val.labels, fixed.val.labels)
        assert torch.equal(problem.test.labels, fixed.test.labels)


def test_batches_have_the_noisy_labels(tmp_path: Path) -> None:
    train = noisy_points(tmp_path).train
    everything = [torch.arange(len(train))]
    _, before, _ = next(train.batches(everything, torch.device("cpu")))
    _, after, _ = next(train.with_labels(train.labels.flip(0)).batches(everything, torch.device("cpu")))
    assert torch.equal(before, train.labels)
    assert torch.equal(after, train.labels.flip(0))


def test_superclass_noise_needs_superclasses() -> None:
    labels = torch.arange(4).repeat(50)
    config = DataConfig(name="folder", label_noise=1)
    changed = add_label_noise(labels, 4, config, ["fish", "bird", "fish", "bird"])
    assert torch.equal(changed % 2, labels % 2)
    with pytest.raises(ShortlistError, match=r"data.noise_groups must be consecutive for folder"):
        add_label_noise(labels, 4, config)


def test_each_purpose_has_random_numbers_of_its_own() -> None:
    first, again, purpose, seed = (
        torch.rand(4, generator=generator_for(DataConfig(seed=number), name)).tolist()
        for number, name in ((0, "validation"), (0, "validation"), (0, "imbalance"), (1, "validation"))
    )
    assert first == again
    assert first != purpose
    assert first != seed


def test_thinning_is_the_same_with_and_without_noise() -> None:
    labels = torch.arange(10).repeat_interleave(50)
    config = DataConfig(imbalance=10, label_noise=0.5, noise_groups="consecutive")
    rows = Rows(torch.arange(500), labels)
    kept, thinning = thin_classes(rows, 10, config)
    assert torch.equal(kept.inputs, thin_classes(rows, 10, DataConfig(imbalance=10))[0].inputs)
    assert torch.equal(kept.labels, labels[kept.inputs])
    assert thinning == Thinning(kept=len(kept.labels), of=500)
    assert thin_classes(rows, 10, DataConfig()) == (rows, None)


@pytest.mark.parametrize("kind", ["exponential", "step"])
def test_thinned_validation_images_fall_like_the_training_images(kind: Literal["exponential", "step"]) -> None:
    labels = torch.arange(10).repeat_interleave(50)
    rows = Rows(torch.arange(500.0).unsqueeze(1), labels)
    config = DataConfig(imbalance=50, imbalance_kind=kind, thin_validation=True)
    kept = torch.bincount(thin_validation(rows, 10, config).labels)
    assert torch.equal(kept, torch.bincount(thin_classes(rows, 10, config)[0].labels)), "the same sizes"
    assert kept.min() == 1
    assert thin_validation(rows, 10, replace(config, thin_validation=False)) is rows
    assert thin_validation(rows, 10, replace(config, imbalance=1)) is rows


def test_thinning_validation_images_leaves_training_images_alone() -> None:
    rows = {
        split: Rows(torch.randn(200, 3), torch.arange(10).repeat_interleave(20)) for split in ("train", "val", "test")
    }
    classes = [str(label) for label in range(10)]
    config = DataConfig(imbalance=10)
    plain = tensor_problem(config, classes, rows)
    thinned = tensor_problem(replace(config, thin_validation=True), classes, rows)
    assert torch.equal(plain.train.labels, thinned.train.labels)
    assert torch.equal(plain.test.labels, thinned.test.labels)
    assert len(plain.val) == 200
    assert torch.equal(torch.bincount(thinned.val.labels), torch.bincount(thinned.train.labels))
