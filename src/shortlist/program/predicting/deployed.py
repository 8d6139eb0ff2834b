"""A run as one network from pixels to suggestions, to be traced into a file that needs nothing of shortlist."""

import torch
from torch import Tensor, nn

from shortlist.program.predicting.calibration import Calibration, log_probabilities
from shortlist.program.predicting.square_pixels import square_pixels
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.model import load_correction, load_model
from shortlist.program.runs.records import read_classes, read_preprocess
from shortlist.sets import PredictionSets


class DeployedModel(nn.Module):
    """From uint8 pixels ``(N, C, H, W)``, or float vectors ``(N, d)``, to what ``Predictor`` says of them.

    Args:
        run: A run with at least one finished epoch.
        k: Number of suggestions.
        calibration: How scores become probabilities; None leaves out probabilities and sets.
        sets: Calibrated sets, which take log-probabilities.

    Attributes:
        preprocess: How an image becomes the network's input; None for embeddings.
    """

    class_counts: Tensor

    def __init__(
        self, run: RunFolder, k: int, calibration: Calibration | None = None, sets: PredictionSets | None = None
    ) -> None:
        super().__init__()
        self.network = load_model(run).eval()
        self.preprocess = None if run.config.data.name == "embeddings" else read_preprocess(run)
        if self.preprocess is not None and self.preprocess.resize < self.preprocess.crop:
            raise run.damaged("preprocess.json", f"resize must be at least crop, which is {self.preprocess.crop}")
        self.correct: nn.Module = load_correction(run) or nn.Identity()
        self.k, self.calibration, self.sets = k, calibration, sets
        self.requires_grad_(False)
        self.register_buffer("class_counts", torch.tensor(read_classes(run).train_images))

    @property
    def outputs(self) -> list[str]:
        """Names of what it gives."""
        return ["indices", "scores", *(("probabilities", "in_set") if self.sets is not None else ())]

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """By name: ``indices`` and ``scores`` ``(N, K)``.

        If the run is calibrated, also ``probabilities`` ``(N, K)`` and ``in_set`` ``(N, L)``.
        """
        rows = inputs if self.preprocess is None else self.preprocess.normalise(square_pixels(inputs, self.preprocess))
        # The last layer is always computed in float32: half precision would round scores to ties.
        plain: Tensor = self.network.head(self.network.backbone(rows.to(self._dtype)).float())
        best = self.correct(plain).topk(self.k)
        found = {"indices": best.indices, "scores": best.values}
        if self.calibration is not None and self.sets is not None:
            log_p = log_probabilities(plain, self.calibration, self.class_counts)
            found |= {"probabilities": log_p.gather(1, best.indices).exp(), "in_set": self.sets(log_p)}
        return found

    def example(self) -> Tensor:
        """Two inputs to trace it with. No two of their sizes are the same, so that none is taken for another."""
        if self.preprocess is None:
            return torch.zeros(2, self.network.head.get_parameter("weight").shape[1])
        side = self.preprocess.resize
        return torch.zeros(2, self.preprocess.channels, side + 5, side + 12, dtype=torch.uint8)

    def half_backbone(self) -> "DeployedModel":
        """Itself, with everything in front of the last layer in float16."""
        self.network.backbone.half()
        return self

    @property
    def _dtype(self) -> torch.dtype:
        weights = next(self.network.backbone.parameters(), None)
        return torch.float32 if weights is None else weights.dtype
