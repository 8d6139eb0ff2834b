"""Lightning logs every metric as one number, that of all validation images."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning_module import Classifier, loader
from long_tail import NUM_CLASSES, Splits, embeddings

import shortlist as sl
from tests.support.examples import run_example

pytestmark = [
    # Lightning asks torch about its trees in a way that torch is about to drop.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    # It recommends worker processes; these data are in memory.
    pytest.mark.filterwarnings("ignore:The .* does not have many workers"),
]


@pytest.fixture(scope="module")
def data() -> Splits:
    return embeddings()


def trained(model: L.LightningModule, data: Splits) -> L.Trainer:
    trainer = L.Trainer(
        max_epochs=1,
        limit_train_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader(data.train), loader(data.val))
    return trainer


def classifier(data: Splits, kind: type[Classifier] = Classifier) -> Any:
    return kind(data.train.inputs.shape[1], torch.bincount(data.train.labels, minlength=NUM_CLASSES))


def test_the_example_runs() -> None:
    assert "macro_top3" in run_example("lightning_module", "--epochs", "1")


def test_every_metric_is_logged_as_the_number_of_all_images(data: Splits) -> None:
    model = classifier(data)
    logged = trained(model, data).callback_metrics
    whole = sl.TopKMetrics(NUM_CLASSES, ks=(1, 3), class_counts=model.metrics.class_counts)
    with torch.no_grad():
        whole.update(model(data.val.inputs), data.val.labels)
    for name, value in whole.compute().items():
        torch.testing.assert_close(logged[f"val_{name}"], value.float())


class LogsTheDictionary(Classifier):
    def on_validation_epoch_end(self) -> None:
        self.log("val", self.metrics.compute())


class LogsTheMetric(Classifier):
    def on_validation_epoch_end(self) -> None:
        self.log("val", self.metrics)


class LogsBatches(Classifier):
    def validation_step(self, batch: Any, _: int) -> None:
        inputs, labels = batch
        self.log_dict({name: value.float() for name, value in self.metrics(self(inputs), labels).items()})

    def on_validation_epoch_end(self) -> None:
        pass


@pytest.mark.parametrize("kind", [LogsTheDictionary, LogsTheMetric])
def test_log_takes_neither_the_dictionary_nor_the_metric(kind: type[Classifier], data: Splits) -> None:
    with pytest.raises(ValueError, match="val"):
        trained(classifier(data, kind), data)


def test_the_mean_over_batches_is_not_the_macro_accuracy(data: Splits) -> None:
    right, by_batch = (trained(classifier(data, kind), data) for kind in (Classifier, LogsBatches))
    assert abs(right.callback_metrics["val_macro_top3"] - by_batch.callback_metrics["macro_top3"]) > 1e-4
