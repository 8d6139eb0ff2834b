"""Chooses the correction for the prior on the validation images."""

from collections.abc import Callable

import torch
from torch import distributed as dist
from torch import nn

from shortlist.metrics import TopKMetrics
from shortlist.prior_correction import PriorCorrection
from shortlist.program.config import RunConfig
from shortlist.program.data.base import Problem
from shortlist.program.runs.model import prior_correction
from shortlist.program.runs.records import Correction
from shortlist.program.training.evaluate import numbers_of, validation_scores


def fit_correction(
    model: nn.Module,
    problem: Problem,
    config: RunConfig,
    *,
    best_sha256: str,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    say: Callable[[str], None] = lambda message: None,
) -> tuple[PriorCorrection, Correction] | None:
    """The correction for the scores of a network, and what it rests on; None if the run is not to be corrected.

    ``best_sha256`` is the digest of the file of its weights.
    """
    metric, sizes = config.corrected_metric, problem.class_counts
    if metric is None or len(torch.unique(sizes[sizes > 0])) == 1:  # classes of one size need no correction
        return None
    batch_size = config.train.eval_batch_size
    scores, labels = validation_scores(
        model, problem, device=device, batch_size=batch_size, rank=rank, world_size=world_size
    )
    correction = prior_correction(sizes.tolist()).to(device)
    if correction.left_out[labels].all():
        say("the scores are not corrected for class sizes: no validation image is of a class with training images")
        return None
    average, _, k = metric.partition("_top")
    correction.fit(scores, labels, int(k), "micro" if average == "micro" else "macro")
    if world_size > 1:  # sums on a GPU may differ in the last digit
        dist.broadcast(correction.tau, 0)
    metrics = TopKMetrics(len(sizes), config.all_ks, sizes)
    metrics.to(device).update(correction(scores), labels)
    chosen = Correction(
        tau=correction.tau.item(),
        metric=metric,
        images=int(correction.images),
        classes=int(correction.classes),
        num_classes=correction.num_classes,
        val=numbers_of(metrics),
        best_sha256=best_sha256,
    )
    return correction, chosen
