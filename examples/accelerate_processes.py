"""A loop with accelerate, on one process or many, that counts every validation image once.

Run it: torchrun --nproc-per-node 2 examples/accelerate_processes.py
"""

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from long_tail import NUM_CLASSES, Samples, embeddings
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shortlist as sl


@torch.no_grad()
def scores_of(accelerator: Accelerator, network: nn.Module, batches: DataLoader[Any]) -> tuple[Tensor, Tensor]:
    """Scores and labels of all images, on every process.

    Every process needs as many batches as the others, so accelerate repeats images at the end: 397 images in batches of
    50 on two processes become 400. ``gather_for_metrics`` takes the repeated ones away, and ``gather`` does not.
    """
    network.eval()
    gathered = [accelerator.gather_for_metrics((network(inputs), labels)) for inputs, labels in batches]
    scores, labels = (torch.cat(parts) for parts in zip(*gathered, strict=True))
    return scores, labels


def loader(samples: Samples, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples), batch_size=50, shuffle=shuffle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    epochs = parser.parse_args().epochs

    # Without a GPU, processes find each other only if the CPU is asked for.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    data = embeddings(held_out_of_class=14)
    data = data._replace(val=Samples(data.val.inputs[:397], data.val.labels[:397]))
    # Counted in the whole data: a prepared loader gives each process its own part.
    images_of_class = torch.bincount(data.train.labels, minlength=NUM_CLASSES).to(accelerator.device)
    criterion = sl.LogitAdjustedLoss(images_of_class)
    torch.manual_seed(0)
    network: Any = nn.Sequential(nn.Linear(data.train.inputs.shape[1], 128), nn.ReLU(), nn.Linear(128, NUM_CLASSES))
    optimizer: Any = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    network, optimizer, train, val, test = accelerator.prepare(
        network, optimizer, loader(data.train, shuffle=True), loader(data.val), loader(data.test)
    )
    for _ in range(epochs):
        network.train()
        for inputs, labels in train:
            loss = criterion(network(inputs), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

    correction = sl.PriorCorrection(images_of_class)
    val_scores, val_labels = scores_of(accelerator, network, val)
    correction.fit(val_scores, val_labels, k=3)
    # Each process has all scores already: without this setting, compute() would add the same counts once more for
    # every process.
    metrics = sl.TopKMetrics(NUM_CLASSES, ks=(1, 3), class_counts=images_of_class, sync_on_compute=False)
    metrics.to(accelerator.device)
    test_scores, test_labels = scores_of(accelerator, network, test)
    metrics.update(correction(test_scores), test_labels)
    result = metrics.compute()
    accelerator.print(f"{accelerator.num_processes} processes, {len(val_labels)} validation images")
    accelerator.print(f"test: macro_top1 {result['macro_top1']:.1%}  macro_top3 {result['macro_top3']:.1%}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
