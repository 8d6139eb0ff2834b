"""A file that ``shortlist export`` wrote as a served model.

It says less than a run: the K best classes, and the set of one coverage. So it fuses no photos and takes no prior.
"""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.data.base import Preprocess
from shortlist.program.data.image_io import before_crop
from shortlist.program.predicting.calibration import Of
from shortlist.program.predicting.exported_files import Opened, open_onnx
from shortlist.program.predicting.predictor import Suggestion
from shortlist.program.serving.models import Answer, CoverageSet


class ServedFile:
    """An exported file as a served model.

    Args:
        path: The file.
        compute: The computation in it.
        metadata: What the file tells about itself.
    """

    most_photos = 1
    takes_prior = False
    coverages: Sequence[float] = ()
    of: Of = "classes"

    def __init__(self, path: Path, compute: Opened, metadata: Mapping[str, Any]) -> None:
        try:
            self.classes: Sequence[str] = tuple(metadata["classes"])
            self.suggested = self.most_suggested = int(metadata["k"])
            settings, sets, calibration = (metadata[name] for name in ("preprocess", "sets", "calibration"))
            if settings is not None:
                numbers = {name: tuple(settings[name]) for name in ("mean", "std")}
                self._prepare = before_crop(Preprocess(**{**settings, **numbers}))
                self.channels = int(settings["channels"])
            if sets is not None and "coverage" in sets:
                self.coverages, self.of = (float(sets["coverage"]),), sets["of"]
        except (KeyError, TypeError, ValueError) as error:
            raise ShortlistError(f"{path} was not written by shortlist export: its metadata lacks {error}") from None
        if settings is None:
            raise ShortlistError(f"{path} was exported from a run on embeddings: only those on images can be served")
        self.name, self._compute = path.stem, compute
        remedy = "shortlist calibrate RUN, then shortlist export RUN"
        self.why_no_probabilities = "" if calibration is not None else remedy

    def prepared(self, image: Image.Image) -> Tensor:
        return self._prepare(image)

    def rows(self, photos: Sequence[Tensor]) -> Sequence[Tensor]:
        """The outputs of each photo in one row: K indices, K scores, K probabilities, and 1 for each class in the set.

        The file crops, so photos of different shapes cannot share a batch.
        """
        found: list[Tensor] = [torch.empty(0)] * len(photos)
        for shape in {photo.shape for photo in photos}:
            places = [place for place, photo in enumerate(photos) if photo.shape == shape]
            outputs = self._compute(torch.stack([photos[place] for place in places]).numpy())
            indices, scores = outputs["indices"], outputs["scores"]
            probabilities = outputs.get("probabilities", np.full(scores.shape, np.nan))
            in_set = outputs.get("in_set", np.zeros((len(scores), len(self.classes))))
            rows = np.concatenate([indices, scores, probabilities, in_set], axis=1, dtype=np.float64)
            for place, row in zip(places, rows, strict=True):
                found[place] = torch.from_numpy(row)
        return found

    def answer(
        self, rows: Sequence[Tensor], k: int, coverages: Sequence[float] = (), log_weights: Tensor | None = None
    ) -> Answer:
        (row,) = rows
        indices, scores, probabilities = (part.tolist() for part in row[: 3 * self.suggested].chunk(3))
        best = {
            int(index): Suggestion(self.classes[int(index)], int(index), score, None if math.isnan(p) else p)
            for index, score, p in zip(indices, scores, probabilities, strict=True)
        }
        inside = set(row[3 * self.suggested :].nonzero().flatten().tolist())
        # Of classes behind the K best, the file tells neither score nor probability.
        others = [Suggestion(self.classes[index], index, math.nan) for index in sorted(inside - best.keys())]
        in_set = [*(item for index, item in best.items() if index in inside), *others]
        return Answer([*best.values()][:k], [CoverageSet(coverage, in_set, True) for coverage in coverages])


def open_file(path: Path) -> ServedFile:
    """A file as a served model, computed by onnxruntime on the CPU."""
    if not path.is_file():
        raise ShortlistError(f"there is no file {path}")
    if importlib.util.find_spec("onnxruntime") is None:
        raise ShortlistError("serving an exported file needs onnxruntime: pip install 'shortlist[export]'")
    try:
        compute, metadata = open_onnx(path)
    except Exception as error:  # onnxruntime raises its own, which differ between versions
        raise ShortlistError(f"{path} cannot be opened as an ONNX file: {error}") from None
    return ServedFile(path, compute, metadata)
