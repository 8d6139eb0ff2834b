"""A training loop in plain PyTorch: three losses on a long tail, with and without the correction, measured alike.

Run it: python examples/plain_loop.py
"""

import argparse

import torch
from long_tail import NUM_CLASSES, Samples, embeddings
from torch import Tensor, nn

import shortlist as sl


def train(criterion: nn.Module, samples: Samples, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(samples.inputs.shape[1], 128), nn.ReLU(), nn.Linear(128, NUM_CLASSES))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    for _ in range(epochs):
        for batch in torch.randperm(len(samples.labels)).split(64):
            loss = criterion(network(samples.inputs[batch]), samples.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network.eval()


@torch.no_grad()
def scores_of(network: nn.Module, samples: Samples) -> Tensor:
    return network(samples.inputs)


def accuracy(scores: Tensor, labels: Tensor, images_of_class: Tensor) -> dict[str, Tensor]:
    metrics = sl.TopKMetrics(NUM_CLASSES, ks=(1, 3, 5), class_counts=images_of_class)
    metrics.update(scores, labels)
    return metrics.compute()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs

    data = embeddings()
    # Class sizes are counted in the training labels alone: these are what the network has seen.
    images_of_class = torch.bincount(data.train.labels, minlength=NUM_CLASSES)
    criteria = {
        "cross-entropy": nn.CrossEntropyLoss(),
        "balanced softmax": sl.LogitAdjustedLoss(images_of_class),
        "noised top-3 hinge": sl.NoisedTopKHinge(3, epsilon=0.5),
    }
    for name, criterion in criteria.items():
        network = train(criterion, data.train, epochs)
        # The correction is chosen on validation images. The test images only measure.
        correction = sl.PriorCorrection(images_of_class)
        correction.fit(scores_of(network, data.val), data.val.labels, k=3)
        plain = scores_of(network, data.test)
        corrected = correction(plain)
        for label, scores in ((name, plain), (f"{name}, corrected", corrected)):
            result = accuracy(scores, data.test.labels, images_of_class)
            shown = "  ".join(f"{metric} {result[metric]:.1%}" for metric in ("macro_top1", "macro_top3", "few_top3"))
            print(f"{label:30} {shown}")


if __name__ == "__main__":
    main()
