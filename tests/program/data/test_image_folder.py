"""Image files in folders of classes, read by worker processes."""

import multiprocessing
import os
import pickle
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.catalogue import load_problem
from shortlist.program.data.image_folder import (
    FileSplit,
    _Reader,
    holds_folders,
    loose_images,
    natural_order,
    scan_classes,
)
from shortlist.program.data.image_io import (
    MakeTransform,
    RandAugment,
    evaluation_transform,
    file_preprocess,
    random_place_and_flip,
    random_resized_crop_and_flip,
)
from tests.support.pictures import colour_of, put_classes, put_image

CPU = torch.device("cpu")
PREPROCESS = file_preprocess(16)
COUNT = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(COUNT):
        put_image(tmp_path / f"{number}.png", colour_of(number), size=(30 + number, 24))
    return tmp_path


def split_of(folder: Path, *, workers: int = 0, on_bad_image: str = "fail", augmented: bool = True) -> FileSplit:
    config = DataConfig(name="folder", workers=workers, on_bad_image=on_bad_image)  # type: ignore[arg-type]
    make: MakeTransform = random_resized_crop_and_flip if augmented else evaluation_transform
    files = [f"{number}.png" for number in range(COUNT)]
    return FileSplit(folder, files, torch.arange(COUNT) % 5, PREPROCESS, config, make)


def plan_of(*sizes: int) -> list[Tensor]:
    return list(torch.split(torch.arange(sum(sizes)), list(sizes)))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_follow_the_plan_whatever_the_workers(folder: Path, workers: int) -> None:
    split = split_of(folder, workers=workers)
    plan = [torch.tensor([5, 0, 11]), torch.tensor([3]), torch.tensor([7, 2])]
    batches = list(split.batches(plan, CPU))
    assert len(batches) == 3
    for (inputs, labels, indices), wanted in zip(batches, plan, strict=True):
        assert torch.equal(indices, wanted)
        assert torch.equal(labels, wanted % 5)
        assert inputs.shape == (len(wanted), 3, 16, 16)
        colours = torch.tensor([colour_of(number) for number in wanted.tolist()], dtype=torch.uint8)
        torch.testing.assert_close(inputs[:, :, 8, 8], PREPROCESS.normalise(colours[:, :, None, None])[:, :, 0, 0])


def test_augmentation_depends_on_seed_and_index_alone(tmp_path: Path) -> None:
    for number in range(COUNT):
        pixels = torch.arange(40 * 30, dtype=torch.uint8).view(30, 40) + number
        Image.fromarray(pixels.numpy()).save(tmp_path / f"{number}.png")

    def augmented(workers: int, plan: list[Tensor], seed: int) -> Tensor:
        found: dict[int, Tensor] = {}
        for inputs, _, indices in split_of(tmp_path, workers=workers).batches(plan, CPU, seed):
            found |= dict(zip(indices.tolist(), inputs, strict=True))
        return torch.stack([found[index] for index in range(COUNT)])

    here = augmented(0, plan_of(12), seed=3)
    assert torch.equal(here, augmented(2, plan_of(5, 5, 2), seed=3))
    assert torch.equal(here, augmented(0, [torch.arange(COUNT).flip(0)], seed=3))
    assert not torch.equal(here, augmented(0, plan_of(12), seed=4))


def test_equal_images_are_not_augmented_alike(tmp_path: Path) -> None:
    pixels = torch.arange(40 * 30, dtype=torch.uint8).view(30, 40)
    for number in range(COUNT):
        Image.fromarray(pixels.numpy()).save(tmp_path / f"{number}.png")
    inputs, _, _ = next(split_of(tmp_path).batches([torch.arange(COUNT)], CPU, 3))
    assert len(inputs.unique(dim=0)) == COUNT


def test_without_a_seed_nothing_is_augmented(tmp_path: Path) -> None:
    pixels = torch.arange(40 * 30, dtype=torch.uint8).view(30, 40)
    for number in range(COUNT):
        Image.fromarray(pixels.numpy()).save(tmp_path / f"{number}.png")
    trained_on, tested_on = (split_of(tmp_path, augmented=augmented) for augmented in (True, False))
    plan = plan_of(COUNT)
    assert torch.equal(next(trained_on.batches(plan, CPU))[0], next(tested_on.batches(plan, CPU))[0])


def test_without_a_training_transform_the_seed_does_nothing(folder: Path) -> None:
    split = split_of(folder, augmented=False)
    plan = plan_of(4)
    assert torch.equal(next(split.batches(plan, CPU, 1))[0], next(split.batches(plan, CPU))[0])


@pytest.mark.parametrize("randaugment", [0, 5])
def test_training_pads_with_the_colour_of_evaluation(tmp_path: Path, randaugment: int) -> None:
    """The colour is the mean of the network's weights, which replaces that of the data when a run begins."""
    put_classes(tmp_path, {"cat": 8, "dog": 8}, size=(4, 40))
    data = DataConfig(name="folder", root=str(tmp_path), fit="pad", image_size=32, workers=0, randaugment=randaugment)
    problem = load_problem(data, 0).normalised_with((0.1, 0.2, 0.3), (0.01, 0.01, 0.01))
    evaluated = next(problem.train.batches(plan_of(8), CPU))[0][:, :, 0, 0]
    trained = next(problem.train.batches(plan_of(8), CPU, augment_seed=1))[0]
    is_padding = (trained == evaluated[:, :, None, None]).all(1)
    assert bool(is_padding.any())  # of some images: RandAugment changes the colours of others


def test_reading_leaves_the_global_random_numbers_alone(folder: Path) -> None:
    before = torch.get_rng_state()
    list(split_of(folder).batches(plan_of(6, 6), CPU, 1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_ends_the_run_with_its_name(folder: Path, workers: int) -> None:
    (folder / "4.png").write_bytes(b"not an image")
    split = split_of(folder, workers=workers)
    with pytest.raises(ShortlistError, match=r"^\S*/4.png cannot be read as an image: .*data\.on_bad_image"):
        list(split.batches(plan_of(3, 3, 6), CPU))
    assert split.skipped == []


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_left_out_and_counted_once(folder: Path, workers: int) -> None:
    (folder / "1.png").write_bytes((folder / "1.png").read_bytes()[:60])
    (folder / "7.png").unlink()
    split = split_of(folder, workers=workers, on_bad_image="skip")
    for seed in (None, 1):
        found = [indices.tolist() for _, _, indices in split.batches(plan_of(3, 3, 6), CPU, seed)]
        assert found == [[0, 2], [3, 4, 5], [6, 8, 9, 10, 11]]
    assert split.skipped == ["1.png", "7.png"]


def test_a_batch_of_unreadable_images_is_empty_but_has_its_shape(folder: Path) -> None:
    (folder / "0.png").unlink()
    split = split_of(folder, on_bad_image="skip")
    inputs, labels, indices = next(split.batches([torch.tensor([0])], CPU))
    assert inputs.shape == (0, 3, 16, 16)
    assert inputs.dtype == torch.float32
    assert labels.shape == indices.shape == (0,)
    assert labels.dtype == indices.dtype == torch.int64


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_leave_signals_to_their_parent(folder: Path, number: signal.Signals) -> None:
    """Terminals and schedulers signal all processes. Training finishes its step first, and needs the workers for it."""
    batches = split_of(folder, workers=2).batches(plan_of(*[1] * COUNT), CPU)
    read = [next(batches), next(batches)]  # one of each worker: both are up
    for worker in multiprocessing.active_children():
        assert worker.pid is not None
        os.kill(worker.pid, number)
    assert len([*read, *batches]) == COUNT


def test_an_empty_plan_gives_no_batches(folder: Path) -> None:
    assert list(split_of(folder).batches([], CPU)) == []


def test_a_thumbnail_is_what_evaluation_sees(folder: Path) -> None:
    split = split_of(folder)
    picture = split.thumbnail(3)
    assert picture is not None
    assert picture.shape == (3, 16, 16)
    assert picture[:, 8, 8].tolist() == list(colour_of(3))


@pytest.mark.parametrize("make", [random_resized_crop_and_flip, random_place_and_flip])
def test_workers_can_be_started_afresh_as_on_other_systems(folder: Path, make: MakeTransform) -> None:
    transform = make(PREPROCESS, RandAugment(9, PREPROCESS))
    reader = _Reader(folder, ["3.png"], PREPROCESS, transform, 1)
    here, there = reader[0].image, pickle.loads(pickle.dumps(reader))[0].image
    assert here is not None
    assert torch.equal(here, there)


def test_images_belong_to_the_outermost_folder_however_deep(tmp_path: Path) -> None:
    put_image(tmp_path / "cat" / "b.png")
    put_image(tmp_path / "cat" / "at home" / "2024" / "a.JPG")
    put_image(tmp_path / "dog" / "c.webp")
    scanned = scan_classes(tmp_path, tmp_path)
    assert scanned.images == {"cat": ["cat/at home/2024/a.JPG", "cat/b.png"], "dog": ["dog/c.webp"]}
    listing = scanned.listing(["dog", "cat"])
    assert dict(zip(listing.files, listing.labels.tolist(), strict=True)) == {
        "cat/at home/2024/a.JPG": 1,
        "cat/b.png": 1,
        "dog/c.webp": 0,
    }


def test_hidden_and_foreign_files_are_no_images(tmp_path: Path) -> None:
    put_classes(tmp_path, {"cat": 1, ".git": 1, "__MACOSX": 1})
    put_image(tmp_path / "cat" / "._0.png")
    put_image(tmp_path / "cat" / ".cache" / "1.png")
    put_image(tmp_path / "loose.png")
    (tmp_path / "README.md").touch()
    (tmp_path / "cat" / "notes.txt").touch()
    (tmp_path / "cat" / "Thumbs.db").touch()
    scanned = scan_classes(tmp_path, tmp_path)
    assert scanned.images == {"cat": ["cat/0.png"]}
    assert sorted(scanned.ignored) == ["cat/Thumbs.db", "cat/notes.txt", "loose.png"]


def test_links_are_followed_and_circles_end(tmp_path: Path) -> None:
    put_classes(tmp_path / "elsewhere", {"cats": 2})
    root = tmp_path / "root"
    put_classes(root, {"dog": 1})
    (root / "cat").symlink_to(tmp_path / "elsewhere" / "cats")
    (root / "dog" / "again").symlink_to(root / "dog")
    (root / "dog" / "one more.png").symlink_to(root / "dog" / "0.png")
    assert scan_classes(root, root).images == {
        "cat": ["cat/0.png", "cat/1.png"],
        "dog": ["dog/0.png", "dog/one more.png"],
    }


def test_classes_without_images_are_named(tmp_path: Path) -> None:
    put_classes(tmp_path, {"cat": 1, "dog": 1})
    (tmp_path / "bird" / "nest").mkdir(parents=True)
    with pytest.raises(ShortlistError, match="1 hold none: bird"):
        scan_classes(tmp_path, tmp_path).require_images()


@pytest.mark.parametrize("counts", [{}, {"cat": 3}])
def test_one_class_is_not_enough(tmp_path: Path, counts: dict[str, int]) -> None:
    put_classes(tmp_path, counts)
    with pytest.raises(ShortlistError, match=rf"at least two classes, got {len(counts)}"):
        scan_classes(tmp_path, tmp_path).require_images()


def test_a_class_that_training_lacks_is_named(tmp_path: Path) -> None:
    put_classes(tmp_path, {"cat": 1, "yeti": 1})
    with pytest.raises(ShortlistError, match="1 have none: yeti"):
        scan_classes(tmp_path, tmp_path).listing(["cat", "dog"])


def test_folders_of_folders_are_told_from_folders_of_images(tmp_path: Path) -> None:
    put_classes(tmp_path / "split", {"cat": 1})
    (tmp_path / "split" / "README").touch()
    assert holds_folders(tmp_path / "split")
    assert not holds_folders(tmp_path / "split" / "cat")
    put_classes(tmp_path / "split", {"tail.png": 1})  # a class
    assert loose_images(tmp_path / "split") == []
    put_image(tmp_path / "split" / "overview.png")
    assert loose_images(tmp_path / "split") == ["overview.png"]


def test_numbers_sort_by_value() -> None:
    names = ["c10", "c9", "C9b", "10", "9", "c", "c9.5"]
    assert sorted(names, key=natural_order) == ["9", "10", "c", "c9", "c9.5", "C9b", "c10"]
