"""How well a calibrated run keeps its promises, measured on the test images that its sets do not rest on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shortlist.ops.class_counts import size_groups
from shortlist.program.predicting.calibration import (
    METHODS,
    Calibration,
    Of,
    divided_test_scores,
    log_probabilities,
    new_image_prior,
)
from shortlist.program.predicting.reliability import ReliabilityBin, calibration_error, reliability_by_size
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.model import load_correction
from shortlist.program.runs.records import read_classes
from shortlist.sets import PredictionSets

COVERAGES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class MeasuredSets:
    """Sets of one coverage, beside plain suggestions of the same mean size."""

    coverage: float
    """What was asked for."""
    of: Of
    metrics: dict[str, float | None]
    """As ``SetMetrics.compute``; None for a mean over no class."""
    top_k: dict[str, float | None]
    """``micro_coverage`` and so on of the first K suggestions, K being the mean size of the sets. Between two whole
    numbers, K is the one or the other for a share of the images."""


@dataclass(frozen=True)
class Certainty:
    """What a calibrated run's probabilities and sets are worth."""

    images: int
    """Test images that this rests on."""
    reliability: dict[str, tuple[ReliabilityBin, ...]]
    """Of all images, and of those of classes with few, a medium number of and many training images."""
    sets: tuple[MeasuredSets, ...]

    @property
    def error(self) -> dict[str, float | None]:
        """Expected calibration errors of the same groups."""
        return {name: calibration_error(bins) for name, bins in self.reliability.items()}


def measured_certainty(run: RunFolder, calibration: Calibration, coverages: Sequence[float] = COVERAGES) -> Certainty:
    """Measure probabilities, and sets of these coverages, from the scores that the run kept."""
    from shortlist.metrics import SetMetrics, scores_above  # torchmetrics takes seconds to load

    counts = torch.tensor(read_classes(run).train_images)
    kept, rest = divided_test_scores(run, calibration)
    log_p_kept, log_p = (log_probabilities(part.scores, calibration, counts) for part in (kept, rest))
    prior = new_image_prior(calibration, counts)
    correction = load_correction(run)
    above = scores_above(rest.scores if correction is None else correction(rest.scores), rest.labels)
    measured = []
    for of, method in METHODS.items():
        for coverage in coverages:
            sets = PredictionSets(coverage, method).calibrate(log_p_kept, kept.labels, prior)
            metrics = SetMetrics(len(counts), counts)
            metrics.update(sets(log_p), rest.labels)
            found = {name: None if value.isnan() else value.item() for name, value in metrics.compute().items()}
            hits = ((found["mean_size"] or 0.0) - above).clamp(0, 1)
            measured.append(MeasuredSets(coverage, of, found, _means(hits, rest.labels, counts)))
    return Certainty(len(rest.labels), reliability_by_size(log_p.exp(), rest.labels, counts), tuple(measured))


def _means(hits_N: Tensor, labels_N: Tensor, counts_L: Tensor) -> dict[str, float | None]:
    """The mean over images, over the classes that occur, and over those of each size."""
    seen_L = labels_N.bincount(minlength=len(counts_L))
    mean_L = torch.zeros(len(counts_L), dtype=torch.float64).index_add_(0, labels_N, hits_N.double()) / seen_L
    groups = {"macro": torch.ones_like(seen_L, dtype=torch.bool)} | size_groups(counts_L)
    found = {"micro": hits_N.double().mean()} | {
        name: mean_L[members & (seen_L > 0)].mean() for name, members in groups.items()
    }
    return {f"{name}_coverage": None if value.isnan() else value.item() for name, value in found.items()}
