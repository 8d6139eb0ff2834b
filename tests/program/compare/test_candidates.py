"""The losses that are compared: each fits the recipe, and all are judged by the same metric."""

import pytest
import torch

from shortlist import ShortlistError
from shortlist.program import recipes
from shortlist.program.cli.parsing import RecipeArguments, parse_recipe
from shortlist.program.compare.candidates import CANDIDATES, find_candidates
from shortlist.program.compare.search import search_points
from shortlist.program.config import changed
from shortlist.program.losses import LOSSES, Range

BASES = {name: recipes.build(name) for name in ("folder", "embeddings", "cifar100_lt_cross_entropy_k3", "smoke")}
THREE = changed(recipes.build("embeddings"), {"loss.k": 3})


@pytest.mark.parametrize("recipe", BASES)
@pytest.mark.parametrize("name", [*CANDIDATES, "focal", "smooth_topk_hinge"])
def test_a_candidate_is_a_loss_that_trains_and_changes_no_other_setting(name: str, recipe: str) -> None:
    base = BASES[recipe]
    (candidate,) = find_candidates([name])
    config = candidate.config(base)
    assert config.select_metric == base.select_metric
    assert (config.model.head == "cosine") == config.loss.takes_cosines
    assert (config.data, config.optim, config.train) == (base.data, base.optim, base.train)
    counts = torch.tensor([50, 20, 10, 5, 2, 1, 1, 1])
    scores = torch.rand(4, 8, requires_grad=True)
    config.loss.build(counts)(scores, torch.tensor([0, 7, 3, 2])).backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("name", CANDIDATES)
def test_the_command_of_a_candidate_is_its_configuration(name: str) -> None:
    config = CANDIDATES[name].config(THREE)
    _, command, *words = recipes.command_line(config).split()
    assert command == "train"
    assert parse_recipe(RecipeArguments, words, "train")[1] == config


def test_several_ks_end_at_the_number_of_suggestions() -> None:
    several = CANDIDATES["noised_several_k"]
    assert [several.config(changed(THREE, {"loss.k": k})).loss.ks for k in (1, 2, 3, 5)] == [
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 3, 5),
    ]


def test_any_loss_is_a_candidate_and_a_misspelt_one_is_answered() -> None:
    assert [candidate.name for candidate in find_candidates(list(LOSSES))] == list(LOSSES)
    with pytest.raises(ShortlistError, match=r"'ldamm' .*did you mean ldam"):
        find_candidates(["cross_entropy", "ldamm"])
    with pytest.raises(ShortlistError, match=r"'mixtrue' .*did you mean mixture"):
        find_candidates(["mixtrue"])


@pytest.mark.parametrize("name", CANDIDATES)
def test_the_search_begins_with_the_candidates_own_settings_and_stays_within_its_ranges(name: str) -> None:
    config, axes = CANDIDATES[name].config(THREE), CANDIDATES[name].axes(THREE)
    assert "optim.lr" in axes
    first, *others = search_points(config, axes, 9)
    assert changed(config, first) == config
    assert len(others) == 8
    for point in others:
        changed(config, point)
        assert all(axis.low <= point[name] <= axis.high for name, axis in axes.items() if isinstance(axis, Range))


def test_more_trials_add_to_those_of_a_shorter_search() -> None:
    axes = CANDIDATES["ldam"].axes(THREE)
    longer = search_points(THREE, {"optim.lr": axes["optim.lr"]}, 9)
    assert search_points(THREE, {"optim.lr": axes["optim.lr"]}, 4) == longer[:4]


def test_typed_settings_stay_and_more_can_be_searched() -> None:
    ldam, plain = CANDIDATES["ldam"], CANDIDATES["cross_entropy"]
    assert "optim.lr" not in ldam.axes(THREE, fixed=["optim.lr"])
    asked = ["optim.lr=0.1,0.2", "loss.scale=20,40", "optim.weight-decay=1e-4"]
    assert plain.axes(THREE, asked, fixed=["optim.lr"]) == {
        "optim.lr": Range(0.1, 0.2, log=True),
        "optim.weight_decay": (1e-4,),
    }
    assert ldam.axes(THREE, asked)["loss.scale"] == Range(20.0, 40.0, log=True)
    with pytest.raises(ShortlistError, match=r"loss\.scael"):
        ldam.axes(THREE, ["loss.scael=1,2"])
