"""What a run recorded about its data and its result, and whether the data is still the same."""

import dataclasses
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from shortlist.errors import ShortlistError
from shortlist.program.config import Fit
from shortlist.program.data.base import SPLITS, DataFacts, LabelNoise, Preprocess, Problem, Thinning
from shortlist.program.runs.checks import METRIC, are_metrics, is_number, is_text, is_whole
from shortlist.program.runs.folder import ADDED, BEST, RunFolder, file_digest
from shortlist.program.text import counted, some_of

_CLASSES, _PREPROCESS, _FACTS, _RESULT = "classes.json", "preprocess.json", "facts.json", "final.json"
_CORRECTION = "correction.json"
_LARGEST_SIDE = 2**14  # of images in pixels
_LARGEST_TAU = 1e30  # float32 can compute with it

Check = Callable[[Any], bool]


@dataclass(frozen=True)
class Classes:
    """The classes in the order of their labels."""

    names: tuple[str, ...]
    train_images: tuple[int, ...]


def corrected_name(metric: str) -> str:
    """Name of a validation metric of an epoch after the correction for class sizes, in ``metrics.jsonl``."""
    return f"corrected_val_{metric}"


def selected_value(line: Mapping[str, Any], metric: str) -> float | None:
    """What an epoch was chosen by: the metric after the correction for class sizes, if the line has it."""
    value: float | None = line.get(corrected_name(metric), line.get(f"val_{metric}"))
    return value


@dataclass(frozen=True)
class Correction:
    """How the scores of a run are corrected for the prior, and what that rests on."""

    tau: float
    metric: str
    """The accuracy that is corrected for, such as macro_top5."""
    ks: tuple[int, ...]
    """The K whose accuracies tau was chosen by together; that of the metric is the largest."""
    images: int
    """Validation images that tau rests on."""
    classes: int
    """Classes that have one of these images."""
    num_classes: int
    val: dict[str, float | None]
    """Metrics of these images after the correction. Too good: tau was chosen on them."""
    best_sha256: str
    """Checksum of the weights that it was chosen for."""

    def __str__(self) -> str:
        average, ks = self.metric.partition("_top")[0], ", ".join(map(str, self.ks))
        images = counted(self.images, "validation image")
        of_classes = f"{self.classes:,} of {counted(self.num_classes, 'class', 'classes')}"
        return f"tau = {self.tau:.3g}, chosen for {average} top-{ks} on {images} of {of_classes}"


@dataclass(frozen=True)
class Added:
    """Classes that a run was given after training, perhaps in several additions."""

    parent: str
    """Folder of the run that the last of them were added to."""
    parent_sha256: str
    """Checksum of its weights."""
    classes: tuple[str, ...]
    photos: tuple[int, ...]
    """Of each class."""
    best_sha256: str
    """Checksum of the weights with the new classes."""


class _Record:
    """A JSON file of a run. Its entries are checked as they are read."""

    def __init__(self, run: RunFolder, file: str) -> None:
        self._run, self._file = run, file
        self.entries = run.read_record(file)

    def require(self, name: str, is_valid: Check, rule: str) -> Any:
        """An entry that must be there and follow the rule."""
        if name not in self.entries:
            raise self.damaged(f"it has no entry {name}")
        if not is_valid(self.entries[name]):
            raise self.damaged(f"{name} must be {rule}, got {reprlib.repr(self.entries[name])}")
        return self.entries[name]

    def optional(self, name: str, is_valid: Check, rule: str) -> Any:
        """An entry that must follow the rule; None if it is not there."""
        return self.require(name, is_valid, rule) if name in self.entries else None

    def damaged(self, reason: str) -> ShortlistError:
        return self._run.damaged(self._file, reason)


def read_classes(run: RunFolder) -> Classes:
    record = _Record(run, _CLASSES)
    names = record.require("names", _list_of(is_text), "a list of strings")
    rule = f"a list of {len(names)} whole numbers >= 0, one for each class"
    sizes = record.require("train_images", _list_of(is_whole, len(names)), rule)
    return Classes(tuple(names), tuple(sizes))


def read_preprocess(run: RunFolder) -> Preprocess:
    record = _Record(run, _PREPROCESS)
    channels = record.require("channels", lambda value: type(value) is int and value in (1, 3), "1 or 3")
    resize, crop = (
        record.require(
            name,
            lambda value: is_whole(value) and 1 <= value <= _LARGEST_SIDE,
            f"a whole number in [1, {_LARGEST_SIDE}]",
        )
        for name in ("resize", "crop")
    )
    mean, std = (
        record.require(name, _list_of(is_number, channels), f"a list of {channels} numbers") for name in ("mean", "std")
    )
    if 0 in std:
        raise record.damaged(f"std must not be 0, got {std!r}")
    # Older versions recorded no fit: they always cropped.
    fit: Fit = record.optional("fit", lambda value: value in get_args(Fit), "crop or pad") or "crop"
    return Preprocess(channels, resize, crop, tuple(mean), tuple(std), fit)


def read_added(run: RunFolder) -> Added | None:
    """The classes that were added to a run; None for a run that was trained."""
    if not run.has(ADDED):
        return None
    record = _Record(run, ADDED)
    parent, parent_sha256, best_sha256 = (
        record.require(name, is_text, "a string") for name in ("parent", "parent_sha256", "best_sha256")
    )
    classes = record.require("classes", _list_of(is_text), "a list of strings")
    if tuple(classes) != read_classes(run).names[-len(classes) :]:
        raise record.damaged("its classes are not the last of classes.json")
    photos = record.require("photos", _list_of(is_whole, len(classes)), "a whole number for each class")
    return Added(parent, parent_sha256, tuple(classes), tuple(photos), best_sha256)


def with_added_classes(problem: Problem, run: RunFolder) -> Problem:
    """The data of a run with the names of the classes that were added to it. It has no image of them."""
    names = read_classes(run).names
    if not run.has(ADDED) or names[: len(problem.classes)] != problem.classes:
        return problem
    return replace(problem, classes=names, superclasses=())


def read_result(run: RunFolder) -> dict[str, Any]:
    """The content of ``final.json``, with all entries that tables and pages show."""
    record = _Record(run, _RESULT)
    record.require("best_epoch", is_whole, "a whole number >= 0")
    record.require("select", _is_metric, "like macro_top5")
    for name in ("val", "test"):
        record.require(name, lambda value: isinstance(value, dict) and are_metrics(value), "numbers by name")
    record.optional("test_corrected", lambda value: isinstance(value, dict) and are_metrics(value), "numbers by name")
    record.require("train_seconds", is_number, "a number")
    return record.entries


def write_correction(run: RunFolder, correction: Correction) -> None:
    run.write_json(_CORRECTION, dataclasses.asdict(correction))


def read_correction(run: RunFolder) -> Correction | None:
    """The correction that goes with the best weights of a run; None if it has none, as runs of earlier versions."""
    if not run.has(_CORRECTION) and not (run.finished and "test_corrected" in read_result(run)):
        return None
    record = _Record(run, _CORRECTION)
    best_sha256 = record.require("best_sha256", is_text, "a checksum")
    if not run.has(BEST) or best_sha256 != file_digest(run.path / BEST):
        if run.finished:
            raise record.damaged(f"it does not belong to the weights in {BEST}")
        return None  # left by another training in this folder
    metric = record.require("metric", _is_metric, "like macro_top5")
    ks = record.optional("ks", _list_of(is_whole), "a list of whole numbers")
    return Correction(
        tau=record.require("tau", lambda value: is_number(value) and 0 <= value <= _LARGEST_TAU, "a number >= 0"),
        metric=metric,
        ks=tuple(ks or (int(metric.partition("_top")[2]),)),  # earlier versions looked at one
        val=record.require("val", lambda value: isinstance(value, dict) and are_metrics(value), "numbers by name"),
        best_sha256=best_sha256,
        **{
            name: record.require(name, is_whole, "a whole number >= 0") for name in ("images", "classes", "num_classes")
        },
    )


def write_facts(run: RunFolder, problem: Problem) -> None:
    """Record what is needed to notice later that the data has changed."""
    known = {split: problem.split(split).fingerprint() for split in SPLITS}
    fingerprints = {split: fingerprint for split, fingerprint in known.items() if fingerprint is not None}
    facts = dataclasses.asdict(replace(problem.facts, fingerprints=fingerprints))
    held_out, remarks = facts.pop("held_out"), facts.pop("remarks")
    run.write_json(_FACTS, held_out | {name: value for name, value in facts.items() if value is not None} | remarks)


def read_facts(run: RunFolder) -> DataFacts:
    """What the run recorded of its data. Older versions recorded less."""
    record = _Record(run, _FACTS)
    files = {f"{split}_files": (is_text, "a list of file names") for split in SPLITS}
    indices = {f"{split}_indices": (is_whole, "a list of row numbers") for split in SPLITS}
    held_out = {
        name: tuple(samples)
        for name, (is_valid, rule) in (files | indices).items()
        if (samples := record.optional(name, _list_of(is_valid), rule)) is not None
    }
    train_digest, test_digest, ignored_files = (
        record.optional(name, is_text, "a string") for name in ("train_digest", "test_digest", "ignored_files")
    )
    imbalance = record.optional("imbalance", _has(is_whole, "kept", "of"), "whole numbers kept and of")
    noise = record.optional("label_noise", _has(is_whole, "changed", "of"), "whole numbers changed and of")
    rule = "digests names and sizes for each split"
    fingerprints = record.optional("fingerprints", _are_fingerprints, rule) or {}
    known = {*files, *indices, *(field.name for field in dataclasses.fields(DataFacts))}
    return DataFacts(
        held_out=held_out,
        train_digest=train_digest,
        test_digest=test_digest,
        imbalance=imbalance and Thinning(imbalance["kept"], imbalance["of"]),
        label_noise=noise and LabelNoise(noise["changed"], noise["of"]),
        ignored_files=ignored_files,
        fingerprints=fingerprints,
        remarks={name: text for name, text in record.entries.items() if name not in known and is_text(text)},
    )


def refuse_other_data(problem: Problem, run: RunFolder) -> None:
    """Raise an error unless the labels have the same meaning, and the same samples would be held out of training.

    An added or removed file moves others between the splits: the test would include images that the run was trained
    on. Splits that are the data's own may grow.
    """
    if problem.classes != read_classes(run).names:
        raise ShortlistError(f"the data has changed: its classes are not those that {run.path} was trained on")
    recorded = read_facts(run).held_out
    if any(samples != recorded.get(name) for name, samples in problem.facts.held_out.items()):
        raise ShortlistError(
            f"the data has changed{_changed_classes(problem, run)}: other images would be held out for validation and "
            f"test than {run.path} had; restore the data that it was trained on"
        )


def has_other_training_images(problem: Problem, run: RunFolder) -> bool:
    """True if training samples were added, removed or replaced since the run began; False if it did not record them."""
    recorded = read_facts(run)
    return recorded.train_digest is not None and (
        recorded.train_digest != problem.facts.train_digest or bool(_replaced(problem, recorded, ["train"]))
    )


def refuse_other_training_images(problem: Problem, run: RunFolder) -> None:
    """Raise an error unless a resumed run would continue with the training samples it began with, in the same order.

    Validation and test may have got more samples; none may have been replaced.
    """
    recorded = read_facts(run)
    if recorded.train_digest not in (None, problem.facts.train_digest):
        raise ShortlistError(
            f"the data has changed{_changed_classes(problem, run)}: the training images are not those that {run.path} "
            "began with; restore them, or start a run in another folder"
        )
    if replaced := _replaced(problem, recorded, SPLITS):
        raise ShortlistError(
            f"the data has changed: samples of {some_of(replaced)} were replaced since {run.path} began; "
            "restore them, or start a run in another folder"
        )


def _replaced(problem: Problem, recorded: DataFacts, splits: Sequence[str]) -> list[str]:
    """Splits of which some sample was replaced by another."""
    found = []
    for split in splits:
        before = recorded.fingerprints.get(split)
        now = problem.split(split).fingerprint() if before else None
        if before and now and before["names"] == now["names"] and before["sizes"] != now["sizes"]:
            found.append(split)
    return found


def _changed_classes(problem: Problem, run: RunFolder) -> str:
    """Classes with another number of training images, if any."""
    now, before = problem.class_counts.tolist(), read_classes(run).train_images
    changes = [
        f"{name}: {counted(size, 'training image')}, not {size_before}"
        for name, size, size_before in zip(problem.classes, now, before, strict=True)
        if size != size_before
    ]
    return f" ({some_of(changes)})" if changes else ""


def _is_metric(value: Any) -> bool:
    return is_text(value) and METRIC.fullmatch(value) is not None


def _list_of(is_valid: Check, length: int | None = None) -> Check:
    return lambda value: isinstance(value, list) and length in (None, len(value)) and all(map(is_valid, value))


def _has(is_valid: Check, *names: str) -> Check:
    return lambda value: isinstance(value, dict) and all(is_valid(value.get(name)) for name in names)


def _are_fingerprints(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_has(is_text, "names", "sizes"), value.values()))
