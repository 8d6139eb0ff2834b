"""A trained run for new images or vectors, from its folder alone."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.program.data.image_io import evaluation_transform
from shortlist.program.devices import autocast, pick_device
from shortlist.program.predicting.inputs import pictures_of, vectors_of
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.model import load_correction, load_model
from shortlist.program.runs.records import read_classes, read_preprocess

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


def load(run: str | Path, device: str = "auto", *, correct: bool = True) -> "Predictor":
    """A trained run, ready for new images.

    Args:
        run: The folder of a run with at least one finished epoch.
        device: Where to compute: ``auto``, ``cpu``, ``cuda``, ...
        correct: Correct the scores for class sizes, if the run chose to.

    Example::

        predictor = sl.load("runs/birds")
        for suggestion in predictor.suggest("photo.jpg", k=5):
            print(suggestion.name, suggestion.score)
    """
    return Predictor(RunFolder.existing(run), device, correct=correct)


class Predictor:
    """The best weights of a run, for new inputs, which are preprocessed as in the run's own evaluation.

    Every method takes one input or several, and gives one result or a list of them. Of a run on images, an input is a
    path, an image of Pillow, a uint8 array ``(H, W)`` or ``(H, W, C)``, or a uint8 tensor ``(C, H, W)``; several are in
    a list, or in an array or tensor with one more dimension in front. Of a run on embeddings it is a vector of floats.

    Args:
        run: A run with at least one finished epoch.
        device: Where to compute.
        correct: Correct the scores for class sizes, if the run chose to.

    Attributes:
        classes: Names of the classes.
        device: Where it computes.
        suggested: How many suggestions the run was trained for.
    """

    def __init__(self, run: RunFolder, device: str = "auto", *, correct: bool = True) -> None:
        config = run.config
        self.device, self._precision = pick_device(device), config.train.precision
        self._model = load_model(run).to(self.device).eval()  # first: a run without weights may lack the other files
        self.classes, self.suggested = read_classes(run).names, config.loss.largest_k
        self._preprocess = None if config.data.name == "embeddings" else read_preprocess(run)
        correction = load_correction(run) if correct else None
        self._correct = nn.Identity() if correction is None else correction.to(self.device)

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
        scores, is_one = self._computed(inputs, lambda rows: self._correct(self._model(rows).float()))
        top = scores.topk(k)
        found = [
            [Suggestion(self.classes[index], index, score) for index, score in zip(indices, values, strict=True)]
            for indices, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        return found[0] if is_one else found

    def scores(self, inputs: Any) -> Tensor:
        """``(L,)`` or ``(N, L)`` scores of all classes, on the CPU, corrected as the suggestions are."""
        scores, is_one = self._computed(inputs, lambda rows: self._correct(self._model(rows).float()))
        return scores[0] if is_one else scores

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
