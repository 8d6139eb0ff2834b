"""Counts of the non-zero coordinates of the gradient of the loss in the scores, over a training."""

import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.program.runs.checks import is_whole
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import read_classes
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.loop import Trainer

COUNTS = "gradients.json"
"""In the run folder: how many coordinates were not zero, and of how many images."""


class GradientCounts(Callback):
    """Counts the non-zero coordinates of the gradient that a loss sends back to the scores.

    The counts are kept in the run folder with each checkpoint, so that a resumed run goes on counting.

    Example:
        >>> scores = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
        >>> loss, counts = nn.MultiMarginLoss(), GradientCounts()
        >>> counts.watch(loss)
        >>> loss(scores, torch.tensor([1])).backward()
        >>> counts.nonzero.item(), counts.images  # the label, and the one class within its margin
        (2, 1)
    """

    def __init__(self) -> None:
        self.nonzero = torch.zeros((), dtype=torch.int64)
        self.images = 0

    def watch(self, loss: nn.Module) -> None:
        """Count the gradients of this loss."""
        loss.register_forward_pre_hook(self._watch_scores)

    def _watch_scores(self, loss: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].register_hook(self._count)  # type: ignore[no-untyped-call]

    def _count(self, gradient: Tensor) -> None:
        self.nonzero += gradient.count_nonzero()
        self.images += len(gradient)

    def on_fit_start(self, trainer: Trainer) -> None:
        if (trainer.run.path / COUNTS).exists():
            nonzero, self.images = _read_counts(trainer.run)
            self.nonzero += nonzero
        self.nonzero = self.nonzero.to(trainer.fabric.device)
        self.on_checkpoint(trainer)
        self.watch(trainer.parts.loss)

    def on_checkpoint(self, trainer: Trainer) -> None:
        trainer.run.write_json(COUNTS, {"nonzero": int(self.nonzero), "images": self.images})


def nonzero_gradients(run: RunFolder) -> float:
    """Mean number of non-zero coordinates of an image's gradient in the scores, over the whole run."""
    nonzero, counted = _read_counts(run)
    images = sum(read_classes(run).train_images) * run.config.train.epochs
    if counted != images:  # it was killed, and what was counted after its last checkpoint is lost
        raise ShortlistError(f"{run.path} has counted {counted} of {images} images")
    return float(nonzero / counted)


def _read_counts(run: RunFolder) -> tuple[int, int]:
    """Non-zero coordinates and images."""
    counts = run.read_record(COUNTS, nonzero=is_whole, images=is_whole)
    try:
        return counts["nonzero"], counts["images"]
    except KeyError as missing:
        raise run.damaged(COUNTS, f"it has no entry {missing}") from None
