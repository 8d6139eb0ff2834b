"""Checkpoints with other content and a right checksum: not made by a failing disk, but by a person."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shortlist.program.runs.folder import RunFolder


def newest_checkpoint(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("*.pt"))


def rewrite_newest(folder: Path, change: Callable[[Any], Any]) -> Path:
    """Replace the newest training state by what ``change`` makes of it."""
    path = newest_checkpoint(folder)
    state = torch.load(path, weights_only=True)
    path.unlink()
    RunFolder(folder).save_checkpoint(change(state), int(path.name.partition("-")[0]))
    return newest_checkpoint(folder)
