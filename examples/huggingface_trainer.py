"""The Trainer of Hugging Face with a loss of shortlist, right with gradient accumulation too.

Run it: python examples/huggingface_trainer.py
"""

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from long_tail import NUM_CLASSES, SIDE, Samples, images
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import shortlist as sl


def loss_of_step(criterion: nn.Module) -> Callable[..., Tensor]:
    """The mean over all images of an optimizer's step, for ``compute_loss_func``.

    The Trainer adds the gradients of the batches that it accumulates and does not divide them. A mean over each batch
    would make the gradient of four accumulated batches four times too large.

    Args:
        criterion: A loss with ``reduction="sum"``.
    """

    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        images_of_step = labels.numel() if num_items_in_batch is None else num_items_in_batch  # None in an evaluation
        return criterion(outputs.logits, labels) / images_of_step

    return compute


def topk_accuracy(images_of_class: Tensor) -> Callable[[EvalPrediction], dict[str, float]]:
    """For ``compute_metrics``, which gets the scores of all validation images at once."""

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        metrics = sl.TopKMetrics(NUM_CLASSES, ks=(1, 3), class_counts=images_of_class)
        metrics.update(torch.from_numpy(prediction.predictions), torch.from_numpy(prediction.label_ids))
        return {name: value.item() for name, value in metrics.compute().items()}

    return compute


def small_network() -> ViTForImageClassification:
    return ViTForImageClassification(
        ViTConfig(
            image_size=SIDE,
            patch_size=8,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            num_labels=NUM_CLASSES,
        )
    )


def as_dataset(samples: Samples) -> list[dict[str, Tensor]]:
    """Rows with the names that the network's ``forward`` has for them."""
    pixels = (samples.inputs - 0.5) * 4
    return [{"pixel_values": x, "labels": y} for x, y in zip(pixels, samples.labels, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs

    data = images()
    images_of_class = torch.bincount(data.train.labels, minlength=NUM_CLASSES)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            small_network(),
            TrainingArguments(
                folder,
                num_train_epochs=epochs,
                learning_rate=3e-3,
                per_device_train_batch_size=16,
                gradient_accumulation_steps=4,  # one step for 64 images
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=as_dataset(data.train),
            eval_dataset=as_dataset(data.val),
            compute_loss_func=loss_of_step(sl.LogitAdjustedLoss(images_of_class, reduction="sum")),
            compute_metrics=topk_accuracy(images_of_class),
        )
        trainer.train()

        # The correction is chosen on validation images. The test images only measure.
        val, test = (trainer.predict(as_dataset(samples)) for samples in (data.val, data.test))
        correction = sl.PriorCorrection(images_of_class)
        correction.fit(torch.from_numpy(val.predictions), torch.from_numpy(val.label_ids), k=3)
    corrected = correction(torch.from_numpy(test.predictions)).numpy()
    result = topk_accuracy(images_of_class)(EvalPrediction(corrected, test.label_ids))
    print(f"test: macro_top1 {result['macro_top1']:.1%}  macro_top3 {result['macro_top3']:.1%}")


if __name__ == "__main__":
    main()
