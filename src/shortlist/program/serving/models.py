"""What can be served: the small interface of a model, and a run behind it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Protocol

import torch
from PIL import Image
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.predicting.calibration import Of
from shortlist.program.predicting.predictor import Predictor, Suggestion


@dataclass(frozen=True)
class CoverageSet:
    """As many classes as it takes."""

    coverage: float
    suggestions: Sequence[Suggestion]
    is_promised: bool
    """False if the coverage was measured in another situation: single photos, without a prior."""


@dataclass(frozen=True)
class Answer:
    """What is said of one thing, of which there were one or several photos."""

    suggestions: Sequence[Suggestion]
    sets: Sequence[CoverageSet]


class ServedModel(Protocol):
    """A model that can be served. Its methods are called from several threads, ``rows`` from one alone."""

    name: str
    classes: Sequence[str]
    suggested: int
    """How many suggestions it was made for."""
    most_suggested: int
    """How many it can give."""
    channels: int
    """1 for grey, 3 for RGB."""
    why_no_probabilities: str
    """What to do about suggestions without probabilities; empty if they have them."""
    coverages: Sequence[float]
    """Coverages of the sets that it can give; empty without probabilities."""
    of: Of
    """What they are of."""
    most_photos: int
    """Of one thing that it can fuse."""
    takes_prior: bool
    """True if weights of a prior can be added to its probabilities."""

    def prepared(self, image: Image.Image) -> Tensor:
        """``(C, H, W)`` uint8: all that the network needs of an image, in little memory."""
        ...

    def rows(self, photos: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the network says of each prepared photo."""
        ...

    def answer(
        self, rows: Sequence[Tensor], k: int, coverages: Sequence[float] = (), log_weights: Tensor | None = None
    ) -> Answer:
        """What the rows of one thing say together, with the logarithms of a prior's weights if there is one."""
        ...


class ServedRun:
    """A run as a served model.

    Several photos are fused by the mean of their plain scores. Log-probabilities are plain scores divided by a
    temperature, plus numbers that are the same for every photo, and normalised; so this is the same as the mean of the
    log-probabilities, normalised again.

    Args:
        predictor: The run, which must be one on images.
        name: What to call it.
        path: Its folder, for messages to the owner: users are not told where it is.
        most_photos: Of one thing that can be fused.
        of: What a coverage is of.
    """

    coverages: Sequence[float] = ()
    takes_prior = False

    def __init__(self, predictor: Predictor, name: str, path: Path, most_photos: int, of: Of = "classes") -> None:
        if predictor.channels == 0:
            raise ShortlistError(f"{path} was trained on embeddings: only runs on images can be served")
        self._predictor: Predictor = predictor
        self.of: Of = of
        self.name, self.most_photos = name, most_photos
        self.classes: Sequence[str] = predictor.classes
        self.suggested, self.most_suggested = predictor.suggested, len(predictor.classes)
        self.channels = predictor.channels
        self.why_no_probabilities = "" if predictor.is_calibrated else f"shortlist calibrate {name}"
        if predictor.is_calibrated:
            self.takes_prior = True
            self.coverages = tuple(percent / 100 for percent in range(50, 100))

    def prepared(self, image: Image.Image) -> Tensor:
        return self._predictor.square(image)

    def rows(self, photos: Sequence[Tensor]) -> Sequence[Tensor]:
        return [*self._predictor.plain_scores(torch.stack([*photos]))]

    def answer(
        self, rows: Sequence[Tensor], k: int, coverages: Sequence[float] = (), log_weights: Tensor | None = None
    ) -> Answer:
        plain, has_prior = torch.stack([*rows]).mean(0, keepdim=True), log_weights is not None
        if log_weights is not None:
            plain = self._predictor.with_prior(plain, log_weights)
        is_promised = len(rows) == 1 and not has_prior
        # The correction for class sizes stands for not knowing how frequent classes are. A prior knows it.
        (suggestions,) = self._predictor.suggestions_of(plain, k, by_probability=has_prior)
        sets = []
        for coverage in coverages:
            (inside,) = self._predictor.sets_of(plain, coverage, of=self.of, by_probability=has_prior)
            sets.append(CoverageSet(coverage, _possible(inside, log_weights), is_promised))
        return Answer(_possible(suggestions, log_weights), sets)


def _possible(suggestions: Sequence[Suggestion], log_weights: Tensor | None) -> list[Suggestion]:
    """Without the classes to which a prior gives a weight of zero."""
    return [item for item in suggestions if log_weights is None or isfinite(log_weights[item.index])]


def known_coverage(coverage: float, known: Sequence[float]) -> float:
    """The same coverage among the known ones. There are no others: the thresholds of each are kept in memory."""
    for candidate in known:
        if abs(candidate - coverage) < 1e-6:
            return candidate
    if not known:
        raise ShortlistError(f"there are no sets with a coverage here, got {coverage}: export the run with one")
    listed = f"{known[0]:g}" if len(known) == 1 else f"one of {known[0]:g}, {known[1]:g}, ..., {known[-1]:g}"
    raise ShortlistError(f"coverage must be {listed}, got {coverage}")


def log_weights_by_name(weights: Mapping[str, Sequence[float]]) -> dict[str, Tensor]:
    """Logarithms of the weights of all classes, for each column of a prior."""
    return {name: torch.tensor(column, dtype=torch.float64).log().float() for name, column in weights.items()}
