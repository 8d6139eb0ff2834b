"""Test images for the report, saved with the run while the data is still there."""

import io

import torch
from PIL import Image
from torch import Tensor

from shortlist.program.data.base import Split
from shortlist.program.runs.folder import RunFolder
from shortlist.program.seeds import uniform_for

FOLDER = "pictures"
_EXAMPLES = 24
_CONFUSED_PAIRS = 24  # more than a report shows, because it ranks the pairs of several runs together
_LONGEST_SIDE = 96
_SEED = 2022  # never the run's own: all runs on the same data must show the same examples


def save_pictures(run: RunFolder, split: Split, labels: Tensor, suggestions: Tensor) -> None:
    """Save examples, and one image of each class of the most confused pairs, as ``pictures/<index>.png``.

    Args:
        run: Where to save them.
        split: The test images; nothing is saved if they are not pictures.
        labels: ``(N,)`` label of each image, -1 for one that could not be read.
        suggestions: ``(N, S)`` suggested classes of each image, best first.
    """
    first = suggestions[:, 0]
    wanted = set(example_images(labels))
    for true, mistaken_for in confused_pairs(labels, first)[0][:_CONFUSED_PAIRS].tolist():
        wanted |= _image_of(true, mistaken_for, labels, first) | _image_of(mistaken_for, mistaken_for, labels, first)
    for index in sorted(wanted):
        picture = split.thumbnail(index)
        if picture is None:
            return
        run.write_file(f"{FOLDER}/{index}.png", _png(picture))


def example_images(labels: Tensor, count: int = _EXAMPLES) -> list[int]:
    """Images to show, chosen by their labels alone: as many classes as possible, in a fixed random order.

    Example:
        >>> sorted(example_images(torch.tensor([0, 1, -1, 2]), count=9))
        [0, 1, 3]
    """
    order = uniform_for(torch.arange(len(labels)), _SEED, 1).squeeze(1).argsort(stable=True)
    order = order[labels[order] >= 0]
    seen: set[int] = set()
    of_new_classes: list[int] = []
    others: list[int] = []
    for index, label in zip(order.tolist(), labels[order].tolist(), strict=True):
        (others if label in seen else of_new_classes).append(index)
        seen.add(label)
    return [*of_new_classes, *others][:count]


def confused_pairs(labels: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs (true class, wrong first suggestion) that occur, most frequent first, and their counts.

    Returns:
        ``(P, 2)`` pairs and ``(P,)`` counts; among equal counts the lower class numbers come first.

    Example:
        >>> confused_pairs(torch.tensor([0, 0, 1, 2, 2]), torch.tensor([1, 0, 1, 0, 0]))
        (tensor([[2, 0],
                 [0, 1]]), tensor([2, 1]))
    """
    wrong = (labels >= 0) & (labels != first)
    pairs, counts = torch.unique(torch.stack([labels[wrong], first[wrong]], 1), dim=0, return_counts=True)
    order = counts.argsort(descending=True, stable=True)
    return pairs[order], counts[order]


def _image_of(label: int, suggested: int, labels: Tensor, first: Tensor) -> set[int]:
    """An image of the class, with this first suggestion if possible; empty for a class without test images."""
    of_class = labels == label
    found = (of_class & (first == suggested)).nonzero()
    if len(found) == 0:
        found = of_class.nonzero()
    return {int(index) for index in found[:1]}


def _png(picture_CHW: Tensor) -> bytes:
    pixels = picture_CHW.permute(1, 2, 0).contiguous().cpu().numpy()
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True)
    return content.getvalue()
