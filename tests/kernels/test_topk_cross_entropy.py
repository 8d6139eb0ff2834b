"""The kernels of the top-K cross-entropy against plain torch in float64.

Without a GPU they run in Triton's interpreter, on rows of a size that it can bear.
"""

import pytest
import torch
from torch import Tensor

from shortlist import ShortlistError
from shortlist import functional as F

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Ks = int | tuple[int, ...]


def draw(
    num_classes: int, spread: float = 1.0, n: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_classes)
    scores = spread * torch.randn(n, num_classes, generator=generator)
    return scores.to(DEVICE, dtype), torch.randint(num_classes, (n,), generator=generator).to(DEVICE)


def loss_and_gradient(
    scores: Tensor, target: Tensor, k: Ks, *, weight: Tensor | None = None, reduction: str = "none"
) -> tuple[Tensor, Tensor]:
    """By plain torch in float64, and by the kernels in all other dtypes."""
    scores = scores.detach().requires_grad_()
    impl = "reference" if scores.dtype == torch.float64 else "triton"
    loss = F._topk_cross_entropy(scores, target, k, weight, -100, reduction, impl=impl)  # type: ignore[arg-type]
    return loss.detach(), torch.autograd.grad(loss.sum(), scores)[0]


def assert_as_in_float64(scores: Tensor, target: Tensor, k: Ks) -> None:
    loss, gradient = loss_and_gradient(scores, target, k)
    want_loss, want_gradient = loss_and_gradient(scores.double(), target, k)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-36)
    # Each entry to five digits of its own, down to a millionth of the row's largest.
    floor = 1e-6 * want_gradient.abs().amax().item()
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-5, atol=1e-5 * floor + 1e-36)


@pytest.mark.parametrize("spread", [0.0, 3.0, 1000.0])
@pytest.mark.parametrize(("k", "num_classes"), [(2, 3), (2, 9), (5, 6), ((1, 2, 4), 7)])
def test_value_and_gradient_are_those_of_float64(k: Ks, num_classes: int, spread: float) -> None:
    assert_as_in_float64(*draw(num_classes, spread), k)


def test_rows_with_more_arrivals_than_a_float_can_hold_at_once() -> None:
    assert_as_in_float64(*draw(60, 0.01, n=1), 5)


@pytest.mark.parametrize("ahead", [5.0, 40.0, -5000.0])
def test_a_label_far_from_the_others(ahead: float) -> None:
    scores, target = draw(8)
    scores.scatter_add_(1, target[:, None], torch.full_like(scores[:, :1], ahead))
    assert_as_in_float64(scores, target, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_round_only_the_result(dtype: torch.dtype) -> None:
    scores, target = draw(12, dtype=dtype)
    loss, gradient = loss_and_gradient(scores, target, 3)
    want_loss, want_gradient = loss_and_gradient(scores.double(), target, 3)
    torch.testing.assert_close((loss, gradient), (want_loss.to(dtype), want_gradient.to(dtype)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter, at infinities
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [4, 7], ids=["label", "other"])
def test_a_bad_score_spoils_its_row_alone(bad: float, at: int) -> None:
    scores, target = draw(8)
    target[0] = 4
    want_loss, want_gradient = loss_and_gradient(scores, target, 3)
    scores[0, at] = bad
    loss, gradient = loss_and_gradient(scores, target, 3)
    assert loss[0].isnan()
    torch.testing.assert_close((loss[1], gradient[1]), (want_loss[1], want_gradient[1]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter, at infinities
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_an_ignored_row_has_neither_loss_nor_gradient_whatever_it_holds(bad: float) -> None:
    scores, target = draw(8, n=3)
    target[1], weight = -100, torch.linspace(0, 2, 8, device=DEVICE)
    want = loss_and_gradient(scores.double(), target, 3, weight=weight.double(), reduction="mean")
    scores[1, 7] = bad
    got = loss_and_gradient(scores, target, 3, weight=weight, reduction="mean")
    torch.testing.assert_close([part.double() for part in got], list(want), rtol=1e-5, atol=1e-7)
    assert (got[1][1] == 0).all()


def test_strides_are_followed_and_nothing_beside_is_read() -> None:
    scores, target = draw(13, n=3)
    across = torch.full((45, 10), torch.nan, device=DEVICE)
    across[2:28:2, 3:9:2] = scores.T
    got = loss_and_gradient(across.T[3:9:2, 2:28:2], target, 2)
    torch.testing.assert_close(got, loss_and_gradient(scores, target, 2))


@pytest.mark.parametrize(
    ("fact", "shape", "k"), [("K from 2 to", (2, 20), 1), ("K from 2 to", (2, 20), 11), ("classes", (1, 513), 2)]
)
def test_a_forced_kernel_names_what_it_needs(fact: str, shape: tuple[int, int], k: int) -> None:
    target = torch.zeros(shape[0], dtype=torch.int64, device=DEVICE)
    with pytest.raises(ShortlistError, match=fact):
        loss_and_gradient(torch.zeros(shape, device=DEVICE), target, k)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize(
    ("k", "num_classes"), [(2, 10), (5, 100), (5, 512), (10, 512), ((1, 2, 3, 4, 5), 100), ((1, 10), 512)]
)
def test_long_rows_on_the_gpu(k: Ks, num_classes: int, spread: float) -> None:
    scores, target = draw(num_classes, spread, n=8)
    loss, gradient = loss_and_gradient(scores, target, k)
    want_loss, want_gradient = loss_and_gradient(scores.double(), target, k)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-36)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("num_classes", [100, 10_000])
def test_the_loss_is_captured_in_a_graph(num_classes: int) -> None:
    scores, target = draw(num_classes, n=4)
    leaf = scores.requires_grad_()
    for _ in range(2):  # compiles before the capture
        want = torch.autograd.grad(F.topk_cross_entropy(leaf, target, 5), leaf)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(F.topk_cross_entropy(leaf, target, 5), leaf)[0]
    graph.replay()
    torch.testing.assert_close(got, want)
