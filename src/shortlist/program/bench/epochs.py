"""The suites ``epoch`` and ``loop``: whole epochs of the training program.

``epoch`` trains the paper's CIFAR-100 network with several losses. ``loop`` compares our training loop with a plain
PyTorch loop: same data, network, loss and device, one after the other in one process. Only their ratio counts.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from shortlist.program import recipes
from shortlist.program.bench.contenders import Bench
from shortlist.program.bench.losses import CROSS_ENTROPY, OURS
from shortlist.program.bench.measurements import Case, Measurement
from shortlist.program.bench.timing import Timing, wait
from shortlist.program.config import RunConfig, changed
from shortlist.program.data.base import Problem
from shortlist.program.data.catalogue import check, load_problem
from shortlist.program.data.in_memory import TensorSplit
from shortlist.program.losses import CrossEntropyConfig, LossConfig, NoisedTopKHingeConfig, SmoothTopKHingeConfig
from shortlist.program.models.build import build_model
from shortlist.program.runs.records import read_classes
from shortlist.program.training.loop import train

SMOOTH_HINGE = "shortlist, smoothed hinge"
PLAIN_LOOP = "plain loop with a DataLoader"
_EPOCHS = 3
_LOSSES: tuple[tuple[str, LossConfig], ...] = (
    (CROSS_ENTROPY, CrossEntropyConfig()),
    *(
        (OURS, NoisedTopKHingeConfig(k=k, epsilon=0.2, n_samples=n_samples))
        for k in (1, 5, 20, 50)
        for n_samples in (3, 10)
    ),
    (SMOOTH_HINGE, SmoothTopKHingeConfig(k=5)),
)


def measure_losses(bench: Bench) -> Iterator[Measurement]:
    """Epochs of CIFAR-100 with each loss; ``quick`` trains on a tiny file instead."""
    if bench.quick:
        with tempfile.TemporaryDirectory() as folder:
            yield _measured(bench, OURS, _tiny(Path(folder)))
    elif not bench.on_gpu:
        bench.say("epoch is left out: it needs a GPU")
    elif problems := check("cifar100", ""):
        bench.say(f"epoch is left out: {'; '.join(problems)}")
    else:
        for entry, loss in _LOSSES:
            config = _few_epochs(recipes.cifar100(loss))
            fast = replace(config.train, precision="bf16-mixed", channels_last=True, compile=True)
            yield _measured(bench, entry, replace(config, train=fast))


def _measured(bench: Bench, entry: str, config: RunConfig) -> Measurement:
    with tempfile.TemporaryDirectory() as folder:
        here = changed(config, {"train.device": bench.device.type})
        run = train(here, folder=Path(folder, "run"), quiet=True)
        times = Timing.of(run.epoch_seconds())
        num_classes = len(read_classes(run).names)
    loss = config.loss
    case = Case(
        dtype="bfloat16" if config.train.precision == "bf16-mixed" else "float32",
        N=config.train.batch_size,
        L=num_classes,
        K=loss.largest_k if loss.uses_k else None,
        B=int(loss.n_samples) if isinstance(loss, NoisedTopKHingeConfig) else None,
        epsilon=loss.epsilon if isinstance(loss, NoisedTopKHingeConfig) else None,
    )
    note = f"an epoch of {config.data.name} with {config.model.name}"
    return bench.row("epoch", entry, case, wall=times, note=note)


def _tiny(folder: Path) -> RunConfig:
    """A run of milliseconds that uses every part of a real one."""
    labels = torch.arange(60) % 6
    file = folder / "features.safetensors"
    safetensors.torch.save_file({"train_x": torch.randn(60, 4), "train_y": labels}, file)
    config = recipes.embeddings()
    return replace(
        config,
        data=replace(config.data, root=str(file), val_fraction=0.2),
        loss=NoisedTopKHingeConfig(k=2),
        train=replace(config.train, epochs=_EPOCHS, batch_size=16, ks=(1, 2)),
    )


def _few_epochs(config: RunConfig) -> RunConfig:
    optim = replace(config.optim, milestones=())
    return replace(config, optim=optim, train=replace(config.train, epochs=_EPOCHS))


@dataclass(frozen=True)
class _Setup:
    config: RunConfig
    augmentation: v2.Transform
    """The usual augmentation of the data, by torchvision, one image at a time."""


def measure_loops(bench: Bench) -> Iterator[Measurement]:
    """Our loop beside a plain one, on CIFAR-100 where there is a GPU and the data, on the built-in glyphs otherwise."""
    if bench.quick:
        bench.say("loop is left out: its smallest case takes longer than quick")
        return
    setup = _cifar100() if bench.on_gpu and not check("cifar100", "") else _glyphs()
    config = changed(setup.config, {"train.device": bench.device.type})
    problem = load_problem(config.data)
    case = Case(dtype="float32", N=config.train.batch_size, L=len(problem.classes))
    note = f"an epoch of {len(problem.train):,} images of {config.data.name} with {config.model.name}"
    loops: dict[str, Callable[[], list[float]]] = {
        PLAIN_LOOP: lambda: _plain_epochs(setup, problem, bench.device),
        OURS: lambda: _our_epochs(config),
    }
    for entry, loop in loops.items():
        yield bench.row("loop", entry, case, wall=Timing.of(loop()), note=note)


def _cifar100() -> _Setup:
    usual = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()])
    return _Setup(_few_epochs(recipes.build("cifar100_table4_cross_entropy_p00")), usual)


def _glyphs() -> _Setup:
    usual = v2.RandomAffine(8, translate=(0.07, 0.07), scale=(0.9, 1.1), shear=8, fill=255)
    return _Setup(_few_epochs(recipes.build("demo_cross_entropy")), usual)


def _our_epochs(config: RunConfig) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return train(config, folder=Path(folder, "run"), quiet=True).epoch_seconds()


class _PlainDataset(Dataset[tuple[Tensor, int]]):
    """As in tutorials: one image at a time, through a list of transforms."""

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
