"""K suggestions for images that a user brings, from a run folder alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.data.image_folder import files_below
from shortlist.program.data.image_io import SUFFIXES, evaluation_transform, read_image
from shortlist.program.models.build import build_model, load_weights
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import read_classes, read_preprocess
from shortlist.program.training.device import autocast, pick_device

_AT_ONCE = 64


@dataclass(frozen=True)
class Suggestion:
    name: str
    score: float


class Predictor:
    """The best weights of a run, ready for new images, which it sees as the run's evaluation saw its own.

    Args:
        run: A run with at least one epoch done.
        device: Where to compute.
    """

    def __init__(self, run: RunFolder, device: str = "auto") -> None:
        if run.config.data.name == "embeddings":
            raise ShortlistError(f"{run.path} was trained on embeddings, not images: it cannot suggest for images")
        weights = run.load_best()  # a run without them may lack the other files too
        self.preprocess, self.classes = read_preprocess(run), read_classes(run).names
        self.device, self.precision = pick_device(device), run.config.train.precision
        shape = (self.preprocess.channels, self.preprocess.crop, self.preprocess.crop)
        config = replace(run.config.model, pretrained=False)  # the run's own weights follow
        self.model = build_model(config, shape, len(self.classes)).to(self.device).eval()
        files = "config.json, classes.json and preprocess.json beside it"
        misfit = f"{run.path}/best.safetensors does not fit the network of {files}: one of the files is damaged"
        load_weights(self.model, weights, misfit)

    @torch.inference_mode()
    def suggest(
        self, paths: Sequence[Path], k: int, on_unreadable: Callable[[ShortlistError], None] | None = None
    ) -> Iterator[tuple[Path, list[Suggestion]]]:
        """For each image file its ``k`` best classes, the best first.

        Args:
            paths: The files.
            k: How many classes.
            on_unreadable: Is told what is wrong with a file, which is then left out; by default that is raised.
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
                except ShortlistError as wrong:
                    if on_unreadable is None:
                        raise
                    on_unreadable(wrong)
            if not images:
                continue
            with autocast(self.precision, self.device):
                output = self.model(self.preprocess.normalise(torch.stack(images).to(self.device)))
            top = output.float().topk(k)
            for path, classes, scores in zip(readable, top.indices.tolist(), top.values.tolist(), strict=True):
                yield path, [Suggestion(self.classes[c], score) for c, score in zip(classes, scores, strict=True)]


def image_files(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Files as they are, and all images below folders, in the order of their names; and what else lies there."""
    found: list[Path] = []
    others: list[Path] = []
    for path in paths:
        if path.is_dir():
            before = len(found)
            files, special = files_below(path)
            others += special
            for each in files:
                (found if each.suffix.lower() in SUFFIXES else others).append(each)
            if len(found) == before:
                raise ShortlistError(f"there is no image in {path}")
        elif path.is_file():
            found.append(path)
        elif path.exists():
            raise ShortlistError(f"{path} is no regular file, so it is no image")
        else:
            raise ShortlistError(f"there is no file {path}")
    return found, others
