"""A trained run for new images or vectors, from its folder alone."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.program.data.base import Preprocess
from shortlist.program.data.image_io import evaluation_transform
from shortlist.program.devices import autocast, pick_device
from shortlist.program.predicting.calibration import (
    METHODS,
    Calibration,
    Of,
    fitted_sets,
    log_probabilities,
    read_calibration,
)
from shortlist.program.predicting.hub_runs import open_run
from shortlist.program.predicting.inputs import pictures_of, vectors_of
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.model import load_correction, load_model
from shortlist.program.runs.records import read_classes, read_preprocess
from shortlist.sets import PredictionSets

AT_ONCE = 64
"""Images in a batch."""


@dataclass(frozen=True)
class Suggestion:
    """A class that an image may belong to."""

    name: str
    index: int
    """The place of the class in ``Predictor.classes``."""
    score: float
    """Higher is better; scores of one image can be compared, and are not probabilities."""
    probability: float | None = None
    """That the image is of this class, if the run is calibrated."""


def load(run: str | Path, device: str = "auto", *, correct: bool = True) -> "Predictor":
    """A trained run, ready for new images.

    Args:
        run: The folder of a run with at least one finished epoch, or its address on the hub, ``hf://OWNER/NAME``.
        device: Where to compute: ``auto``, ``cpu``, ``cuda``, ...
        correct: Correct the scores for class sizes, if the run chose to.

    Example:
        ```python
        predictor = sl.load("runs/birds")
        for suggestion in predictor.suggest("photo.jpg", k=5):
            print(suggestion.name, suggestion.score)
        ```
    """
    return Predictor(open_run(run), device, correct=correct)


class Predictor:
    """The best weights of a run, for new inputs, which are preprocessed as in the run's own evaluation.

    Every method takes one input or several, and gives one result or a list of them. Of a run on images, an input is a
    path, an image of Pillow, a uint8 array ``(H, W)`` or ``(H, W, C)``, or a uint8 tensor ``(C, H, W)``; several are in
    a list, or in an array or tensor with one more dimension in front. Of a run on embeddings it is a vector of floats.

    Args:
        run: A run with at least one finished epoch.
        device: Where to compute.
        correct: Correct the scores for class sizes, if the run chose to.
        precision: Arithmetic, as ``train.precision`` has it; by default that of the run.

    Attributes:
        classes: Names of the classes.
        device: Where it computes.
        suggested: How many suggestions the run was trained for.
    """

    def __init__(self, run: RunFolder, device: str = "auto", *, correct: bool = True, precision: str = "") -> None:
        config = run.config
        self.device, self._precision = pick_device(device), precision or config.train.precision
        self._model = load_model(run).to(self.device).eval()  # first: a run without weights may lack the other files
        self._run, classes = run, read_classes(run)
        self.classes, self.suggested = classes.names, config.loss.largest_k
        self._preprocess = None if config.data.name == "embeddings" else read_preprocess(run)
        self._correct = (load_correction(run) if correct else None) or nn.Identity()
        self._calibration, self._class_counts = read_calibration(run), torch.tensor(classes.train_images)
        self._sets: dict[tuple[object, ...], PredictionSets] = {}

    @property
    def channels(self) -> int:
        """Of its images: 1 for grey, 3 for RGB; 0 for a run on embeddings."""
        return 0 if self._preprocess is None else self._preprocess.channels

    def suggest(self, inputs: Any, k: int | None = None) -> Any:
        """The ``k`` best classes, the best first; by default as many as the run was trained for.

        Returns:
            A list of ``Suggestion`` for one input, or a list of such lists.
        """
        k = self.suggested if k is None else k
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= len(self.classes):
            raise ShortlistError(f"k must be in [1, {len(self.classes)}] for {len(self.classes)} classes, got {k!r}")
        plain, is_one = self._plain_scores(inputs)
        found = self.suggestions_of(plain, k)
        return found[0] if is_one else found

    def suggestions_of(self, plain: Tensor, k: int, *, by_probability: bool = False) -> list[list[Suggestion]]:
        """The same for ``(N, L)`` plain scores, as ``plain_scores`` gives them.

        They are in the order of the corrected scores, or in that of the probabilities of a calibrated run.
        """
        every = torch.ones_like(plain, dtype=torch.bool)
        return list(self._suggestions(plain, every, k, by_probability=by_probability))

    def sets(
        self,
        inputs: Any,
        coverage: float = 0.9,
        *,
        of: Of = "classes",
        average_k: float | None = None,
        max_k: int | None = None,
    ) -> Any:
        """As many classes as it takes, the best first: a set that contains the right one with a chosen probability.

        The run must be calibrated (``shortlist calibrate``). A set may be empty, if no class is likely enough.

        Args:
            inputs: One or several.
            coverage: The probability, on average over what ``of`` says.
            of: ``"classes"``, each class counting the same, or ``"photos"``, each photo counting the same.
            average_k: Sets of this mean size, instead of a coverage.
            max_k: At most so many classes in a set. The coverage is then no longer promised.

        Returns:
            A list of ``Suggestion`` for one input, or a list of such lists.
        """
        self._fit_sets(coverage, of, average_k)  # first: a mistake must not wait for the images
        plain, is_one = self._plain_scores(inputs)
        found = self.sets_of(plain, coverage, of=of, average_k=average_k, max_k=max_k)
        return found[0] if is_one else found

    def sets_of(
        self,
        plain: Tensor,
        coverage: float = 0.9,
        *,
        of: Of = "classes",
        average_k: float | None = None,
        max_k: int | None = None,
        by_probability: bool = False,
    ) -> list[list[Suggestion]]:
        """The same for ``(N, L)`` plain scores."""
        sets, calibration = self._fit_sets(coverage, of, average_k)
        inside = sets(log_probabilities(plain, calibration, self._class_counts), max_k)
        return list(self._suggestions(plain, inside, int(inside.sum(1).max()), by_probability=by_probability))

    def _fit_sets(self, coverage: float, of: Of, average_k: float | None) -> tuple[PredictionSets, Calibration]:
        calibration = self._require_calibration()
        if of not in METHODS:
            raise ShortlistError(f"of must be classes or photos, got {of!r}")
        key = (coverage, of, average_k)
        if key not in self._sets:
            self._sets[key] = fitted_sets(
                self._run, calibration, coverage=coverage, method=METHODS[of], average_k=average_k
            )
        return self._sets[key], calibration

    def with_prior(self, plain: Tensor, log_weights: Tensor) -> Tensor:
        """Plain scores whose log-probabilities have these ``(L,)`` numbers added, before they are normalised again.

        The run must be calibrated: the temperature says how much of a score is worth a unit of log-probability.
        """
        return plain + self._require_calibration().temperature * log_weights

    def _require_calibration(self) -> Calibration:
        if self._calibration is None:
            raise ShortlistError(
                f"{self._run.path} is not calibrated: run `shortlist calibrate {self._run.path}` first"
            )
        return self._calibration

    @property
    def is_calibrated(self) -> bool:
        """True if suggestions have probabilities, and ``sets`` can be used."""
        return self._calibration is not None

    @property
    def unpromised(self) -> list[str]:
        """Names of the classes that ``sets`` promises nothing for, because calibration saw no image of them."""
        return [self.classes[label] for label in self._calibration.unseen] if self._calibration else []

    def scores(self, inputs: Any) -> Tensor:
        """``(L,)`` or ``(N, L)`` scores of all classes, on the CPU, corrected as the suggestions are."""
        plain, is_one = self._plain_scores(inputs)
        scores: Tensor = self._correct(plain)
        return scores[0] if is_one else scores

    def square(self, picture: Any) -> Tensor:
        """``(C, H, W)`` uint8: what the network sees of one image."""
        (image,), _ = pictures_of([picture], self._image_preprocess.channels)
        return evaluation_transform(self._image_preprocess)(image)

    @torch.inference_mode()
    def plain_scores(self, squares: Tensor) -> Tensor:
        """``(N, L)`` scores of ``(N, C, H, W)`` squares in one batch, on the CPU, not corrected for class sizes."""
        with autocast(self._precision, self.device):
            scores: Tensor = self._model(self._image_preprocess.normalise(squares.to(self.device))).float()
        return scores.cpu()

    @property
    def _image_preprocess(self) -> Preprocess:
        if self._preprocess is None:
            raise ShortlistError(f"{self._run.path} was trained on embeddings: it takes vectors, not images")
        return self._preprocess

    def _plain_scores(self, inputs: Any) -> tuple[Tensor, bool]:
        return self._computed(inputs, lambda rows: self._model(rows).float())

    def _suggestions(
        self, plain: Tensor, inside: Tensor, most: int, *, by_probability: bool = False
    ) -> Iterator[list[Suggestion]]:
        """The best classes of each image among those inside, at most so many."""
        scores = order = self._correct(plain)
        chances: list[list[float | None]] = [[None] * most] * len(plain)
        log_p = None
        if self._calibration is not None:
            log_p = log_probabilities(plain, self._calibration, self._class_counts)
            order = log_p if by_probability else scores
        top = order.masked_fill(~inside, -math.inf).topk(most).indices
        values = scores.gather(1, top).tolist()
        if log_p is not None:
            chances = log_p.exp().gather(1, top).tolist()
        sizes = inside.sum(1).clamp(max=most).tolist()
        for indices, of_scores, of_chances, size in zip(top.tolist(), values, chances, sizes, strict=True):
            best = zip(indices[:size], of_scores[:size], of_chances[:size], strict=True)
            yield [Suggestion(self.classes[index], index, score, chance) for index, score, chance in best]

    def embed(self, inputs: Any) -> Tensor:
        """``(d,)`` or ``(N, d)`` features in front of the last layer, on the CPU; vectors are their own features."""
        features, is_one = self._computed(inputs, lambda rows: self._model.backbone(rows).float())
        return features[0] if is_one else features

    @torch.inference_mode()
    def _computed(self, inputs: Any, compute: Callable[[Tensor], Tensor]) -> tuple[Tensor, bool]:
        """What is computed of all inputs, on the CPU, and True if there was one and not several."""
        if self._preprocess is None:
            rows, is_one = vectors_of(inputs, self._model.head.get_parameter("weight").shape[1])
            batches = [rows[start : start + AT_ONCE] for start in range(0, len(rows), AT_ONCE)]
        else:
            pictures, is_one = pictures_of(inputs, self._preprocess.channels)
            transform = evaluation_transform(self._preprocess)
            batches = [
                torch.stack([transform(picture) for picture in pictures[start : start + AT_ONCE]])
                for start in range(0, len(pictures), AT_ONCE)
            ]
        if not batches:
            raise ShortlistError("inputs must be at least one, got none")
        found = []
        with autocast(self._precision, self.device):
            for batch in batches:
                there = batch.to(self.device)
                found.append(compute(there if self._preprocess is None else self._preprocess.normalise(there)).cpu())
        return torch.cat(found), is_one
