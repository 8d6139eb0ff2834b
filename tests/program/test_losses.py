"""The losses as settings: each has the defaults of its Module, and passes every setting on to it."""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch

from shortlist import ShortlistError, losses
from shortlist.program.losses import LOSSES, LossConfig

OTHER = {"epsilon": 0.7, "n_samples": 4, "tau": 0.3, "gamma": 1.5, "max_margin": 0.6, "scale": 7.0}

every_loss = pytest.mark.parametrize("name", LOSSES)


@every_loss
def test_every_setting_of_a_loss_reaches_it(name: str) -> None:
    others: Any = {field.name: OTHER[field.name] for field in fields(LOSSES[name]) if field.name in OTHER}
    config = LOSSES[name](k=3, **others)
    module: Any = config.build(torch.ones(6))
    assert {setting: getattr(module, setting) for setting in config.settings()} == config.settings()
    assert config.settings() == others | ({"k": 3} if config.uses_k else {})


@every_loss
def test_the_defaults_are_those_of_the_module(name: str) -> None:
    config = LOSSES[name]()
    arguments = inspect.signature(type(config.build(torch.ones(6)))).parameters
    for setting, value in config.settings().items():
        assert setting == "k" or arguments[setting].default == value


@every_loss
def test_the_ranges_contain_the_papers_grid(name: str) -> None:
    loss = LOSSES[name]
    assert {*loss.paper_grid, *loss.ranges} <= {field.name for field in fields(loss)}
    for setting, values in loss.paper_grid.items():
        assert all(loss.ranges[setting].low <= value <= loss.ranges[setting].high for value in values)


def test_every_module_can_be_trained_with() -> None:
    """But for the error, which has no gradient; ``balanced_softmax`` and ``cross_entropy`` have no Module of ours."""
    classes = [kind for _, kind in inspect.getmembers(losses, inspect.isclass) if kind.__module__ == losses.__name__]
    built = {type(loss().build(torch.ones(6))) for loss in LOSSES.values()}
    assert {kind for kind in classes if not kind.__name__.startswith("_")} - built == {losses.TopKError}


def test_a_loss_does_not_take_the_name_of_another() -> None:
    with pytest.raises(ShortlistError, match="must have the name focal, got ldam"):
        LOSSES["focal"](name="ldam")
    with pytest.raises(ShortlistError, match=r"loss\.name must be one of .* got 'foca': did you mean focal"):
        LossConfig.kind_called("foca")
