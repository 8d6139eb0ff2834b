"""The kernels of the log-sum smoothed hinge against plain torch in float64.

Without a GPU they run in Triton's interpreter, on rows and tiles of a size that it can bear.
"""

import pytest
import torch
from torch import Tensor

from shortlist import functional as F

pytest.importorskip("triton")
from shortlist.kernels import smooth_hinge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies strands entry by entry. Small enough for rows of several blocks, too.
TILING = smooth_hinge.Tiling(64, 64) if DEVICE == "cpu" else smooth_hinge.Tiling()


def draw(
    num_classes: int, spread: float = 1.0, n: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_classes)
    scores = spread * torch.randn(n, num_classes, generator=generator)
    return scores.to(DEVICE, dtype), torch.randint(num_classes, (n,), generator=generator).to(DEVICE)


def loss_and_gradient(
    scores: Tensor, target: Tensor, k: int, tau: float, *, weight: Tensor | None = None, reduction: str = "none"
) -> tuple[Tensor, Tensor]:
    """By plain torch in float64, and by the kernels in all other dtypes."""
    scores = scores.detach().requires_grad_()
    impl = "reference" if scores.dtype == torch.float64 else "triton"
    loss = F._smooth_topk_hinge(scores, target, k, tau, weight, -100, reduction, impl=impl)  # type: ignore[arg-type]
    return loss.detach(), torch.autograd.grad(loss.sum(), scores)[0]


def assert_as_in_float64(scores: Tensor, target: Tensor, k: int, tau: float) -> None:
    leaf = scores.detach().requires_grad_()
    loss = tau * torch.nn.functional.softplus(
        smooth_hinge.log_odds_against(leaf, target, k, tau, tiling=TILING).double()
    )
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    want_loss, want_gradient = loss_and_gradient(scores.double(), target, k, tau)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-30)
    # Each entry to five digits of its own, down to a millionth of the row's largest.
    floor = 1e-6 * want_gradient.abs().amax()
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-5, atol=1e-5 * floor.item())


@pytest.mark.parametrize(("spread", "tau"), [(0.0, 1.0), (1.0, 0.01), (1.0, 10.0), (100.0, 1.0)])
@pytest.mark.parametrize(("k", "num_classes"), [(1, 2), (1, 70), (2, 9), (5, 33), (9, 10)])
def test_value_and_gradient_are_those_of_float64(k: int, num_classes: int, tau: float, spread: float) -> None:
    assert_as_in_float64(*draw(num_classes, spread, n=1), k, tau)


@pytest.mark.parametrize(("k", "num_classes"), [(20, 100), (50, 60), (100, 101)])
def test_many_suggestions(k: int, num_classes: int) -> None:
    assert_as_in_float64(*draw(num_classes, n=1), k, 0.1)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_ties(k: int) -> None:
    scores, target = draw(40, n=1)
    assert_as_in_float64(scores.round(), target, k, 0.1)


@pytest.mark.parametrize("k", [2, 5])
def test_a_few_classes_far_above_all_others(k: int) -> None:
    scores, target = draw(40)
    scores[:, :4] += 1e3
    assert_as_in_float64(scores, target, k, 0.1)


def test_scores_too_large_for_their_differences() -> None:
    # Neighbouring floats at 1e8 are 8 apart: 800 log-odds. Only the flat row has classes that compete.
    scores = torch.tensor([[1e8] * 9, [1e8, 1e8 + 8, 0, -1e8, 1e30, 3, 4, 5, -1e30]], device=DEVICE)
    assert_as_in_float64(scores, torch.tensor([4, 0], device=DEVICE), 3, tau=0.01)


def test_adding_a_constant_changes_nothing() -> None:
    scores, target = draw(20)
    scores = scores.mul(64).round().div(64)  # so that the sum is exact
    torch.testing.assert_close(
        loss_and_gradient(scores + 1000, target, 3, 0.5),
        loss_and_gradient(scores, target, 3, 0.5),
        rtol=1e-5,
        atol=1e-7,
    )


def test_gradients_of_a_row_cancel() -> None:
    _, gradient = loss_and_gradient(*draw(50, spread=3.0), 5, 1.0)
    torch.testing.assert_close(gradient.sum(1), torch.zeros(2, device=DEVICE), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_round_only_the_result(dtype: torch.dtype) -> None:
    scores, target = draw(20, dtype=dtype)
    loss, gradient = loss_and_gradient(scores, target, 3, 1.0)
    want_loss, want_gradient = loss_and_gradient(scores.double(), target, 3, 1.0)
    torch.testing.assert_close((loss, gradient), (want_loss.to(dtype), want_gradient.to(dtype)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter, at infinities
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [4, 7], ids=["label", "other"])
def test_a_bad_score_spoils_its_row_alone(bad: float, at: int) -> None:
    scores, target = draw(20)
    target[0] = 4
    want_loss, want_gradient = loss_and_gradient(scores, target, 3, 1.0)
    scores[0, at] = bad
    loss, gradient = loss_and_gradient(scores, target, 3, 1.0)
    assert not loss[0].isfinite()
    torch.testing.assert_close((loss[1], gradient[1]), (want_loss[1], want_gradient[1]))


def test_strides_are_followed_and_nothing_beside_is_read() -> None:
    scores, target = draw(21, n=3)
    across = torch.full((45, 10), torch.nan, device=DEVICE)
    across[2:44:2, 3:9:2] = scores.T
    got = loss_and_gradient(across.T[3:9:2, 2:44:2], target, 4, 1.0)
    torch.testing.assert_close(got, loss_and_gradient(scores, target, 4, 1.0))


def test_weights_and_ignored_rows() -> None:
    scores, target = draw(12, n=4)
    target[1], target[3] = -100, -100
    weight = torch.linspace(0, 2, 12, device=DEVICE)
    got = loss_and_gradient(scores, target, 3, 1.0, weight=weight, reduction="mean")
    want = loss_and_gradient(scores.double(), target, 3, 1.0, weight=weight.double(), reduction="mean")
    torch.testing.assert_close([part.double() for part in got], list(want), rtol=1e-5, atol=1e-7)
    assert (got[1][[1, 3]] == 0).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter, at infinities
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 7])
def test_an_ignored_row_has_neither_loss_nor_gradient_whatever_it_holds(bad: float, at: int) -> None:
    scores, target = draw(12, n=3)
    target[1] = -100
    want = loss_and_gradient(scores, target, 3, 1.0, reduction="mean")
    scores[1, at] = bad
    got = loss_and_gradient(scores, target, 3, 1.0, reduction="mean")
    torch.testing.assert_close(got, want)
    assert (got[1][1] == 0).all()


def test_an_empty_batch() -> None:
    scores, target = draw(5, n=0)
    leaf = scores.requires_grad_()
    loss = F.smooth_topk_hinge(leaf, target, 2, reduction="none")
    assert loss.shape == (0,)
    assert torch.autograd.grad(loss.sum(), leaf)[0].shape == (0, 5)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 20, 21, 100, 1000])
def test_points_are_enough_for_the_widest_law(k: int) -> None:
    period = 2 * smooth_hinge._points_for(k) + 1
    law = torch.distributions.Poisson(torch.tensor(k - 0.5, dtype=torch.float64))
    counts = torch.arange(k + 20 * period, dtype=torch.float64)
    probability = law.log_prob(counts).exp()
    for count in (k - 1, k):
        mistaken = probability[(counts - count) % period == 0].sum() - probability[count]
        assert mistaken < 2e-8 * probability[count]


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("tau", [0.01, 1.0])
@pytest.mark.parametrize(
    ("k", "num_classes"), [(1, 10), (5, 100), (5, 10_000), (20, 1000), (50, 1000), (5, 100_000), (1000, 3000)]
)
def test_long_rows_on_the_gpu(k: int, num_classes: int, tau: float, spread: float) -> None:
    scores, target = draw(num_classes, spread, n=8)
    loss, gradient = loss_and_gradient(scores, target, k, tau)
    want_loss, want_gradient = loss_and_gradient(scores.double(), target, k, tau)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-30)
    largest = want_gradient.abs().amax().item()
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=5e-5, atol=1e-9 * largest)


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_batch() -> None:
    scores, target = draw(1000, n=300)
    alone = [loss_and_gradient(scores[row : row + 1], target[row : row + 1], 5, 1.0) for row in (0, 299)]
    loss, gradient = loss_and_gradient(scores, target, 5, 1.0)
    for row, (its_loss, its_gradient) in zip((0, 299), alone, strict=True):
        assert torch.equal(loss[row], its_loss[0])
        assert torch.equal(gradient[row], its_gradient[0])
