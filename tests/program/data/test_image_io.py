"""Reading one image file of any kind."""

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from shortlist.errors import ShortlistError
from shortlist.program.data.image_io import (
    RandAugment,
    _not_too_thin,
    converted,
    evaluation_transform,
    file_preprocess,
    random_crop,
    random_place_and_flip,
    random_resized_crop_and_flip,
    read_image,
)
from tests.support.pictures import put_image


def saved(path: Path, image: Image.Image, **settings: Any) -> Path:
    image.save(path, **settings)
    return path


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".bmp", ".gif", ".tif", ".webp", ".ppm"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_usual_format_is_read(tmp_path: Path, suffix: str, channels: int) -> None:
    path = put_image(tmp_path / f"a{suffix}", (200, 100, 50))
    pixels = np.asarray(read_image(path, channels)).reshape(30, 40, channels)
    wanted = (200, 100, 50) if channels == 3 else (124,)
    np.testing.assert_allclose(pixels[15, 20], wanted, atol=4)


@pytest.mark.parametrize(
    ("mode", "suffix"), [("1", "png"), ("L", "png"), ("P", "png"), ("CMYK", "jpg"), ("YCbCr", "tif")]
)
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str, suffix: str) -> None:
    settings = {"compression": "tiff_lzw"} if suffix == "tif" else {}  # Pillow 12 cannot read its own without
    path = saved(tmp_path / f"a.{suffix}", Image.new("RGB", (9, 9), "white").convert(mode), **settings)
    read = read_image(path, 3)
    assert read.mode == "RGB"
    np.testing.assert_allclose(np.asarray(read)[4, 4], (255, 255, 255), atol=3)


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_sixteen_bits_are_scaled_not_cut_off(tmp_path: Path, suffix: str) -> None:
    values = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    path = saved(tmp_path / f"a{suffix}", Image.fromarray(values))
    assert np.asarray(read_image(path, 1)).tolist() == [[0, 1, 127, 255]]
    assert np.asarray(read_image(path, 3))[0, 2].tolist() == [127] * 3


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_become_white(tmp_path: Path, mode: str) -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.putpixel((0, 0), (10, 10, 10, 255))
    path = saved(tmp_path / "a.png", image.convert(mode), **({"transparency": 0} if mode == "P" else {}))
    pixels = np.asarray(read_image(path, 3))
    assert pixels[3, 3].tolist() == [255, 255, 255]
    if mode != "P":
        assert pixels[0, 0].tolist() == [10, 10, 10]


@pytest.mark.parametrize("orientation", range(10))
def test_a_rotated_photograph_stands_upright(tmp_path: Path, orientation: int) -> None:
    image = Image.effect_noise((8, 4), 50)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = saved(tmp_path / "a.png", image, exif=exif)
    with Image.open(path) as file:
        upright = np.asarray(ImageOps.exif_transpose(file))
    np.testing.assert_array_equal(np.asarray(read_image(path, 1)), upright)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "CMYK", "I;16"])
@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 7, 8])
def test_a_scan_is_upright_whether_its_file_is_packed_or_not(tmp_path: Path, mode: str, orientation: int) -> None:
    noise = Image.effect_noise((16, 8), 50)
    image = noise.convert("I;16") if mode == "I;16" else noise.convert("RGB").convert(mode)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    plain, packed = (
        np.asarray(read_image(saved(tmp_path / f"{how}.tif", image, exif=exif, compression=how), 3))
        for how in (None, "tiff_lzw")
    )
    assert plain.shape == ((16, 8, 3) if orientation > 4 else (8, 16, 3))
    np.testing.assert_array_equal(plain, packed)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".webp"])
def test_an_image_that_was_read_is_not_turned_again(tmp_path: Path, suffix: str) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    read = read_image(saved(tmp_path / f"a{suffix}", Image.new("RGB", (40, 30)), exif=exif), 3)
    assert read.size == (30, 40)
    assert converted(read, 3).size == (30, 40)
    assert not read.getexif()


def test_an_odd_note_in_a_photograph_keeps_nobody_from_seeing_it(tmp_path: Path) -> None:
    turned = struct.pack("<HHIHH", ExifTags.Base.Orientation, 3, 1, 6, 0)
    odd = struct.pack("<HHI4s", ExifTags.Base.ResolutionUnit, 2, 4, b"xyz")  # text in place of a number
    notes = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + turned + odd + struct.pack("<I", 0)
    path = saved(tmp_path / "a.jpg", Image.new("RGB", (8, 4)), exif=notes)
    assert read_image(path, 3).size == (4, 8)
    hidden = PngInfo()
    hidden.add_text("Raw profile type exif", "\nexif\n  4\nnot hexadecimal")
    assert read_image(saved(tmp_path / "a.png", Image.new("RGB", (8, 4)), pnginfo=hidden), 3).size == (8, 4)


def test_floating_point_pixels_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.tif", Image.new("F", (4, 4)))
    with pytest.raises(ShortlistError, match=r"a.tif cannot be read as an image: its pixels are floating-point"):
        read_image(path, 3)


@pytest.mark.parametrize("damage", ["truncated", "not an image", "empty", "vanished", "a folder"])
def test_an_unreadable_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.jpg"
    if damage == "truncated":
        Image.effect_noise((200, 200), 50).save(path)
        path.write_bytes(path.read_bytes()[:2000])
    elif damage == "a folder":
        path.mkdir()
    elif damage != "vanished":
        path.write_bytes(b"hello" if damage == "not an image" else b"")
    with pytest.raises(ShortlistError, match=r"a.jpg cannot be read as an image"):
        read_image(path, 3)


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1), (7, 5), (300, 400)])
def test_images_of_any_shape_fill_the_square(size: tuple[int, int]) -> None:
    preprocess = file_preprocess(32)
    for make in (evaluation_transform, random_crop, random_resized_crop_and_flip):
        pixels = make(preprocess)(Image.new("RGB", size, (9, 9, 9)))
        assert pixels.shape == (3, 32, 32)
        assert pixels.dtype == torch.uint8
        assert pixels.unique().tolist() == [9]  # no padding came into view


def test_a_thread_of_an_image_is_cut_before_it_is_enlarged() -> None:
    image = Image.new("L", (1001, 2))
    image.putpixel((500, 0), 255)
    cut = _not_too_thin(image)
    assert cut.size == (40, 2)
    assert cut.getpixel((20, 0)) == 255  # the middle stayed in the middle


def test_evaluation_sees_the_middle() -> None:
    image = Image.new("L", (256, 512), 0)
    image.paste(255, (16, 144, 240, 368))
    assert int(evaluation_transform(file_preprocess(0))(image).min()) == 255


def test_the_size_sets_resize_and_crop_together() -> None:
    assert (file_preprocess(0).resize, file_preprocess(0).crop) == (256, 224)
    assert (file_preprocess(448).resize, file_preprocess(448).crop) == (512, 448)
    for crop in range(1, 600):  # the share of ImageNet's usual sizes, to the nearest pixel
        assert abs(file_preprocess(crop).resize - crop * 256 / 224) <= 0.5


MEAN_COLOUR = (124, 116, 104)  # of ImageNet


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (49, 160), (160, 49), (300, 400), (32, 32)])
def test_a_padded_image_is_as_pillow_pads_it(size: tuple[int, int]) -> None:
    image = Image.effect_noise(size, 90).convert("RGB")
    square = ImageOps.pad(image, (32, 32), Image.Resampling.BILINEAR, MEAN_COLOUR)
    pixels = evaluation_transform(file_preprocess(32, "pad"))(image)
    np.testing.assert_array_equal(pixels.permute(1, 2, 0).numpy(), np.asarray(square))


@pytest.mark.parametrize("size", [(1, 3000), (3000, 1)])
def test_a_thread_of_an_image_stays_in_view_when_padded(size: tuple[int, int]) -> None:
    pixels = evaluation_transform(file_preprocess(32, "pad"))(Image.new("RGB", size, "white"))
    assert int((pixels == 255).all(0).sum()) == 32


def test_padding_is_nothing_to_the_network() -> None:
    preprocess = file_preprocess(32, "pad")
    inputs = preprocess.normalise(evaluation_transform(preprocess)(Image.new("RGB", (10, 40))).unsqueeze(0))
    assert inputs[..., :8].abs().max() < 0.01


def test_a_training_image_is_padded_upright_and_unstretched_or_a_part_of_it_seen() -> None:
    image = Image.new("RGB", (50, 100), "red")
    image.paste((0, 0, 255), (0, 50, 50, 100))
    image.paste((255, 255, 255), (0, 0, 25, 100))  # the left half
    transform = random_place_and_flip(file_preprocess(64, "pad"))
    places, widths, flips, is_whole = set(), [], [], []
    torch.manual_seed(0)
    for _ in range(200):
        pixels = transform(image).int()
        rows, columns = (pixels - torch.tensor(MEAN_COLOUR).view(3, 1, 1)).any(0).nonzero().unbind(1)
        height, width = (int(found.max() - found.min()) + 1 for found in (rows, columns))
        seen = pixels[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        red, _, blue = seen.float().mean(2)
        assert height == 64 or abs(2 * width - height) <= 1
        assert height < 64 or width >= 31  # what is cut off is larger than the square
        if height < 64:
            assert red[0] == 255 == blue[-1]  # to the last row
        assert red[0] >= red[-1]  # upright
        assert blue[0] <= blue[-1]
        places.add((int(rows.min()), int(columns.min())))
        widths.append(width)
        flips.append(seen[1, 0, 0] == 0)
        is_whole.append(height < 64)
    assert 25 <= min(widths) < 28
    assert 49 < max(widths) <= 52
    assert len(places) > 30
    assert 70 < sum(flips) < 130
    assert 25 < sum(is_whole) < 80


@pytest.mark.parametrize("size", [(100, 25), (25, 100), (60, 60)])
def test_a_padded_image_that_is_larger_than_the_square_leaves_no_room_at_its_ends(size: tuple[int, int]) -> None:
    transform = random_place_and_flip(file_preprocess(64, "pad"))
    torch.manual_seed(0)
    spans = set()
    for _ in range(200):
        is_image = (transform(Image.new("RGB", size, "white")) == 255).all(0)
        direction = 0 if size[0] >= size[1] else 1
        places = is_image.any(direction).nonzero().flatten().tolist()
        spans.add(len(places))
        assert places == list(range(places[0], places[0] + len(places)))
    assert spans == set(range(51, 65))  # 51 is 80 % of the square


def test_randaugment_keeps_padded_images_in_view() -> None:
    preprocess = file_preprocess(32, "pad")
    transform = random_place_and_flip(preprocess, RandAugment(5, preprocess))
    narrow = Image.effect_noise((4, 40), 90).convert("RGB")
    torch.manual_seed(0)
    for _ in range(200):
        assert len(transform(narrow).flatten(1).unique(dim=1)[0]) > 1


def test_randaugment_at_its_strongest_fails_for_no_image() -> None:
    transform = evaluation_transform(file_preprocess(8), RandAugment(10, file_preprocess(8)))
    image = Image.effect_noise((8, 8), 90).convert("RGB")
    torch.manual_seed(0)
    assert {tuple(transform(image).shape) for _ in range(300)} == {(3, 8, 8)}


def test_randaugment_draws_from_torch_alone() -> None:
    preprocess = file_preprocess(32)
    transform = evaluation_transform(preprocess, RandAugment(9, preprocess))
    image = Image.effect_noise((40, 40), 90).convert("RGB")

    def drawn_by_others() -> list[float]:
        return [random.random(), float(np.random.random())]  # noqa: NPY002

    def augmented(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return transform(image)

    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    expected = [drawn_by_others() for _ in range(8)]
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    pairs = [(augmented(seed % 4), drawn_by_others()) for seed in range(8)]
    assert [others for _, others in pairs] == expected
    images = [pixels for pixels, _ in pairs]
    assert all(torch.equal(first, again) for first, again in zip(images[:4], images[4:], strict=True))
    assert len(torch.stack(images).unique(dim=0)) > 1
