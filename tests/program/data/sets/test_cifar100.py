"""CIFAR-100 from small files in the official format, and from the real ones if they are there."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.base import LabelNoise, Problem, Split, Thinning
from shortlist.program.data.catalogue import load_problem
from shortlist.program.data.in_memory import TensorSplit
from shortlist.program.data.sets import cifar100
from tests.support.official_cifar import (
    CLASSES,
    SUPERCLASSES,
    expect,
    make_files,
    official_pickle,
    put_archive,
    put_folder,
)

REAL = Path(os.environ.get("SHORTLIST_DATA", "")) / "cifar-100-python"
needs_the_real_files = pytest.mark.skipif(
    not os.environ.get("SHORTLIST_DATA") or not REAL.is_dir(),
    reason="SHORTLIST_DATA does not point to a folder that holds cifar-100-python",
)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = make_files()
    expect(monkeypatch, files)
    put_folder(tmp_path, files)
    return tmp_path


def load(root: Path, **settings: object) -> Problem:
    return load_problem(DataConfig(name="cifar100", root=str(root), **settings))  # type: ignore[arg-type]


def pixels(split: Split) -> torch.Tensor:
    assert isinstance(split, TensorSplit)
    return split.inputs


def test_images_keep_their_labels_in_every_split(small: Path) -> None:
    problem = load(small)
    assert problem.classes == tuple(CLASSES)
    assert problem.superclasses == tuple(SUPERCLASSES * 2)
    assert (len(problem.train), len(problem.val), len(problem.test)) == (108, 12, 24)
    for split in (problem.train, problem.val, problem.test):
        assert torch.equal(pixels(split)[:, 0, 0, 0].long(), split.labels)  # as the file was made


def test_pixels_lie_channel_after_channel_and_row_after_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its authors describe it: 1,024 red values, then green, then blue, each in rows of 32."""
    place = np.arange(3072)
    told = np.stack([place // 1024, place // 32 % 32, place % 32]).astype(np.uint8)  # channel, row, column
    stored = {"fine_labels": [0, 1, 2], "coarse_labels": [0, 1, 2], "data": told}
    files = make_files() | {"test": official_pickle(stored)}
    expect(monkeypatch, files)
    put_folder(tmp_path, files)
    test = load(tmp_path).test
    sides = [torch.arange(side, dtype=torch.uint8) for side in (3, 32, 32)]
    for image, expected in enumerate(torch.meshgrid(sides, indexing="ij")):
        picture = test.thumbnail(image)
        assert picture is not None
        assert torch.equal(picture, expected)


def test_validation_is_stratified_fixed_by_the_seed_and_noted(small: Path) -> None:
    first, again, other = load(small), load(small, label_noise=0.5), load(small, seed=1)
    assert torch.bincount(first.val.labels).tolist() == [2] * 6
    assert first.facts.held_out == again.facts.held_out != other.facts.held_out
    assert torch.equal(first.val.labels, again.val.labels)  # and clean under noise
    assert len(load(small, val_fraction=0.5).val) == 60


def test_nothing_is_both_in_training_and_validation(small: Path) -> None:
    problem = load(small)
    both = torch.cat((pixels(problem.train), pixels(problem.val))).flatten(1)
    assert len(both.unique(dim=0)) == 120


@pytest.mark.parametrize(("kind", "sizes"), [("exponential", [18, 11, 7, 4, 2, 1]), ("step", [18] * 3 + [1] * 3)])
def test_imbalance_thins_training_in_the_order_of_labels(small: Path, kind: str, sizes: list[int]) -> None:
    problem = load(small, imbalance=10, imbalance_kind=kind)
    assert problem.class_counts.tolist() == sizes
    assert torch.bincount(problem.test.labels).tolist() == [4] * 6
    assert problem.facts.imbalance == Thinning(kept=sum(sizes), of=108)


def test_superclass_noise_stays_in_the_superclass(small: Path) -> None:
    problem = load(small, label_noise=1)
    true = pixels(problem.train)[:, 0, 0, 0].long()
    assert torch.equal(problem.train.labels % 3, true % 3)
    wrong = int((problem.train.labels != true).sum())
    assert wrong > 30
    assert problem.facts.label_noise == LabelNoise(changed=wrong, of=108)


def test_augmentation_can_be_turned_off(small: Path) -> None:
    cpu, plan = torch.device("cpu"), [torch.arange(9)]
    for augment, changes in (("auto", True), ("none", False)):
        split = load(small, augment=augment).train
        assert torch.equal(next(split.batches(plan, cpu, 0))[0], next(split.batches(plan, cpu))[0]) != changes


def test_the_folder_itself_may_be_the_root(small: Path) -> None:
    assert len(load(small / cifar100.FOLDER).train) == 108


def test_the_archive_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_files()
    expect(monkeypatch, files)
    root = tmp_path / "root"
    root.mkdir()
    path = put_archive(root, files, tmp_path / "scratch")
    assert len(load(root).train) == 108
    assert list(root.iterdir()) == [path]
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(ShortlistError, match=r"cifar-100-python.tar.gz is damaged: .*fetch it again"):
        load(root)


def test_nothing_there_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match=r"CIFAR-100 must be in .*cifar-100-python.tar.gz; neither is there"):
        load(tmp_path)


def test_a_changed_file_is_refused_by_its_checksum(small: Path) -> None:
    path = small / cifar100.FOLDER / "train"
    content = bytearray(path.read_bytes())
    content[-500] ^= 1
    path.write_bytes(content)
    with pytest.raises(ShortlistError, match=r"train must have the MD5 \w{32} of the official file, got \w{32}"):
        load(small)


def test_images_can_be_enlarged_for_a_network_of_larger_ones(small: Path) -> None:
    problem = load(small, image_size=48)
    assert problem.input_shape == (3, 48, 48)
    inputs, _, _ = next(problem.train.batches([torch.arange(3)], torch.device("cpu"), augment_seed=0))
    assert inputs.shape == (3, 3, 48, 48)
    assert problem.facts == load(small).facts, "the same images"


def test_a_smaller_size_is_refused(small: Path) -> None:
    with pytest.raises(ShortlistError, match="image_size"):
        load(small, image_size=16)


@needs_the_real_files
def test_the_real_files() -> None:
    problem = load(REAL.parent)
    assert (len(problem.train), len(problem.val), len(problem.test)) == (45_000, 5_000, 10_000)
    assert problem.classes[:2] == ("apple", "aquarium_fish")
    assert problem.superclasses[:2] == ("fruit_and_vegetables", "fish")
    assert [problem.superclasses.count(name) for name in set(problem.superclasses)] == [5] * 20
    assert torch.bincount(problem.val.labels).tolist() == [50] * 100
    inputs, _, _ = next(problem.train.batches([torch.arange(45_000)], torch.device("cpu")))
    torch.testing.assert_close(inputs.mean((0, 2, 3)), torch.zeros(3), atol=0.01, rtol=0)
    torch.testing.assert_close(inputs.std((0, 2, 3)), torch.ones(3), atol=0.01, rtol=0)


@needs_the_real_files
def test_the_real_long_tail_and_noise() -> None:
    problem = load(REAL.parent, imbalance=100, label_noise=0.5, noise_groups="consecutive")
    assert len(problem.train) == 9_754
    assert problem.facts.label_noise is not None
    assert problem.facts.label_noise.changed == pytest.approx(0.4 * 9_754, rel=0.05)


@needs_the_real_files
def test_labels_of_the_real_files_agree_with_torchvision() -> None:
    from torchvision.datasets import CIFAR100

    theirs = CIFAR100(str(REAL.parent), train=False)
    ours = load(REAL.parent).test
    assert torch.equal(ours.labels, torch.tensor(theirs.targets))
    assert torch.equal(pixels(ours), torch.from_numpy(theirs.data).permute(0, 3, 1, 2))
