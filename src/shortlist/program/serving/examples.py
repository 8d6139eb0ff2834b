"""Example pictures of each class, made from the training images when the owner of a run asks for it.

They are kept in the run as one file, so that the data is needed once. The file holds pixels alone: no names, places or
times of the images that the pictures were made from.
"""

import io
import re
import zipfile
from collections.abc import Callable

import torch
from PIL import Image

from shortlist.errors import ShortlistError
from shortlist.program.data.base import Problem
from shortlist.program.runs.folder import RunFolder
from shortlist.program.seeds import uniform_for
from shortlist.program.text import counted
from shortlist.program.training.evaluate import load_run_problem

FILE = "examples.zip"
OF_CLASS = 3
"""Pictures of each class, at most."""
LONGEST_SIDE = 128
LARGEST = 64 * 2**20
"""Bytes of all pictures."""
_QUALITY = 80
_NAME = re.compile(r"(\d{1,9})-(\d)\.webp")
_SEED = 2022

Examples = dict[int, list[bytes]]
"""WebP files, by class."""


def examples_of(run: RunFolder, root: str = "", say: Callable[[str], None] = lambda text: None) -> Examples:
    """The example pictures of a run, which are made first if it has none.

    Args:
        run: The run.
        root: Where its data is now, if it has moved.
        say: Is told what the user should know.
    """
    if not run.has(FILE):
        if run.config.data.label_noise:
            raise ShortlistError(
                f"{run.path} was trained with wrong labels (data.label-noise), so its training images are no examples "
                "of their classes: leave out --examples"
            )
        say(f"making {FILE} in {run.path} from the training images")
        examples = _made(load_run_problem(run, root), say)
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
            for label, pictures in examples.items():
                for number, picture in enumerate(pictures):
                    archive.writestr(zipfile.ZipInfo(f"{label}-{number}.webp"), picture)  # of no date
        run.write_file(FILE, content.getvalue())
    return _read(run)


def _made(problem: Problem, say: Callable[[str], None]) -> Examples:
    labels = problem.train.labels
    order = uniform_for(torch.arange(len(labels)), _SEED, 1).squeeze(1).argsort(stable=True)
    examples: Examples = {}
    size, unreadable = 0, 0
    # First one picture of every class, then the others: if they do not all fit, no class is left without.
    for most in range(1, OF_CLASS + 1):
        counts = torch.zeros(len(problem.classes), dtype=torch.int64)
        for index, label in zip(order.tolist(), labels[order].tolist(), strict=True):
            counts[label] += 1
            if counts[label] != most:
                continue
            try:
                picture = _webp(problem, index)
            except ShortlistError:
                unreadable += 1
                continue
            size += len(picture)
            if size > LARGEST:
                say(f"not all example pictures fit into {LARGEST // 2**20} MB: some classes have fewer than {OF_CLASS}")
                return examples
            examples.setdefault(label, []).append(picture)
    if unreadable:
        say(f"left out {counted(unreadable, 'unreadable image')}")
    return examples


def _webp(problem: Problem, index: int) -> bytes:
    picture_CHW = problem.train.thumbnail(index)
    if picture_CHW is None:
        raise ShortlistError("there are no pictures of this data: leave out --examples")
    pixels = picture_CHW.permute(1, 2, 0).contiguous().cpu().numpy()
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).convert("RGB")
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.save(content, "WEBP", quality=_QUALITY, method=4)
    return content.getvalue()


def _read(run: RunFolder) -> Examples:
    """The pictures in the file, which may come from a stranger: pictures alone, and not too many bytes."""
    path = run.path / FILE
    if path.is_symlink():
        raise ShortlistError(f"{path} is a link to {path.readlink()}, which might be anything: delete it")
    examples: Examples = {}
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > LARGEST:
                raise run.damaged(FILE, f"it holds more than {LARGEST // 2**20} MB")
            for entry in entries:
                name = _NAME.fullmatch(entry.filename)
                content = archive.read(entry) if name and entry.compress_type == zipfile.ZIP_STORED else b""
                if name is None or content[:4] != b"RIFF" or content[8:12] != b"WEBP":
                    raise run.damaged(FILE, f"{entry.filename!r} is not one of its pictures")
                examples.setdefault(int(name[1]), []).append(content)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, ShortlistError):
            raise
        raise run.damaged(FILE, error) from None
    return examples
