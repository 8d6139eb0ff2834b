"""The law of the noise that the kernels see: independent standard normals.

``test_sample.py`` shows that the kernels compute the plain loss on this noise. The seeds are fixed, so these tests
always pass or always fail. Over the choice of seeds, each would fail a correct law once in 10,000 times
(``tests.support.laws.LEVEL``).
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from tests.support import noise_field
from tests.support.laws import LEVEL, assert_same_law

TILES = 1500


@pytest.fixture(scope="module")
def tiles() -> NDArray[np.float64]:
    return noise_field.tile_normals(TILES * noise_field.T, seed=42, row=3, draw=1).reshape(TILES, noise_field.T)


def assert_law(sample: NDArray[np.float64], law: str, *parameters: float) -> None:
    p_value = stats.kstest(sample.ravel(), law, parameters).pvalue
    assert p_value > LEVEL, f"not {law}: p = {p_value:.1e}"


def test_each_normal_of_a_tile_is_standard(tiles: NDArray[np.float64]) -> None:
    assert_law(tiles, "norm")


def test_the_normals_of_a_tile_are_independent(tiles: NDArray[np.float64]) -> None:
    # If they were dependent, their sums and the sums of their squares would vary too much or too little.
    assert_law(tiles.sum(1) / np.sqrt(noise_field.T), "norm")
    assert_law((tiles**2).sum(1), "chi2", noise_field.T)


def test_the_largest_may_be_anywhere(tiles: NDArray[np.float64]) -> None:
    counts = np.bincount(tiles.argmax(1), minlength=noise_field.T)
    assert stats.chisquare(counts).pvalue > LEVEL


def test_own_normals_are_standard() -> None:
    assert_law(noise_field.own_normals(50_000, seed=7, row=1, draw=0), "norm")


@pytest.mark.parametrize("change", [{"seed": 43}, {"seed": 42 + 2**39}, {"row": 4}, {"draw": 2}])
def test_seeds_rows_and_draws_have_noise_of_their_own(change: dict[str, int]) -> None:
    settings = {"seed": 42, "row": 3, "draw": 1}
    for normals in (noise_field.own_normals, noise_field.tile_normals):
        one, other = normals(3200, **settings), normals(3200, **settings | change)
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(3200)


@pytest.mark.parametrize("k", [1, 4])
def test_the_kth_largest_has_the_law_of_dense_draws(k: int) -> None:
    """Value and class, hot ones and cold ones together."""
    rows, draws, epsilon, level = 300, 4, 0.5, 1.4
    scores = np.random.default_rng(0).normal(size=90) * 0.7

    def kth(noise: Tensor) -> tuple[Tensor, Tensor]:
        values, classes = (torch.from_numpy(scores).unsqueeze(-1) + epsilon * noise).topk(k, dim=1)
        return values[:, -1], classes[:, -1]

    def lazily() -> tuple[Tensor, Tensor]:
        fields = [noise_field.noise(scores, (level, -2 * epsilon), 99, row, draws) for row in range(rows)]
        return kth(torch.from_numpy(np.stack(fields)))

    def densely() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        return kth(torch.randn(20 * rows, len(scores), draws, generator=generator, dtype=torch.float64))

    assert_same_law(lazily, densely)
