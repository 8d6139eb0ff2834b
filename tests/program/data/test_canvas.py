"""Images that are read once: training sees what it would see of the files, and evaluation sees exactly that."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig, Fit, RunConfig, changed
from shortlist.program.data.base import SPLITS, Preprocess, Problem
from shortlist.program.data.canvas import random_view, view, with_canvases
from shortlist.program.data.catalogue import load_problem
from shortlist.program.data.image_folder import FileSplit
from shortlist.program.data.image_io import read_image
from shortlist.program.recipes import build as build_recipe
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.build import build
from shortlist.program.training.evaluate import evaluate_run
from shortlist.program.training.loop import train
from tests.support.early_ends import train_until_step
from tests.support.small_runs import outcome, photos_config

CPU = torch.device("cpu")
SIZES = st.tuples(st.integers(1, 400), st.integers(1, 400))
SHARES = st.lists(st.floats(0, 1, exclude_max=True, width=32), min_size=5, max_size=5)


def put_gradients(folder: Path) -> Path:
    """Photographs of several shapes in which every place has its own colour."""
    for number, size in enumerate([(40, 30), (20, 60), (64, 16), (33, 33)] * 3):
        name = "ash" if number % 2 else "elm"
        path = folder / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        x, y = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
        Image.fromarray(np.stack((x, y, np.full_like(x, 40 * number % 256)), 2).astype(np.uint8)).save(path)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return put_gradients(tmp_path_factory.mktemp("photos"))


def canvas_config(photos: Path, fit: Fit = "crop", **settings: Any) -> RunConfig:
    return photos_config(photos, fit=fit, canvas=24, val_fraction=0.2, **settings)


def both(config: RunConfig) -> tuple[Problem, Problem]:
    """The problem as it is read from files, and in memory."""
    files = load_problem(config.data)
    return files, with_canvases(files, config.data, say=lambda message: None)


def views(size: tuple[int, int], shares: list[float], fit: Fit) -> tuple[torch.Tensor, torch.Tensor]:
    middle, reach = random_view(torch.tensor([size], dtype=torch.float32), torch.tensor([shares]), fit)
    return middle[0], reach[0]


@given(SIZES, SHARES)
def test_a_padded_image_keeps_its_shape_and_leaves_no_room_that_it_could_fill(
    size: tuple[int, int], shares: list[float]
) -> None:
    middle, reach = views(size, shares, "pad")
    # Where the edges of the image are in the square that the network sees, in both directions.
    edges = torch.stack(((-1 - middle) / reach, (1 - middle) / reach)).sort(0).values
    lengths = (edges[1] - edges[0]) / 2
    assert 0.8 - 1e-4 <= lengths.max() <= 1.6 + 1e-4
    assert lengths[0] / lengths[1] == pytest.approx(size[0] / size[1], rel=1e-3)
    for (begin, end), length in zip(edges.T.tolist(), lengths.tolist(), strict=True):
        if length <= 1:
            assert begin >= -1 - 1e-4
            assert end <= 1 + 1e-4
        else:
            assert begin <= -1 + 1e-4
            assert end >= 1 - 1e-4


def test_padded_images_are_of_all_sizes_between_the_smallest_and_the_largest() -> None:
    uniform = torch.rand(1000, 5, generator=torch.Generator().manual_seed(0))
    _, reach = random_view(torch.full((1000, 2), 50.0), uniform, "pad")
    lengths = (1 / reach.abs()[:, 0]).sort().values
    torch.testing.assert_close(lengths, torch.linspace(0.8, 1.6, 1000), rtol=0, atol=0.04)


@given(SIZES, SHARES)
def test_a_crop_is_a_part_of_the_image(size: tuple[int, int], shares: list[float]) -> None:
    middle, reach = views(size, shares, "crop")
    assert (middle.abs() + reach.abs() <= 1 + 1e-5).all()
    width, height = reach.abs().tolist()
    if width < 1 and height < 1:  # longer than the image, it is as long as the image
        assert 0.08 - 1e-4 <= width * height <= 1 + 1e-4
        assert 3 / 4 - 1e-3 <= width * size[0] / (height * size[1]) <= 4 / 3 + 1e-3


def test_half_of_the_images_are_flipped() -> None:
    uniform = torch.rand(10_000, 5, generator=torch.Generator().manual_seed(0))
    for fit in ("crop", "pad"):
        _, reach = random_view(torch.full((10_000, 2), 50.0), uniform, fit)
        assert (reach[:, 1] > 0).all(), "never upside down"
        assert abs((reach[:, 0] < 0).float().mean() - 0.5) < 5 * 0.005


def test_the_whole_canvas_is_itself_and_mirrored_if_it_is_flipped() -> None:
    preprocess = Preprocess(3, 8, 8, (0.5,) * 3, (0.5,) * 3)
    images = torch.randn(2, 3, 8, 8)
    middle, reach = torch.zeros(2, 2), torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    seen = view(images, middle, reach, preprocess)
    torch.testing.assert_close(seen[0], images[0])
    torch.testing.assert_close(seen[1], images[1].flip(2))


def test_a_padded_view_shows_the_places_that_it_says(photos: Path) -> None:
    """Red tells the place from left to right, and green from top to bottom."""
    files, held = both(canvas_config(photos, "pad", image_size=32))
    preprocess = files.preprocess
    assert preprocess is not None
    inputs, _, _ = next(held.train.batches([torch.arange(len(held.train))], CPU, augment_seed=7))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) * 255 for values in (preprocess.mean, preprocess.std))
    pixels = inputs * std + mean
    train = files.train
    assert isinstance(train, FileSplit)
    for image, normalised, file in zip(pixels, inputs, train.files, strict=True):
        inside = (normalised.abs().sum(0) > 0.3).nonzero()
        top, left = inside.min(0).values.tolist()
        bottom, right = inside.max(0).values.tolist()
        height, width = bottom - top + 1, right - left + 1
        assert 0.7 * 32 <= max(height, width) <= 32
        across, down = read_image(train.root / file, 3).size
        if max(height, width) < 31:  # all of it is seen
            assert width == pytest.approx(height * across / down, abs=2.5)
        # So are then both ends of a gradient, up to the interpolation of the outermost pixels.
        shown = image[:, top : bottom + 1, left : right + 1]
        for colour, length in enumerate((width, height)):
            if length < 31:
                assert shown[colour].max() > 185
                assert shown[colour].min() < 70


@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_evaluation_sees_exactly_what_the_files_give(photos: Path, fit: Fit) -> None:
    files, held = both(canvas_config(photos, fit))
    for name in SPLITS:
        plan = [torch.arange(len(files.split(name)))]
        ours, theirs = (next(problem.split(name).batches(plan, CPU)) for problem in (held, files))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert held.split(name).fingerprint() == files.split(name).fingerprint()
        ours_small, theirs_small = held.split(name).thumbnail(0), files.split(name).thumbnail(0)
        assert ours_small is not None
        assert theirs_small is not None
        assert torch.equal(ours_small, theirs_small)


@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_an_augmented_image_depends_on_seed_and_index_alone(photos: Path, fit: Fit) -> None:
    train = both(canvas_config(photos, fit))[1].train
    (together, _, _), (alone, _, _), (other, _, _) = (
        next(train.batches([torch.tensor(indices)], CPU, augment_seed=seed))
        for indices, seed in (([3, 1, 2], 5), ([1], 5), ([1], 6))
    )
    torch.testing.assert_close(together[1], alone[0], rtol=0, atol=1e-5)
    assert not torch.allclose(alone, other)


def test_a_run_with_canvases_is_an_ordinary_run(photos: Path, tmp_path: Path) -> None:
    config = canvas_config(photos, epochs=3)
    run = train(config, folder=tmp_path / "run", quiet=True)
    evaluation, _ = evaluate_run(run, device="cpu")
    assert evaluation.metrics == run.read_json("final.json")["test"]
    interrupted = tmp_path / "interrupted"
    train_until_step(config, interrupted, 2)
    train(config, folder=interrupted, resume=True, quiet=True)
    assert outcome(interrupted) == outcome(run.path)


def test_without_augmentation_training_sees_the_files(photos: Path) -> None:
    files, held = both(canvas_config(photos, augment="none"))
    plan = [torch.arange(4)]
    ours, theirs = (next(problem.train.batches(plan, CPU, augment_seed=3))[0] for problem in (held, files))
    assert torch.equal(ours, theirs)


def test_unreadable_images_are_named_or_left_out(photos: Path, tmp_path: Path) -> None:
    folder = put_gradients(tmp_path / "photos")
    (folder / "ash/broken.png").write_bytes(b"no image")
    config = canvas_config(folder)
    with pytest.raises(ShortlistError, match=r"broken\.png"):
        both(config)
    run = train(changed(config, {"data.on_bad_image": "skip"}), folder=tmp_path / "run", quiet=True)
    assert RunFolder(run.path).read_json("final.json")["skipped_files"] == ["ash/broken.png"]


def test_canvases_are_refused_where_they_mean_nothing(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match=r"data\.canvas .*RandAugment.* 24"):
        DataConfig(name="folder", canvas=24, randaugment=5)
    with pytest.raises(ShortlistError, match=r"data\.canvas .*glyphs"):
        load_problem(DataConfig(name="glyphs", canvas=24))
    frozen = changed(build_recipe("folder_frozen"), {"data.root": str(photos), "data.canvas": 24})
    with pytest.raises(ShortlistError, match=r"data\.canvas .*model\.frozen"):
        build(frozen, tmp_path / "run")
