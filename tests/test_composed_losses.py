"""Losses made of losses: the prior around any loss, and weighted sums. They obey all laws of a loss besides."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as torch_functional

import shortlist as sl
from tests.support.drawing import normal, value_and_grad
from tests.support.loss_cases import TARGET, L, N
from tests.support.rejections import rejects

COUNTS = torch.tensor([100, 50, 20, 10, 5, 2, 1])


def test_the_prior_around_cross_entropy_is_logit_adjustment() -> None:
    for tau in (0.0, 0.5, 1.0):
        losses = sl.PriorAdjusted(nn.CrossEntropyLoss(), COUNTS, tau=tau), sl.LogitAdjustedLoss(COUNTS, tau=tau)
        ours, want = (value_and_grad(partial(loss, target=TARGET), normal(N, L)) for loss in losses)
        torch.testing.assert_close(ours, want)


def test_the_prior_around_ldam_is_added_after_its_scale() -> None:
    scale, cosines = 30.0, normal(N, L).tanh()
    loss = sl.PriorAdjusted(sl.LDAMLoss(COUNTS, max_margin=0.3, scale=scale), COUNTS, tau=1 / scale)
    margins = sl.class_margins(COUNTS.double(), 0.3)
    scores = scale * (cosines - margins * torch_functional.one_hot(TARGET, L)) + (COUNTS / COUNTS.sum()).log()
    torch.testing.assert_close(loss(cosines, TARGET), torch_functional.cross_entropy(scores, TARGET))


def test_parts_can_be_composed_of_parts() -> None:
    noise, hinge = normal(N, L, 4, seed=1), sl.NoisedTopKHinge(2, epsilon=0.5)
    mixed = sl.MixedLoss([(0.25, nn.CrossEntropyLoss()), (0.75, sl.PriorAdjusted(hinge, COUNTS))])
    got = mixed(normal(N, L), TARGET, noise=noise)
    adjusted = hinge(normal(N, L) + (COUNTS / COUNTS.sum()).log(), TARGET, noise=noise)
    torch.testing.assert_close(got, 0.25 * torch_functional.cross_entropy(normal(N, L), TARGET) + 0.75 * adjusted)


def test_a_generator_reaches_the_loss_that_draws() -> None:
    loss = sl.MixedLoss([(1.0, sl.FocalLoss()), (1.0, sl.PriorAdjusted(sl.NoisedTopKHinge(2, epsilon=1.0), COUNTS))])
    values = [loss(normal(N, L), TARGET, generator=torch.Generator().manual_seed(seed)).item() for seed in (1, 1, 2)]
    assert values[0] == values[1] != values[2]


def test_noise_that_no_part_uses_is_refused() -> None:
    for loss in (sl.PriorAdjusted(sl.FocalLoss(), COUNTS), sl.MixedLoss([(1.0, sl.FocalLoss())])):
        with pytest.raises(sl.ShortlistError, match="noise must not be given"):
            loss(normal(N, L), TARGET, noise=normal(N, L, 2))


def test_counts_and_weights_of_all_parts_travel_in_the_state_dict() -> None:
    def mixed(counts: Tensor, weight: Tensor) -> nn.Module:
        inner = sl.MixedLoss([(0.5, sl.FocalLoss(weight=weight)), (0.5, sl.TopKHinge(2, weight=weight))])
        return sl.PriorAdjusted(inner, counts)

    saved, loaded = mixed(COUNTS, torch.arange(1.0, L + 1)), mixed(torch.ones(L), torch.ones(L))
    loaded.load_state_dict(saved.state_dict(), strict=True)
    assert torch.equal(loaded(normal(N, L), TARGET), saved(normal(N, L), TARGET))


def test_counts_survive_half() -> None:
    counts = torch.tensor([70_001, 3])  # more than float16 can hold
    loss = sl.PriorAdjusted(nn.CrossEntropyLoss(), counts).half().float()
    assert torch.equal(loss.class_counts, counts)
    want = -math.log(3 / 70_004)
    torch.testing.assert_close(loss(torch.zeros(1, 2), torch.tensor([1])), torch.tensor(want))


def test_a_class_left_out_by_name_does_not_compete() -> None:
    counts = [4, 2, 0, 1]
    loss = sl.PriorAdjusted(nn.CrossEntropyLoss(), counts, leave_out=[2])
    scores, target = normal(5, 4), torch.tensor([0, 1, 3, 3, 0])
    kept = [0, 1, 3]
    want = sl.LogitAdjustedLoss([4, 2, 1])(scores[:, kept], torch.tensor([0, 1, 2, 2, 0]))
    torch.testing.assert_close(loss(scores, target), want)


def test_a_class_without_an_image_is_named_unless_it_is_left_out() -> None:
    with pytest.raises(sl.ShortlistError, match=r"class_counts must .* got 0 for class 2.* leave_out"):
        sl.PriorAdjusted(nn.CrossEntropyLoss(), [4, 2, 0, 1])
    with pytest.raises(sl.ShortlistError, match=r"leave_out must .* class 1 has some"):
        sl.PriorAdjusted(nn.CrossEntropyLoss(), [4, 2, 0, 1], leave_out=[2, 1])
    with rejects("leave_out", "[0, 3]", 4):
        sl.PriorAdjusted(nn.CrossEntropyLoss(), [4, 2, 0, 1], leave_out=[4])


def test_counts_of_other_classes_are_refused() -> None:
    with rejects("class_counts", f"({L},)", (L + 1,)):
        sl.PriorAdjusted(nn.CrossEntropyLoss(), torch.ones(L + 1))(normal(N, L), TARGET)


@pytest.mark.parametrize("setting", [{"reduction": "sum"}, {"ignore_index": 3}])
def test_parts_must_agree(setting: dict[str, object]) -> None:
    (name,) = setting
    with pytest.raises(sl.ShortlistError, match=f"agree in {name}"):
        sl.MixedLoss([(0.5, nn.CrossEntropyLoss()), (0.5, sl.FocalLoss(**setting))])  # type: ignore[arg-type]


def test_what_a_mixture_cannot_be_made_of_is_named() -> None:
    with pytest.raises(sl.ShortlistError, match=r"weight of loss 1 must be .* > 0, got 0"):
        sl.MixedLoss([(0.5, sl.FocalLoss()), (0, sl.FocalLoss())])
    for parts in ([], [sl.FocalLoss()], [(1.0, sl.FocalLoss(), 2)]):
        with pytest.raises(sl.ShortlistError, match="parts must be pairs"):
            sl.MixedLoss(parts)  # type: ignore[arg-type]
    with pytest.raises(sl.ShortlistError, match="a loss must be a Module"):
        sl.MixedLoss([(1.0, "focal")])  # type: ignore[list-item]
