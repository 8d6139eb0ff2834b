"""Whether an exported file says what the run says, how accurate it is, and how fast."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.predicting.calibration import Of
from shortlist.program.predicting.check_inputs import CheckInputs, as_batch
from shortlist.program.predicting.exported_files import Opened
from shortlist.program.predicting.predictor import Predictor

TOLERANCE = 1e-3
"""How far scores may be apart, as a share of the standard deviation of an image's scores."""
PROBABILITY_TOLERANCE = 1e-3
FEWEST_EQUAL_SETS = 0.95
"""Share of the images. A class whose confidence is at the threshold may fall on either side of it."""
_AT_ONCE = 16  # photographs in memory


@dataclass(frozen=True)
class Expected:
    """What the run itself says of some inputs."""

    scores: Tensor
    """``(N, L)``, corrected for class sizes if the run chose to."""
    probabilities: Tensor | None
    """``(N, L)``, if the run is calibrated."""
    in_set: Tensor | None
    """``(N, L)`` bool, if the run is calibrated."""


@dataclass(frozen=True)
class Agreement:
    """How a file compares with the run on the same inputs."""

    same: float
    """Share of the inputs with the same suggestions in the same order. Classes whose scores are within the tolerance of
    each other may change places."""
    score: float
    """Largest difference of scores, as a share of the standard deviation of an input's scores."""
    probability: float | None
    """Largest difference of probabilities."""
    equal_sets: float | None
    """Share of the inputs with exactly the same set."""

    @property
    def problem(self) -> str:
        """What is beyond the tolerances, in words; empty if nothing is."""
        if self.same < 1 or not self.score <= TOLERANCE:  # NaN is beyond every tolerance
            return (
                f"its scores differ by up to {self.score:.3g} standard deviations, where {TOLERANCE} is allowed, and "
                f"it has the same suggestions for {self.same:.1%} of them"
            )
        if self.probability is not None and self.probability > PROBABILITY_TOLERANCE:
            return f"its probabilities differ by up to {self.probability:.3g}, where {PROBABILITY_TOLERANCE} is allowed"
        if self.equal_sets is not None and self.equal_sets < FEWEST_EQUAL_SETS:
            return f"it has the same sets for {self.equal_sets:.1%} of them, where {FEWEST_EQUAL_SETS:.0%} is required"
        return ""


def expected(predictor: Predictor, given: CheckInputs, *, coverage: float, of: Of, average_k: float | None) -> Expected:
    """What the run says, with sets of this kind."""
    scores, chances, in_set = [], [], []
    every = len(predictor.classes)
    for inputs, _ in _groups(given):
        scores.append(predictor.scores(inputs))
        if not predictor.is_calibrated:
            continue
        for best in predictor.suggest(inputs, every):
            chances.append(torch.empty(every).index_put_((_indices(best),), _chances(best)))
        for inside in predictor.sets(inputs, coverage, of=of, average_k=average_k):
            in_set.append(torch.zeros(every, dtype=torch.bool).index_fill_(0, _indices(inside), True))
    if not scores:
        raise ShortlistError(f"none of {given.source} can be read")
    return Expected(
        torch.cat(scores),
        torch.stack(chances) if chances else None,
        torch.stack(in_set) if in_set else None,
    )


def compared(file: Opened, given: CheckInputs, wanted: Expected) -> Agreement:
    """A file beside the run, one input at a time: images have different sizes."""
    outputs = [file(batch) for batch in given.batches()]
    found = {name: torch.from_numpy(np.concatenate([row[name] for row in outputs])) for name in outputs[0]}
    indices, spread = found["indices"], _spread(wanted.scores)
    own = wanted.scores.gather(1, indices)
    # Judged by the run's own scores of these classes: only classes that nearly tie may change places.
    is_same = ((own - wanted.scores.topk(indices.shape[1]).values).abs() <= TOLERANCE * spread).all(1)
    score = ((found["scores"] - own).abs() / spread).max().item()
    probability = equal_sets = None
    if wanted.probabilities is not None and wanted.in_set is not None:
        probability = (found["probabilities"] - wanted.probabilities.gather(1, indices)).abs().max().item()
        equal_sets = _mean((found["in_set"] == wanted.in_set).all(1))
    return Agreement(_mean(is_same), score, probability, equal_sets)


def run_accuracy(predictor: Predictor, given: CheckInputs, k: int) -> dict[str, float]:
    """Top-1 and top-K accuracy of the run: of photos, and of the classes among them, each counting the same."""
    found = [(predictor.suggest(inputs, k), labels) for inputs, labels in _groups(given)]
    indices = torch.stack([_indices(best) for group, _ in found for best in group])
    return _accuracy(indices, torch.tensor([label for _, labels in found for label in labels]))


def file_accuracy(file: Opened, given: CheckInputs) -> dict[str, float]:
    """The same of a file."""
    found = [(file(as_batch(item))["indices"], label) for item, label in given]
    indices = torch.from_numpy(np.concatenate([best for best, _ in found]))
    return _accuracy(indices, torch.tensor([label for _, label in found]))


def images_a_second(file: Callable[[np.ndarray[Any, Any]], Any], image: Any, batch: int, seconds: float) -> float:
    """How many copies of an input it takes a second, in batches of this size, after one batch to warm up."""
    inputs = np.repeat(as_batch(image), batch, axis=0)
    file(inputs)
    begin, batches = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < seconds or batches == 0:
        file(inputs)
        batches += 1
    return batch * batches / elapsed


def _groups(given: CheckInputs) -> Iterable[tuple[list[Any], list[int]]]:
    items = iter(given)
    while group := list(islice(items, _AT_ONCE)):
        inputs, labels = map(list, zip(*group, strict=True))
        yield inputs, labels


def _indices(suggestions: Any) -> Tensor:
    return torch.tensor([item.index for item in suggestions], dtype=torch.int64)


def _chances(suggestions: Any) -> Tensor:
    return torch.tensor([item.probability for item in suggestions])


def _accuracy(indices: Tensor, labels: Tensor) -> dict[str, float]:
    hits = indices == labels.unsqueeze(1)
    _, seen = torch.unique(labels, return_inverse=True)
    found: dict[str, float] = {}
    for k in sorted({1, indices.shape[1]}):
        correct = hits[:, :k].any(1).double()
        by_class = torch.zeros(int(seen.max()) + 1, dtype=torch.float64).index_add_(0, seen, correct) / seen.bincount()
        found |= {f"top-{k}, photos": _mean(correct), f"top-{k}, classes": _mean(by_class)}
    return found


def _spread(scores: Tensor) -> Tensor:
    """``(N, 1)`` standard deviation of the scores of each input, without classes that are never suggested."""
    kept = scores.masked_fill(scores == torch.finfo(scores.dtype).min, torch.nan)
    centred = kept - kept.nanmean(1, keepdim=True)
    return centred.square().nanmean(1, keepdim=True).sqrt().clamp(min=1e-6)  # all scores may be the same


def _mean(values: Tensor) -> float:
    return values.double().mean().item()
