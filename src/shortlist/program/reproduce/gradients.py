"""Training that counts the non-zero coordinates of the gradient of the loss in the scores."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.program.config import RunConfig
from shortlist.program.runs.checks import is_whole
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import read_classes
from shortlist.program.training.loop import Interrupted, Trainer, make_fabric, run_to_the_end

COUNTS = "gradients.json"
"""In the run folder: how many coordinates were not zero, and of how many images."""


class CountingLoss(nn.Module):
    """A loss that looks at the gradient it sends back to the scores; what it computes stays as it was.

    Example:
        >>> scores = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
        >>> loss = CountingLoss(nn.MultiMarginLoss())
        >>> loss(scores, torch.tensor([1])).backward()
        >>> loss.nonzero.item(), loss.images  # the label, and the one class within its margin
        (2, 1)
    """

    nonzero: Tensor

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss
        self.register_buffer("nonzero", torch.zeros((), dtype=torch.int64))
        self.images = 0

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        scores.register_hook(self._count)  # type: ignore[no-untyped-call]
        loss: Tensor = self.loss(scores, target)
        return loss

    def _count(self, gradient: Tensor) -> None:
        self.nonzero += gradient.count_nonzero()
        self.images += len(gradient)


def train_and_count(config: RunConfig, *, folder: Path, resume: bool, quiet: bool) -> RunFolder:
    """As ``shortlist.program.training.loop.train`` on one device, and leave the counts in the run folder."""
    run = RunFolder(folder)
    trainer = Trainer(config, make_fabric(config), run, quiet=quiet)
    criterion = trainer.criterion = CountingLoss(trainer.criterion).to(trainer.fabric.device)
    return run_to_the_end(trainer, resume=resume, while_fitting=_counts_kept(criterion, run))


@contextmanager
def _counts_kept(criterion: CountingLoss, run: RunFolder) -> Iterator[None]:
    """In the run folder, beside the checkpoints: a run that was stopped goes on counting."""
    if (run.path / COUNTS).exists():
        nonzero, criterion.images = _read_counts(run)
        criterion.nonzero += nonzero
    stopped = None
    try:
        yield
    except Interrupted as interrupted:
        stopped = interrupted
    run.write_json(COUNTS, {"nonzero": int(criterion.nonzero), "images": criterion.images})
    if stopped:
        raise stopped


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
        raise ShortlistError(f"{run.path / COUNTS} is damaged: it has no entry {missing}") from None
