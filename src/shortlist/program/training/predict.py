"""K suggestions for new images, from a run folder alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.program.data.image_folder import files_below
from shortlist.program.data.image_io import SUFFIXES, evaluation_transform, read_image
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.model import load_correction, load_model
from shortlist.program.runs.records import read_classes, read_preprocess

_AT_ONCE = 64


@dataclass(frozen=True)
class Suggestion:
    name: str
    score: float


class Predictor:
    """The best weights of a run, for new images. They are preprocessed as in the run's own evaluation.

    Args:
        run: A run with at least one finished epoch.
        device: Where to compute.
        correct: Correct the scores as the run chose to, if it did.
    """

    def __init__(self, run: RunFolder, device: str = "auto", *, correct: bool = True) -> None:
        if run.config.data.name == "embeddings":
            raise ShortlistError(f"{run.path} was trained on embeddings, not images: it cannot suggest for images")
        self.device, self.precision = pick_device(device), run.config.train.precision
        self.model = load_model(run).to(self.device).eval()
        self.preprocess, self.classes = read_preprocess(run), read_classes(run).names
        correction = load_correction(run) if correct else None
        self._correct = nn.Identity() if correction is None else correction.to(self.device)

    @torch.inference_mode()
    def suggest(
        self, paths: Sequence[Path], k: int, on_unreadable: Callable[[ShortlistError], None] | None = None
    ) -> Iterator[tuple[Path, list[Suggestion]]]:
        """The ``k`` best classes of each image file, best first.

        Args:
            paths: The files.
            k: How many classes.
            on_unreadable: Called with the error of each unreadable file, which is then left out; by default the error
                is raised.
        """
        if not 1 <= k <= len(self.classes):
            raise ShortlistError(f"k must be in [1, {len(self.classes)}] for {len(self.classes)} classes, got {k}")
        transform = evaluation_transform(self.preprocess)
        for start in range(0, len(paths), _AT_ONCE):
            readable: list[Path] = []
            images: list[Tensor] = []
            for path in paths[start : start + _AT_ONCE]:
                try:
                    images.append(transform(read_image(path, self.preprocess.channels)))
                    readable.append(path)
                except ShortlistError as error:
                    if on_unreadable is None:
                        raise
                    on_unreadable(error)
            if not images:
                continue
            with autocast(self.precision, self.device):
                output = self.model(self.preprocess.normalise(torch.stack(images).to(self.device)))
            top = self._correct(output.float()).topk(k)
            for path, classes, scores in zip(readable, top.indices.tolist(), top.values.tolist(), strict=True):
                yield path, [Suggestion(self.classes[c], score) for c, score in zip(classes, scores, strict=True)]


def image_files(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The given files and all images below the given folders, by name; and the other files in these folders."""
    found: list[Path] = []
    others: list[Path] = []
    for path in paths:
        if path.is_dir():
            before = len(found)
            files, special = files_below(path)
            others += special
            for file in files:
                (found if file.suffix.lower() in SUFFIXES else others).append(file)
            if len(found) == before:
                raise ShortlistError(f"there is no image in {path}")
        elif path.is_file():
            found.append(path)
        elif path.exists():
            raise ShortlistError(f"{path} is not an image: it is no regular file")
        else:
            raise ShortlistError(f"there is no file {path}")
    return found, others


def pick_device(name: str) -> torch.device:
    """The named device; ``auto`` takes a GPU if there is one."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ShortlistError(f"device must be auto or one of this machine's, got {name!r}: {error}") from None


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """The arithmetic of a run with this ``train.precision``, for use outside its training."""
    half = torch.float16 if precision == "16-mixed" and device.type != "cpu" else torch.bfloat16
    return torch.autocast(device.type, half, enabled=precision != "32-true")
