"""The suite ``epoch``: whole epochs of the paper's CIFAR-100 set-up through the training program itself."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import safetensors.torch
import torch

from shortlist.program import recipes
from shortlist.program.bench.contenders import Bench
from shortlist.program.bench.losses import CROSS_ENTROPY, OURS
from shortlist.program.bench.measurements import Case, Measurement
from shortlist.program.bench.timing import Timing
from shortlist.program.config import RunConfig, changed
from shortlist.program.data.catalogue import check
from shortlist.program.losses import CrossEntropyConfig, LossConfig, NoisedTopKHingeConfig, SmoothTopKHingeConfig
from shortlist.program.runs.records import read_classes
from shortlist.program.training.loop import train

SUITE = "epoch"
SMOOTH_HINGE = "shortlist, smoothed hinge"
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


def measure(bench: Bench) -> Iterator[Measurement]:
    if bench.quick:
        with tempfile.TemporaryDirectory() as folder:
            yield _measured(bench, OURS, _tiny(Path(folder)))
    elif not bench.on_gpu:
        bench.say(f"{SUITE} is left out: it needs a GPU")
    elif wrong := _missing_data():
        bench.say(f"{SUITE} is left out: {wrong}")
    else:
        for entry, loss in _LOSSES:
            yield _measured(bench, entry, _cifar100(loss))


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
        K=loss.k if loss.uses_k else None,
        B=int(loss.n_samples) if isinstance(loss, NoisedTopKHingeConfig) else None,
        epsilon=loss.epsilon if isinstance(loss, NoisedTopKHingeConfig) else None,
    )
    note = f"an epoch of {config.data.name} with {config.model.name}"
    return bench.row(SUITE, entry, case, wall=times, note=note)


def _cifar100(loss: LossConfig) -> RunConfig:
    """The paper's run, cut to a few epochs, as fast as the program can make it."""
    config = recipes.cifar100(loss)
    fast = replace(config.train, epochs=_EPOCHS, precision="bf16-mixed", channels_last=True, compile=True)
    return replace(config, optim=replace(config.optim, milestones=()), train=fast)


def _tiny(folder: Path) -> RunConfig:
    """A run of milliseconds that passes through everything a real one does."""
    labels = torch.arange(60) % 6
    file = folder / "features.safetensors"
    safetensors.torch.save_file({"train_x": torch.randn(60, 4), "train_y": labels}, file)
    config = recipes.embeddings()
    return replace(
        config,
        data=replace(config.data, root=str(file), val_fraction=0.2),
        model=replace(config.model, head="linear"),
        loss=NoisedTopKHingeConfig(k=2),
        train=replace(config.train, epochs=_EPOCHS, batch_size=16, ks=(1, 2)),
    )


def _missing_data() -> str:
    return "; ".join(check("cifar100", ""))
