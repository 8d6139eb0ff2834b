"""Pictures that a run saves for its report."""

from collections import Counter
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.thumbnails import confused_pairs, example_images, save_pictures
from tests.support.run_folders import ScoredSplit, one_colour

LABELS = torch.arange(40).repeat(5)


def _suggestions(labels: Tensor, seed: int) -> Tensor:
    """Three each, most first ones right, the wrong ones often the next class."""
    generator = torch.Generator().manual_seed(seed)
    step = torch.randint(0, 6, labels.shape, generator=generator) ** 2 // 9
    first = (labels.clamp(min=0) + step) % 40
    return torch.stack([first, (first + 1) % 40, (first + 2) % 40], 1)


def _saved(folder: Path) -> set[int]:
    return {int(path.stem) for path in (folder / "pictures").iterdir()}


def _save(folder: Path, labels: Tensor, suggestions: Tensor) -> set[int]:
    folder.mkdir()
    save_pictures(RunFolder(folder), ScoredSplit(suggestions, labels), labels, suggestions)
    return _saved(folder)


def test_the_most_confused_pair_is_the_most_confused() -> None:
    labels, first = LABELS, _suggestions(LABELS, 0)[:, 0]
    counted = Counter(pair for pair in zip(labels.tolist(), first.tolist(), strict=True) if pair[0] != pair[1])
    pairs, counts = confused_pairs(labels, first)
    assert counted == {tuple(pair): count for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True)}
    assert counts.tolist() == sorted(counts.tolist(), reverse=True)


def test_a_run_without_mistakes_has_no_confused_pair() -> None:
    pairs, counts = confused_pairs(torch.tensor([0, 1, -1]), torch.tensor([0, 1, 0]))
    assert len(pairs) == len(counts) == 0


def test_examples_depend_on_the_labels_alone(tmp_path: Path) -> None:
    chosen = set(example_images(LABELS))
    assert len(chosen) == 24
    assert len(set(LABELS[list(chosen)].tolist())) == 24
    for seed in range(3):
        assert chosen <= _save(tmp_path / str(seed), LABELS, _suggestions(LABELS, seed))


def test_fewer_classes_than_examples_are_shown_more_than_once() -> None:
    labels = torch.tensor([0, 1, 2]).repeat(20)
    chosen = example_images(labels)
    assert len(set(chosen)) == 24
    assert sorted(labels[chosen[:3]].tolist()) == [0, 1, 2]


def test_both_classes_of_each_confused_pair_are_saved(tmp_path: Path) -> None:
    suggestions = _suggestions(LABELS, 0)
    saved = _save(tmp_path / "run", LABELS, suggestions)
    pairs, _ = confused_pairs(LABELS, suggestions[:, 0])
    for true, mistaken_for in pairs[:24].tolist():
        assert any(LABELS[index] == true and suggestions[index, 0] == mistaken_for for index in saved)
        assert any(LABELS[index] == mistaken_for for index in saved)
    assert len(saved) <= 24 + 2 * 24


def test_a_confused_class_without_test_images_has_no_picture(tmp_path: Path) -> None:
    assert _save(tmp_path / "run", torch.tensor([0, 0]), torch.tensor([[7], [7]])) == {0, 1}


def test_unreadable_images_are_never_chosen(tmp_path: Path) -> None:
    labels = LABELS.clone()
    labels[::2] = -1
    saved = _save(tmp_path / "run", labels, _suggestions(labels, 0))
    assert all(labels[index] >= 0 for index in saved)


def test_pictures_are_small_and_look_like_the_image(tmp_path: Path) -> None:
    class Wide(ScoredSplit):
        def thumbnail(self, index: int) -> Tensor:
            return one_colour(5).repeat(1, 3, 10)

    save_pictures(RunFolder(tmp_path), Wide(torch.zeros(1), torch.tensor([5])), torch.tensor([5]), torch.tensor([[5]]))
    with Image.open(tmp_path / "pictures" / "0.png") as picture:
        assert picture.size == (96, 38)
        assert picture.getpixel((0, 0)) == tuple(one_colour(5)[:, 0, 0].tolist())


def test_grey_images_stay_grey(tmp_path: Path) -> None:
    class Grey(ScoredSplit):
        def thumbnail(self, index: int) -> Tensor:
            return torch.full((1, 28, 28), 77, dtype=torch.uint8)

    save_pictures(RunFolder(tmp_path), Grey(torch.zeros(1), torch.tensor([5])), torch.tensor([5]), torch.tensor([[5]]))
    with Image.open(tmp_path / "pictures" / "0.png") as picture:
        assert (picture.mode, picture.size, picture.getpixel((3, 3))) == ("L", (28, 28), 77)


def test_what_is_no_picture_saves_nothing(tmp_path: Path) -> None:
    suggestions = _suggestions(LABELS, 0)
    save_pictures(RunFolder(tmp_path), ScoredSplit(suggestions, LABELS, picture=None), LABELS, suggestions)
    assert list(tmp_path.iterdir()) == []
