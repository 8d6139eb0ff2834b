"""New classes for a trained run, from a few photos of each, as a new run. The old classes are not trained again."""

import json
import math
import secrets
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import WRITING, explained, write_file
from shortlist.program.config import to_dict
from shortlist.program.data.base import Problem, Split, evaluation_plan
from shortlist.program.data.image_folder import holds_folders, loose_images, natural_order, scan_classes
from shortlist.program.devices import autocast
from shortlist.program.models.build import Classifier
from shortlist.program.predicting.calibration import FILE as CALIBRATION
from shortlist.program.predicting.calibration import calibrate
from shortlist.program.predicting.inputs import VECTOR_FILES, image_files, read_vectors, readable_images
from shortlist.program.predicting.new_class_weights import Known, extended_head
from shortlist.program.predicting.predictor import AT_ONCE, Predictor
from shortlist.program.runs.card import FILE as CARD
from shortlist.program.runs.card import card_text
from shortlist.program.runs.folder import ADDED, BEST, RunFolder, as_safetensors, file_digest
from shortlist.program.runs.model import load_model, prior_correction
from shortlist.program.runs.records import Added, read_added, read_classes, read_correction, write_correction
from shortlist.program.runs.scores import Scores, write_scores
from shortlist.program.text import counted, printable, some_of
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.class_weights import set_class_weights
from shortlist.program.training.evaluate import load_run_problem
from shortlist.program.training.features import weights_digest, with_features

_MOST_IMAGES = 2000  # of a split whose features are not kept: more would take minutes
_MOST_TRAIN, _MOST_VAL = 50_000, 20_000  # images whose features are kept: more change little and take time
_LONGEST_NAME = 80  # bytes of a class's name in that of the new folder: names of files end at 255
_COPIED = ("preprocess.json", "facts.json", "environment.json")

Say = Callable[[str], None]


def add_classes(
    run: RunFolder, folder: Path, out: Path | None = None, *, root: str = "", say: Say = lambda text: None
) -> RunFolder:
    """Write a new run that knows the classes of a run and those in the folder.

    Args:
        run: A finished run, or one that this function made. It is not changed.
        folder: Photos of one class, whose name is the folder's; or a folder for each class. Of a run on embeddings, a
            file of vectors, whose name is the class's, or a folder of such files.
        out: Folder of the new run; by default beside the other, with the name of the class, or the number of classes.
        root: Where the data of the run is now, if it has moved.
        say: Is told what the user should know.

    Raises:
        ShortlistError: Something cannot be added. Then nothing is written.
    """
    if not run.is_usable:
        raise ShortlistError(f"{run.path} has not finished: finish it with shortlist train --resume first")
    takes_vectors = run.config.data.name == "embeddings"
    found = _vector_files(folder) if takes_vectors else _photos(folder, say)
    classes = read_classes(run)
    if taken := sorted({*found} & {*classes.names}):
        raise ShortlistError(
            f"{run.path} already has {counted(len(taken), 'class', 'classes')} of these names: {some_of(taken)}. "
            "Rename what is new; to give a known class more photos, train again"
        )
    target = _target(run, out, [*found])
    for name, alike in _look_alikes(found, classes.names):
        say(f"{printable(name)} and {printable(alike)}, which {run.path} has, are two classes: is that meant?")
    predictor = Predictor(run, "cpu")
    features = _features_of_new(found, predictor, say)
    model = load_model(run).eval()
    try:
        problem = load_run_problem(run, root)
    except (ShortlistError, OSError) as error:
        raise ShortlistError(
            f"classes cannot be added without the images of {run.path}: without them nothing says how high the scores "
            f"of a new class should be, and it would be suggested for everything. {error}"
        ) from error
    known, held = _known(run, model, problem, say)

    counts = (*classes.train_images, *(len(rows) for rows in features.values()))
    correction = read_correction(run)
    correct: nn.Module = nn.Identity()
    if correction is not None:
        fitted = prior_correction(counts)
        fitted.tau.fill_(correction.tau)
        correct = fitted
    loss = run.config.loss.build(torch.tensor(counts).clamp(min=1))
    set_class_weights(loss, run.config, torch.tensor(counts), run.config.train.epochs)
    head = extended_head(model.head, [*features.values()], known, loss, run.config.loss.largest_k, correct)
    if not all(bool(parameter.isfinite().all()) for parameter in head.parameters()):
        raise ShortlistError(f"the weights of {some_of([*features])} are no finite numbers: the features are too large")
    extended = Classifier(model.backbone, head)
    weights = as_safetensors(extended.state_dict())

    names = (*classes.names, *features)
    with _whole_folder(target) as (child, write):
        write("config.json", to_dict(run.config))
        write("classes.json", {"names": names, "train_images": counts})
        for name in _COPIED:
            if run.has(name):
                write_file(child.path / name, (run.path / name).read_bytes())
        write_file(child.path / BEST, weights)
        digest = file_digest(child.path / BEST)
        if correction is not None:
            write_correction(child, replace(correction, best_sha256=digest))
        if held is not None:
            write_scores(child, **{name: _scores(split, rows, head) for name, (split, rows) in held.items()})
        before = read_added(run)
        added = Added(
            parent=str(run.path.resolve()),
            parent_sha256=file_digest(run.path / BEST),
            classes=((*before.classes, *features) if before else tuple(features)),
            photos=((*before.photos, *counts[len(classes.names) :]) if before else counts[len(classes.names) :]),
            best_sha256=digest,
        )
        write(ADDED, asdict(added))
        if held is not None and run.has(CALIBRATION):
            calibrate(child)
        write_file(child.path / CARD, card_text(child, name=target.name).encode())
    child = RunFolder(target)
    _tell(run, child, say)
    return child


def _photos(folder: Path, say: Say) -> dict[str, list[Path]]:
    """Image files by class."""
    if not folder.is_dir():
        raise ShortlistError(f"there is no folder {folder}")
    if not holds_folders(folder):
        files, others = image_files([folder])
        found, ignored = {folder.resolve().name: files}, [str(path) for path in others]
    else:
        if strays := loose_images(folder):
            raise ShortlistError(
                f"{folder} must hold photos of one class, or a folder for each class, and holds both: move "
                f"{some_of(strays)} away"
            )
        scanned = scan_classes(folder, folder)
        empty = sorted(name for name, images in scanned.images.items() if not images)
        if empty:
            raise ShortlistError(f"every class must have at least one photo; there is none of {some_of(empty)}")
        found = {
            name: [folder / file for file in scanned.images[name]] for name in sorted(scanned.images, key=natural_order)
        }
        ignored = scanned.ignored
    if ignored:
        which = counted(len(ignored), "file that is not an image", "files that are not images")
        say(f"left out {which}: {some_of(ignored)}")
    return found


def _vector_files(path: Path) -> dict[str, list[Path]]:
    if not path.exists():
        raise ShortlistError(f"there is no file or folder {path}")
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in VECTOR_FILES)
    if not files:
        raise ShortlistError(f"{path} must hold files of vectors, one for each class: {', '.join(VECTOR_FILES)}")
    found: dict[str, list[Path]] = {}
    for file in files:
        found.setdefault(file.stem, []).append(file)
    return found


def _features_of_new(found: Mapping[str, Sequence[Path]], predictor: Predictor, say: Say) -> dict[str, Tensor]:
    features: dict[str, Tensor] = {}
    unreadable: list[ShortlistError] = []
    for name, files in found.items():
        if predictor.channels == 0:
            vectors = [read_vectors(file) for file in files]
            rows = [predictor.embed(row.unsqueeze(0) if row.dim() == 1 else row) for row in vectors if len(row)]
        else:
            images = readable_images(files, predictor.channels, AT_ONCE, unreadable.append)
            rows = [predictor.embed(group) for _, group in images]
        if not rows:
            reasons = f": {unreadable[-1]}" if unreadable else ""
            raise ShortlistError(f"a class needs at least one readable photo, and {name} has none{reasons}")
        features[name] = torch.cat(rows)
        if not bool(features[name].isfinite().all()):
            raise ShortlistError(f"the features of {name} must be finite numbers, and some are not: remove them")
    if unreadable:
        say(f"left out {counted(len(unreadable), 'unreadable photo')}: {some_of([str(error) for error in unreadable])}")
    return features


def _look_alikes(new: Iterable[str], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names that differ from a known one only in case, or in how their accents are encoded."""

    def folded(name: str) -> str:
        return unicodedata.normalize("NFC", name).casefold()

    by_folded = {folded(name): name for name in known}
    return ((name, by_folded[folded(name)]) for name in new if folded(name) in by_folded)


def _target(run: RunFolder, out: Path | None, names: Sequence[str]) -> Path:
    is_short = len(names) == 1 and names[0].isprintable() and len(names[0].encode(errors="replace")) <= _LONGEST_NAME
    what = names[0] if is_short else counted(len(names), "class", "classes").replace(" ", "-")
    here = run.path.resolve()
    target = here.with_name(f"{here.name}+{what}") if out is None else out
    if target.exists():
        raise ShortlistError(f"{target} is already there: choose another folder with --out")
    return target


@dataclass(frozen=True)
class _Part:
    """Images of a split."""

    labels: Tensor
    images: Tensor
    """Their numbers in the split."""


Held = dict[str, tuple[_Part, Tensor]]


class _Messages(Callback):
    """Passes on what is said while features are computed."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def on_message(self, message: str) -> None:
        self._say(message)


def _known(run: RunFolder, model: Classifier, problem: Problem, say: Say) -> tuple[Known, Held | None]:
    """Features of the run's images; and those of all validation and test images, if they need not be computed."""
    config, device = run.config, torch.device("cpu")
    if config.model.frozen:
        digest = weights_digest(model.backbone)
        problem = with_features(problem, model.backbone, digest, config, device, [_Messages(say)])
    most = None if config.has_fixed_features else _MOST_IMAGES
    backbone: nn.Module = nn.Identity() if config.has_fixed_features else model.backbone
    if not config.has_fixed_features:
        total = sum(min(_MOST_IMAGES, len(split)) for split in (problem.train, problem.val))
        say(f"computing the features of {counted(total, 'image')}")
    train, train_indices = _rows(problem.train, backbone, config.train.precision, most or _MOST_TRAIN)
    labels = problem.train.labels[train_indices]
    if len(problem.val) == 0:
        say(f"{run.path} has no validation images: its training images choose how high the new scores lie")
        return Known(train, labels, train, labels), None
    val, val_indices = _rows(problem.val, backbone, config.train.precision, most)
    some = slice(None, None, math.ceil(len(val) / _MOST_VAL))
    known = Known(train, labels, val[some], problem.val.labels[val_indices][some])
    if not config.has_fixed_features or len(problem.test) == 0:
        return known, None
    test, test_indices = _rows(problem.test, backbone, config.train.precision, most)
    splits = {"val": (problem.val, val, val_indices), "test": (problem.test, test, test_indices)}
    return known, {name: (_Part(split.labels[at], at), rows) for name, (split, rows, at) in splits.items()}


@torch.inference_mode()
def _rows(split: Split, backbone: nn.Module, precision: str, most: int | None) -> tuple[Tensor, Tensor]:
    """Features of the images that could be read, of evenly spaced ones if there are more than ``most``; which ones."""
    every = 1 if most is None else max(1, math.ceil(len(split) / most))
    device, found, places = torch.device("cpu"), [], []
    plan = [part * every for part in evaluation_plan(math.ceil(len(split) / every), AT_ONCE, 0, 1)]
    for inputs, _, indices in split.batches(plan, device):
        if len(indices):
            with autocast(precision, device):
                found.append(backbone(inputs).float())
            places.append(indices)
    if not found:
        raise ShortlistError("none of the images of the run could be read")
    return torch.cat(found).clone(), torch.cat(places)


@torch.no_grad()
def _scores(part: _Part, rows: Tensor, head: nn.Module) -> Scores:
    return Scores(head(rows), part.labels, part.images)


@contextmanager
def _whole_folder(target: Path) -> Iterator[tuple[RunFolder, Callable[[str, Any], None]]]:
    """A folder that takes its name only if the block succeeds, and what writes a JSON file there."""
    partial = target.with_name(f"{WRITING}{target.name}-{secrets.token_hex(8)}")

    def write(name: str, content: Any) -> None:
        text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        write_file(partial / name, text.encode(errors="backslashreplace"))

    with explained(target):
        partial.mkdir(parents=True)
    try:
        yield RunFolder(partial), write
        with explained(target):
            partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _tell(run: RunFolder, child: RunFolder, say: Say) -> None:
    say(f"{child.path} has no test result of its own: that of {run.path} is not its result")
    if child.has(CALIBRATION):
        say("calibrated anew on images of the old classes: sets promise nothing for the new ones")
    elif run.has(CALIBRATION):
        say(
            f"the calibration of {run.path} does not hold for more classes and is left out: for a new one, train "
            "again with the new classes"
        )
