"""The loss and gradient that the kernels make of their samples."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from shortlist.kernels.noised_hinge.autograd import Labels, Settings, compute_rows, gradient, scattered_gradient
from shortlist.kernels.noised_hinge.plan import plan_for
from shortlist.ops.noised_hinge import noised_hinge
from tests.support.noised_hinge_kernels import DEVICE, draw, kernel_loss, lazy_plan, seed_for

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaNs in the interpreter


def test_rows_without_loss_have_no_gradient_whatever_comes_back() -> None:
    scores = torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0]], device=DEVICE, requires_grad=True)
    loss = kernel_loss(scores, torch.tensor([0, 0]), 1, 0.1, 2)
    (gradient_RL,) = torch.autograd.grad(loss, scores, torch.tensor([math.inf, 1.0], device=DEVICE))
    assert (gradient_RL[0] == 0).all()
    assert gradient_RL[1].abs().sum() > 0


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_score_spoils_its_row_alone(bad: float, is_lazy: bool) -> None:
    scores, target = draw(2, 130, 1.0)
    scores[1, 77] = bad
    here = scores.to(DEVICE).requires_grad_()
    loss = kernel_loss(here, target, 3, 0.2, 1, plan=lazy_plan(scores, 4, 1, is_lazy=is_lazy))
    assert loss[0].isfinite()
    assert not loss[1].isfinite()
    (gradient_RL,) = torch.autograd.grad(loss.sum(), here)
    assert gradient_RL[0].isfinite().all()
    assert not gradient_RL[1].isfinite().all(), "or a gradient scaler would take the step"


def test_memory_beside_the_rows_is_not_touched() -> None:
    surroundings = torch.full((4, 64), math.nan, device=DEVICE)
    scores, target = draw(2, 33, 1.0)
    surroundings[1:3, 16:49] = scores.to(DEVICE)
    inside = surroundings[1:3, 16:49]
    alone = kernel_loss(scores.to(DEVICE), target, 3, 0.2, 2)
    torch.testing.assert_close(kernel_loss(inside, target, 3, 0.2, 2), alone)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    ("imbalanced", "k", "relative"),
    [(False, 3, False), (True, 3, True), (False, (1, 3, 6), True), (True, (1, 3), False)],
)
def test_the_losses_take_the_kernel_with_all_their_settings(
    reduction: str, imbalanced: bool, k: int | tuple[int, ...], relative: bool
) -> None:
    """With hardly any noise the loss must be that without any, which plain torch computes."""
    scores, target = draw(5, 20, 3.0)
    target[2] = -7
    margins_L = torch.linspace(0.1, 1, 20, device=DEVICE) if imbalanced else None
    results: list[tuple[Tensor, ...]] = []
    for epsilon, impl in ((1e-6, "triton"), (0.0, "reference")):
        here = scores.to(DEVICE).requires_grad_()
        loss = noised_hinge(
            here,
            target.to(DEVICE),
            k,
            margin=2.5,
            margins_L=margins_L,
            scale=7.0 if imbalanced else 1.0,
            epsilon=epsilon,
            relative=relative,
            n_samples=2,
            noise=None,
            generator=None,
            weight=torch.linspace(0.5, 2, 20, device=DEVICE),
            ignore_index=-7,
            reduction=reduction,  # type: ignore[arg-type]
            impl=impl,  # type: ignore[arg-type]
        )
        assert ("NoisedHinge" in type(loss.grad_fn).__name__) == (impl == "triton")
        results.append((loss, *torch.autograd.grad(loss.sum(), here)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("reduction", "ks"), [("none", (3,)), ("mean", (1, 3)), ("sum", (1, 3))])
def test_many_draws_are_added_up_to_the_same_gradient(reduction: str, ks: tuple[int, ...]) -> None:
    scores, target = draw(3, 40, 0.5)
    target[1] = -100
    plan, labels = plan_for(3, 40, 4, 6), Labels.of(target.to(DEVICE), None, None)
    settings = Settings.of(ks, 1.0, 1.0, 0.5, 6, -100, reduction)
    results, _ = compute_rows(scores.to(DEVICE), labels, settings, seed_for(plan, 3, 6), plan)
    upstream = torch.ones_like(results.loss)
    kept = (labels.target_R, results.classes_RPB, results.slope_RP)
    compared = gradient(upstream, *kept, results.total_share, 40, torch.float32, reduction)
    share = results.total_share[0] if reduction == "mean" else 1
    torch.testing.assert_close(compared, scattered_gradient(upstream / share, *kept, 40))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_label_out_of_range_gives_nan(weighted: bool) -> None:
    scores, _ = draw(3, 20, 1.0)
    weight = torch.ones(20, device=DEVICE) if weighted else None
    loss = kernel_loss(scores.to(DEVICE), torch.tensor([3, 20, -1]), 3, 0.2, 1, weight=weight)
    assert loss.isnan().tolist() == [False, True, True]


def test_ignored_rows_have_neither_loss_nor_gradient_whatever_is_in_them() -> None:
    scores, _ = draw(2, 20, 1.0)
    scores[1, 4] = math.nan
    for target in ([3, -100], [-100, -100]):
        here = scores.to(DEVICE).requires_grad_()
        loss = kernel_loss(here, torch.tensor(target), 3, 0.2, 2, reduction="mean")
        (gradient_RL,) = torch.autograd.grad(loss, here)
        assert (gradient_RL[torch.tensor(target) == -100] == 0).all()
        assert loss.isfinite() == (target[0] == 3), "the mean of no rows is not a number"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_widened(dtype: torch.dtype) -> None:
    scores, target = draw(2, 40, 1.0)
    scores = scores.to(dtype)
    narrow = scores.to(DEVICE).requires_grad_()
    wide = scores.float().to(DEVICE).requires_grad_()
    losses = [kernel_loss(leaf, target, 3, 0.2, 2) for leaf in (narrow, wide)]
    torch.testing.assert_close(losses[0], losses[1])
    gradients = [torch.autograd.grad(loss.sum(), leaf)[0] for loss, leaf in zip(losses, (narrow, wide), strict=True)]
    torch.testing.assert_close(gradients[0], gradients[1].to(dtype))
