"""The suite ``loop``: an epoch of our training loop beside a plain PyTorch loop with a DataLoader.

Same data, network, loss and device, in one process, one after the other: read the ratio. CIFAR-100 on a GPU where the
data is there, the built-in glyphs otherwise.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from shortlist.program import recipes
from shortlist.program.bench.contenders import Bench
from shortlist.program.bench.measurements import Case, Measurement
from shortlist.program.bench.timing import Timing, wait
from shortlist.program.config import RunConfig, changed
from shortlist.program.data.base import Problem
from shortlist.program.data.catalogue import check
from shortlist.program.data.in_memory import TensorSplit
from shortlist.program.data.loading import load_problem
from shortlist.program.models.build import build_model
from shortlist.program.training.loop import train

SUITE = "loop"
PLAIN, OURS = "plain loop with a DataLoader", "shortlist"
_EPOCHS = 3


@dataclass(frozen=True)
class _Setup:
    config: RunConfig
    augmentation: v2.Transform
    """The data's usual one, as torchvision does it, one image at a time."""


def measure(bench: Bench) -> Iterator[Measurement]:
    if bench.quick:
        bench.say(f"{SUITE} is left out: its smallest case takes longer than quick")
        return
    setup = _cifar100() if bench.on_gpu and not check("cifar100", "") else _glyphs()
    config = changed(setup.config, {"train.device": bench.device.type})
    problem = load_problem(config.data)
    case = Case(dtype="float32", N=config.train.batch_size, L=len(problem.classes))
    note = f"an epoch of {len(problem.train):,} images of {config.data.name} with {config.model.name}"
    loops: dict[str, Callable[[], list[float]]] = {
        PLAIN: lambda: _plain_epochs(setup, problem, bench.device),
        OURS: lambda: _our_epochs(config),
    }
    for entry, loop in loops.items():
        yield bench.row(SUITE, entry, case, wall=Timing.of(loop()), note=note)


def _cifar100() -> _Setup:
    usual = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()])
    return _Setup(_short(recipes.build("cifar100_table4_cross_entropy_p00")), usual)


def _glyphs() -> _Setup:
    usual = v2.RandomAffine(8, translate=(0.07, 0.07), scale=(0.9, 1.1), shear=8, fill=255)
    return _Setup(_short(recipes.build("demo_cross_entropy")), usual)


def _short(config: RunConfig) -> RunConfig:
    optim = replace(config.optim, milestones=())
    return replace(config, optim=optim, train=replace(config.train, epochs=_EPOCHS))


def _our_epochs(config: RunConfig) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return train(config, folder=Path(folder, "run"), quiet=True).epoch_seconds()


class _PlainDataset(Dataset[tuple[Tensor, int]]):
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


def _plain_epochs(setup: _Setup, problem: Problem, device: torch.device) -> list[float]:
    """Seconds of each epoch but the first."""
    config = setup.config
    assert isinstance(problem.train, TensorSplit)
    loader = DataLoader(
        _PlainDataset(problem.train, setup.augmentation),
        config.train.batch_size,
        shuffle=True,
        num_workers=2,
        pin_memory=device.type == "cuda",
        persistent_workers=True,
    )
    model = build_model(config.model, problem.input_shape, len(problem.classes)).to(device)
    optim = config.optim
    optimizer = torch.optim.SGD(
        model.parameters(), optim.lr, optim.momentum, weight_decay=optim.weight_decay, nesterov=True
    )
    criterion = nn.CrossEntropyLoss()
    ends = []
    for _ in range(_EPOCHS):
        for images, labels in loader:
            loss = criterion(model(images.to(device, non_blocking=True)), labels.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        wait(device)
        ends.append(time.perf_counter())
    return [after - before for before, after in pairwise(ends)]
