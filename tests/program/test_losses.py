"""The losses as settings: each has the defaults of its Module, and passes every setting on to it."""

import inspect
import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shortlist import ShortlistError, losses
from shortlist.program.losses import LOSSES, LossConfig

OTHER = {
    "epsilon": 0.7,
    "relative": True,
    "n_samples": 4,
    "margin": 2.0,
    "tau": 0.3,
    "gamma": 1.5,
    "max_margin": 0.6,
    "scale": 7.0,
}

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
    built = {type(loss(k=3).build(torch.ones(6))) for loss in LOSSES.values()}
    assert {kind for kind in classes if not kind.__name__.startswith("_")} - built == {losses.TopKError}


@every_loss
def test_the_common_settings_are_built_around_every_loss(name: str) -> None:
    """The prior of the scores that a softmax sees, and cross-entropy of the same scores."""
    kind, counts = LOSSES[name], torch.tensor([50, 20, 10, 5, 2, 1])
    scores, target = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 6
    settings: Any = {"k": 2} | ({"n_samples": math.inf} if "n_samples" in {f.name for f in fields(kind)} else {})
    plain = kind(**settings)
    scale = plain.settings().get("scale", 1.0)
    softmax = F.cross_entropy(scale * scores, target)
    mixed = kind(**settings, cross_entropy_share=0.25).build(counts)(scores, target)
    torch.testing.assert_close(mixed, 0.25 * softmax + 0.75 * plain.build(counts)(scores, target))
    torch.testing.assert_close(kind(**settings, cross_entropy_share=1.0).build(counts)(scores, target), softmax)
    if kind.contains_prior:
        with pytest.raises(ShortlistError, match=r"loss\.prior must be 0 .* got 2"):
            kind(**settings, prior=2.0)
        return
    adjusted = kind(**settings, prior=2.0).build(counts)(scores, target)
    of_adjusted = plain.build(counts)(scores + 2 / scale * (counts / counts.sum()).log(), target)
    torch.testing.assert_close(adjusted, of_adjusted)


def test_cross_entropy_with_the_prior_is_the_balanced_softmax() -> None:
    counts, scores, target = torch.tensor([5, 2, 1]), torch.randn(4, 3), torch.tensor([0, 1, 2, 2])
    ours = LOSSES["cross_entropy"](prior=1.0).build(counts)(scores, target)
    torch.testing.assert_close(ours, LOSSES["balanced_softmax"]().build(counts)(scores, target))


@every_loss
def test_several_k_are_for_the_losses_that_take_them(name: str) -> None:
    kind = LOSSES[name]
    if not kind.takes_several_k:
        with pytest.raises(ShortlistError, match=rf"loss\.k must be one number for {name}, got 1 3"):
            kind(k=(1, 3))
        return
    config = kind(k=(5, 1, 3))
    assert (config.k, config.ks, config.largest_k) == ((1, 3, 5), (1, 3, 5), 5)
    assert kind(k=(3,)) == kind(k=3)
    for k in ((), (0, 1), (2, 2), (1.5, 2)):
        with pytest.raises(ShortlistError, match=r"loss\.k must be"):
            kind(k=k)  # type: ignore[arg-type]


def test_a_loss_does_not_take_the_name_of_another() -> None:
    with pytest.raises(ShortlistError, match="must have the name focal, got ldam"):
        LOSSES["focal"](name="ldam")
    with pytest.raises(ShortlistError, match=r"loss\.name must be one of .* got 'foca': did you mean focal"):
        LossConfig.kind_called("foca")
