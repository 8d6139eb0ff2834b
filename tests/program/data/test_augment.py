"""Augmentation on the device: the same as doing it image by image, and repeatable."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shortlist.program.data.augment import CropAndFlip, SmallAffine, warp
from shortlist.program.seeds import uniform_for


def some_images(count: int = 6, channels: int = 3, height: int = 8, width: int = 10) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (count, channels, height, width), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_crop_and_flip_is_pad_crop_and_flip_of_each_image(padding: int) -> None:
    images = some_images(20)
    uniform = uniform_for(torch.arange(20), 3, CropAndFlip.columns)
    got = CropAndFlip(padding)(images, uniform)
    for image, out, (down, right, flip) in zip(images, got, uniform.tolist(), strict=True):
        top, left = int(down * (2 * padding + 1)), int(right * (2 * padding + 1))
        want = F.pad(image, (padding,) * 4)[:, top : top + 8, left : left + 10]
        assert torch.equal(out, want.flip(-1) if flip >= 0.5 else want)


def test_crop_and_flip_reaches_every_offset_and_both_directions() -> None:
    image = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    image[0, 0, 4, 3] = 1
    uniform = uniform_for(torch.arange(2000), 0, CropAndFlip.columns)
    places = CropAndFlip(2)(image.expand(2000, -1, -1, -1), uniform).flatten(1).argmax(1)
    # five rows, and five columns around each of 3 and its mirror image 5
    assert len(places.unique()) == 5 * 7


def test_small_affine_in_the_middle_of_its_ranges_changes_nothing() -> None:
    images = some_images()
    middle = torch.full((6, SmallAffine.columns), 0.5)
    torch.testing.assert_close(SmallAffine()(images, middle), images.float(), atol=1e-2, rtol=0)


def test_small_affine_brings_background_into_view_and_stays_in_range() -> None:
    black = torch.zeros(50, 1, 28, 28, dtype=torch.uint8)
    moved = SmallAffine()(black, uniform_for(torch.arange(50), 0, SmallAffine.columns))
    assert float(moved.min()) >= -1e-3
    assert float(moved.max()) <= 255 + 1e-3
    assert float(moved[:, 0, 0].flatten(1).max(1).values.mean()) > 200  # corners of most are paper now
    assert float(moved[:, 0, 14, 14].max()) < 1e-3


def warped(images: Tensor, size: int | None = None, **changes: float) -> Tensor:
    still = {"angle": 0.0, "shear": 0.0, "height": 1.0, "width": 1.0, "down": 0.0, "right": 0.0}
    numbers = {name: torch.full((len(images),), value) for name, value in {**still, **changes}.items()}
    return warp(images, size=size, **numbers)


def test_warp_by_a_quarter_turn_rotates_clockwise() -> None:
    images = some_images(3, 1, 9, 9).float()
    got = warped(images, angle=torch.pi / 2)
    torch.testing.assert_close(got, images.rot90(-1, (2, 3)), atol=1e-2, rtol=0)


def test_warp_by_whole_pixels_shifts() -> None:
    images = some_images(3, 1, 10, 10).float()
    got = warped(images, down=0.2, right=0.1)
    want = F.pad(images, (1, -1, 2, -2))
    torch.testing.assert_close(got, want, atol=1e-2, rtol=0)


def test_warp_to_twice_the_height_stretches_about_the_middle() -> None:
    band = torch.zeros(1, 1, 16, 16)
    band[:, :, 6:10] = 1
    got = warped(band, height=2)
    assert got[0, 0, :, 8].sum().item() == pytest.approx(8)
    assert got[0, 0, 4:12, 8].sum().item() == pytest.approx(7.5, abs=0.6)


def test_warp_to_another_size_shows_the_same_scene() -> None:
    left_half = torch.zeros(1, 1, 16, 16)
    left_half[..., :8] = 1
    got = warped(left_half, size=8)
    assert got.shape == (1, 1, 8, 8)
    torch.testing.assert_close(got[0, 0, 3], torch.tensor([1.0] * 4 + [0.0] * 4))


def test_warp_with_shear_moves_rows_sideways_by_their_height() -> None:
    column = torch.zeros(1, 1, 11, 11)
    column[..., 5] = 1
    leaning = warped(column, shear=1.0)[0, 0]
    torch.testing.assert_close(leaning, torch.eye(11), atol=1e-5, rtol=0)
