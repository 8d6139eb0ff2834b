"""The data of the scale ``smoke``: a few hundred embeddings in long-tailed classes, made on first use."""

from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from shortlist.program.atomic_files import write_file

NUM_CLASSES = 60
"""More than the largest K of any experiment."""
_FEATURES = 16
_HELD_OUT_A_CLASS = 2
# Training images of each class: one class has many, some have a medium number, the rest few.
_TRAIN_SIZES = [110, *[24] * 5, *[4] * (NUM_CLASSES - 6)]


def path(runs_root: Path) -> Path:
    return runs_root / "tiny-data.safetensors"


def ensure(runs_root: Path) -> None:
    """Write the file if it does not exist."""
    if path(runs_root).exists():
        return
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(NUM_CLASSES, _FEATURES, generator=generator)
    arrays: dict[str, Tensor] = {}
    held_out = [_HELD_OUT_A_CLASS] * NUM_CLASSES
    for split, sizes in {"train": _TRAIN_SIZES, "val": held_out, "test": held_out}.items():
        labels = torch.arange(NUM_CLASSES).repeat_interleave(torch.tensor(sizes))
        spread = torch.randn(len(labels), _FEATURES, generator=generator)
        arrays |= {f"{split}_x": centres[labels] + spread, f"{split}_y": labels}
    write_file(path(runs_root), safetensors.torch.save(arrays))
