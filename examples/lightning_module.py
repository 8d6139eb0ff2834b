"""A LightningModule with a loss and the metrics of shortlist.

Run it: python examples/lightning_module.py
"""

import argparse

import lightning as L
import torch
from long_tail import NUM_CLASSES, Samples, embeddings
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shortlist as sl

Batch = tuple[Tensor, Tensor]


class Classifier(L.LightningModule):
    def __init__(self, num_features: int, images_of_class: Tensor) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(num_features, 128), nn.ReLU(), nn.Linear(128, NUM_CLASSES))
        self.criterion = sl.LogitAdjustedLoss(images_of_class)  # as an attribute, it moves to the device
        self.metrics = sl.TopKMetrics(NUM_CLASSES, ks=(1, 3), class_counts=images_of_class)
        self.correction = sl.PriorCorrection(images_of_class)  # and is part of the checkpoint

    def forward(self, inputs: Tensor) -> Tensor:
        return self.correction(self.network(inputs))

    def training_step(self, batch: Batch, _: int) -> Tensor:
        inputs, labels = batch
        loss = self.criterion(self.network(inputs), labels)
        self.log("train_loss", loss)
        return loss

    # Count batch by batch, compute once. A mean over classes is not the mean of those of the batches.
    def validation_step(self, batch: Batch, _: int) -> None:
        inputs, labels = batch
        self.metrics.update(self(inputs), labels)

    def on_validation_epoch_end(self) -> None:
        # compute() gives a dictionary, and self.log takes one number: log_dict takes them all. It has summed over
        # processes by itself, so no sync_dist.
        self.log_dict({f"val_{name}": value.float() for name, value in self.metrics.compute().items()})
        self.metrics.reset()

    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self.log_dict({f"test_{name}": value.float() for name, value in self.metrics.compute().items()})
        self.metrics.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=1e-2)


def loader(samples: Samples, *, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*samples), batch_size=64, shuffle=shuffle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    epochs = parser.parse_args().epochs

    data = embeddings()
    images_of_class = torch.bincount(data.train.labels, minlength=NUM_CLASSES)
    torch.manual_seed(0)
    model = Classifier(data.train.inputs.shape[1], images_of_class)
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader(data.train, shuffle=True), loader(data.val))

    with torch.no_grad():
        model.correction.fit(model.network(data.val.inputs), data.val.labels, k=3)
    (result,) = trainer.test(model, loader(data.test), verbose=False)
    print(f"test: macro_top1 {result['test_macro_top1']:.1%}  macro_top3 {result['test_macro_top3']:.1%}")


if __name__ == "__main__":
    main()
