"""Checkpoints with other content and a right checksum: not what a disk does to a file, but what a person can do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shortlist.program.runs.folder import RunFolder


def newest_checkpoint(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("*.pt"))


def rewrite_newest(folder: Path, change: Callable[[Any], Any]) -> Path:
    """Put what ``change`` makes of the newest training state in its place."""
    path = newest_checkpoint(folder)
    state = torch.load(path, weights_only=True)
    path.unlink()
    RunFolder(folder).save_checkpoint(change(state), int(path.name.partition("-")[0]))
    return newest_checkpoint(folder)
