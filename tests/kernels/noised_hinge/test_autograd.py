"""The kernels of the noised hinge against the plain loss, on the noise that they would have seen.

Without a GPU they run in Triton's interpreter, on shapes that it can bear.
"""

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

import shortlist as sl
from shortlist import kernels
from shortlist.heads.running_topk import Standings
from shortlist.ops import random as _noise
from tests.support import noise_field

pytest.importorskip("triton")
noised = importlib.import_module("shortlist.kernels.noised_hinge.autograd")
noised_operator = importlib.import_module("shortlist.kernels.noised_hinge.custom_op")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED = 3_456_789_012
# The interpreter computes with infinities and NaNs as a GPU does, and numpy remarks on it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Take the lazy kernels however short the rows are, with so many programs a draw."""

    def choose(splits: int = 1) -> None:
        monkeypatch.setattr(noised, "_DENSE", 8)
        monkeypatch.setattr(noised, "_MOST_DENSE", 8)
        monkeypatch.setattr(noised, "_splits", lambda draws, tiles, capacity: splits)

    return choose


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """``(R, 2)`` for each search: a row's level and what is cold, from there. This decides whose noise is whose."""
    seen: list[Tensor] = []

    def remembering(step: Callable[..., None]) -> Callable[..., None]:
        def run(search: Any, *arguments: object) -> None:
            step(search, *arguments)
            cold_R = torch.where(search.hot_found_R <= search.hot, search.cold_R, math.inf)
            seen.append(torch.stack([search.level_R, cold_R], -1).cpu())

        return run

    for name in ("prepare", "survey"):
        monkeypatch.setattr(noised._Search, name, remembering(getattr(noised._Search, name)))
    return seen


def draw(n: int, num_classes: int, spread: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * num_classes)
    scores = spread * torch.randn(n, num_classes, generator=generator)
    return scores, torch.randint(num_classes, (n,), generator=generator)


def field(scores: Tensor, levels: Tensor | None, draws: int, key: int = 0) -> Tensor:
    rows = []
    for number, row in enumerate(scores):
        cold = None if levels is None else (levels[number, 0].item(), levels[number, 1].item())
        rows.append(noise_field.noise(row.detach().double().numpy(), cold, SEED ^ key, number, draws))
    return torch.from_numpy(np.stack(rows))


def fused(
    scores: Tensor,
    target: Tensor,
    k: int,
    epsilon: float,
    draws: int,
    reduction: str = "none",
    weight: Tensor | None = None,
) -> Tensor:
    labels = noised.Labels(target.to(DEVICE), None, weight, -100)
    settings = noised.Settings.of(k, 1.0, epsilon, draws, reduction)
    seed = noised.Seed(torch.full((noised.words_for(scores.shape, settings),), SEED, device=DEVICE), 0)
    loss: Tensor = noised._NoisedHinge.apply(scores, labels, settings, seed)
    return loss


def assert_as_plain(scores: Tensor, target: Tensor, k: int, epsilon: float, draws: int, levels: list[Tensor]) -> None:
    here = scores.to(DEVICE).requires_grad_()
    loss = fused(here, target, k, epsilon, draws)
    plain = scores.double().requires_grad_()
    noise = field(scores, levels[-1] if levels else None, draws)
    expected = sl.functional.noised_topk_hinge(plain, target, k, epsilon=epsilon, noise=noise, reduction="none")
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    slopes = torch.arange(1.0, len(target) + 1)
    (gradient,) = torch.autograd.grad((loss * slopes.to(DEVICE)).sum(), here)
    (expected_gradient,) = torch.autograd.grad((expected * slopes.double()).sum(), plain)
    torch.testing.assert_close(gradient.cpu().double(), expected_gradient, rtol=1e-5, atol=1e-6)


DENSE = [(3, 40, 3, 2, 0.3, 1.0), (2, 40, 38, 2, 0.3, 1.0), (2, 65, 1, 3, 2.0, 0.0), (1, 2, 1, 1, 0.1, 1.0)]


@pytest.mark.parametrize(("n", "num_classes", "k", "draws", "epsilon", "spread"), DENSE)
def test_short_rows_are_the_plain_loss_on_the_same_noise(
    n: int, num_classes: int, k: int, draws: int, epsilon: float, spread: float, levels: list[Tensor]
) -> None:
    assert_as_plain(*draw(n, num_classes, spread), k, epsilon, draws, levels)


LAZY = [
    (2, 500, 3, 2, 0.3, 1.0, 1),
    (2, 500, 3, 2, 1.0, 0.1, 1),  # flat: every class may be the one
    (1, 700, 1, 2, 0.01, 3.0, 2),  # steep: a few are certain
    (1, 700, 8, 2, 1.0, 1.0, 1),
    (1, 4000, 2, 2, 0.05, 1.0, 1),  # few are hot, and far below the level
    (1, 97, 30, 1, 0.5, 1.0, 1),  # the level is found too high and must come down
]


@pytest.mark.parametrize(("n", "num_classes", "k", "draws", "epsilon", "spread", "splits"), LAZY)
def test_long_rows_are_the_plain_loss_on_noise_that_was_hardly_drawn(
    n: int,
    num_classes: int,
    k: int,
    draws: int,
    epsilon: float,
    spread: float,
    splits: int,
    lazy: Callable[[int], None],
    levels: list[Tensor],
) -> None:
    lazy(splits)
    assert_as_plain(*draw(n, num_classes, spread), k, epsilon, draws, levels)


def test_a_list_that_is_too_short_raises_the_threshold(
    lazy: Callable[[int], None], levels: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy(1)
    monkeypatch.setattr(noised, "_capacity", lambda wanted: 8)
    scores, target = draw(1, 300, 1.0)
    assert_as_plain(scores, target, 2, 0.3, 2, levels)
    noise = field(scores, levels[-1], 2)
    assert ((scores.unsqueeze(-1) + 0.3 * noise > levels[-1][:, 0]).sum(1) > 8).all(), "the level let no more pass"


def test_flat_rows_are_cold_and_the_level_comes_down(
    lazy: Callable[[int], None], levels: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy(1)
    monkeypatch.setattr(noised, "_wanted", float)
    monkeypatch.setattr(noised, "_capacity", lambda wanted: 32)
    scores, target = draw(4, 2000, 0.1)
    assert_as_plain(scores, target, 5, 1.0, 6, levels)
    level_R1, cold_R1 = levels[-1].split(1, -1)
    assert not (scores - level_R1 > cold_R1).any(), "no class is hot"
    passing = (scores.unsqueeze(-1) + field(scores, levels[-1], 6) > level_R1.unsqueeze(-1)).sum(1)
    assert (passing < 6).any(), "in some draw too few pass at first"


@pytest.mark.parametrize("ruled_out_at", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("alive", [7, 70])
def test_the_noise_of_the_few_that_are_not_ruled_out_counts(
    alive: int, ruled_out_at: float, lazy: Callable[[int], None], levels: list[Tensor]
) -> None:
    """Side by side, as those of one family: then the tiles, for their best class each, seem to hold too few."""
    lazy(1)
    scores, _ = draw(2, 1000, 2.0)
    scores[:, :500], scores[:, 500 + alive :] = ruled_out_at, ruled_out_at
    assert_as_plain(scores, torch.tensor([500, 503]), 3, 0.2, 2, levels)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("listed_at_once", [1024, 4])
def test_rows_that_many_programs_read(
    splits: int,
    listed_at_once: int,
    lazy: Callable[[int], None],
    levels: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several parts in ``prepare``, several lists of hot classes, several blocks of the gradient."""
    lazy(splits)
    monkeypatch.setattr(noised, "_LISTED_AT_ONCE", listed_at_once)
    monkeypatch.setattr(noised, "_TILES_READ", 64)
    assert_as_plain(*draw(2, 4200, 1.0), 3, 0.5, 2, levels)


def test_lists_of_parts_that_are_too_short_are_made_anew(
    lazy: Callable[[int], None], levels: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy(2)
    monkeypatch.setattr(noised, "_capacity", lambda wanted: 8)
    assert_as_plain(*draw(2, 700, 1.0), 2, 1.0, 2, levels)


def test_more_rows_and_draws_than_are_added_at_once() -> None:
    scores, target = draw(260, 3, 1.0)
    each, mean = (fused(scores.to(DEVICE), target, 1, 0.5, 1, reduction) for reduction in ("none", "mean"))
    torch.testing.assert_close(mean, each.mean())
    scores, target = draw(1, 5, 1.0)
    loss = fused(scores.to(DEVICE), target, 2, 0.5, 130)
    noise = field(scores, None, 130)
    expected = sl.functional.noised_topk_hinge(scores.double(), target, 2, epsilon=0.5, noise=noise, reduction="none")
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_without_loss_have_no_gradient_whatever_comes_back() -> None:
    scores = torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0]], device=DEVICE, requires_grad=True)
    loss = fused(scores, torch.tensor([0, 0]), 1, 0.1, 2)
    (gradient,) = torch.autograd.grad(loss, scores, torch.tensor([math.inf, 1.0], device=DEVICE))
    assert (gradient[0] == 0).all()
    assert gradient[1].abs().sum() > 0


def test_a_row_with_more_hot_classes_than_can_be_listed_does_without(
    lazy: Callable[[int], None], levels: list[Tensor]
) -> None:
    lazy(1)
    scores, target = draw(1, 2000, 0.1)
    scores[:, 640:] -= 10
    assert_as_plain(scores, target, 2, 1.0, 1, levels)
    assert levels[-1][0, 1] == math.inf


@pytest.mark.parametrize("shift", [0.0, 0.8, 20.0, -20.0])
@pytest.mark.parametrize("chunks", [[400], [300, 200], [200, 300, 130]])
def test_chunks_that_challenge_give_the_best_of_all(
    chunks: list[int], shift: float, levels: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a chunk is better than all before it, or worse."""
    monkeypatch.setattr(kernels, "usable", lambda scores: True)
    monkeypatch.setattr(noised, "can_challenge", lambda *_: True)
    seed = noised.Seed(torch.tensor([SEED], device=DEVICE), 0)
    monkeypatch.setattr(noised, "new_seed", lambda device, generator: seed)
    scores, _ = draw(2, sum(chunks), 1.0)
    scores[:, chunks[0] :] += shift
    standings = Standings(2, 2, 4, epsilon=0.4, dtype=torch.float32, device=torch.device(DEVICE))
    reference = Standings(2, 2, 4, epsilon=0.4, dtype=torch.float64, device=torch.device("cpu"))
    start = 0
    for chunk in scores.split(chunks, 1):
        standings.add(chunk.contiguous().to(DEVICE), start)
        noise = field(chunk, levels[-1], 2, key=start << 32)
        reference.enter(*best(chunk.double(), noise, 0.4, 4, start))
        start += chunk.shape[1]
    values, order = standings.values_RBK.sort(-1, descending=True)
    torch.testing.assert_close(values.cpu().double(), reference.values_RBK, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(standings.classes_RBK.gather(-1, order).cpu(), reference.classes_RBK)
    assert (standings.spoil_R == 0).all()


def test_places_that_nobody_holds_are_open_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel measures from the least that holds a place: where there is none, it must not be asked."""
    monkeypatch.setattr(kernels, "usable", lambda scores: True)
    monkeypatch.setattr(noised, "can_challenge", lambda chunk, places, *_: chunk.shape[1] > places)
    scores = draw(2, 203, 1.0)[0].to(DEVICE)
    standings = Standings(2, 2, 4, epsilon=0.4, dtype=torch.float32, device=torch.device(DEVICE))
    standings.add(scores[:, :3].contiguous(), 0)
    standings.add(scores[:, 3:].contiguous(), 3)
    assert standings.values_RBK.isfinite().all()
    assert (standings.classes_RBK >= 3).any()


def best(scores: Tensor, noise: Tensor, epsilon: float, places: int, first_class: int) -> tuple[Tensor, Tensor]:
    values, classes = (scores.unsqueeze(-1) + epsilon * noise).transpose(1, 2).topk(places)
    return values, classes + first_class


def test_bad_scores_spoil_their_row_in_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "usable", lambda scores: True)
    monkeypatch.setattr(noised, "can_challenge", lambda *_: True)
    scores, _ = draw(3, 300, 1.0)
    scores[0, 3], scores[2, 299] = math.nan, math.inf
    standings = Standings(3, 1, 2, epsilon=0.4, dtype=torch.float32, device=torch.device(DEVICE))
    for start in (0, 150):
        standings.add(scores[:, start : start + 150].contiguous().to(DEVICE), start)
    assert standings.spoil_R.isnan().tolist() == [True, False, True]


def test_a_chunk_of_classes_that_are_ruled_out_is_never_wrong_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next chunk is measured from there, and may be too far away for its noise to be told."""
    monkeypatch.setattr(kernels, "usable", lambda scores: True)
    monkeypatch.setattr(noised, "can_challenge", lambda *_: True)
    scores, _ = draw(1, 300, 2.0)
    scores[:, :150] = -1e9
    standings = Standings(1, 1, 4, epsilon=0.2, dtype=torch.float32, device=torch.device(DEVICE))
    for start in (0, 150):
        standings.add(scores[:, start : start + 150].contiguous().to(DEVICE), start)
    value, want = standings.last_place()[0].cpu(), scores.topk(4).values[:, -1:]
    assert (value.isnan() | ((value - want).abs() < 6 * 0.2)).all()


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_score_spoils_its_row_alone(bad: float, is_lazy: bool, lazy: Callable[[int], None]) -> None:
    if is_lazy:
        lazy(1)
    scores, target = draw(2, 130, 1.0)
    scores[1, 77] = bad
    here = scores.to(DEVICE).requires_grad_()
    loss = fused(here, target, 3, 0.2, 1)
    assert loss[0].isfinite()
    assert not loss[1].isfinite()
    (gradient,) = torch.autograd.grad(loss.sum(), here)
    assert gradient[0].isfinite().all()
    assert not gradient[1].isfinite().all(), "or a gradient scaler would take the step"


def test_memory_beside_the_rows_is_not_touched() -> None:
    surroundings = torch.full((4, 64), math.nan, device=DEVICE)
    scores, target = draw(2, 33, 1.0)
    surroundings[1:3, 16:49] = scores.to(DEVICE)
    inside = surroundings[1:3, 16:49]
    torch.testing.assert_close(fused(inside, target, 3, 0.2, 2), fused(scores.to(DEVICE), target, 3, 0.2, 2))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("imbalanced", [False, True])
def test_the_losses_take_the_kernel_with_all_their_settings(
    reduction: str, imbalanced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hardly any noise the loss must be that without any, which the plain path computes."""
    scores, target = draw(5, 20, 3.0)
    target[2] = -7
    weight, counts = torch.linspace(0.5, 2, 20), torch.arange(1, 21)
    settings: Any = {"weight": weight.to(DEVICE), "ignore_index": -7, "reduction": reduction}
    results = []
    for epsilon, kernel in ((1e-6, True), (0.0, False)):
        monkeypatch.setattr(kernels, "at_hand", lambda scores, kernel=kernel: kernel)
        here = scores.to(DEVICE).requires_grad_()
        if imbalanced:
            loss = sl.functional.imbalanced_noised_topk_hinge(
                here, target.to(DEVICE), counts.to(DEVICE), 3, epsilon=epsilon, scale=7.0, **settings
            )
        else:
            loss = sl.functional.noised_topk_hinge(here, target.to(DEVICE), 3, epsilon=epsilon, **settings)
        assert ("NoisedHinge" in type(loss.grad_fn).__name__) == kernel
        results.append((loss, *torch.autograd.grad(loss.sum(), here)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("imbalanced", [False, True])
def test_a_compiled_graph_holds_the_kernels_as_one_node(
    reduction: str, imbalanced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "at_hand", lambda scores: True)
    scores, target = draw(5, 20, 3.0)
    target[2] = -100
    settings: Any = {"k": 3, "epsilon": 1e-6, "weight": torch.linspace(0.5, 2, 20), "reduction": reduction}
    module: torch.nn.Module = sl.NoisedTopKHinge(**settings)
    if imbalanced:
        module = sl.ImbalancedNoisedTopKHinge(torch.arange(1, 21), **settings)
    graphs: list[torch.fx.GraphModule] = []

    def remember(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    results = []
    for loss in (module.to(DEVICE), torch.compile(module.to(DEVICE), fullgraph=True, backend=remember)):
        here = scores.to(DEVICE).requires_grad_()
        value = loss(here, target.to(DEVICE))
        results.append((value, *torch.autograd.grad(value.sum(), here)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum("shortlist" in name for name in called) == 1
    assert not any("randn" in name or "topk" in name for name in called)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_graph_of_the_kernels_serves_every_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "at_hand", lambda scores: True)
    module = sl.NoisedTopKHinge(3, epsilon=1e-6)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (5, 8, 3):
        scores, target = draw(size, 20, 3.0)
        with torch.compiler.set_stance("default" if size == 5 else "fail_on_recompile"):
            loss = compiled(scores.to(DEVICE), target.to(DEVICE))
        torch.testing.assert_close(loss, module(scores.to(DEVICE), target.to(DEVICE)), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_compiler")
def test_an_exported_loss_takes_every_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "at_hand", lambda scores: True)
    module = sl.NoisedTopKHinge(3, epsilon=1e-6)
    (scores, target), (others, labels) = draw(5, 20, 3.0), draw(3, 20, 3.0)
    any_size = torch.export.Dim.DYNAMIC
    exported = torch.export.export(
        module, (scores.to(DEVICE), target.to(DEVICE)), dynamic_shapes=({0: any_size}, {0: any_size})
    )
    loss = exported.module()(others.to(DEVICE), labels.to(DEVICE))
    torch.testing.assert_close(loss, module(others.to(DEVICE), labels.to(DEVICE)), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_function_transforms_do_without_kernels() -> None:
    def loss(scores: Tensor) -> Tensor:
        return sl.functional.noised_topk_hinge(scores, target.to(DEVICE), 3, epsilon=1e-6)

    scores, target = draw(5, 20, 3.0)
    gradient = torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")(scores.to(DEVICE))
    here = scores.to(DEVICE).requires_grad_()
    torch.testing.assert_close(gradient, *torch.autograd.grad(loss(here), here), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the rules' own code
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_operators_keep_torchs_rules(reduction: str) -> None:
    scores, target = draw(3, 20, 1.0)
    drawn = torch.tensor([SEED], device=DEVICE)
    here = scores.to(DEVICE).requires_grad_()
    arguments = (here, target.to(DEVICE), None, None, drawn, False, 3, 1.0, 0.3, 2, -100, reduction)
    torch.library.opcheck(noised_operator.forward, arguments)
    loss, *kept = (each.detach() for each in noised_operator.forward(*arguments))
    backward = (torch.ones_like(loss), target.to(DEVICE), *kept, 20, scores.dtype, reduction)
    torch.library.opcheck(noised_operator.backward, backward)


def test_ranks_draw_their_own_in_a_compiled_graph_unless_their_generators_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores, target = draw(3, 20, 1.0)
    drawn = torch.tensor([SEED], device=DEVICE)
    losses = {}
    for rank in (0, 1):
        monkeypatch.setattr(_noise, "_rank", lambda rank=rank: rank)
        for alike in (True, False):
            arguments = (scores.to(DEVICE), target.to(DEVICE), None, None, drawn, alike, 3, 1.0, 0.3, 2, -100, "none")
            losses[rank, alike] = noised_operator.forward(*arguments)[0]
    assert torch.equal(losses[0, True], losses[1, True])
    assert torch.equal(losses[0, True], losses[0, False])
    assert (losses[0, False] != losses[1, False]).all()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_many_draws_are_added_up_to_the_same_gradient(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, target = draw(3, 40, 0.5)
    target[1] = -100
    gradients: list[Tensor] = []
    for most in (128, 1):
        monkeypatch.setattr(noised, "_MOST_DRAWS", most)
        here = scores.to(DEVICE).requires_grad_()
        gradients += torch.autograd.grad(fused(here, target, 3, 0.5, 6, reduction).sum(), here)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_label_out_of_range_gives_nan(weighted: bool) -> None:
    scores, _ = draw(3, 20, 1.0)
    weight = torch.ones(20, device=DEVICE) if weighted else None
    loss = fused(scores.to(DEVICE), torch.tensor([3, 20, -1]), 3, 0.2, 1, weight=weight)
    assert loss.isnan().tolist() == [False, True, True]


def test_ignored_rows_have_neither_loss_nor_gradient_whatever_is_in_them() -> None:
    scores, _ = draw(2, 20, 1.0)
    scores[1, 4] = math.nan
    for target in ([3, -100], [-100, -100]):
        here = scores.to(DEVICE).requires_grad_()
        loss = fused(here, torch.tensor(target), 3, 0.2, 2, "mean")
        (gradient,) = torch.autograd.grad(loss, here)
        assert (gradient[torch.tensor(target) == -100] == 0).all()
        assert loss.isfinite() == (target[0] == 3), "the mean of no rows is not a number"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_widened(dtype: torch.dtype) -> None:
    scores, target = draw(2, 40, 1.0)
    scores = scores.to(dtype)
    narrow = scores.to(DEVICE).requires_grad_()
    wide = scores.float().to(DEVICE).requires_grad_()
    losses = [fused(each, target, 3, 0.2, 2) for each in (narrow, wide)]
    torch.testing.assert_close(losses[0], losses[1])
    gradients = [torch.autograd.grad(loss.sum(), each)[0] for loss, each in zip(losses, (narrow, wide), strict=True)]
    torch.testing.assert_close(gradients[0], gradients[1].to(dtype))


def test_long_rows_with_thousands_of_draws_are_left_to_torch_which_needs_less_memory() -> None:
    short, long = 1000, 100_000
    assert noised.can_take(long, 5, 4096)
    assert not noised.can_take(long, 5, 10_000)
    assert noised.can_take(short, 5, 10_000), "they keep no lists"
