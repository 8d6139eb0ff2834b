"""The paper's figures: each is drawn from the numbers in its file, and these obey the laws of the losses."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from shortlist.functional import calibrated_topk_hinge, imbalanced_noised_topk_hinge, noised_topk_hinge, topk_error
from shortlist.ops.exact import exact_topk
from shortlist.program.cli import research
from shortlist.program.reproduce.figures import FIGURES, from_results, loss_maps
from shortlist.program.reproduce.figures.gradient_sparsity import nonzero_coordinates
from shortlist.program.reproduce.figures.style import Columns, publish, read_columns, write_columns
from shortlist.program.reproduce.figures.triangle import (
    BALANCED,
    LABEL,
    LANDSCAPES,
    MIRROR,
    Landscape,
    places,
    repeated,
    rescaled,
    triangle_of,
    with_margin,
)
from shortlist.program.reproduce.registry import COLUMN_NAMES, EXPERIMENTS
from tests.support.reproducing import Place, made_up

GRID = triangle_of(steps=12)
QUICK = loss_maps.Effort(steps=12, repetitions=20)

every_k = pytest.mark.parametrize("k", [1, 2])
every_landscape = pytest.mark.parametrize("landscape", LANDSCAPES, ids=lambda landscape: landscape.column)


def landscape(name: str) -> Landscape:
    (found,) = (landscape for landscape in LANDSCAPES if landscape.column == name)
    return found


def span(values: Tensor) -> tuple[float, float]:
    return values.min().item(), values.max().item()


def mirrored_points() -> Tensor:
    """For each point of the grid, the one with the scores of the wrong classes exchanged."""
    place = {tuple(scores): index for index, scores in enumerate(GRID.scores_PL.tolist())}
    return torch.tensor([place[tuple(scores)] for scores in GRID.scores_PL[:, MIRROR].tolist()])


# The files


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_written_as_svg_png_and_numbers(
    name: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    research.reproduce([name, "--scale", "smoke", *place.command()])
    folder = place.results / "smoke"
    svg, png, numbers = written = [folder / f"{name}.{kind}" for kind in ("svg", "png", "csv")]
    assert capsys.readouterr().out.split() == list(map(str, written))
    assert sorted(folder.iterdir()) == sorted(written)
    assert "<svg" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")
    assert all(column.isfinite().all() for column in read_columns(numbers).values())


def test_the_same_call_gives_the_same_files(tmp_path: Path) -> None:
    first, again = (FIGURES["gradient-sparsity-given-scores"](tmp_path / run, "smoke") for run in ("first", "again"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


def test_the_file_rebuilds_the_arrays(tmp_path: Path) -> None:
    columns = loss_maps.level_sets(2, QUICK)
    write_columns(tmp_path / "numbers.csv", columns)
    again = read_columns(tmp_path / "numbers.csv")
    assert list(again) == list(columns)
    for name, column in columns.items():
        torch.testing.assert_close(again[name], column.double(), rtol=1e-5, atol=0)


def test_figures_are_painted_from_the_file_and_not_from_memory(tmp_path: Path) -> None:
    painted = []

    def paint(columns: Columns) -> Figure:
        painted.append(columns)
        return Figure()

    *_, numbers = publish(tmp_path, "third", {"third": torch.tensor([1 / 3], dtype=torch.float64)}, paint)
    assert numbers.read_text() == "third\n0.333333\n"
    assert painted[0]["third"].item() == 0.333333


# The triangle


def test_the_scores_fill_twice_the_simplex() -> None:
    assert (GRID.scores_PL >= 0).all()
    torch.testing.assert_close(GRID.scores_PL.sum(1), torch.full((91,), 2.0))
    assert len(GRID.scores_PL.unique(dim=0)) == 13 * 14 // 2


def test_the_true_label_is_at_the_top() -> None:
    highest = places(GRID.scores_PL)[:, 1].argmax()
    assert GRID.scores_PL[highest].tolist() == [0, 0, 2]
    assert (GRID.target_P == LABEL).all()


def test_the_cells_tile_the_triangle() -> None:
    a, b, c = places(GRID.scores_PL.double())[GRID.cells_T3].unbind(1)
    areas = ((b - a)[:, 0] * (c - a)[:, 1] - (b - a)[:, 1] * (c - a)[:, 0]) / 2
    torch.testing.assert_close(
        areas, torch.full((144,), math.sqrt(3) / 4 / 144, dtype=torch.float64), atol=1e-7, rtol=0
    )


@pytest.mark.parametrize("steps", [1, 2, 12, 120])
def test_the_mesh_is_known_from_the_file_alone(steps: int) -> None:
    triangle = triangle_of(steps)
    assert loss_maps.mesh_of(loss_maps.score_columns(triangle)).triangles.tolist() == triangle.cells_T3.tolist()


def test_a_constant_is_rescaled_to_nothing() -> None:
    assert rescaled(torch.full((3,), 7.0)).tolist() == [0, 0, 0]


# The ten losses


@every_k
def test_each_loss_fills_the_unit_interval(k: int) -> None:
    columns = loss_maps.level_sets(k, QUICK)
    assert list(columns)[3:] == [landscape.column for landscape in LANDSCAPES]
    for landscape in LANDSCAPES:
        assert span(columns[landscape.column]) == (0, 1)


@every_k
@every_landscape
def test_exchanging_the_wrong_classes_changes_nothing(landscape: Landscape, k: int) -> None:
    losses_P = landscape.losses(GRID, k, 20)
    torch.testing.assert_close(losses_P[mirrored_points()], losses_P, rtol=1e-5, atol=1e-6)


@every_k
@every_landscape
def test_no_loss_is_lower_than_with_all_of_the_score_on_the_label(landscape: Landscape, k: int) -> None:
    losses_P = landscape.losses(GRID, k, 20)
    assert losses_P[-1] == losses_P.min()


@every_k
def test_the_error_is_one_where_k_scores_exceed_the_labels(k: int) -> None:
    errors_P = landscape("top-K error").losses(GRID, k, 1)
    better_P = (GRID.scores_PL > GRID.scores_PL[:, [LABEL]]).sum(1)
    assert set(errors_P.tolist()) == {0, 1}
    assert torch.equal(errors_P == 1, better_P >= k)


def test_the_calibrated_hinge_is_flat_where_the_label_is_last() -> None:
    last_P = landscape("top-K error").losses(GRID, 2, 1) == 1
    losses_P = landscape("calibrated hinge").losses(GRID, 2, 1)
    torch.testing.assert_close(losses_P[last_P], torch.ones(int(last_P.sum())))
    assert (losses_P[~last_P] < 1 + 1e-6).all()


def test_the_plain_and_the_convexified_hinge_agree_for_one_suggestion() -> None:
    plain_P, convex_P = (landscape(name).losses(GRID, 1, 1) for name in ("hinge", "convexified hinge"))
    torch.testing.assert_close(plain_P, convex_P)


# The noised loss


@every_k
def test_without_noise_it_is_the_calibrated_hinge(k: int) -> None:
    hard_P = calibrated_topk_hinge(GRID.scores_PL, GRID.target_P, k, reduction="none")
    noised_RP = repeated(BALANCED, GRID, k, epsilon=1e-6, n_samples=3, repetitions=2)
    torch.testing.assert_close(noised_RP, hard_P.expand(2, -1), rtol=0, atol=1e-5)


@every_k
def test_a_margin_of_one_gives_the_balanced_loss(k: int) -> None:
    balanced_RP, imbalanced_RP = (
        repeated(loss, GRID, k, epsilon=0.3, n_samples=3, repetitions=4) for loss in (BALANCED, with_margin(1.0))
    )
    torch.testing.assert_close(balanced_RP, imbalanced_RP)


@every_k
def test_the_mean_over_repetitions_is_the_expectation(k: int) -> None:
    """With a margin of 5 the loss is always active, so its mean is the limit of infinitely many draws."""
    losses_RP = repeated(with_margin(5.0), GRID, k, epsilon=1.0, n_samples=30, repetitions=100).double()
    exact_P = imbalanced_noised_topk_hinge(
        GRID.scores_PL, GRID.target_P, [1, 1, 1], k, epsilon=1.0, n_samples=math.inf, max_margin=5.0, scale=1.0,
        reduction="none",
    )  # fmt: skip
    # Repetitions come in mirrored pairs, so only half of them are independent.
    standard_error_P = losses_RP.std(0) / math.sqrt(50)
    assert ((losses_RP.mean(0) - exact_P).abs() < 4 * standard_error_P).all()


@every_k
def test_more_draws_mean_less_spread_between_repetitions(k: int) -> None:
    columns = loss_maps.impact_of_b(QUICK)
    spreads = [columns[f"K={k} B={draws} spread"].mean() for draws in loss_maps.DRAWS]
    assert spreads == sorted(spreads, reverse=True)
    few_RP, many_RP = (
        repeated(with_margin(5.0), GRID, k, epsilon=1.0, n_samples=draws, repetitions=400) for draws in (4, 64)
    )
    assert few_RP.std(0).mean() / many_RP.std(0).mean() == pytest.approx(4, rel=0.2)


def test_single_repetitions_keep_the_scale_of_their_mean() -> None:
    columns = loss_maps.impact_of_b(QUICK)
    losses_RP = repeated(BALANCED, GRID, 1, epsilon=1.0, n_samples=5, repetitions=QUICK.repetitions).double()
    low, high = losses_RP.mean(0).aminmax()
    torch.testing.assert_close(columns["K=1 B=5 repetition 0"] * (high - low) + low, losses_RP[0])


def test_the_epsilon_panels_fill_the_unit_interval_or_are_nothing_at_all() -> None:
    columns = loss_maps.impact_of_epsilon(QUICK)
    nothing = {name for name, column in columns.items() if (column == 0).all()}
    assert nothing == {"K=2 epsilon=10", "K=2 epsilon=100"}
    assert all(span(columns[name]) == (0, 1) for name in list(columns)[3:] if name not in nothing)


@pytest.mark.parametrize("epsilon", [10.0, 100.0])
def test_much_noise_kills_the_loss_if_only_the_lowest_score_is_an_error(epsilon: float) -> None:
    exact_P = noised_topk_hinge(GRID.scores_PL, GRID.target_P, 2, epsilon=epsilon, n_samples=math.inf, reduction="none")
    assert topk_error(GRID.scores_PL, GRID.target_P, 2) > 0
    assert (exact_P == 0).all()


def test_much_noise_makes_the_levels_straight() -> None:
    losses_P = loss_maps.impact_of_epsilon(QUICK)["K=1 epsilon=100"]
    for height in GRID.scores_PL[:, LABEL].unique():
        row = losses_P[GRID.scores_PL[:, LABEL] == height]
        assert row.max() - row.min() < 0.05


# The gradient


@pytest.mark.parametrize("epsilon", [1e-3, 0.05, 1.0])
def test_the_number_of_nonzero_coordinates_is_what_the_exact_gradient_predicts(epsilon: float) -> None:
    """Class i has a gradient if it is the (K+1)-th in some draw, the label unless it is so in all."""
    generator = torch.Generator().manual_seed(1)
    scores_NL = 0.1 * torch.randn(
        400, 20, generator=generator, dtype=torch.float64
    )  # so close that the loss is always active
    target_N = torch.randint(20, (400,), generator=generator)
    leaf_NL = scores_NL.clone().requires_grad_()
    (chance_NL,) = torch.autograd.grad(exact_topk(leaf_NL, 6, epsilon=epsilon).sum(), leaf_NL)
    is_nonzero_NL = 1 - (1 - chance_NL) ** 3
    is_nonzero_NL.scatter_(1, target_N[:, None], 1 - chance_NL.gather(1, target_N[:, None]) ** 3)
    expected = is_nonzero_NL.sum(1).mean().item()
    counted = nonzero_coordinates(scores_NL, target_N, 5, epsilon=epsilon, n_samples=3, generator=generator)
    assert counted.item() == pytest.approx(expected, abs=4 / math.sqrt(400))
    assert counted <= 4


# From training


@pytest.mark.parametrize("name", from_results.PAINTERS)
def test_what_the_paper_draws_is_drawn_from_the_longest_runs(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    short = [made_up(50.0, row=cell.row, column=cell.column, epochs=2) for cell in experiment.cells]
    long = [replace(result, value=place, epochs=4) for place, result in enumerate(short, 1)]
    assert from_results.draw(name, [], tmp_path) == []
    files = from_results.draw(name, long, tmp_path)
    alone = [path.read_bytes() for path in files]
    from_results.draw(name, [*short, *long], tmp_path)
    assert [path.read_bytes() for path in files] == alone
    outdated = [replace(result, value=0.0, config="bbbbbbbbbb", date="2025-01-01T00:00:00+00:00") for result in long]
    from_results.draw(name, [*outdated, *long], tmp_path)
    assert [path.read_bytes() for path in files] == alone, "configurations are not mixed"
    drawn = files[0].read_text()
    seeds = [replace(result, value=result.value + off, seed=seed) for result in long for seed, off in ((0, 1), (1, -1))]
    from_results.draw(name, seeds, tmp_path)
    assert files[0].read_text() == drawn, "a point is the mean over the seeds"
    assert all(COLUMN_NAMES[column] in drawn for column in experiment.columns)


def test_the_points_of_the_sparsity_bear_their_values(tmp_path: Path) -> None:
    cells = EXPERIMENTS["gradient-sparsity"].cells
    results = [made_up(10.5 + place, row=cell.row, column=cell.column) for place, cell in enumerate(cells)]
    drawn = from_results.draw("gradient-sparsity", results, tmp_path)[0].read_text()
    places = {}
    for result in results:
        if result.column == "noised":
            (places[result.row],) = re.findall(rf'x="([\d.]+)"[^>]*>{result.value}</text>', drawn)
    in_order = [float(places[row]) for row in sorted(places, key=float)]
    assert in_order == sorted(set(in_order)), "from left to right, without overlaps"
