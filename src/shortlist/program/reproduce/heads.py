"""Every last layer on every network: is it the features that a loss learns, or the layer on top of them?

The networks are those of ``rare-cifar100-lt``. Each is frozen, and a new last layer is trained on its features with
each of the losses.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import write_file
from shortlist.program.compare.intervals import Interval, interval
from shortlist.program.config import Changes, RunConfig, changed, differences
from shortlist.program.reproduce.comparison_results import Found
from shortlist.program.runs.folder import FinishedError, InUseError, RunFolder, default_folder
from shortlist.program.runs.records import read_result
from shortlist.program.training.build import free_earlier_runs
from shortlist.program.training.loop import train

NAME = "rare-heads"
COMPARISON = "rare-cifar100-lt"
LOSSES = ("cross_entropy", "balanced_softmax", "noised_k1", "noised_k5")

_LAST_LAYER: Changes = {
    "model.frozen": True,
    "optim.name": "adamw",
    "optim.lr": 3e-3,
    "optim.schedule": "cosine",
    "optim.milestones": (),
    "optim.warmup_epochs": 0.5,
    "optim.weight_decay": 1e-4,
    "train.epochs": 30,
    "train.batch_size": 256,
    "train.precision": "32-true",
    "train.channels_last": False,
    "train.compile": False,
}


@dataclass(frozen=True)
class HeadRun:
    """A last layer on a frozen network."""

    backbone: str
    """The loss that trained the network."""
    head: str
    """The loss that trained the last layer."""
    seed: int
    test: dict[str, float | None]
    """After the correction for class sizes, if there is one."""
    commit: str
    device: str
    started: str


def head_config(head: RunConfig, backbone: RunFolder) -> RunConfig:
    """The run that trains a last layer with the loss and settings of ``head`` on the features of a trained network."""
    return replace(changed(head, {**_LAST_LAYER, "model.weights": str(backbone.path)}), seed=backbone.config.seed)


def train_heads(
    found: Found, *, seeds: Sequence[int], results: Path, say: Callable[[str], None] = lambda message: None
) -> Path:
    """Train what is missing, and write all numbers of the runs on this disk. Several processes may share the work.

    Args:
        found: The comparison that the networks and the settings of the losses come from.
        seeds: Of the networks; a last layer has the seed of its network.
        results: Folder of the file.
        say: Called with messages.
    """
    configs = {name: _config_of(found, name) for name in LOSSES}
    runs = []
    for seed in seeds:
        for backbone in LOSSES:
            network = RunFolder(default_folder(replace(configs[backbone], seed=seed)))
            if not network.finished:
                raise ShortlistError(
                    f"the network of {backbone}, seed {seed}, is not in {network.path}: train it first with `shortlist "
                    f"reproduce {COMPARISON}`"
                )
            for head in LOSSES:
                say(f"{head} on the features of {backbone}, seed {seed}")
                run = _finished(head_config(configs[head], network))
                if run is not None:
                    runs.append(_head_run(backbone, head, run))
    path = results / f"{NAME}.json"
    lines = ",\n".join(json.dumps(vars(run), allow_nan=False) for run in runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, f"[\n{lines}\n]\n".encode())
    return path


def _config_of(found: Found, name: str) -> RunConfig:
    loss = found.loss(name)
    if loss is None or loss.config is None:
        raise ShortlistError(
            f"{COMPARISON} has no settings for {name} yet: run `shortlist reproduce {COMPARISON}` first"
        )
    return loss.config


def _finished(config: RunConfig) -> RunFolder | None:
    """The finished run, trained now if need be; None if another process is training it."""
    run = RunFolder(default_folder(config))
    if run.finished and not differences(run.config, config):
        return run
    free_earlier_runs(config)
    try:
        return train(config, folder=run.path, resume=True, quiet=True)
    except FinishedError:  # another process has finished it in the meantime
        return run
    except InUseError:
        return None


def _head_run(backbone: str, head: str, run: RunFolder) -> HeadRun:
    result, environment = read_result(run), run.read_environment()
    metrics = result.get("test_corrected") or result["test"]
    return HeadRun(
        backbone=backbone,
        head=head,
        seed=run.config.seed,
        test={name: value if value is None else round(value, 6) for name, value in metrics.items()},
        commit=" ".join(run.commits()),
        device=environment["device"],
        started=environment["started"],
    )


def read_heads(path: Path) -> list[HeadRun]:
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return [HeadRun(**entry) for entry in entries]
    except (OSError, ValueError, TypeError) as error:
        raise ShortlistError(f"{path} cannot be read: {error}") from None


def mean_of(runs: Sequence[HeadRun], backbone: str, head: str, metric: str) -> Interval | None:
    """The mean over seeds, with its interval."""
    found = [run.test.get(metric) for run in runs if (run.backbone, run.head) == (backbone, head)]
    return interval([value for value in found if value is not None])
