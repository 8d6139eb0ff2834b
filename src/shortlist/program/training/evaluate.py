"""Evaluation on a split: every image counts exactly once, on any number of ranks."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist

from shortlist.errors import ShortlistError
from shortlist.metrics import TopKMetrics, scores_above
from shortlist.prior_correction import PriorCorrection
from shortlist.program.data.base import Problem, Split, evaluation_plan
from shortlist.program.data.catalogue import load_problem
from shortlist.program.devices import autocast, pick_device
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.model import load_correction, load_model
from shortlist.program.runs.records import refuse_other_data, with_added_classes
from shortlist.program.runs.scores import Scores
from shortlist.program.runs.start import normalised_as_recorded
from shortlist.program.text import spreadsheet_cell

_FEWEST_SUGGESTIONS_KEPT = 10
_MOST_SCORES_IN_MEMORY = 2**28  # a GiB


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
    corrected: "Evaluation | None" = None
    """The same images with scores corrected for the prior, if there was a correction."""

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
        """A line for each class: its name, its images in training and here, its accuracy at each K.

        With a correction, the accuracies of the corrected scores follow.
        """
        accuracies = {f"top{k}": values for k, values in self.per_class.items()}
        if self.corrected is not None:
            accuracies |= {f"corrected_top{k}": values for k, values in self.corrected.per_class.items()}
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["class", "name", "train_images", "images", *accuracies])
        columns = zip(problem.classes, problem.class_counts.tolist(), self.seen.tolist(), strict=True)
        for index, (name, in_training, here) in enumerate(columns):
            accuracy = [f"{values[index].item():.6f}" if here else "" for values in accuracies.values()]
            as_text = name.encode(errors="backslashreplace").decode()  # folder names may not be valid UTF-8
            writer.writerow([index, spreadsheet_cell(as_text), in_training, here, *accuracy])
        return text.getvalue()


class _Tally:
    """Counts this rank's share of the images, then adds up the shares."""

    def __init__(self, problem: Problem, split: Split, ks: Sequence[int], device: torch.device) -> None:
        self._metrics = TopKMetrics(len(problem.classes), ks, problem.class_counts, sync_on_compute=False).to(device)
        self._kept = min(max(_FEWEST_SUGGESTIONS_KEPT, *ks), len(problem.classes))
        # Zero for the images of other ranks, so that a sum over ranks gives each image its row.
        self._read = torch.zeros(len(split), dtype=torch.int64, device=device)
        self._labels, self._above = torch.zeros_like(self._read), torch.zeros_like(self._read)
        self._suggestions = torch.zeros(len(split), self._kept, dtype=torch.int64, device=device)
        self._scores = torch.zeros(len(split), self._kept, device=device)

    def add(self, output: Tensor, target: Tensor, indices: Tensor) -> None:
        self._metrics.update(output, target)
        top = output.topk(self._kept)
        self._read[indices] += 1
        self._labels[indices], self._above[indices] = target, scores_above(output, target)
        self._suggestions[indices], self._scores[indices] = top.indices, top.values

    def result(self, split: Split, world_size: int) -> Evaluation:
        if world_size > 1:
            for tensor in (self._read, self._labels, self._suggestions, self._scores, self._above):
                dist.all_reduce(tensor)
        assert self._read.max() <= 1, "an image was counted twice"
        if not self._read.any():
            raise ShortlistError(f"none of {len(split)} images could be read: {'; '.join(split.skipped[:3])}")
        with self._metrics.sync_context(should_sync=world_size > 1):
            values, per_class, seen = numbers_of(self._metrics), self._metrics.per_class(), self._metrics.seen.cpu()
        return Evaluation(
            metrics=values,
            per_class={k: accuracy.cpu() for k, accuracy in per_class.items()},
            seen=seen,
            labels=torch.where(self._read == 1, self._labels, -1).cpu(),
            suggestions=self._suggestions.cpu(),
            scores=self._scores.cpu(),
            above=self._above.cpu(),
        )


def numbers_of(metrics: TopKMetrics) -> dict[str, float | None]:
    """The metrics as numbers; None for a mean over no class."""
    return {name: None if value.isnan() else value.item() for name, value in metrics.compute().items()}


def standard_error(accuracy: float, seen: Tensor) -> float:
    """The standard error of a mean accuracy over classes.

    All classes are taken to be equally hard: the few images of a class do not tell its own error.

    Args:
        accuracy: The mean.
        seen: Images of each class. Classes without any are not in the mean.

    Example:
        >>> standard_error(0.5, torch.tensor([100])), standard_error(0.5, torch.tensor([50, 50, 0]))
        (0.05, 0.05)
    """
    seen = seen[seen > 0].double()
    return math.sqrt(accuracy * (1 - accuracy) * seen.reciprocal().sum().item()) / len(seen)


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
    correction: PriorCorrection | None = None,
    kept: "KeptScores | None" = None,
) -> Evaluation:
    """Evaluate this rank's share of the images, then add up the shares; with a correction, without and with it.

    ``kept`` keeps the plain scores.
    """
    plain = _Tally(problem, split, ks, device)
    corrected = None if correction is None else _Tally(problem, split, ks, device)
    plan = evaluation_plan(len(split), batch_size, rank, world_size)
    for output, target, indices in _outputs(model, split, plan, device):
        plain.add(output, target, indices)
        if corrected is not None and correction is not None:
            corrected.add(correction(output), target, indices)
        if kept is not None:
            kept.add(output, target, indices)
    result = plain.result(split, world_size)
    return result if corrected is None else replace(result, corrected=corrected.result(split, world_size))


@torch.inference_mode()
def split_scores(
    model: nn.Module,
    split: Split,
    num_classes: int,
    *,
    device: torch.device,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
) -> Scores:
    """The scores of a split, on every rank; of more images than memory should hold, those of evenly spaced ones."""
    kept = KeptScores(split, num_classes, device)
    plan = [kept.images[part] for part in evaluation_plan(len(kept.images), batch_size, rank, world_size)]
    for output, target, indices in _outputs(model, split, plan, device):
        kept.add(output, target, indices)
    return kept.result(world_size)


class KeptScores:
    """Collects the scores of all classes while a split is evaluated.

    Args:
        split: The split.
        num_classes: Number L of classes.
        device: Where the scores come from.
        most: Of more scores than this, those of evenly spaced images are kept.
    """

    def __init__(
        self, split: Split, num_classes: int, device: torch.device, most: int = _MOST_SCORES_IN_MEMORY
    ) -> None:
        self._every = max(1, math.ceil(len(split) * num_classes / most))
        self.images = torch.arange(0, len(split), self._every)
        # Zero for the images of other ranks, so that a sum over ranks gives each image its row.
        self._scores = torch.zeros(len(self.images), num_classes, device=device)
        self._read = torch.zeros(len(self.images), dtype=torch.int64, device=device)
        self._labels = torch.zeros_like(self._read)

    def add(self, output: Tensor, target: Tensor, indices: Tensor) -> None:
        """A batch: its scores, labels, and numbers in the split."""
        chosen = indices % self._every == 0
        rows = indices[chosen] // self._every
        self._scores[rows], self._labels[rows], self._read[rows] = output[chosen], target[chosen], 1

    def result(self, world_size: int) -> Scores:
        if world_size > 1:
            for tensor in (self._scores, self._labels, self._read):
                dist.all_reduce(tensor)
        is_read = self._read == 1
        return Scores(self._scores[is_read], self._labels[is_read], self.images[is_read.cpu()])


def _outputs(
    model: nn.Module, split: Split, plan: list[Tensor], device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Scores, labels and places of the images of each batch that could be read."""
    was_training = model.training
    model.eval()
    for inputs, target, indices in split.batches(plan, device):
        if len(target):
            yield model(inputs).float(), target, indices
    model.train(was_training)


def load_run_problem(run: RunFolder, root: str = "") -> Problem:
    """The data of a run, if it is still what the run had; ``root`` says where it is now, if it has moved."""
    config = run.config
    if not root and config.data.root and not Path(config.data.root).expanduser().exists():
        raise ShortlistError(f"the data of {run.path} is not at {config.data.root}: say with --root where it is now")
    data = replace(config.data, root=root or config.data.root)
    problem = with_added_classes(load_problem(data, config.seed), run)
    refuse_other_data(problem, run)
    return normalised_as_recorded(problem, config, run)


def evaluate_run(
    run: RunFolder, *, split: str = "test", ks: Sequence[int] = (), root: str = "", device: str = "auto"
) -> tuple[Evaluation, Problem]:
    """Evaluate the best weights of a run on one of its splits, and with its correction if it has one.

    Args:
        run: The run.
        split: ``train``, ``val`` or ``test``.
        ks: The K; by default those of the run.
        root: Where the data is now, if it has moved.
        device: Where to compute.
    """
    if split not in ("train", "val", "test"):
        raise ShortlistError(f"split must be train, val or test, got {split!r}")
    config, problem = run.config, load_run_problem(run, root)
    where = pick_device(device)
    model = load_model(run, problem.input_shape).to(where)
    correction = load_correction(run)
    batch_size = config.train.eval_batch_size
    ks = ks or config.all_ks
    with autocast(config.train.precision, where):
        result = evaluate(
            model,
            problem,
            problem.split(split),
            ks,
            device=where,
            batch_size=batch_size,
            correction=correction and correction.to(where),
        )
    return result, problem
