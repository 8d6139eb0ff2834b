"""Chooses the correction for the prior on the validation images."""

from collections.abc import Callable

import torch
from torch import distributed as dist

from shortlist.metrics import TopKMetrics
from shortlist.prior_correction import Average, PriorCorrection
from shortlist.program.config import RunConfig
from shortlist.program.data.base import Problem
from shortlist.program.runs.model import prior_correction
from shortlist.program.runs.records import Correction
from shortlist.program.runs.scores import Scores
from shortlist.program.training.evaluate import numbers_of


def fit_correction(
    found: Scores,
    problem: Problem,
    config: RunConfig,
    *,
    best_sha256: str,
    world_size: int = 1,
    say: Callable[[str], None] = lambda message: None,
) -> tuple[PriorCorrection, Correction] | None:
    """The correction for the scores of a network, and what it rests on; None if the run is not to be corrected.

    Args:
        found: The scores of the validation images, the same on every rank.
        problem: The data.
        config: The run's.
        best_sha256: Digest of the file of the network's weights.
        world_size: Number of ranks.
        say: Called with why there is no correction.
    """
    metric, sizes = config.corrected_metric, problem.class_counts
    if metric is None or len(torch.unique(sizes[sizes > 0])) == 1:  # classes of one size need no correction
        return None
    correction = prior_correction(sizes.tolist()).to(found.scores.device)
    if correction.left_out[found.labels].all():
        say("the scores are not corrected for class sizes: no validation image is of a class with training images")
        return None
    choose_tau(correction, found, config)
    if world_size > 1:  # sums on a GPU may differ in the last digit
        dist.broadcast(correction.tau, 0)
    metrics = TopKMetrics(len(sizes), config.all_ks, sizes)
    metrics.to(found.scores.device).update(correction(found.scores), found.labels)
    chosen = Correction(
        tau=correction.tau.item(),
        metric=metric,
        ks=config.corrected_ks,
        images=int(correction.images),
        classes=int(correction.classes),
        num_classes=correction.num_classes,
        val=numbers_of(metrics),
        best_sha256=best_sha256,
    )
    return correction, chosen


def choose_tau(correction: PriorCorrection, found: Scores, config: RunConfig) -> None:
    """Fit a correction to scores as a run with these settings does."""
    average: Average = "micro" if config.select_metric.startswith("micro") else "macro"
    correction.fit(found.scores, found.labels, config.corrected_ks, average)
