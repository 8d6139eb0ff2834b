"""Which settings a search tries."""

from dataclasses import replace
from typing import Any

import pytest

from shortlist import ShortlistError
from shortlist.program import recipes
from shortlist.program.config import RunConfig, changed
from shortlist.program.losses import LOSSES, CrossEntropyConfig, NoisedTopKHingeConfig, Range
from shortlist.program.tuning.space import grid_points, search_axes


def test_the_papers_grids_are_these() -> None:
    margins = (0.2, 0.3, 0.4, 0.5)
    assert {
        "focal": {"gamma": (0.5, 1.0, 2.0, 5.0)},
        "smooth_topk_hinge": {"tau": (0.1, 1.0)},
        "ldam": {"max_margin": margins},
        "imbalanced_noised_topk_hinge": {"max_margin": margins, "epsilon": (0.01, 0.05, 0.1)},
    } == {name: loss.paper_grid for name, loss in LOSSES.items() if loss.paper_grid}
    assert len(grid_points(search_axes(recipes.build("plantnet_table5_imbalanced_k5")))) == 12


def test_given_values_join_or_replace_the_grid_and_span_what_is_sampled() -> None:
    ldam = recipes.build("plantnet_table5_ldam_k5")
    assert search_axes(ldam, search=["loss.max-margin=0.1", "optim.lr=0.01,0.1"]) == {
        "loss.max_margin": (0.1,),
        "optim.lr": (0.01, 0.1),
    }
    assert search_axes(ldam, "given", ["loss.scale=30,50"]) == {"loss.scale": (30, 50)}
    heads = search_axes(ldam, "given", ["optim.head-lr-factor=1,10"])
    assert [changed(ldam, point).optim.head_lr_factor for point in grid_points(heads)] == [1, 10]
    assert search_axes(ldam, "none", ["loss.scale=40", "optim.lr=0.1,0.01,0.03"]) == {
        "loss.max_margin": Range(0.0, 0.8),
        "loss.scale": (40,),
        "optim.lr": Range(0.01, 0.1, log=True),
    }
    from_zero = search_axes(ldam, "none", ["optim.weight_decay=0,0.1"])["optim.weight_decay"]
    assert from_zero == Range(0.0, 0.1), "zero has no logarithm"
    without_grid = recipes.build("plantnet_table5_noised_k5")
    assert search_axes(without_grid, search=["optim.lr=0.05,0.2"]) == {"optim.lr": (0.05, 0.2)}, "only these values"
    assert search_axes(without_grid) == {"loss.epsilon": LOSSES["noised_topk_hinge"].ranges["epsilon"]}


def test_what_was_set_is_not_searched_unless_asked_for() -> None:
    both = recipes.build("plantnet_table5_imbalanced_k5")
    epsilons = LOSSES["imbalanced_noised_topk_hinge"].paper_grid["epsilon"]
    with_margin = changed(both, {"loss.max_margin": 0.7})
    assert search_axes(with_margin) == search_axes(with_margin, "paper") == {"loss.epsilon": epsilons}
    assert search_axes(with_margin, "none").keys() == {"loss.epsilon", "loss.scale"}
    assert search_axes(with_margin, search=["loss.max-margin=0.7,0.8"])["loss.max_margin"] == (0.7, 0.8)
    assert search_axes(with_margin, "given", ["optim.lr=1,2"]) == {"optim.lr": (1, 2)}
    assert search_axes(both, fixed=["loss.max_margin", "train.epochs"]) == {"loss.epsilon": epsilons}
    assert search_axes(both, search=["loss.epsilon=1,2"], fixed=["loss.epsilon"])["loss.epsilon"] == (1, 2)
    other_loss = changed(both, {"loss.name": "ldam"})
    assert search_axes(other_loss) == {"loss.max_margin": LOSSES["ldam"].paper_grid["max_margin"]}
    without_recipe = replace(with_margin, recipe="custom")  # there is nothing to compare its values with
    assert search_axes(without_recipe).keys() == {"loss.max_margin", "loss.epsilon"}


@pytest.mark.parametrize(
    ("recipe", "setting", "message"),
    [
        ("plantnet_table5_ldam_k5", "loss.max_margin", "ldam .* --search loss.max_margin=0.2,0.5"),
        ("plantnet_table5_noised_k5", "loss.epsilon", "noised_topk_hinge.* --search loss.epsilon=0.01,10"),
    ],
)
def test_if_all_was_set_it_takes_a_search_to_have_something_to_try(recipe: str, setting: str, message: str) -> None:
    config = changed(recipes.build(recipe), {setting: 0.7})
    with pytest.raises(ShortlistError, match=f"{setting} .*{message}"):
        search_axes(config)
    assert search_axes(config, search=["optim.lr=0.1"]) == {"optim.lr": (0.1,)}


@pytest.mark.parametrize(("grid", "values"), [("none", "2,9"), ("given", "2.5"), ("given", "nan")])
def test_draws_are_whole_numbers(config: RunConfig, grid: Any, values: str) -> None:
    noised = replace(config, loss=NoisedTopKHingeConfig(k=3))
    with pytest.raises(ShortlistError, match=r"loss\.n_samples .*whole number"):
        search_axes(noised, grid, [f"loss.n_samples={values}"])


def test_losses_without_a_grid_or_without_settings_say_so(config: RunConfig) -> None:
    plain = replace(config, loss=CrossEntropyConfig(k=3))
    with pytest.raises(ShortlistError, match=r"cross_entropy.* focal, "):
        search_axes(plain, "paper")
    with pytest.raises(ShortlistError, match=r"cross_entropy.*--search"):
        search_axes(plain)
