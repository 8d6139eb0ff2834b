"""Pictures that are resized in a traced network are those of Pillow, to the last bit."""

import numpy as np
import pytest
import torch
from PIL import Image

from shortlist.program.config import Fit
from shortlist.program.data.base import Preprocess
from shortlist.program.data.image_io import evaluation_transform
from shortlist.program.predicting.square_pixels import square_pixels

# A single pixel, lines of one pixel, images that are cut because they are thin, and sizes about the square's.
ODD_SIZES = [(1, 1), (1, 50), (50, 1), (2000, 3), (3, 2000), (24, 24), (27, 27), (160, 80), (160, 46), (564, 282)]


@pytest.mark.parametrize("fit", ["crop", "pad"])
@pytest.mark.parametrize("channels", [1, 3])
def test_squares_are_exactly_those_of_pillow(fit: Fit, channels: int) -> None:
    preprocess = Preprocess(channels, 27, 24, (0.485, 0.456, 0.406)[:channels], (0.2,) * channels, fit)
    transform = evaluation_transform(preprocess)
    random = np.random.default_rng(0)
    for height, width in [*ODD_SIZES, *random.integers(1, 200, (60, 2)).tolist()]:
        pixels = random.integers(0, 256, (height, width, channels), dtype=np.uint8)
        wanted = transform(Image.fromarray(pixels[..., 0] if channels == 1 else pixels))
        found = square_pixels(torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0), preprocess)
        assert torch.equal(found[0], wanted), (height, width)


def test_images_of_a_batch_do_not_mix() -> None:
    preprocess = Preprocess(3, 27, 24, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "pad")
    images = torch.randint(0, 256, (5, 3, 40, 33), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    together = square_pixels(images, preprocess)
    assert torch.equal(together, torch.cat([square_pixels(image.unsqueeze(0), preprocess) for image in images]))
