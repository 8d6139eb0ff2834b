"""Recipes: found by their names, and listed so that people find theirs."""

import math
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest

from shortlist import ShortlistError
from shortlist.program import recipes
from shortlist.program.cli import commands
from shortlist.program.cli.parsing import parse_recipe
from shortlist.program.config import changed


def test_an_unknown_recipe_is_answered_with_those_close_to_it() -> None:
    with pytest.raises(ShortlistError, match="'cifar100_table4_noise_p40': did you mean cifar100_table4_noised_p40"):
        recipes.build("cifar100_table4_noise_p40")


def test_the_overview_names_every_recipe_once_and_those_for_ones_own_data_first() -> None:
    listed = []
    for heading, lines in recipes.overview().items():
        for name, _ in lines:
            stem, _, endings = name.rstrip("}").partition("{")
            listed += [stem + ending for ending in endings.split(",")]
        if heading == "Your own data":
            assert listed == ["folder", "folder_lite", "folder_frozen", "embeddings"]
    assert sorted(listed) == sorted(recipes.RECIPES)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_the_last_layer_is_a_cosine_for_losses_that_take_cosines(name: str) -> None:
    config = recipes.build(name)
    assert (config.model.head == "cosine") == config.loss.takes_cosines
    for loss in ("cross_entropy", "ldam"):
        other = recipes.with_loss(config, loss)
        assert (other.loss.name, other.loss.largest_k) == (loss, config.loss.largest_k)
        assert other.model.head == ("cosine" if loss == "ldam" else "linear")
        assert re.fullmatch("[0-9a-f]{10}", other.key())


def test_ones_own_images_are_trained_on_a_cosine_after_an_epoch_of_warm_up() -> None:
    """And the new last layer learns faster than the others. The paper's recipe for the same network keeps its steps."""
    own, paper = (recipes.build(name).optim for name in ("folder", "plantnet_table5_imbalanced_k5"))
    assert own == replace(paper, schedule="cosine", milestones=(), warmup_epochs=1, head_lr_factor=10)
    assert (paper.schedule, paper.drop_epochs(30)) == ("step", [20, 25])


def test_the_command_line_tells_all_that_differs_from_the_recipe() -> None:
    recipe = recipes.build("cifar100_table4_noised_p00")
    changes = {"loss.epsilon": 0.5, "loss.n_samples": math.inf, "data.root": "my data", "optim.milestones": []}
    config = changed(recipe, {**changes, "train.cuda_graph": False, "train.compile": True})
    assert recipes.command_line(replace(config, seed=3)) == (
        "shortlist train cifar100_table4_noised_p00 --seed 3 --data.root 'my data' --loss.epsilon 0.5 "
        "--loss.n-samples inf --optim.milestones --train.compile --train.no-cuda-graph"
    )


@pytest.mark.parametrize("changes", [{}, {"train.epochs": 400}, {"train.epochs": 400, "optim.milestones": [0.25, 0.5]}])
def test_the_command_line_trains_that_very_configuration(changes: dict[str, Any]) -> None:
    config = changed(recipes.build("cifar100_table4_noised_p00"), changes)
    _, _, *arguments = shlex.split(recipes.command_line(config))
    assert parse_recipe(commands.TrainArguments, arguments, "train")[1] == config
