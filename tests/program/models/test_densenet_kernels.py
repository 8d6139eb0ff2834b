"""The kernels of DenseNet's blocks against its plain path.

Without a GPU they run in Triton's interpreter, on few pixels and small tiles.
"""

import copy
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shortlist import kernels
from shortlist.program.models.cifar import DenseNetBC

pytest.importorskip("triton")
batch_norm = importlib.import_module("shortlist.program.models.densenet_kernels.batch_norm")
dense_block = importlib.import_module("shortlist.program.models.densenet_kernels.dense_block")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILINGS = ("_OBSERVING", "_ACTIVATING", "_PULLING", "_SETTLING")


@pytest.fixture(autouse=True)
def _kernels_for_all_but_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "at_hand", lambda x: x.dtype != torch.float64)


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and several parts, the last of them not full."""
    for kernel in TILINGS:
        monkeypatch.setattr(batch_norm, kernel, replace(getattr(batch_norm, kernel), rows=16, columns=8, most_parts=4))


@pytest.fixture
def blocks_by_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The images that went to the kernels, block by block."""
    seen: list[Tensor] = []

    def noted(images: Tensor, *arguments: Any, **settings: Any) -> Any:
        seen.append(images)
        return original(images, *arguments, **settings)

    original = dense_block.dense_block
    monkeypatch.setattr(dense_block, "dense_block", noted)
    return seen


def network(growth: int = 6, *, depth: int = 16) -> DenseNetBC:
    """Norms that are not the identity, and whose activation cuts where the mean is not zero."""
    torch.manual_seed(0)
    model = DenseNetBC(depth=depth, growth=growth, channels=3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
    return model.to(DEVICE)


def weighted_sum(features: Tensor) -> Tensor:
    return (features * torch.linspace(-1, 1, features.numel(), device=DEVICE).to(features).view_as(features)).sum()


def trained_once(
    model: DenseNetBC, images: Tensor, loss: Callable[[Tensor], Tensor] = weighted_sum
) -> tuple[Tensor, dict[str, Tensor]]:
    """Features, and the gradients and buffers that one step leaves."""
    images = images.clone().requires_grad_()
    features = model(images)
    loss(features).backward()
    left = {name: parameter.grad for name, parameter in model.named_parameters()} | dict(model.named_buffers())
    assert images.grad is not None
    return features.detach(), {name: each for name, each in left.items() if each is not None} | {"images": images.grad}


def assert_as_in_float64(
    model: DenseNetBC, images: Tensor, loss: Callable[[Tensor], Tensor] = weighted_sum, *, tolerance: float = 1e-4
) -> None:
    features, left = trained_once(copy.deepcopy(model), images, loss)
    expected_features, expected = trained_once(copy.deepcopy(model).double(), images.double(), loss)
    torch.testing.assert_close(features.double(), expected_features, rtol=tolerance, atol=tolerance)
    assert left.keys() == expected.keys()
    for name, value in expected.items():
        error = (left[name] - value).abs().max().item()
        assert error <= tolerance * value.abs().max().item(), name


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize(("growth", "count"), [(6, 3), (8, 1)])
def test_kernels_compute_what_torch_computes(growth: int, count: int, blocks_by_kernels: list[Tensor]) -> None:
    """With channels that can be read eight at a time, and others."""
    model = network(growth).to(memory_format=torch.channels_last)
    assert_as_in_float64(model, 2 + torch.randn(count, 3, 16, 16, device=DEVICE))
    assert len(blocks_by_kernels) == 3


@pytest.mark.parametrize("stages", [1, 3])
def test_tiles_as_they_are_in_earnest_compute_the_same(
    stages: int, blocks_by_kernels: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several to a part; on a GPU, also with some of them loaded ahead."""
    for kernel in TILINGS:
        monkeypatch.setattr(batch_norm, kernel, replace(getattr(batch_norm, kernel), most_parts=2, stages=stages))
    assert_as_in_float64(network(8, depth=10), torch.randn(3, 3, 16, 16, device=DEVICE))
    assert len(blocks_by_kernels) == 3


LOSSES = {
    "a gradient without memory of its own": lambda features: features.sum(),
    "a part of a larger gradient": lambda features: weighted_sum(torch.cat([features, features.detach()], 1)),
    "a gradient in another order": lambda features: weighted_sum(features.t().contiguous()),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("count", [1, 2])
def test_images_and_gradients_may_lie_in_memory_as_they_like(count: int, loss: Callable[[Tensor], Tensor]) -> None:
    assert_as_in_float64(network(4, depth=10), torch.randn(count, 3, 8, 8, device=DEVICE), loss)


def test_mixed_precision_rounds_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On average: in a single draw, activations that rounding turns on or off decide."""
    model, errors = network(8, depth=10), []
    for _ in range(3):
        images = torch.randn(4, 3, 16, 16, device=DEVICE)
        want, expected = trained_once(copy.deepcopy(model).double(), images.double())
        for by_kernels in (True, False):
            monkeypatch.setattr(kernels, "at_hand", lambda x, by_kernels=by_kernels: by_kernels)
            with torch.autocast(DEVICE, torch.bfloat16):
                features, left = trained_once(copy.deepcopy(model), images, lambda each: weighted_sum(each.float()))
            assert features.dtype == torch.bfloat16
            assert all(left[name].dtype == value.dtype for name, value in model.named_parameters())
            pairs = [(left[name], value) for name, value in expected.items() if value.is_floating_point()]
            errors.append([((got - exact).norm() / exact.norm()).item() for got, exact in [(features, want), *pairs]])
    ours, plain = torch.tensor(errors).view(3, 2, -1).mean(0)
    assert ours.mean() <= 1.25 * plain.mean()
    assert (ours <= 2 * plain + 0.01).all()


def test_large_means_and_constant_channels_keep_their_variance() -> None:
    x = torch.randn(300, 16, device=DEVICE) + 300 * torch.arange(16, device=DEVICE)
    x[:, 5] = 7.0
    statistics = batch_norm.empty_statistics(x)
    batch_norm.observe(x, statistics)
    torch.testing.assert_close(statistics.mean_C.double(), x.double().mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(statistics.var_C.double(), x.double().var(0, correction=0), rtol=1e-4, atol=0)


def test_channels_that_norms_switch_off_have_no_gradient() -> None:
    """Where the activation is exactly zero, it cuts."""
    model = network(4, depth=10)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for parameter in (module.weight, module.bias):
                parameter.data[::3] = 0
    assert_as_in_float64(model, torch.randn(4, 3, 4, 4, device=DEVICE))


def test_not_a_number_stays_one() -> None:
    images = torch.randn(2, 3, 8, 8, device=DEVICE)
    images[0, 0, 0, 0] = torch.nan
    model = network(4, depth=10)
    features, left = trained_once(model, images)
    expected_features, expected = trained_once(network(4, depth=10).double(), images.double())
    assert torch.equal(features.isnan(), expected_features.isnan())
    assert [name for name, value in left.items() if value.isnan().any()] == [
        name for name, value in expected.items() if value.isnan().any()
    ]


@pytest.mark.parametrize(("side", "count"), [(4, 16), (12, 2), (20, 2), (32, 1)])
def test_squares_of_every_size_that_kernels_take_are_averaged(
    side: int, count: int, blocks_by_kernels: list[Tensor]
) -> None:
    assert_as_in_float64(network(2, depth=10), torch.randn(count, 3, side, side, device=DEVICE))
    assert len(blocks_by_kernels) == 3


@pytest.mark.parametrize("shape", [(2, 3, 16, 8), (2, 3, 36, 36)])
def test_images_that_no_kernel_takes_are_left_to_torch(shape: tuple[int, ...], blocks_by_kernels: list[Tensor]) -> None:
    assert_as_in_float64(network(2, depth=10), torch.randn(shape, device=DEVICE))
    assert all(images.shape[-1] == images.shape[-2] > 9 for images in blocks_by_kernels)


def test_one_pixel_is_refused_as_torch_refuses_it() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        network(2, depth=10)(torch.randn(1, 3, 4, 4, device=DEVICE))


def frozen(norm: nn.BatchNorm2d) -> None:
    norm.eval()


def another_momentum(norm: nn.BatchNorm2d) -> None:
    norm.momentum = 0.5


def no_momentum(norm: nn.BatchNorm2d) -> None:
    norm.momentum = None


def another_epsilon(norm: nn.BatchNorm2d) -> None:
    norm.eps = 0.1


@pytest.mark.parametrize("change", [frozen, another_momentum, no_momentum, another_epsilon])
@pytest.mark.parametrize("which", ["squeeze_norm", "grow_norm", "norm"])
def test_norms_that_were_changed_are_obeyed(change: Callable[[nn.BatchNorm2d], None], which: str) -> None:
    model = network(2, depth=10)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == which and isinstance(module, nn.BatchNorm2d):
            change(module)
    assert_as_in_float64(model, torch.randn(2, 3, 8, 8, device=DEVICE))


def test_evaluation_takes_no_notice_of_the_batch(blocks_by_kernels: list[Tensor]) -> None:
    model, images = network(2, depth=10).eval(), torch.randn(3, 3, 8, 8, device=DEVICE)
    torch.testing.assert_close(model(images)[:1], model(images[:1]))
    assert not blocks_by_kernels


def test_norms_that_ask_other_gpus_are_left_to_torch() -> None:
    block: Any = network(2, depth=10).layers[1]
    images = torch.randn(2, 4, 8, 8, device=DEVICE)
    assert block._has_kernels(images)
    block.norm = nn.SyncBatchNorm.convert_sync_batchnorm(block.norm)
    assert not block._has_kernels(images)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_network_keeps_its_kernels(blocks_by_kernels: list[Tensor]) -> None:
    model, images = network(2, depth=10), torch.randn(2, 3, 8, 8, device=DEVICE)
    want = copy.deepcopy(model)(images)
    blocks_by_kernels.clear()
    torch.testing.assert_close(torch.compile(model, backend="eager")(images), want)
    assert len(blocks_by_kernels) == 3


@pytest.mark.parametrize("kernel", TILINGS)
@pytest.mark.parametrize("rows", [1, 63, 64, 4096, 65536, 65537, 10**7])
def test_parts_are_whole_tiles_and_cover_all_rows(kernel: str, rows: int) -> None:
    for side in range(1, 9):
        tiling = getattr(batch_norm, kernel).for_squares(side)
        assert all(number & (number - 1) == 0 for number in (tiling.rows, tiling.columns, tiling.warps))
        rows_a_part, parts = tiling.parts(rows)
        assert rows_a_part % tiling.rows == 0
        assert rows_a_part * (parts - 1) < rows <= rows_a_part * parts
        assert parts <= tiling.most_parts
