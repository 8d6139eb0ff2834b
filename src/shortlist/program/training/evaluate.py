"""Evaluation on a split: every image counts exactly once, on any number of ranks."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist

from shortlist.errors import ShortlistError
from shortlist.metrics import TopKMetrics, scores_above
from shortlist.program.data.base import Problem, Split, evaluation_plan
from shortlist.program.data.catalogue import load_problem
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.model import load_model
from shortlist.program.runs.records import refuse_other_data
from shortlist.program.runs.start import normalised_as_recorded
from shortlist.program.text import spreadsheet_cell
from shortlist.program.training.predict import autocast, pick_device

_FEWEST_SUGGESTIONS_KEPT = 10


@dataclass(frozen=True)
class Evaluation:
    """Accuracy and suggestions of a network on a split."""

    metrics: dict[str, float | None]
    """As ``TopKMetrics.compute``; None for a mean over no class."""
    per_class: dict[int, Tensor]
    """For each K the accuracy of each class, NaN for a class without images."""
    seen: Tensor
    """Images of each class."""
    labels: Tensor
    """``(N,)`` label of each image, -1 for one that could not be read."""
    suggestions: Tensor
    """``(N, S)`` best classes of each image, the best first."""
    scores: Tensor
    """``(N, S)`` their scores."""
    above: Tensor
    """``(N,)`` number of scores above the label's: the image is correct at K if it is below K."""

    @property
    def predictions(self) -> dict[str, Tensor]:
        """What a run keeps of each image."""
        return {"labels": self.labels, "suggestions": self.suggestions, "scores": self.scores, "above": self.above}

    @property
    def ties(self) -> str:
        """A remark if some images are correct only because of a tie, or else nothing."""
        shares = {k: self.metrics[f"tied_top{k}"] for k in self.per_class}
        tied = ", ".join(f"{share:.2%} at K = {k}" for k, share in shares.items() if share)
        return f"correct only by a tie with the K-th best score: {tied} of the images" if tied else ""

    def per_class_csv(self, problem: Problem) -> str:
        """A line for each class: its name, its images in training and here, its accuracy at each K."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["class", "name", "train_images", "images", *(f"top{k}" for k in self.per_class)])
        columns = zip(problem.classes, problem.class_counts.tolist(), self.seen.tolist(), strict=True)
        for index, (name, in_training, here) in enumerate(columns):
            accuracy = [f"{values[index].item():.6f}" if here else "" for values in self.per_class.values()]
            as_text = name.encode(errors="backslashreplace").decode()  # folder names may not be valid UTF-8
            writer.writerow([index, spreadsheet_cell(as_text), in_training, here, *accuracy])
        return text.getvalue()


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    problem: Problem,
    split: Split,
    ks: Sequence[int],
    *,
    device: torch.device,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
) -> Evaluation:
    """Evaluate this rank's share of the images, then add up the shares."""
    metrics = TopKMetrics(len(problem.classes), ks, problem.class_counts, sync_on_compute=False).to(device)
    kept = min(max(_FEWEST_SUGGESTIONS_KEPT, *ks), len(problem.classes))
    # Zero for the images of other ranks, so that a sum over ranks gives each image its row.
    read = torch.zeros(len(split), dtype=torch.int64, device=device)
    labels = torch.zeros_like(read)
    suggestions = torch.zeros(len(split), kept, dtype=torch.int64, device=device)
    scores = torch.zeros(len(split), kept, device=device)
    above = torch.zeros_like(read)
    was_training = model.training
    model.eval()
    plan = evaluation_plan(len(split), batch_size, rank, world_size)
    for inputs, target, indices in split.batches(plan, device):
        if len(target):
            output = model(inputs).float()
            metrics.update(output, target)
            top = output.topk(kept)
            read[indices] += 1
            labels[indices], suggestions[indices], scores[indices] = target, top.indices, top.values
            above[indices] = scores_above(output, target)
    model.train(was_training)
    if world_size > 1:
        for tensor in (read, labels, suggestions, scores, above):
            dist.all_reduce(tensor)
    assert read.max() <= 1, "an image was counted twice"
    if not read.any():
        raise ShortlistError(f"none of {len(split)} images could be read: {'; '.join(split.skipped[:3])}")
    with metrics.sync_context(should_sync=world_size > 1):
        values, per_class, seen = metrics.compute(), metrics.per_class(), metrics.seen.cpu()
    return Evaluation(
        metrics={name: None if value.isnan() else value.item() for name, value in values.items()},
        per_class={k: accuracy.cpu() for k, accuracy in per_class.items()},
        seen=seen,
        labels=torch.where(read == 1, labels, -1).cpu(),
        suggestions=suggestions.cpu(),
        scores=scores.cpu(),
        above=above.cpu(),
    )


def evaluate_run(
    run: RunFolder, *, split: str = "test", ks: Sequence[int] = (), root: str = "", device: str = "auto"
) -> tuple[Evaluation, Problem]:
    """Evaluate the best weights of a run on one of its splits.

    Args:
        run: The run.
        split: ``train``, ``val`` or ``test``.
        ks: The K; by default those of the run.
        root: Where the data is now, if it has moved.
        device: Where to compute.
    """
    if split not in ("train", "val", "test"):
        raise ShortlistError(f"split must be train, val or test, got {split!r}")
    config = run.config
    if not root and config.data.root and not Path(config.data.root).expanduser().exists():
        raise ShortlistError(f"the data of {run.path} is not at {config.data.root}: say with --root where it is now")
    problem = load_problem(replace(config.data, root=root or config.data.root))
    refuse_other_data(problem, run)
    problem = normalised_as_recorded(problem, config, run)
    where = pick_device(device)
    model = load_model(run, problem.input_shape).to(where)
    batch_size = config.train.eval_batch_size
    ks = ks or config.all_ks
    with autocast(config.train.precision, where):
        result = evaluate(model, problem, problem.split(split), ks, device=where, batch_size=batch_size)
    return result, problem
