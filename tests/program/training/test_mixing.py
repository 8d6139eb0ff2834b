"""Mixup and CutMix, compared with their definitions."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from shortlist.program.config import DataConfig, TrainConfig, changed
from shortlist.program.losses import LOSSES
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.loop import Trainer, train
from shortlist.program.training.mixing import Mixing
from tests.support.early_ends import train_until_step
from tests.support.small_runs import outcome, small_config, write_embeddings

SIDE = 12


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Images that differ in every pixel, each of a class of its own."""
    images = torch.rand(size, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    return images, torch.arange(size).flip(0)


def mixed(config: DataConfig, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mixed images, the share of each image's own label, and all probabilities."""
    images, labels = batch(size)
    inputs, probabilities = Mixing(config, size)(images, labels, seed)
    return inputs, probabilities.gather(1, labels.unsqueeze(1)), probabilities


def partners_of(size: int) -> Tensor:
    """The first image goes with the last, the second with the one before; a last odd one stays alone."""
    even = size // 2 * 2
    return torch.cat((torch.arange(even).flip(0), torch.arange(even, size)))


@pytest.mark.parametrize("size", [1, 2, 7, 8])
@pytest.mark.parametrize("config", [DataConfig(mixup=0.8), DataConfig(cutmix=1.0)])
def test_targets_are_the_shares_of_two_labels(config: DataConfig, size: int) -> None:
    _, labels = batch(size)
    _, own, probabilities = mixed(config, size, seed=5)
    partner = probabilities.gather(1, labels[partners_of(size)].unsqueeze(1))
    alone = labels[partners_of(size)] == labels
    torch.testing.assert_close(probabilities.sum(1), torch.ones(size))
    torch.testing.assert_close(torch.where(alone, own.squeeze(1), (own + partner).squeeze(1)), torch.ones(size))
    assert alone.tolist() == [False] * (size // 2 * 2) + [True] * (size % 2)


@pytest.mark.parametrize("size", [1, 7, 8])
def test_mixup_blends_images_by_the_shares_of_their_labels(size: int) -> None:
    images, _ = batch(size)
    for seed in range(5):
        inputs, own, _ = mixed(DataConfig(mixup=1.0), size, seed)
        share = own.view(-1, 1, 1, 1)
        torch.testing.assert_close(inputs, share * images + (1 - share) * images[partners_of(size)])


@pytest.mark.parametrize("size", [1, 7, 8])
def test_cutmix_pastes_a_box_of_the_share_of_the_other_label(size: int) -> None:
    images, _ = batch(size)
    partner = images[partners_of(size)]
    for seed in range(5):
        inputs, own, _ = mixed(DataConfig(cutmix=1.0), size, seed)
        is_own = (inputs == images).all(1)
        assert (is_own | (inputs == partner).all(1)).all()
        torch.testing.assert_close(is_own.float().mean((1, 2)), own.squeeze(1))
        for rows, columns in ((pasted.any(1), pasted.any(0)) for pasted in ~is_own):
            assert (~is_own).sum((1, 2)).max() == rows.sum() * columns.sum() or not rows.any()  # a box


def test_with_both_a_batch_has_one_or_the_other() -> None:
    images, _ = batch(8)
    pasted = [bool((mixed(DataConfig(mixup=1.0, cutmix=1.0), 8, seed)[0] == images).any()) for seed in range(40)]
    assert 10 < sum(pasted) < 30


def test_the_draws_depend_on_the_seed_alone() -> None:
    config = DataConfig(mixup=1.0, cutmix=1.0)
    np.random.seed(3)  # noqa: NPY002
    expected = np.random.random(3)  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    first, again, other = (mixed(config, 8, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    np.testing.assert_array_equal(np.random.random(3), expected)  # noqa: NPY002


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embeddings(tmp_path_factory.mktemp("data") / "points.npz", images=75)  # and one of each class


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_trains_on_mixed_samples(name: str, data: Path, tmp_path: Path) -> None:
    head = "cosine" if LOSSES[name].takes_cosines else "linear"
    settings = {"loss.name": name, "model.head": head, "data.mixup": 0.5, "train.epochs": 4}
    config = changed(small_config(data), settings)
    lines = outcome(train(config, folder=tmp_path, quiet=True).path)["metrics"]
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]


class Shares(Callback):
    """The largest share of a label in the first target of each call of the loss."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.parts.loss.register_forward_pre_hook(lambda _, inputs: self.shares.append(inputs[1][0].max().item()))


def test_every_part_of_every_step_of_every_epoch_has_a_share_of_its_own(data: Path, tmp_path: Path) -> None:
    settings = TrainConfig(epochs=2, batch_size=30, accumulate=2, ks=(1, 3), device="cpu")  # three steps an epoch
    shares = {}
    for name in ("first", "again"):
        callback = Shares()
        config = changed(small_config(data, train=settings), {"data.mixup": 1.0})
        train(config, folder=tmp_path / name, quiet=True, callbacks=[callback])
        shares[name] = callback.shares
    assert shares["first"] == shares["again"]
    different = set(shares["first"]) - {1.0}  # of a pair of one class
    assert len(different) >= 2 * 3 * 2 - 3


@pytest.mark.parametrize("parts", [1, 2])
def test_a_run_that_mixes_ends_as_if_undisturbed(parts: int, data: Path, tmp_path: Path) -> None:
    """Of four steps an epoch; the last batch is odd."""
    config = small_config(data, train=TrainConfig(epochs=2, batch_size=28, accumulate=parts, ks=(1, 3), device="cpu"))
    config = changed(config, {"data.mixup": 0.5})
    want = outcome(train(config, folder=tmp_path / "undisturbed", quiet=True).path)
    train_until_step(config, tmp_path / "stopped", 5)
    assert outcome(train(config, folder=tmp_path / "stopped", resume=True, quiet=True).path) == want
    other = replace(config, data=replace(config.data, mixup=0.0))
    assert outcome(train(other, folder=tmp_path / "plain", quiet=True).path) != want
