"""Images a second: our training loop against a plain PyTorch loop with a DataLoader, same data, network and loss.

    python bench/throughput.py [--cifar100]

Both train the same epochs on the same device in this process, one after the other; read the ratio, not the numbers.
The built-in glyphs need nothing; CIFAR-100 is looked for in $SHORTLIST_DATA.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from shortlist import recipes
from shortlist.config import RunConfig
from shortlist.data import Problem, load_problem
from shortlist.data.tensors import TensorSplit
from shortlist.device import pick_device
from shortlist.models import build_model
from shortlist.training import train

EPOCHS = 3


class PlainDataset(Dataset[tuple[Tensor, int]]):
    """As tutorials write it: one image at a time through a list of transforms."""

    def __init__(self, split: TensorSplit, augmentation: v2.Transform) -> None:
        assert split.preprocess is not None
        self.images, self.labels = split.inputs, split.labels
        normalise = v2.Normalize(split.preprocess.mean, split.preprocess.std)
        self.transform = v2.Compose([augmentation, v2.ToDtype(torch.float32, scale=True), normalise])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), int(self.labels[index])


def plain_loop(config: RunConfig, problem: Problem, augmentation: v2.Transform) -> float:
    """Seconds of the last epochs, the first left out as a warm-up."""
    device = pick_device("auto")
    assert isinstance(problem.train, TensorSplit)
    loader = DataLoader(
        PlainDataset(problem.train, augmentation),
        config.train.batch_size,
        shuffle=True,
        num_workers=2,
        pin_memory=device.type == "cuda",
        persistent_workers=True,
    )
    model = build_model(config.model, problem.input_shape, len(problem.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), config.optim.lr, 0.9, weight_decay=1e-4, nesterov=True)
    criterion = nn.CrossEntropyLoss()
    began = 0.0
    for epoch in range(EPOCHS):
        if epoch == 1:
            began = time.perf_counter()
        for images, labels in loader:
            loss = criterion(model(images.to(device, non_blocking=True)), labels.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    loss.item()  # waits for the GPU
    return time.perf_counter() - began


def our_loop(config: RunConfig) -> float:
    with tempfile.TemporaryDirectory() as folder:
        lines = train(config, folder=Path(folder, "run"), quiet=True).metrics()
    return float(lines[-1]["train_seconds"] - lines[0]["train_seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar100", action="store_true", help="CIFAR-100 with DenseNet 40-40 in place of glyphs")
    if parser.parse_args().cifar100:
        config = recipes.build("cifar100_table4_cross_entropy_p00")
        augmentation: v2.Transform = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()])
    else:
        config = recipes.build("demo_cross_entropy")
        augmentation = v2.RandomAffine(8, translate=(0.07, 0.07), scale=(0.9, 1.1), shear=8, fill=255)
    optim = replace(config.optim, milestones=())
    config = replace(config, optim=optim, train=replace(config.train, epochs=EPOCHS))
    problem = load_problem(config.data)
    images = len(problem.train) * (EPOCHS - 1)
    ours, plain = images / our_loop(config), images / plain_loop(config, problem, augmentation)
    print(f"{config.data.name}, {config.model.name}, {pick_device('auto')}, batch {config.train.batch_size}")
    print(f"plain loop {plain:10,.0f} images/s\nshortlist  {ours:10,.0f} images/s\nratio      {ours / plain:10.2f}")


if __name__ == "__main__":
    main()
