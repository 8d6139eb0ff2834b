"""Data held as one tensor."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.augment import CropAndFlip, SmallAffine
from shortlist.program.data.base import Preprocess
from shortlist.program.data.image_io import evaluation_transform
from shortlist.program.data.in_memory import TensorSplit, refuse_settings_of_files

CPU = torch.device("cpu")
GREY = Preprocess(channels=1, resize=12, crop=12, mean=(0.5,), std=(0.25,))


def images_split(augmented: bool = True) -> TensorSplit:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 1, 12, 12), generator=generator, dtype=torch.uint8)
    return TensorSplit(images, torch.arange(40) % 7, GREY, SmallAffine() if augmented else None)


def all_inputs(split: TensorSplit, plan: list[Tensor], seed: int | None) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    for inputs, labels, indices in split.batches(plan, CPU, seed):
        assert torch.equal(labels, split.labels[indices])
        found |= dict(zip(indices.tolist(), inputs, strict=True))
    return found


def test_batches_follow_the_plan() -> None:
    plan = [torch.tensor([5, 3]), torch.tensor([0, 39, 7])]
    split = images_split()
    for (inputs, labels, indices), wanted in zip(split.batches(plan, CPU), plan, strict=True):
        assert torch.equal(indices, wanted)
        assert torch.equal(labels, split.labels[wanted])
        torch.testing.assert_close(inputs, (split.inputs[wanted] / 255 - 0.5) / 0.25)


def test_an_empty_plan_gives_no_batches() -> None:
    assert list(images_split().batches([], CPU)) == []


def test_augmentation_depends_on_seed_and_index_alone() -> None:
    split = images_split()
    forwards = all_inputs(split, list(torch.split(torch.arange(40), 8)), seed=5)
    backwards = all_inputs(split, list(torch.split(torch.arange(40).flip(0), 3)), seed=5)
    for index in range(40):
        assert torch.equal(forwards[index], backwards[index])


def test_another_seed_augments_otherwise_and_none_not_at_all() -> None:
    split = images_split()
    plan = [torch.arange(40)]
    plain, first, second = (torch.stack(list(all_inputs(split, plan, seed).values())) for seed in (None, 1, 2))
    torch.testing.assert_close(plain, GREY.normalise(split.inputs))
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, plain)


def test_without_an_augmentation_the_seed_does_nothing() -> None:
    split = images_split(augmented=False)
    plan = [torch.arange(40)]
    assert torch.equal(next(split.batches(plan, CPU, 1))[0], next(split.batches(plan, CPU))[0])


def test_the_device_copy_is_made_once() -> None:
    split = images_split()
    meta = torch.device("meta")
    next(split.batches([torch.arange(2)], meta))
    kept = split._copies[meta][0]
    next(split.batches([torch.arange(2)], meta))
    assert split._copies[meta][0] is kept


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_embeddings_come_as_float32_and_are_no_pictures(dtype: torch.dtype) -> None:
    split = TensorSplit(torch.randn(5, 3).to(dtype), torch.arange(5))
    inputs, _, _ = next(split.batches([torch.tensor([4, 1])], CPU, augment_seed=3))
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs, split.inputs[[4, 1]].float())
    assert split.thumbnail(0) is None


def test_a_thumbnail_is_the_stored_picture() -> None:
    split = images_split()
    picture = split.thumbnail(3)
    assert picture is not None
    assert torch.equal(picture, split.inputs[3])
    assert picture.dtype == torch.uint8


@pytest.mark.parametrize("settings", [{"canvas": 64}, {"randaugment": 9}, {"fit": "pad"}])
def test_settings_of_image_files_are_refused_for_images_in_memory(settings: dict[str, Any]) -> None:
    refuse_settings_of_files(DataConfig(), 28)
    ((name, value),) = settings.items()
    with pytest.raises(ShortlistError, match=rf"data\.{name} .* must be (0|crop) for glyphs, got {value}"):
        refuse_settings_of_files(DataConfig(**settings), 28)


@pytest.mark.parametrize(("size", "side", "rule"), [(27, 28, "0 or at least 28"), (28, 0, "0")])
def test_images_in_memory_are_enlarged_and_never_shrunk(size: int, side: int, rule: str) -> None:
    for allowed in (0, side, 4 * side):
        refuse_settings_of_files(DataConfig(image_size=allowed), side)
    with pytest.raises(ShortlistError, match=rf"data\.image_size must be {rule} for glyphs, got {size}"):
        refuse_settings_of_files(DataConfig(image_size=size), side)


@pytest.mark.parametrize("side", [17, 48])
def test_an_enlarged_image_is_what_prediction_makes_of_it(side: int) -> None:
    larger = replace(GREY, resize=side, crop=side)
    split = images_split(augmented=False).with_preprocess(larger)
    inputs = torch.stack(list(all_inputs(split, [torch.arange(40)], None).values()))
    transform = evaluation_transform(larger)
    predicted = torch.stack([transform(to_pil_image(image)) for image in split.inputs])
    one_step_of_brightness = 1 / 255 / larger.std[0]  # Pillow rounds to whole ones
    torch.testing.assert_close(inputs, larger.normalise(predicted), atol=1.01 * one_step_of_brightness, rtol=0)


def test_augmentation_comes_before_enlarging() -> None:
    split = images_split()
    plan = [torch.arange(40)]
    small = torch.stack(list(all_inputs(split, plan, 3).values()))
    large = all_inputs(split.with_preprocess(replace(GREY, resize=36, crop=36)), plan, 3)
    middles = torch.stack(list(large.values()))[..., 1::3, 1::3]  # three times the side: they lie on the pixels
    torch.testing.assert_close(middles, small)


@pytest.mark.parametrize("at_once", [1, 16, 2048])
def test_how_many_batches_are_made_at_once_changes_nothing(at_once: int) -> None:
    split = images_split()
    plan = [torch.arange(7), torch.tensor([], dtype=torch.int64), torch.arange(7, 40), torch.tensor([3])]
    wanted = list(split.batches(plan, CPU, 7))
    split.prepared_at_once = at_once
    for got, want in zip(split.batches(plan, CPU, 7), wanted, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("augmentation", [CropAndFlip(), SmallAffine()])
def test_batches_on_the_gpu_equal_those_on_the_cpu_and_never_wait(augmentation: CropAndFlip | SmallAffine) -> None:
    split = images_split()
    split.prepared_at_once = 16
    split.augmentation = augmentation
    plan = list(torch.split(torch.arange(40), 16))
    batches = split.batches(plan, torch.device("cuda"), 7)
    found = [next(batches)]  # the copies to the GPU are made now
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            found += list(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for (got, got_labels, _), (want, want_labels, _) in zip(found, split.batches(plan, CPU, 7), strict=True):
        torch.testing.assert_close(got.cpu(), want, atol=1e-3, rtol=1e-3)
        assert torch.equal(got_labels.cpu(), want_labels)
