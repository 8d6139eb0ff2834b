"""The training state: what a checkpoint holds, and which of its contents can be trusted."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from shortlist.errors import ShortlistError
from shortlist.program.config import RunConfig
from shortlist.program.models.build import load_weights
from shortlist.program.runs.checks import is_metrics_line
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.build import Parts


@dataclass
class Position:
    """How far a run has come: all that resuming needs besides weights and optimiser. Its fields are those on disk."""

    epoch: int = 0
    step: int = 0
    """Steps done in this epoch."""
    loss_sum: float = 0.0
    """Sum over this rank's images of this epoch so far; in a checkpoint, over those of all ranks."""
    images: float = 0
    """Number of these images."""
    seconds: float = 0.0
    """Spent on training steps since the run began."""
    best_epoch: int = -1
    """Whose weights are kept."""
    best_value: float = -1.0
    """The highest of all epochs."""
    best_at_smaller_ks: list[float] = field(default_factory=list)
    """Decides between epochs of the same value: the largest of these K first."""
    best_digest: str = ""
    """Checksum of the file of the best weights."""
    skipped: list[str] = field(default_factory=list)
    """Images that could not be read, on any rank, when the checkpoint was written."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """The lines of ``metrics.jsonl``. Results come from here, because a checksum guards the checkpoint."""


def training_state(parts: Parts, position: Position) -> dict[str, Any]:
    """What a checkpoint holds."""
    return {
        "model": parts.trained.state_dict(),
        "frozen": parts.frozen_digest,
        "optimizer": parts.optimizer.state_dict(),
        "precision": parts.fabric.strategy.precision.state_dict(),
        "position": asdict(position),
    }


def restore(parts: Parts, state: dict[str, Any]) -> Position:
    """Load a training state into the parts, or raise a ``ShortlistError`` that says what is wrong with it."""
    if missing := {"model", "optimizer", "precision", "position"} - state.keys():
        raise ShortlistError(f"it has no {min(missing)}")
    position = read_position(state, parts.config)
    if position.step > parts.steps:
        raise ShortlistError(f"its position is step {position.step} of an epoch of {parts.steps}")
    # Checkpoints that have no such entry are of versions without frozen networks.
    if state.get("frozen", "") != parts.frozen_digest:
        raise ShortlistError("its last layer was trained on the features of a backbone with other weights")
    load_weights(parts.trained, state["model"], "its weights do not fit the network")
    try:
        parts.optimizer.load_state_dict(_optimizer_state(state["optimizer"], parts.optimizer))
        parts.fabric.strategy.precision.load_state_dict(state["precision"])
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        raise ShortlistError("its optimiser state does not fit the network") from None
    return position


def read_position(state: dict[str, Any], config: RunConfig) -> Position:
    """The position in a training state; a ``ShortlistError`` if no run with this configuration can be there."""
    try:
        position = Position(**state["position"])
        possible = _is_possible(position, config.train.epochs)
        possible = possible and {"epoch", "step", "best_epoch", "best_digest"} <= state["position"].keys()
    except (KeyError, TypeError):
        possible = False
    if not possible:
        raise ShortlistError(f"its position is impossible in a run of {config.train.epochs} epochs")
    return position


def _is_possible(position: Position, epochs: int) -> bool:
    numbers = (position.loss_sum, position.images, position.seconds, position.best_value)
    return (
        all(type(number) is int for number in (position.epoch, position.step, position.best_epoch))
        and all(math.isfinite(number) for number in (*numbers, *position.best_at_smaller_ks))
        and 0 <= position.epoch <= epochs
        and -1 <= position.best_epoch < max(1, position.epoch)
        and min(position.step, position.images, position.seconds) >= 0
        and isinstance(position.best_digest, str)
        and all(isinstance(file, str) for file in position.skipped)
        and all(is_metrics_line(line) for line in position.lines)
        # Older checkpoints have no lines.
        and [line["epoch"] for line in position.lines] in ([], list(range(position.epoch)))
    )


def epochs_done(run: RunFolder, config: RunConfig, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """The metrics of a run's finished epochs: those in its checkpoint, or without one those in its file."""
    state = run.load_checkpoint(warn, lambda state: read_position(state, config))
    return run.metrics() if state is None else lines_of(run, read_position(state, config))


def lines_of(run: RunFolder, position: Position) -> list[dict[str, Any]]:
    """The metrics of the finished epochs; with a checkpoint of an older version only the file has them."""
    if position.lines or position.epoch == 0:
        return position.lines
    lines = [line for line in run.metrics() if line["epoch"] < position.epoch]
    if position.best_epoch not in {line["epoch"] for line in lines}:
        raise run.damaged_metrics()
    return lines


def _optimizer_state(saved: Any, optimizer: Optimizer) -> dict[str, Any]:
    """The saved moments with the optimiser's present settings. Checks shapes, which torch does not."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {"step", "exp_avg", "exp_avg_sq"} if isinstance(optimizer, AdamW) else {"momentum_buffer"}
    for index, moments in saved["state"].items():
        for name in names if moments else ():
            value, shape = moments[name], torch.Size() if name == "step" else parameters[index].shape
            if value is not None and value.shape != shape:
                raise ValueError(name)
    return {"state": saved["state"], "param_groups": optimizer.state_dict()["param_groups"]}
