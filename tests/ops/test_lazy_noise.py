"""Noise that is almost never drawn has the law of noise that is drawn.

False alarms: each call of ``assert_same_law`` makes three tests at level 1e-4. The seeds are fixed, so that a failure
stays; over the choice of seeds, a right law would fail one of the 40 or so calls below about once in 80.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shortlist import smooth_topk, smooth_topk_sum
from shortlist.heads.running_topk import Standings
from shortlist.ops import lazy_noise as _lazy
from shortlist.ops import random as _noise
from shortlist.ops.smoothing import find_places
from tests.support.drawing import normal, value_and_grad
from tests.support.laws import Draws, assert_same_law

ROWS, N_SAMPLES = 500, 6


@pytest.fixture(autouse=True)
def lazily_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lazy, "_FEWEST_CELLS", 0)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clusters(num_classes: int) -> Tensor:
    """A few good classes, a group that comes next, and a crowd far below."""
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


def lazily(x_L: Tensor, k: int, epsilon: float, *, total: bool = False, seed: int = 0) -> Draws:
    """Values and positions of the k-th largest, or totals of the k largest with the position of the last."""

    def draw() -> tuple[Tensor, Tensor]:
        x_RL = x_L.expand(ROWS, -1).contiguous()
        places = slice(0 if total else k - 1, k)
        found = _lazy.largest_perturbed(x_RL, k, places, epsilon, N_SAMPLES, seeded(seed))
        assert found is not None
        position_RBP, shift_RBP = found
        return (x_L[position_RBP] + shift_RBP).sum(-1), position_RBP[..., -1]

    return draw


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
def test_law_with_tiles_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # 500 is a multiple of 2 only: the last slot of the tiles overlaps the one before.
    monkeypatch.setattr(_lazy, "tile_size", lambda *_: size)
    monkeypatch.setattr(_lazy, "_MOST_POINTS_A_CELL", math.inf)
    x_L = SCORES["spread"](500) / 2
    assert_same_law(lazily(x_L, 6, 0.7), densely(x_L, 6, 0.7))


def test_classes_with_two_slots_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 73 classes in tiles of 9, which are 9 tiles, 8 have a second slot.
    monkeypatch.setattr(_lazy, "tile_size", lambda *_: 9)
    monkeypatch.setattr(_lazy, "_MOST_POINTS_A_CELL", math.inf)
    x_L = torch.zeros(73)
    assert_same_law(lazily(x_L, 1, 1.0), densely(x_L, 1, 1.0))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 32, 499])
@pytest.mark.parametrize("num_classes", [500, 501, 511])
def test_every_class_has_one_slot_in_the_tiles(num_classes: int, size: int) -> None:
    tiles = _lazy.Tiles.cut(num_classes, size)
    classes_GT = torch.arange(tiles.count).unsqueeze(1) + tiles.starts
    owned = classes_GT[tiles.owns(torch.arange(tiles.size), classes_GT)]
    assert_close(owned.sort().values, torch.arange(num_classes), rtol=0, atol=0)
    x_RL = normal(3, num_classes)
    assert_close(tiles.maxima(x_RL), x_RL[:, classes_GT].amax(-1), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["flat", "spread", "clustered"])
@pytest.mark.parametrize("by", [-1.0, 1.0, 10.0], ids=["low", "high", "far too high"])
def test_law_does_not_depend_on_the_threshold(kind: str, by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    epsilon, choose, short = 0.4, _lazy.choose_threshold, []
    monkeypatch.setattr(_lazy, "choose_threshold", lambda *args: choose(*args) + by * epsilon)
    not_passing = _lazy._not_passing

    def counted(score_above_FL: Tensor, *args: object) -> Tensor:
        short.append(len(score_above_FL))
        return not_passing(score_above_FL, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(_lazy, "_not_passing", counted)
    monkeypatch.setattr(_lazy, "_DRAWN_AT_ONCE", 100_000)
    x_L = SCORES[kind](300)
    assert_same_law(lazily(x_L, 4, epsilon), densely(x_L, 4, epsilon))
    assert by < 10 or sum(short) > 0.9 * ROWS * N_SAMPLES
    assert by > 0 or sum(short) == 0


@pytest.mark.parametrize("k", [20, 39, 40])
def test_law_of_low_places(k: int) -> None:
    x_L = SCORES["spread"](40) / 2
    assert_same_law(lazily(x_L, k, 0.7), densely(x_L, k, 0.7))


def test_law_with_a_large_common_offset() -> None:
    # At 1e6 float32 is a multiple of 1/16: the scores are what they are, and their noise must not be rounded to that.
    x_L = (16 * SCORES["spread"](400)).round() / 16
    near, far, epsilon = x_L.double(), x_L + 1e6, 0.02

    def shifted_back() -> tuple[Tensor, Tensor]:
        found = _lazy.largest_perturbed(
            far.expand(ROWS, -1).contiguous(), 6, slice(5, 6), epsilon, N_SAMPLES, seeded(0)
        )
        assert found is not None
        position_RB, shift_RB = (part.squeeze(-1) for part in found)
        return near[position_RB] + shift_RB, position_RB

    assert_same_law(shifted_back, densely(near, 6, epsilon))


@pytest.mark.parametrize("epsilon", [1e-7, 1e-30])
def test_very_little_noise_finds_the_hard_position(epsilon: float) -> None:
    x_RL = normal(20, 1000, dtype=torch.float32)
    value, grad = value_and_grad(lambda x: smooth_topk(x, 6, epsilon=epsilon), x_RL)
    want, want_grad = value_and_grad(lambda x: smooth_topk(x, 6, epsilon=0.0), x_RL)
    assert_close(value, want)
    assert_close(grad, want_grad)


@pytest.mark.parametrize("size", [1e10, 1e30, 1e37])
def test_huge_scores_have_finite_values(size: float) -> None:
    x_RL = size * normal(4, 1000, dtype=torch.float32).clamp(-1, 1)
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


def test_a_row_of_few_classes_costs_the_others_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of equal classes behind a threshold would all be hot, and every row have room for as many."""
    monkeypatch.setattr(_lazy, "_MOST_HOT", 20_000)
    x_RL = normal(10, 1000, dtype=torch.float32)
    drawn = [_lazy.largest_perturbed(x_RL, 6, slice(5, 6), 0.5, 10, seeded(0))]
    x_RL[0, 3:] = -1e4
    drawn.append(_lazy.largest_perturbed(x_RL, 6, slice(5, 6), 0.5, 10, seeded(0)))
    assert [each is None for each in drawn] == [False, True]


def test_bad_rows_leave_the_others_alone() -> None:
    x_RL = normal(5, 1000, dtype=torch.float32)
    x_RL[0, 7], x_RL[1, 7], x_RL[2] = math.nan, math.inf, -math.inf
    got = smooth_topk(x_RL, 6, epsilon=0.5, n_samples=50)
    assert got[0].isnan()
    assert got[1].isfinite()
    assert got[2] == -math.inf
    want = smooth_topk(x_RL[3:], 6, epsilon=0.5, n_samples=50)
    assert_close(got[3:], want, rtol=0, atol=0.3)


def test_law_of_many_draws_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Parts of 4 and 2 draws.
    monkeypatch.setattr(_lazy, "_CANDIDATES_AT_ONCE", 4 * math.ceil(ROWS * _lazy.expected_candidates(6)))
    x_L = SCORES["spread"](500)
    assert_same_law(lazily(x_L, 6, 0.5), densely(x_L, 6, 0.5))


def test_where_many_classes_compete_all_noise_is_drawn() -> None:
    x_RL = torch.zeros(3, 150)
    assert _lazy.can_do(x_RL, 6, 4)
    assert _lazy.largest_perturbed(x_RL, 6, slice(5, 6), 1.0, 4, seeded(0)) is None
    assert smooth_topk(x_RL, 6, epsilon=1.0).isfinite().all()


@pytest.mark.parametrize(
    "draw",
    [
        lambda x_RL: smooth_topk(x_RL, 6, epsilon=1.0),
        lambda x_RL: Standings(3, 5, 6, epsilon=1.0, dtype=x_RL.dtype, device=x_RL.device).add(x_RL, 0),
    ],
    ids=["rows", "chunks"],
)
def test_what_is_drawn_after_depends_on_no_score(draw: Callable[[Tensor], Any]) -> None:
    """Ranks with one seed see other scores, and shuffle alike afterwards."""
    after = []
    for x_RL in (SCORES["spread"](500).expand(3, -1), torch.zeros(3, 150), torch.full((3, 500), -math.inf)):
        torch.manual_seed(7)
        draw(x_RL.float())
        after.append(torch.randperm(8).tolist())
    assert after[0] == after[1] == after[2]


def test_any_shape_and_layout() -> None:
    x = normal(2, 1000, 3, 4, dtype=torch.float32)
    got = value_and_grad(lambda x: smooth_topk(x, 6, epsilon=0.3, dim=1, generator=seeded(0)), x)
    rows = x.movedim(1, -1).reshape(-1, 1000)
    want = value_and_grad(lambda x: smooth_topk(x, 6, epsilon=0.3, generator=seeded(0)), rows)
    assert_close(got[0].flatten(), want[0], rtol=0, atol=0)
    assert_close(got[1].movedim(1, -1).reshape(-1, 1000), want[1], rtol=0, atol=0)


@pytest.mark.parametrize("k", [1, 6])
def test_gradient_is_a_share_of_each_draw_at_its_positions(k: int) -> None:
    x_RL = normal(50, 1000, dtype=torch.float32)
    _, grad = value_and_grad(lambda x: smooth_topk(x, k, epsilon=1.0, n_samples=4, generator=seeded(0)), x_RL)
    assert_close(grad.sum(-1), torch.ones(50))
    assert_close(grad * 4, (grad * 4).round())
    _, grad = value_and_grad(lambda x: smooth_topk_sum(x, k, epsilon=1.0, n_samples=4, generator=seeded(0)), x_RL)
    assert_close(grad.sum(-1), torch.full((50,), float(k)))
    assert grad.max() <= 1


def test_draws_are_repeatable_and_the_same_at_every_call_of_the_operator() -> None:
    x_RL = normal(5, 1000, dtype=torch.float32)
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
        monkeypatch.setattr(_noise, "_rank", lambda rank=rank: rank)
        torch.manual_seed(0)
        # Ranks have other scores, and so need other numbers of draws.
        seen.append(smooth_topk(normal(5, 1000, dtype=torch.float32), 6, epsilon=0.3))
        smooth_topk((1 + rank) * normal(5, 1000, dtype=torch.float32), 6, epsilon=0.3)
        after.append(torch.rand(()))
    assert (seen[0] != seen[1]).all()
    assert (seen[1] != seen[2]).all()
    assert after[0] == after[1] == after[2]


def test_ranks_with_equal_generators_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    x_RL = normal(5, 1000, dtype=torch.float32)
    seen = []
    for rank in range(2):
        monkeypatch.setattr(_noise, "_rank", lambda rank=rank: rank)
        seen.append(smooth_topk(x_RL, 6, epsilon=0.3, generator=seeded(3)))
    assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("kind", ["flat", "spread", "equal"])
def test_little_is_drawn(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, num_classes, n_samples = 4, 100_000, 5
    drawn, process = [], _lazy._poisson_process

    def counted(end_D: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        points = process(end_D, generator)
        drawn.append(len(points[0]))
        return points

    monkeypatch.setattr(_lazy, "_poisson_process", counted)
    x_RL = SCORES[kind](num_classes).expand(rows, -1)
    smooth_topk(x_RL, 6, epsilon=0.2, n_samples=n_samples)
    assert sum(drawn) < 0.005 * rows * num_classes * n_samples
