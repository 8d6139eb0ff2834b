"""The kernels of DenseNet's blocks against plain torch.

Without a GPU they run in Triton's interpreter, on few pixels. A forced kernel that could not run would raise, so every
network here with ``impl="triton"`` did use them.
"""

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shortlist import ShortlistError
from shortlist.kernels.dispatch import Impl
from shortlist.program.models.cifar import DenseNetBC, _DenseBlock

pytest.importorskip("triton")
from shortlist.program.models.densenet_kernels.batch_norm import (
    TILINGS,
    Tiling,
    Tilings,
    compute_statistics,
    empty_statistics,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def tilings_with(**changes: int) -> Tilings:
    return Tilings(**{field.name: replace(getattr(TILINGS, field.name), **changes) for field in fields(Tilings)})


# Few programs: the interpreter runs one after the other.
WHOLE = tilings_with(rows=256, max_parts=1)


def network(growth: int = 6, *, depth: int = 10, impl: Impl = "triton", tilings: Tilings | None = None) -> DenseNetBC:
    """With norms that are not the identity, and activations that are zero where the mean is not."""
    torch.manual_seed(0)
    model = DenseNetBC(depth=depth, growth=growth, channels=3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
        elif isinstance(module, _DenseBlock) and (tilings or DEVICE == "cpu"):
            module.kernel_options = {"tilings": tilings or WHOLE}
    return with_impl(model, impl).to(DEVICE)


def with_impl(model: DenseNetBC, impl: Impl) -> DenseNetBC:
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, DenseNetBC | _DenseBlock):
            module.impl = impl
    return model


def as_float64(model: DenseNetBC) -> DenseNetBC:
    return with_impl(model, "reference").double()


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
    kept = {name: value for name, value in left.items() if value is not None}
    return features.detach(), kept | {"images": images.grad}


def assert_as_in_float64(
    model: DenseNetBC, images: Tensor, loss: Callable[[Tensor], Tensor] = weighted_sum, *, tolerance: float = 1e-4
) -> None:
    features, left = trained_once(copy.deepcopy(model), images, loss)
    expected_features, expected = trained_once(as_float64(model), images.double(), loss)
    torch.testing.assert_close(features.double(), expected_features, rtol=tolerance, atol=tolerance)
    assert left.keys() == expected.keys()
    for name, value in expected.items():
        error = (left[name] - value).abs().max().item()
        assert error <= tolerance * value.abs().max().item(), name


@pytest.mark.parametrize(("growth", "count"), [(6, 3), (8, 1)])
def test_kernels_compute_what_torch_computes(growth: int, count: int) -> None:
    """With channels that can be read eight at a time, and others; several tiles and parts, the last ones not full."""
    model = network(growth, depth=16, tilings=tilings_with(rows=16, columns=8, max_parts=4))
    model = model.to(memory_format=torch.channels_last)
    assert_as_in_float64(model, 2 + torch.randn(count, 3, 12, 12, device=DEVICE))


@pytest.mark.parametrize("stages", [1, 3])
def test_tiles_as_they_are_in_earnest_compute_the_same(stages: int) -> None:
    """Several to a part; on a GPU, also with some of them loaded ahead."""
    model = network(8, tilings=tilings_with(max_parts=2, stages=stages))
    assert_as_in_float64(model, torch.randn(3, 3, 16, 16, device=DEVICE))


LOSSES = {
    "a gradient without memory of its own": lambda features: features.sum(),
    "a part of a larger gradient": lambda features: weighted_sum(torch.cat([features, features.detach()], 1)),
    "a gradient in another order": lambda features: weighted_sum(features.t().contiguous()),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("count", [1, 2])
def test_images_and_gradients_may_lie_in_memory_as_they_like(count: int, loss: Callable[[Tensor], Tensor]) -> None:
    assert_as_in_float64(network(4), torch.randn(count, 3, 8, 8, device=DEVICE), loss)


def test_mixed_precision_rounds_as_torch_does() -> None:
    """On average: in a single draw, activations that rounding turns on or off decide."""
    model, errors = network(8), []
    for _ in range(3):
        images = torch.randn(4, 3, 16, 16, device=DEVICE)
        want, expected = trained_once(as_float64(model), images.double())
        for impl in ("triton", "reference"):
            with torch.autocast(DEVICE, torch.bfloat16):
                features, left = trained_once(with_impl(model, impl), images, lambda out: weighted_sum(out.float()))
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
    statistics = empty_statistics(x)
    compute_statistics(x, statistics)
    torch.testing.assert_close(statistics.mean_C.double(), x.double().mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(statistics.var_C.double(), x.double().var(0, correction=0), rtol=1e-4, atol=0)


def test_channels_that_norms_switch_off_have_no_gradient() -> None:
    """Where the activation is exactly zero, it cuts."""
    model = network(4)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for parameter in (module.weight, module.bias):
                parameter.data[::3] = 0
    assert_as_in_float64(model, torch.randn(4, 3, 4, 4, device=DEVICE))


def test_not_a_number_stays_one() -> None:
    images = torch.randn(2, 3, 8, 8, device=DEVICE)
    images[0, 0, 0, 0] = torch.nan
    model = network(4)
    expected_features, expected = trained_once(as_float64(model), images.double())
    features, left = trained_once(model, images)
    assert torch.equal(features.isnan(), expected_features.isnan())
    assert [name for name, value in left.items() if value.isnan().any()] == [
        name for name, value in expected.items() if value.isnan().any()
    ]


@pytest.mark.parametrize(("side", "count"), [(4, 16), (12, 2), (20, 2), (32, 1)])
def test_squares_of_every_size_that_kernels_take_are_averaged(side: int, count: int) -> None:
    assert_as_in_float64(network(2), torch.randn(count, 3, side, side, device=DEVICE))


@pytest.mark.parametrize(
    ("shape", "fact"), [((2, 3, 16, 8), "square images"), ((2, 3, 36, 36), "at most 8 x 8 pixels")]
)
def test_images_that_no_kernel_takes_are_left_to_torch(shape: tuple[int, ...], fact: str) -> None:
    assert_left_to_torch(network(2), torch.randn(shape, device=DEVICE), fact)


def assert_left_to_torch(model: DenseNetBC, images: Tensor, fact: str) -> None:
    """Forced kernels raise; otherwise the result is torch's."""
    with pytest.raises(ShortlistError, match=fact):
        model(images)
    assert_as_in_float64(with_impl(model, "auto"), images)


def test_one_pixel_is_refused_as_torch_refuses_it() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        network(2, impl="auto")(torch.randn(1, 3, 4, 4, device=DEVICE))


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
    model = network(2)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == which and isinstance(module, nn.BatchNorm2d):
            change(module)
    assert_left_to_torch(model, torch.randn(2, 3, 8, 8, device=DEVICE), "batch norms")


def test_evaluation_takes_no_notice_of_the_batch() -> None:
    model, images = network(2, impl="auto").eval(), torch.randn(3, 3, 8, 8, device=DEVICE)
    torch.testing.assert_close(model(images)[:1], model(images[:1]))
    with pytest.raises(ShortlistError, match="in training"):
        with_impl(model, "triton")(images)


def test_norms_that_ask_other_gpus_are_left_to_torch() -> None:
    block: Any = network(2).layers[1]
    images = torch.randn(2, 4, 8, 8, device=DEVICE)
    block(images)
    block.norm = nn.SyncBatchNorm.convert_sync_batchnorm(block.norm)
    with pytest.raises(ShortlistError, match="batch norms"):
        block(images)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_network_keeps_its_kernels() -> None:
    model, images = network(2), torch.randn(2, 3, 8, 8, device=DEVICE)
    want = copy.deepcopy(model)(images)
    torch.testing.assert_close(torch.compile(model, backend="eager")(images), want)


@pytest.mark.parametrize("whole", [getattr(TILINGS, field.name) for field in fields(Tilings)])
@pytest.mark.parametrize("rows", [1, 63, 64, 4096, 65536, 65537, 10**7])
def test_parts_are_whole_tiles_and_cover_all_rows(whole: Tiling, rows: int) -> None:
    for tiling in (whole.for_squares(side) for side in range(1, 9)):
        assert all(number & (number - 1) == 0 for number in (tiling.rows, tiling.columns, tiling.warps))
        rows_a_part, parts = tiling.parts(rows)
        assert rows_a_part % tiling.rows == 0
        assert rows_a_part * (parts - 1) < rows <= rows_a_part * parts
        assert parts <= tiling.max_parts
