"""A step of the Trainer has the gradient of the mean over all of its images, however they are divided into batches."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_trainer import as_dataset, loss_of_step, small_network
from long_tail import Samples, images
from torch import Tensor
from transformers import Trainer, TrainingArguments

import shortlist as sl
from tests.support.examples import run_example

# The Trainer asks for pinned memory by default, and torch warns about that where there is no GPU.
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")

Loss = Callable[..., Tensor]


def test_the_example_runs() -> None:
    assert "macro_top3" in run_example("huggingface_trainer", "--epochs", "1")


@pytest.fixture(scope="module")
def samples() -> Samples:
    inputs, labels = images().train
    return Samples(inputs[:64], labels[:64])


def mean_of_batch(outputs: object, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """What one would write first: the mean over the batch."""
    loss: Tensor = torch.nn.functional.cross_entropy(outputs.logits, labels)  # type: ignore[attr-defined]
    return loss


def gradient(loss: Loss, samples: Samples, folder: Path, *, batch: int, accumulated: int) -> Tensor:
    """The gradient of the Trainer's first step: what plain SGD takes from the weights with a learning rate of 1."""
    torch.manual_seed(0)
    network = small_network().double()
    before = torch.nn.utils.parameters_to_vector(network.parameters()).detach()
    sgd = torch.optim.SGD(network.parameters(), lr=1.0)
    settings = TrainingArguments(
        str(folder),
        max_steps=1,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulated,
        max_grad_norm=0,  # no clipping
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        network,
        settings,
        train_dataset=as_dataset(Samples(samples.inputs.double(), samples.labels)),
        compute_loss_func=loss,
        optimizers=(sgd, torch.optim.lr_scheduler.ConstantLR(sgd, factor=1.0)),
    )
    trainer.train()
    return before - torch.nn.utils.parameters_to_vector(network.parameters()).detach()


@pytest.mark.parametrize("images_of_step", [64, 56], ids=["full batches", "a shorter last batch"])
def test_accumulated_batches_have_the_gradient_of_one_large_batch(
    images_of_step: int, samples: Samples, tmp_path: Path
) -> None:
    loss = loss_of_step(sl.LogitAdjustedLoss(torch.arange(1, 31), reduction="sum"))
    step = Samples(samples.inputs[:images_of_step], samples.labels[:images_of_step])
    at_once = gradient(loss, step, tmp_path, batch=64, accumulated=1)
    assert at_once.norm() > 0.1
    torch.testing.assert_close(gradient(loss, step, tmp_path, batch=16, accumulated=4), at_once)


def test_a_mean_over_each_batch_has_four_times_the_gradient(samples: Samples, tmp_path: Path) -> None:
    at_once = gradient(mean_of_batch, samples, tmp_path, batch=64, accumulated=1)
    accumulated = gradient(mean_of_batch, samples, tmp_path, batch=16, accumulated=4)
    torch.testing.assert_close(accumulated, 4 * at_once)
