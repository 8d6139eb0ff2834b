"""Mixup of timm makes class probabilities of labels. The losses take them, the metrics take labels."""

import pytest
import torch
from long_tail import NUM_CLASSES
from timm.data import Mixup
from timm_mixup import make_mixup

import shortlist as sl
from tests.support.examples import run_example


def test_the_example_runs() -> None:
    assert "macro_top3" in run_example("timm_mixup", "--epochs", "1")


def test_the_loss_of_a_mixed_image_is_the_mixed_loss_of_its_two_labels() -> None:
    labels = torch.arange(8)
    _, target = make_mixup(0.2)(torch.rand(8, 3, 4, 4), labels)
    torch.testing.assert_close(target.sum(1), torch.ones(8))
    share = target[0, 0]  # of the first of two labels: timm mixes an image with the one opposite
    assert 0 < share < 1
    scores = torch.randn(8, NUM_CLASSES)
    loss = sl.LogitAdjustedLoss(torch.arange(1, NUM_CLASSES + 1), reduction="none")
    torch.testing.assert_close(
        loss(scores, target), share * loss(scores, labels) + (1 - share) * loss(scores, labels.flip(0))
    )


def test_by_default_timm_gives_every_class_a_share_of_every_image() -> None:
    _, target = Mixup(mixup_alpha=0.2, num_classes=NUM_CLASSES)(torch.rand(8, 3, 4, 4), torch.arange(8))
    assert (target > 0).all()


def test_metrics_refuse_mixed_targets() -> None:
    _, target = make_mixup(0.2)(torch.rand(8, 3, 4, 4), torch.arange(8))
    with pytest.raises(sl.ShortlistError, match="target"):
        sl.TopKMetrics(NUM_CLASSES).update(torch.randn(8, NUM_CLASSES), target)
