"""What a run starts from: the weights that ``model.weights`` names, and the mean and deviation that belong to them.

Only a training that begins reads them. Later the run's own files have all that is needed, so that a run folder from a
stranger leads to no file and no address outside of it.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import ModelConfig, RunConfig
from shortlist.program.data.base import Problem
from shortlist.program.models.build import input_statistics
from shortlist.program.models.package_weights import package_file, package_weights
from shortlist.program.models.weights import read_weights
from shortlist.program.runs.folder import BEST, RunFolder, file_digest
from shortlist.program.runs.records import read_preprocess

PACKAGE = "package"
"""The value of ``model.weights`` for weights that a package brings."""


@dataclass(frozen=True)
class StartWeights:
    """Weights to start from, and where they were found."""

    source: str
    """What to call it."""
    sha256: str
    """Of the file."""
    tensors: Mapping[str, Tensor]


def read_start(model: ModelConfig) -> StartWeights | None:
    """The weights that the settings name; None if they name none."""
    if not model.weights:
        return None
    if model.weights == PACKAGE:
        tensors, digest = package_weights(model.name)
        return StartWeights(f"the package of {model.name}", digest, tensors)
    path = _file(model)
    if run := _run(model):
        return StartWeights(str(run.path), file_digest(path), run.load_best())
    content = path.read_bytes()
    return StartWeights(str(path), hashlib.sha256(content).hexdigest(), read_weights(content, str(path)))


def refuse_other_start(model: ModelConfig, run: RunFolder) -> None:
    """Raise an error if the weights that a run began with were replaced. If they are gone, it can do without."""
    if not model.weights or not run.has("environment.json"):
        return
    recorded = now = run.read_environment().get("start_sha256")
    with suppress(ShortlistError, OSError):
        now = file_digest(_file(model))
    if recorded not in (None, now):
        raise ShortlistError(
            f"model.weights = {model.weights} has changed: {run.path} began with other weights; restore them, or start "
            "a run in another folder"
        )


def normalised_for_start(problem: Problem, config: RunConfig) -> Problem:
    """The problem as a new run sees it: with the mean and deviation of its network's weights, if the settings say so.

    A run folder as ``model.weights`` gives those of that run.
    """
    if not config.normalises_for_network:
        return problem
    channels = problem.preprocess.channels if problem.preprocess else 0
    statistics = input_statistics(config.model.name)
    if run := _run(config.model):
        preprocess = read_preprocess(run)
        statistics = preprocess.mean, preprocess.std
    if statistics and len(statistics[0]) == channels:
        return problem.normalised_with(*statistics)
    if config.data.normalise == "network":
        raise ShortlistError(
            f"data.normalise = network needs a network of timm and colour images, got {config.model.name} for "
            f"{config.data.name}"
        )
    return problem


def normalised_as_recorded(problem: Problem, config: RunConfig, run: RunFolder) -> Problem:
    """The problem as a run saw it that has begun: with the mean and deviation in its ``preprocess.json``."""
    if not config.normalises_for_network or problem.preprocess is None:
        return problem
    recorded = read_preprocess(run)
    return problem.normalised_with(recorded.mean, recorded.std)


def _run(model: ModelConfig) -> RunFolder | None:
    """The run that the settings name as the source of weights, if it is a run."""
    path = Path(model.weights).expanduser()
    if not model.weights or model.weights == PACKAGE or not path.is_dir():
        return None
    run = RunFolder.existing(path)
    if run.config.model.name != model.name:
        raise ShortlistError(
            f"model.weights = {model.weights} is a run of the network {run.config.model.name}, and model.name is "
            f"{model.name}: add --model.name {run.config.model.name}"
        )
    return run


def _file(model: ModelConfig) -> Path:
    """The file that the weights are in."""
    if model.weights == PACKAGE:
        return package_file(model.name)
    path = Path(model.weights).expanduser()
    if run := _run(model):
        return run.path / BEST
    if not path.is_file():
        raise ShortlistError(
            f"model.weights must be a file of weights, a run folder, or {PACKAGE}: there is no file {model.weights}"
        )
    return path
