"""Class weights begin at their share of the run, in all parts of a loss, and resuming needs no state of them."""

import pytest
import torch
from torch import Tensor, nn

from shortlist.program.config import RunConfig, changed
from shortlist.program.training.class_weights import class_weights, set_class_weights

COUNTS = torch.tensor([1000, 100, 10, 1])


def weights_of(loss: nn.Module) -> list[Tensor]:
    return [
        buffer for name, buffer in loss.named_buffers(remove_duplicate=False) if name.rpartition(".")[2] == "weight"
    ]


def weights_at(epoch: int, loss: nn.Module, config: RunConfig) -> list[Tensor]:
    set_class_weights(loss, config, COUNTS, epoch)
    return weights_of(loss)


def test_weights_begin_at_their_share_of_the_run_in_all_parts_of_the_loss() -> None:
    settings = {"loss.class_weights": "inverse", "loss.weight_from": 0.8, "train.epochs": 10}
    config = changed(RunConfig(), {**settings, "loss.k": 2, "loss.prior": 1.0, "loss.cross_entropy_share": 0.5})
    loss = config.loss.build(COUNTS)
    memory = [weight.data_ptr() for weight in weights_of(loss)]
    for epoch in (9, 0, 7, 8):  # a run may begin anywhere
        found = weights_at(epoch, loss, config)
        want = 1 / COUNTS if epoch >= 8 else torch.ones(4)
        assert len(found) == 2
        for weight in found:
            torch.testing.assert_close(weight / weight.sum(), want / want.sum())
    assert memory == [weight.data_ptr() for weight in weights_of(loss)], "a captured graph reads this memory"


def test_without_class_weights_the_loss_has_none() -> None:
    assert weights_at(3, RunConfig().loss.build(COUNTS), RunConfig()) == []


@pytest.mark.parametrize("kind", ["none", "inverse", "effective"])
def test_weights_have_a_mean_of_one_and_favour_rare_classes(kind: str) -> None:
    weights = class_weights(kind, COUNTS)
    torch.testing.assert_close(weights.mean(), torch.tensor(1.0))
    assert torch.equal(weights.sort().values, weights)


def test_effective_numbers_are_those_of_repeated_images() -> None:
    """n images cover 1 + beta + ... + beta^(n - 1) of the class."""
    numbers = torch.tensor([sum(0.9999**i for i in range(count)) for count in COUNTS.tolist()])
    weights = class_weights("effective", COUNTS)
    torch.testing.assert_close(weights * numbers, (weights * numbers).mean().expand(4))
