"""A run as files for other programs, compared with the run before they are written."""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shortlist import __version__
from shortlist.errors import ShortlistError
from shortlist.ops.checks import check_k
from shortlist.program.atomic_files import refuse_links, write_file
from shortlist.program.data.base import Problem
from shortlist.program.predicting.agreement import Agreement, Expected, compared, expected, file_accuracy, run_accuracy
from shortlist.program.predicting.calibration import METHODS, Of, fitted_sets, read_calibration
from shortlist.program.predicting.check_inputs import CheckInputs, held_out_inputs, made_inputs
from shortlist.program.predicting.deployed import DeployedModel
from shortlist.program.predicting.exported_files import (
    Format,
    Opened,
    check_packages,
    onnx_file,
    onnx_model,
    opened,
    pt2_file,
    traced,
)
from shortlist.program.predicting.predictor import Predictor
from shortlist.program.predicting.quantised import int8_model
from shortlist.program.predicting.timm_weights import timm_file
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import read_classes, read_correction
from shortlist.program.training.evaluate import load_run_problem

Precision = Literal["float32", "float16", "int8"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "pt2": ".pt2", "timm": ".safetensors"}
FOLDER = "export"
"""In the folder of the run, where files are written by default."""
PRECISIONS: dict[Format, tuple[Precision, ...]] = {
    "onnx": ("float32", "float16", "int8"),
    "pt2": ("float32", "float16"),
    "timm": ("float32",),
}
_COVERAGE = 0.9
_COMPARED = 100  # inputs
_MEASURED = 1000  # images whose accuracy is measured
_RANGES_FROM = 200  # images that show the ranges of activations


@dataclass(frozen=True)
class ExportedFile:
    """A file that was written."""

    path: Path
    format: Format
    size: int
    """In bytes."""
    agreement: Agreement | None
    """With the run; None for timm's weights, which are no suggestions."""
    accuracy: dict[str, float]
    """Of other precisions than float32, on ``Export.measured_on``; otherwise empty."""


@dataclass(frozen=True)
class Export:
    """What was written, and what is known of it."""

    model: DeployedModel
    """The same in torch and float32."""
    files: tuple[ExportedFile, ...]
    compared_on: CheckInputs
    """What the files were compared with the run on."""
    measured_on: CheckInputs | None
    """What the accuracy of other precisions than float32 was measured on: test images that no set rests on. None if the
    data of the run is not there."""
    run_accuracy: dict[str, float]
    """Of the run itself on these images; empty without."""


def export_run(
    run: RunFolder,
    out: Path | None = None,
    *,
    formats: Sequence[Format] = (),
    precision: Precision = "float32",
    k: int | None = None,
    coverage: float | None = None,
    of: Of = "classes",
    average_k: float | None = None,
    root: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> Export:
    """Write a run as files that need nothing of shortlist, if they say what ``Predictor`` says.

    Args:
        run: A run with at least one finished epoch.
        out: A folder, by default ``export`` in that of the run; or a file, whose ending chooses the format.
        formats: By default ``onnx`` and ``pt2``, or ``onnx`` alone for int8.
        precision: Of the network. Its last layer stays in float32.
        k: Number of suggestions; by default as many as the run was trained for.
        coverage: Of the sets of a calibrated run; by default 0.9.
        of: What the coverage is of.
        average_k: Sets of this mean size, instead of a coverage.
        root: Where the data of the run is now, if it has moved.
        say: Is told what the user should know.

    Raises:
        ShortlistError: Something cannot be exported, or a file disagrees with the run. Then nothing is written.
    """
    paths = _paths(run, out, formats, precision)
    predictor = Predictor(run, "cpu", precision="32-true")  # files compute so, whatever the run was trained with
    k = predictor.suggested if k is None else k
    check_k(k, len(predictor.classes), len(predictor.classes))
    if precision != "float32" and predictor.channels == 0:
        raise ShortlistError(
            f"{run.path} was trained on embeddings: it is a last layer alone, which stays in float32. Leave out "
            f"--precision {precision}"
        )
    if "onnx" in paths:
        check_packages()
    if coverage is not None and average_k is not None:
        raise ShortlistError("--coverage and --average-k exclude each other: give one of them")
    calibration = read_calibration(run)
    if calibration is None:
        _refuse_sets(run, coverage, average_k, say)
    coverage = _COVERAGE if coverage is None else coverage
    sets = None
    if calibration is not None:
        sets = fitted_sets(run, calibration, coverage=coverage, method=METHODS[of], average_k=average_k)
    problem = _data(run, root, precision, say)
    model = DeployedModel(run, k, calibration, sets)
    metadata = _metadata(run, model, of, precision)
    contents = {kind: _content(run, kind, model, precision, metadata, problem) for kind in paths}

    given = (
        held_out_inputs(problem, "test", _COMPARED)
        if problem is not None and len(problem.test)
        else made_inputs(model.preprocess, model.example().shape[1], _COMPARED)
    )
    wanted = expected(predictor, given, coverage=coverage, of=of, average_k=average_k)
    measured = None
    if precision != "float32" and problem is not None and len(problem.test):
        measured = held_out_inputs(problem, "test", _MEASURED, calibration.set_images if calibration else ())
    files = []
    for kind, path in paths.items():
        agreement, accuracy = None, dict[str, float]()
        if kind != "timm":
            file = opened(contents[kind], kind)
            agreement = _checked(file, path, given, wanted, precision)
            accuracy = file_accuracy(file, measured) if measured else {}
        files.append(ExportedFile(path, kind, len(contents[kind]), agreement, accuracy))
    accuracy = run_accuracy(predictor, measured, k) if measured else {}
    for kind, path in paths.items():
        _write(run, path, contents[kind])
    return Export(model, tuple(files), given, measured, accuracy)


def _paths(run: RunFolder, out: Path | None, formats: Sequence[Format], precision: Precision) -> dict[Format, Path]:
    """Where the file of each format goes."""
    is_file = out is not None and out.suffix in SUFFIXES.values() and not out.is_dir()
    if out is not None and is_file:
        (kind,) = (kind for kind, suffix in SUFFIXES.items() if suffix == out.suffix)
        if formats and [*formats] != [kind]:
            raise ShortlistError(
                f"--out {out} is one file of the format {kind}: leave out --format, or give a folder as --out"
            )
        formats = [kind]
    default: Sequence[Format] = ("onnx",) if precision == "int8" else ("onnx", "pt2")
    for kind in formats or default:
        if precision not in PRECISIONS[kind]:
            raise ShortlistError(
                f"--precision {precision} is not for --format {kind}, only {' or '.join(PRECISIONS[kind])}"
            )
    if out is not None and is_file:
        return dict.fromkeys(formats, out)
    folder = run.path / FOLDER if out is None else out
    name = "model" if precision == "float32" else f"model-{precision}"
    return {kind: folder / f"{name}{SUFFIXES[kind]}" for kind in formats or default}


def _refuse_sets(run: RunFolder, coverage: float | None, average_k: float | None, say: Callable[[str], None]) -> None:
    """Say what a run that is not calibrated lacks, or raise an error if that was asked for."""
    remedy = f"run `shortlist calibrate {run.path}` first"
    if coverage is not None or average_k is not None:
        raise ShortlistError(f"{run.path} is not calibrated and can give no sets: {remedy}")
    say(f"{run.path} is not calibrated: the files give neither probabilities nor sets. For these, {remedy}")


def _data(run: RunFolder, root: str, precision: Precision, say: Callable[[str], None]) -> Problem | None:
    """The data of the run; None if it is not there, and not needed."""
    try:
        problem = load_run_problem(run, root)
    except (ShortlistError, OSError) as error:
        if precision == "int8":
            raise ShortlistError(
                f"--precision int8 needs the validation images of {run.path}, to see which values the network takes: "
                f"{error}"
            ) from error
        say(f"the run's own images are not used to check the files: {error}")
        return None
    if precision == "int8" and len(problem.val) == 0:
        raise ShortlistError(f"--precision int8 needs validation images, and {run.path} has none")
    return problem


def _metadata(run: RunFolder, model: DeployedModel, of: Of, precision: Precision) -> dict[str, Any]:
    """What a reader of a file may want to know. All of it can be written as JSON."""
    config, correction, sets, calibration = run.config, read_correction(run), model.sets, model.calibration
    preprocess = None if model.preprocess is None else dataclasses.asdict(model.preprocess)
    found: dict[str, Any] = {
        "classes": read_classes(run).names,
        "k": model.k,
        "preprocess": preprocess,
        "network": config.model.name,
        "loss": config.loss.name,
        "precision": precision,
        "correction": correction and {"tau": correction.tau},
        "calibration": calibration and {"temperature": calibration.temperature, "prior": calibration.prior},
        "sets": None,
        "shortlist": __version__,
    }
    if sets is not None and sets.average_k is not None:
        found["sets"] = {"average_k": sets.average_k}
    elif sets is not None:
        found["sets"] = {"coverage": sets.coverage, "of": of}
    return found


def _content(
    run: RunFolder,
    kind: Format,
    model: DeployedModel,
    precision: Precision,
    metadata: dict[str, Any],
    problem: Problem | None,
) -> bytes:
    if kind == "timm":
        return timm_file(run, metadata)
    program = traced(copy.deepcopy(model).half_backbone() if precision == "float16" else model)
    if kind == "pt2":
        return pt2_file(program, metadata)
    inputs = "vectors" if model.preprocess is None else "pixels"
    found = onnx_model(program, inputs, model.outputs)
    if precision == "int8" and problem is not None:
        found = int8_model(found, inputs, held_out_inputs(problem, "val", _RANGES_FROM))
    return onnx_file(found, metadata)


def _checked(file: Opened, path: Path, given: CheckInputs, wanted: Expected, precision: Precision) -> Agreement:
    """How the file agrees with the run, or an error if it does not. Lower precisions may differ as they do."""
    agreement = compared(file, given, wanted)
    if agreement.problem and (precision == "float32" or not math.isfinite(agreement.score)):
        raise ShortlistError(f"{path} is not written: on {given.source} it disagrees with the run: {agreement.problem}")
    return agreement


def _write(run: RunFolder, path: Path, content: bytes) -> None:
    if path.is_relative_to(run.path):  # it may come from a stranger
        refuse_links(run.path, path)
    write_file(path, content)
