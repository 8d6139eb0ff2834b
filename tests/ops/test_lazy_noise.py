"""Lazily drawn noise has the same distribution as noise that is drawn in full.

False alarms: each call of ``assert_same_law`` makes three tests at level 1e-4. The seeds are fixed, so a failure is
repeatable; over the choice of seeds, correct code would fail one of the 40 or so calls below about once in 80.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shortlist import smooth_topk, smooth_topk_sum
from shortlist.heads.running_topk import RunningTopK
from shortlist.ops import lazy_noise
from shortlist.ops.lazy_noise import DEFAULT_LIMITS, Limits, Search, Tiles, largest_perturbed
from shortlist.ops.smoothing import find_places
from tests.support.drawing import RandomNumbers, become_rank, normal, seeded, value_and_grad
from tests.support.laws import Draws, assert_same_law

ROWS, N_SAMPLES = 500, 6
# With 1000 classes and five draws, enough rows for the operators to draw lazily.
OPERATOR_ROWS = 110


def clusters(num_classes: int) -> Tensor:
    """A few large scores, a group below them, and most of the classes far below."""
    place = torch.arange(num_classes) * 7 % num_classes
    return torch.where(place < 4, 3.0, torch.where(place < 60, 1.0, -2.0)) + 0.01 * normal(num_classes).float()


SCORES = {
    "flat": lambda num_classes: 0.1 * normal(num_classes).float(),
    "spread": lambda num_classes: 2 * normal(num_classes).float(),
    "clustered": clusters,
    "sorted": lambda num_classes: normal(num_classes).float().sort(descending=True).values,
    "equal": lambda num_classes: torch.zeros(num_classes),
    "tied": lambda num_classes: normal(num_classes).float().round(),
}


def lazily(x_L: Tensor, k: int, epsilon: float, *, total: bool = False, limits: Limits = DEFAULT_LIMITS) -> Draws:
    """Values and positions of the k-th largest, or totals of the k largest with the position of the last."""

    def draw() -> tuple[Tensor, Tensor]:
        x_RL = x_L.expand(ROWS, -1).contiguous()
        ranks = slice(0 if total else k - 1, k)
        return values_and_positions(x_L, largest_perturbed(x_RL, k, ranks, epsilon, N_SAMPLES, seeded(0), limits))

    return draw


def values_and_positions(x_L: Tensor, found: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    assert found is not None
    position_RBP, shift_RBP = found
    return (x_L[position_RBP] + shift_RBP).sum(-1), position_RBP[..., -1]


def search(x_L: Tensor, k: int, epsilon: float, *, tile_size: int = 1, shift: float = 0.0) -> Search:
    """A search with tiles and a threshold of its own: the usual one, plus ``shift``. It takes any number of points."""
    x_RL, tiles = x_L.expand(ROWS, -1).contiguous(), Tiles.cut(len(x_L), tile_size)
    tile_max_RG = tiles.maxima(x_RL)
    threshold_R1 = lazy_noise.choose_threshold(x_RL, tile_max_RG, k, epsilon) + shift
    limits = Limits(max_points_per_cell=math.inf, completed_at_once=100_000)
    return Search(x_RL, tiles, tile_max_RG, threshold_R1, epsilon, seeded(0), limits)


def densely(x_L: Tensor, k: int, epsilon: float, *, total: bool = False) -> Draws:
    """The definition."""

    def draw() -> tuple[Tensor, Tensor]:
        noise = torch.randn(ROWS, N_SAMPLES, len(x_L), generator=seeded(1), dtype=x_L.dtype)
        value_RBK, position_RBK = (x_L + epsilon * noise).topk(k)
        return value_RBK.sum(-1) if total else value_RBK[..., -1], position_RBK[..., -1]

    return draw


@pytest.mark.parametrize("kind", ["flat", "spread", "clustered", "sorted"])
@pytest.mark.parametrize("k", [1, 6, 51])
@pytest.mark.parametrize("epsilon", [0.05, 1.0])
def test_law(kind: str, k: int, epsilon: float) -> None:
    x_L = SCORES[kind](1000)
    assert_same_law(lazily(x_L, k, epsilon), densely(x_L, k, epsilon))


@pytest.mark.parametrize("kind", ["equal", "tied"])
@pytest.mark.parametrize("num_classes", [40, 1000])
def test_law_of_ties(kind: str, num_classes: int) -> None:
    x_L = SCORES[kind](num_classes)
    assert_same_law(lazily(x_L, 3, 0.3), densely(x_L, 3, 0.3))


@pytest.mark.parametrize("kind", ["flat", "spread"])
def test_law_of_the_sum(kind: str) -> None:
    x_L = SCORES[kind](500)
    assert_same_law(lazily(x_L, 6, 0.5, total=True), densely(x_L, 6, 0.5, total=True))


def test_law_in_float64() -> None:
    x_L = SCORES["spread"](500).double()
    assert_same_law(lazily(x_L, 6, 0.5), densely(x_L, 6, 0.5))


@pytest.mark.parametrize("size", [1, 2, 7, 32])
def test_law_with_tiles_of_any_size(size: int) -> None:
    # 500 is a multiple of 2 only: the last slot of the tiles overlaps the one before.
    x_L = SCORES["spread"](500) / 2
    with_tiles = search(x_L, 6, 0.7, tile_size=size)
    assert_same_law(
        lambda: values_and_positions(x_L, with_tiles.largest(6, slice(5, 6), N_SAMPLES)), densely(x_L, 6, 0.7)
    )


def test_classes_with_two_slots_count_once() -> None:
    # Of 73 classes in 9 tiles of 9 classes, 8 have a second slot.
    x_L = torch.zeros(73)
    with_tiles = search(x_L, 1, 1.0, tile_size=9)
    assert_same_law(
        lambda: values_and_positions(x_L, with_tiles.largest(1, slice(0, 1), N_SAMPLES)), densely(x_L, 1, 1.0)
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7, 32, 499])
@pytest.mark.parametrize("num_classes", [500, 501, 511])
def test_every_class_has_one_slot_in_the_tiles(num_classes: int, size: int) -> None:
    tiles = Tiles.cut(num_classes, size)
    classes_GT = torch.arange(tiles.count).unsqueeze(1) + tiles.starts
    owned = classes_GT[tiles.owns(torch.arange(tiles.size), classes_GT)]
    assert_close(owned.sort().values, torch.arange(num_classes), rtol=0, atol=0)
    x_RL = normal(3, num_classes)
    assert_close(tiles.maxima(x_RL), x_RL[:, classes_GT].amax(-1), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["flat", "spread", "clustered"])
@pytest.mark.parametrize("by", [-1.0, 1.0, 10.0], ids=["low", "high", "far too high"])
def test_law_does_not_depend_on_the_threshold(kind: str, by: float) -> None:
    epsilon, x_L = 0.4, SCORES[kind](300)
    shifted = search(x_L, 4, epsilon, shift=by * epsilon)
    assert_same_law(
        lambda: values_and_positions(x_L, shifted.largest(4, slice(3, 4), N_SAMPLES)), densely(x_L, 4, epsilon)
    )
    candidates = shifted.draw_candidates(4, N_SAMPLES)
    assert candidates is not None
    short = (candidates.above.topk(4).values[:, -1] <= 0).sum()
    assert by < 10 or short > 0.9 * ROWS * N_SAMPLES
    assert by > 0 or short == 0


@pytest.mark.parametrize("k", [20, 39, 40])
def test_law_of_low_places(k: int) -> None:
    x_L = SCORES["spread"](40) / 2
    assert_same_law(lazily(x_L, k, 0.7), densely(x_L, k, 0.7))


def test_law_with_a_large_common_offset() -> None:
    # At 1e6 float32 is a multiple of 1/16: the scores are exact, and their noise must not be rounded to that.
    x_L = (16 * SCORES["spread"](400)).round() / 16
    near, far, epsilon = x_L.double(), x_L + 1e6, 0.02

    def shifted_back() -> tuple[Tensor, Tensor]:
        far_RL = far.expand(ROWS, -1).contiguous()
        return values_and_positions(near, largest_perturbed(far_RL, 6, slice(5, 6), epsilon, N_SAMPLES, seeded(0)))

    assert_same_law(shifted_back, densely(near, 6, epsilon))


@pytest.mark.parametrize("epsilon", [1e-7, 1e-30])
def test_very_little_noise_finds_the_hard_position(epsilon: float) -> None:
    x_RL = normal(OPERATOR_ROWS, 1000, dtype=torch.float32)
    value, grad = value_and_grad(lambda x: smooth_topk(x, 6, epsilon=epsilon), x_RL)
    want, want_grad = value_and_grad(lambda x: smooth_topk(x, 6, epsilon=0.0), x_RL)
    assert_close(value, want)
    assert_close(grad, want_grad)


@pytest.mark.parametrize("size", [1e10, 1e30, 1e37])
def test_huge_scores_have_finite_values(size: float) -> None:
    x_RL = size * normal(OPERATOR_ROWS, 1000, dtype=torch.float32).clamp(-1, 1)
    x_RL[:, :10] = torch.linspace(0.1, 1, 10) * size
    got = smooth_topk(x_RL, 3, epsilon=1.0)
    assert_close(got, smooth_topk(x_RL, 3, epsilon=0.0))


@pytest.mark.parametrize("ruled_out_at", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("alive", [8, 12, 40])
def test_law_of_the_few_that_are_not_ruled_out(alive: int, ruled_out_at: float) -> None:
    x_L = torch.full((1000,), ruled_out_at)
    x_L[:alive] = SCORES["spread"](alive)

    def draw() -> tuple[Tensor, Tensor]:
        place_RB1, shift_RB1 = find_places(x_L.repeat(ROWS, 1), 6, slice(5, 6), 0.5, N_SAMPLES, None, seeded(0))
        return (x_L[place_RB1] + shift_RB1).squeeze(-1), place_RB1.squeeze(-1)

    assert_same_law(draw, densely(x_L, 6, 0.5))


def test_a_row_of_few_classes_costs_the_others_no_memory() -> None:
    """Hundreds of equal classes near the threshold would all be hot, and every row would need room for as many."""
    limits = Limits(max_hot=20_000)
    x_RL = normal(10, 1000, dtype=torch.float32)
    assert largest_perturbed(x_RL, 6, slice(5, 6), 0.5, 10, seeded(0), limits) is not None
    x_RL[0, 3:] = -1e4
    assert largest_perturbed(x_RL, 6, slice(5, 6), 0.5, 10, seeded(0), limits) is None


def test_bad_rows_leave_the_others_alone() -> None:
    x_RL = normal(5, 1000, dtype=torch.float32)
    x_RL[0, 7], x_RL[1, 7], x_RL[2] = math.nan, math.inf, -math.inf
    got = smooth_topk(x_RL, 6, epsilon=0.5, n_samples=110)
    assert got[0].isnan()
    assert got[1].isfinite()
    assert got[2] == -math.inf
    want = smooth_topk(x_RL[3:], 6, epsilon=0.5, n_samples=110)
    assert_close(got[3:], want, rtol=0, atol=0.3)


def test_law_of_many_draws_in_parts() -> None:
    # Parts of 4 and 2 draws.
    limits = Limits(candidates_at_once=4 * math.ceil(ROWS * lazy_noise.expected_candidates(6)))
    x_L = SCORES["spread"](500)
    assert_same_law(lazily(x_L, 6, 0.5, limits=limits), densely(x_L, 6, 0.5))


def test_where_many_classes_compete_all_noise_is_drawn() -> None:
    x_RL = torch.zeros(3, 150)
    limits = Limits(min_cells=0)
    assert lazy_noise.supports(x_RL, 6, 4, limits)
    assert largest_perturbed(x_RL, 6, slice(5, 6), 1.0, 4, seeded(0), limits) is None
    _, shift_RBP = find_places(x_RL, 6, slice(5, 6), 1.0, 4, None, None, limits)
    assert shift_RBP.isfinite().all()


@pytest.mark.parametrize(
    "draw",
    [
        lambda x_RL: smooth_topk(x_RL, 6, epsilon=1.0),
        lambda x_RL: RunningTopK(len(x_RL), 5, 6, epsilon=1.0, dtype=x_RL.dtype, device=x_RL.device).add(x_RL, 0),
    ],
    ids=["rows", "chunks"],
)
def test_what_is_drawn_after_depends_on_no_score(draw: Callable[[Tensor], Any]) -> None:
    """Ranks with one seed see other scores, and shuffle alike afterwards."""
    after = []
    # As many rows as it takes to draw lazily.
    for x_RL in (SCORES["spread"](500).expand(210, -1), torch.zeros(700, 150), torch.full((210, 500), -math.inf)):
        assert lazy_noise.supports(x_RL, 6, 5)
        torch.manual_seed(7)
        draw(x_RL.float())
        after.append(torch.randperm(8).tolist())
    assert after[0] == after[1] == after[2]


def test_any_shape_and_layout() -> None:
    x = normal(10, 1000, 3, 4, dtype=torch.float32)
    got = value_and_grad(lambda x: smooth_topk(x, 6, epsilon=0.3, dim=1, generator=seeded(0)), x)
    rows = x.movedim(1, -1).reshape(-1, 1000)
    want = value_and_grad(lambda x: smooth_topk(x, 6, epsilon=0.3, generator=seeded(0)), rows)
    assert_close(got[0].flatten(), want[0], rtol=0, atol=0)
    assert_close(got[1].movedim(1, -1).reshape(-1, 1000), want[1], rtol=0, atol=0)


@pytest.mark.parametrize("k", [1, 6])
def test_gradient_is_a_share_of_each_draw_at_its_positions(k: int) -> None:
    rows = 140
    x_RL = normal(rows, 1000, dtype=torch.float32)
    _, grad = value_and_grad(lambda x: smooth_topk(x, k, epsilon=1.0, n_samples=4, generator=seeded(0)), x_RL)
    assert_close(grad.sum(-1), torch.ones(rows))
    assert_close(grad * 4, (grad * 4).round())
    _, grad = value_and_grad(lambda x: smooth_topk_sum(x, k, epsilon=1.0, n_samples=4, generator=seeded(0)), x_RL)
    assert_close(grad.sum(-1), torch.full((rows,), float(k)))
    assert grad.max() <= 1


def test_draws_are_repeatable_and_the_same_at_every_call_of_the_operator() -> None:
    x_RL = normal(OPERATOR_ROWS, 1000, dtype=torch.float32)
    first = smooth_topk(x_RL, 6, epsilon=0.3, generator=seeded(3))
    assert_close(smooth_topk(x_RL, 6, epsilon=0.3, generator=seeded(3)), first, rtol=0, atol=0)
    assert (smooth_topk(x_RL, 6, epsilon=0.3, generator=seeded(4)) != first).all()
    torch.manual_seed(3)
    by_default, again = (smooth_topk(x_RL, 6, epsilon=0.3) for _ in range(2))
    assert_close(by_default, first, rtol=0, atol=0)
    assert (again != by_default).all()


def test_ranks_draw_their_own_and_agree_on_what_is_drawn_after(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, after = [], []
    for rank in range(3):
        become_rank(rank, monkeypatch)
        torch.manual_seed(0)
        # Ranks have other scores, and so need other numbers of draws.
        seen.append(smooth_topk(normal(OPERATOR_ROWS, 1000, dtype=torch.float32), 6, epsilon=0.3))
        smooth_topk((1 + rank) * normal(OPERATOR_ROWS, 1000, dtype=torch.float32), 6, epsilon=0.3)
        after.append(torch.rand(()))
    assert (seen[0] != seen[1]).all()
    assert (seen[1] != seen[2]).all()
    assert after[0] == after[1] == after[2]


def test_ranks_with_equal_generators_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    x_RL = normal(OPERATOR_ROWS, 1000, dtype=torch.float32)
    seen = []
    for rank in range(2):
        become_rank(rank, monkeypatch)
        seen.append(smooth_topk(x_RL, 6, epsilon=0.3, generator=seeded(3)))
    assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("kind", ["flat", "spread", "equal"])
def test_little_is_drawn(kind: str) -> None:
    rows, num_classes, n_samples = 4, 100_000, 5
    x_RL = SCORES[kind](num_classes).expand(rows, -1)
    with RandomNumbers() as random:
        smooth_topk(x_RL, 6, epsilon=0.2, n_samples=n_samples)
    assert 0 < random.count < 0.005 * rows * num_classes * n_samples
