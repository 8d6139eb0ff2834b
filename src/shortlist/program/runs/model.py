"""The network of a run, with its best weights, and the correction of its scores."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from shortlist.prior_correction import PriorCorrection
from shortlist.program.models.build import Classifier, build_model, load_weights
from shortlist.program.runs.folder import BEST, RunFolder
from shortlist.program.runs.records import read_classes, read_correction, read_preprocess


def load_model(run: RunFolder, input_shape: tuple[int, ...] = ()) -> Classifier:
    """Build the network of a run and load its best weights.

    Args:
        run: A run with at least one finished epoch.
        input_shape: Shape of one input; by default that of the images in ``preprocess.json``, or of the embeddings that
            the last layer takes.
    """
    weights = run.load_best()  # first: a run without weights may lack the other files too
    if not input_shape and run.config.data.name == "embeddings":
        input_shape = tuple(weights["head.weight"].shape[1:]) if "head.weight" in weights else (0,)
    if not input_shape:
        preprocess = read_preprocess(run)
        input_shape = (preprocess.channels, preprocess.crop, preprocess.crop)
    # The run's own weights replace those that it started from. The folder may come from a stranger: nothing is fetched.
    config = replace(run.config.model, pretrained=False)
    model = build_model(config, input_shape, len(read_classes(run).names))
    load_weights(model, weights, _misfit(run, input_shape))
    return model


def load_best(model: nn.Module, run: RunFolder, input_shape: tuple[int, ...]) -> None:
    """Load the best weights of a run into its network."""
    load_weights(model, run.load_best(), _misfit(run, input_shape))


def prior_correction(train_images: Sequence[int]) -> PriorCorrection:
    """A correction for classes of these sizes. A class without a training image is never suggested."""
    return PriorCorrection(train_images, leave_out=[label for label, count in enumerate(train_images) if count == 0])


def load_correction(run: RunFolder) -> PriorCorrection | None:
    """The correction that a run chose for its scores; None if it has none."""
    recorded = read_correction(run)
    if recorded is None:
        return None
    correction = prior_correction(read_classes(run).train_images)
    correction.tau.fill_(recorded.tau)
    return correction


def _misfit(run: RunFolder, input_shape: tuple[int, ...]) -> str:
    size = " x ".join(map(str, input_shape))
    return (
        f"{run.path / BEST} does not fit the network of config.json for inputs of {size}: "
        "a file of the run is damaged, or the data is not that of the run"
    )
