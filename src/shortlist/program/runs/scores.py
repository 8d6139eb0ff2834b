"""The scores that a run keeps of its validation and test images, so that calibration needs no second look at them."""

from dataclasses import dataclass
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.runs.folder import ADDED, BEST, RunFolder, file_digest

FILE = "scores.safetensors"
MOST_WRITTEN = 2**24
"""Scores of a split: 64 MiB. Of more, those of evenly spaced images are kept."""
_WEIGHTS = "best_sha256"


@dataclass(frozen=True)
class Scores:
    """What a network says of images: the plain scores of all classes."""

    scores: Tensor
    """``(N, L)``, of the images that could be read."""
    labels: Tensor
    """``(N,)``."""
    images: Tensor
    """``(N,)`` their numbers in the split, on the CPU."""

    def subset(self, indices: Tensor) -> "Scores":
        return Scores(self.scores[indices], self.labels[indices], self.images[indices])


def write_scores(run: RunFolder, **splits: Scores) -> None:
    """Keep the scores of the best weights, by the names of the splits."""
    tensors = {}
    for name, found in splits.items():
        most = max(1, MOST_WRITTEN // found.scores.shape[1])
        every = max(1, -(-len(found.labels) // most))
        for part in ("scores", "labels", "images"):
            tensors[f"{name}_{part}"] = getattr(found, part)[::every].cpu().clone()
    metadata = {_WEIGHTS: file_digest(run.path / BEST)}
    run.write_file(FILE, safetensors.torch.save(tensors, metadata))


def read_scores(run: RunFolder, split: str) -> Scores:
    """The scores that a finished run kept of a split."""
    path = run.path / FILE
    if not path.is_file() and run.has(ADDED):
        raise ShortlistError(
            f"{run.path} has no {FILE}: classes were added to it after training, and its network would have to see "
            "all images again; for a calibration, train again with the new classes"
        )
    if not path.is_file():
        raise ShortlistError(
            f"{run.path} has no {FILE}: it has not finished, or an earlier version trained it; finish it with "
            "--resume, or train it again"
        )
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            weights = (file.metadata() or {}).get(_WEIGHTS)
            scores, labels, images = (file.get_tensor(f"{split}_{part}") for part in ("scores", "labels", "images"))
    except (safetensors.SafetensorError, OSError) as error:
        raise run.damaged(FILE, error) from None
    if weights != file_digest(run.path / BEST):
        raise run.damaged(FILE, f"it does not belong to the weights in {BEST}")
    if not _fit_together(scores, labels, images):
        raise run.damaged(FILE, f"the scores, labels and images of {split} do not fit together")
    return Scores(scores, labels, images)


def _fit_together(scores: Any, labels: Any, images: Any) -> bool:
    whole = labels.dtype == images.dtype == torch.int64 and scores.is_floating_point()
    if not whole or scores.dim() != 2 or labels.shape != scores.shape[:1] or images.shape != labels.shape:
        return False
    return len(labels) == 0 or bool((labels >= 0).all() and (labels < scores.shape[1]).all())
