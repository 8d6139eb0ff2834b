"""Labels that are wrong on purpose."""

import pytest
import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.alter import noisy, seeded, thinned
from shortlist.program.data.label_noise import consecutive_groups, redraw_within_groups


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


def test_the_seed_decides_and_the_count_is_noted() -> None:
    labels = torch.arange(20).repeat(30)
    config = DataConfig(label_noise=0.5, noise_groups="consecutive", seed=4)
    changed, facts = noisy(labels, 20, config)
    assert torch.equal(changed, noisy(labels, 20, config)[0])
    assert not torch.equal(changed, noisy(labels, 20, DataConfig(label_noise=0.5, noise_groups="consecutive"))[0])
    assert facts == {"label_noise": {"changed": int((changed != labels).sum()), "of": 600}}
    assert noisy(labels, 20, DataConfig()) == (labels, {})


def test_superclass_noise_needs_superclasses() -> None:
    labels = torch.arange(4).repeat(50)
    config = DataConfig(name="folder", label_noise=1)
    changed, _ = noisy(labels, 4, config, ["fish", "bird", "fish", "bird"])
    assert torch.equal(changed % 2, labels % 2)
    with pytest.raises(ShortlistError, match=r"data.noise_groups must be consecutive for folder"):
        noisy(labels, 4, config)


def test_each_purpose_has_random_numbers_of_its_own() -> None:
    first, again, purpose, seed = (
        torch.rand(4, generator=seeded(DataConfig(seed=number), name)).tolist()
        for number, name in ((0, "validation"), (0, "validation"), (0, "imbalance"), (1, "validation"))
    )
    assert first == again
    assert first != purpose
    assert first != seed


def test_thinning_is_the_same_with_and_without_noise() -> None:
    labels = torch.arange(10).repeat_interleave(50)
    config = DataConfig(imbalance=10, label_noise=0.5, noise_groups="consecutive")
    kept, facts = thinned(labels, 10, config)
    assert torch.equal(kept, thinned(labels, 10, DataConfig(imbalance=10))[0])
    assert facts == {"imbalance": {"kept": len(kept), "of": 500}}
    assert torch.equal(thinned(labels, 10, DataConfig())[0], torch.arange(500))
