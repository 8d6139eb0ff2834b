"""How well a calibrated run keeps its promises, measured on the test images that its sets do not rest on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.ops.class_counts import size_groups
from shortlist.program.predicting.calibration import (
    METHODS,
    Calibration,
    Of,
    divided_test_scores,
    half_of_each_class,
    log_probabilities,
    new_image_prior,
)
from shortlist.program.predicting.reliability import ReliabilityBin, calibration_error, reliability_by_size
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.model import load_correction
from shortlist.program.runs.records import read_classes
from shortlist.program.runs.scores import read_scores
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


@dataclass(frozen=True)
class KeptPromise:
    """The coverage of sets over many divisions of the test images into two halves, beside what is promised."""

    of: Of
    coverage: float
    """Mean over the divisions, of the images of the second half or of their classes."""
    standard_error: float
    lowest: float
    """What was asked for."""
    highest: float
    """The same plus the slack that a finite number of images leaves, ties apart."""
    mean_size: float

    @property
    def is_kept(self) -> bool:
        """True if the coverage is within two standard errors of what is promised."""
        slack = 2 * self.standard_error
        return self.lowest - slack <= self.coverage <= self.highest + slack


def kept_promises(run: RunFolder, calibration: Calibration, coverage: float, divisions: int) -> list[KeptPromise]:
    """Choose thresholds on one half of the test images of each class and measure on the other, many times.

    The probabilities stay those of the validation images. Classes with a single test image are left out: they would
    have a say in the threshold, but be measured in no division that they had it in.
    """
    counts, test = torch.tensor(read_classes(run).train_images), read_scores(run, "test")
    test = test.subset(test.labels.bincount()[test.labels] > 1)
    if len(test.labels) == 0:
        raise ShortlistError(f"{run.path} has no class with two test images, so they cannot be divided")
    log_p, prior = log_probabilities(test.scores, calibration, counts), new_image_prior(calibration, counts)
    found = []
    for of, method in METHODS.items():
        covered, sizes, slack = [], [], []
        for seed in range(divisions):
            is_kept = half_of_each_class(test.labels, seed)
            labels = test.labels[~is_kept]
            sets = PredictionSets(coverage, method).calibrate(log_p[is_kept], test.labels[is_kept], prior)
            inside = sets(log_p[~is_kept])
            means = _means(inside.gather(1, labels.unsqueeze(1)).squeeze(1), labels, counts)
            covered.append(means["macro_coverage" if of == "classes" else "micro_coverage"] or 0.0)
            sizes.append(inside.sum(1).double().mean().item())
            seen = sets.class_images[sets.class_images > 0]
            slack.append(1 / (len(seen) * int(seen.min())) if of == "classes" else 1 / (int(sets.images) + 1))
        error = torch.tensor(covered, dtype=torch.float64).std().item() / math.sqrt(divisions)
        found.append(KeptPromise(of, fmean(covered), error, coverage, coverage + fmean(slack), mean_size=fmean(sizes)))
    return found


def _means(hits_N: Tensor, labels_N: Tensor, counts_L: Tensor) -> dict[str, float | None]:
    """The mean over images, over the classes that occur, and over those of each size."""
    seen_L = labels_N.bincount(minlength=len(counts_L))
    mean_L = torch.zeros(len(counts_L), dtype=torch.float64).index_add_(0, labels_N, hits_N.double()) / seen_L
    groups = {"macro": torch.ones_like(seen_L, dtype=torch.bool)} | size_groups(counts_L)
    found = {"micro": hits_N.double().mean()} | {
        name: mean_L[members & (seen_L > 0)].mean() for name, members in groups.items()
    }
    return {f"{name}_coverage": None if value.isnan() else value.item() for name, value in found.items()}
