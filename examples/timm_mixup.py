"""A network, optimizer, schedule, Mixup and averaged weights of timm with a loss of shortlist.

Run it: python examples/timm_mixup.py
"""

import argparse

import timm
import torch
import torch.nn.functional as F
from long_tail import NUM_CLASSES, Samples, images
from timm.data import Mixup, resolve_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

import shortlist as sl

SIDE = 32  # four patches of the network
BATCH = 64


def prepared(samples: Samples, network: nn.Module) -> Samples:
    """Images of the size and with the mean and deviation that the network expects."""
    config = resolve_data_config({"input_size": (3, SIDE, SIDE)}, model=network)
    mean, std = (torch.tensor(config[name]).view(-1, 1, 1) for name in ("mean", "std"))
    return Samples((F.interpolate(samples.inputs, size=config["input_size"][1:]) - mean) / std, samples.labels)


def make_mixup(alpha: float) -> Mixup:
    """Targets become class probabilities, which every loss of shortlist takes.

    Label smoothing is on by default, and would give every rare class a share of every image.
    """
    return Mixup(mixup_alpha=alpha, label_smoothing=0, num_classes=NUM_CLASSES)


@torch.no_grad()
def scores_of(network: nn.Module, samples: Samples) -> Tensor:
    return torch.cat([network.eval()(inputs) for inputs in samples.inputs.split(256)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    network = timm.create_model("test_vit", img_size=SIDE, num_classes=NUM_CLASSES)  # add pretrained=True for yours
    train, val, test = (prepared(samples, network) for samples in images())
    images_of_class = torch.bincount(train.labels, minlength=NUM_CLASSES)  # of the labels before they are mixed
    criterion = sl.LogitAdjustedLoss(images_of_class)
    optimizer = create_optimizer_v2(network, opt="adamw", lr=3e-3, weight_decay=0.05)
    schedule = CosineLRScheduler(optimizer, t_initial=epochs)
    averaged = ModelEmaV3(network, decay=0.98)
    mixup = make_mixup(0.2)
    for epoch in range(epochs):
        network.train()
        order = torch.randperm(len(train.labels))
        for batch in order[: len(order) // BATCH * BATCH].split(BATCH):  # Mixup needs an even number of images
            inputs, target = mixup(train.inputs[batch], train.labels[batch])
            loss = criterion(network(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averaged.update(network)
        schedule.step(epoch + 1)

    # Metrics and correction take labels, of images that are not mixed, and the averaged weights.
    correction = sl.PriorCorrection(images_of_class)
    correction.fit(scores_of(averaged.module, val), val.labels, k=3)
    metrics = sl.TopKMetrics(NUM_CLASSES, ks=(1, 3), class_counts=images_of_class)
    metrics.update(correction(scores_of(averaged.module, test)), test.labels)
    result = metrics.compute()
    print(f"test: macro_top1 {result['macro_top1']:.1%}  macro_top3 {result['macro_top3']:.1%}")


if __name__ == "__main__":
    main()
