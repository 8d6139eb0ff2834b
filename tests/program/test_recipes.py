"""Recipes: found by their names, and listed so that people find theirs."""

import re

import pytest

from shortlist import ShortlistError
from shortlist.program import recipes


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
            assert listed == ["folder", "embeddings"]
    assert sorted(listed) == sorted(recipes.RECIPES)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_the_last_layer_is_a_cosine_for_losses_that_take_cosines(name: str) -> None:
    config = recipes.build(name)
    assert (config.model.head == "cosine") == config.loss.takes_cosines
    for loss in ("cross_entropy", "ldam"):
        other = recipes.with_loss(config, loss)
        assert (other.loss.name, other.loss.k) == (loss, config.loss.k)
        assert other.model.head == ("cosine" if loss == "ldam" else "linear")
        assert re.fullmatch("[0-9a-f]{10}", other.key())
