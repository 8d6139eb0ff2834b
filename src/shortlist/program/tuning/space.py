"""The settings that a search tries: the paper's grid, ranges to sample from, or values that the user lists."""

import dataclasses
import itertools
import operator
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from shortlist.errors import ShortlistError
from shortlist.program import recipes
from shortlist.program.config import RunConfig, changed
from shortlist.program.losses import LOSSES, Range

Grid = Literal["auto", "paper", "given", "none"]
Settings = Mapping[str, float]
"""Values by their names on the command line, such as ``loss.max_margin``."""


Axis = tuple[float, ...] | Range
"""What is tried for one setting: every value of a list, or samples from a range."""


def search_axes(
    config: RunConfig, grid: Grid = "auto", search: Sequence[str] = (), fixed: Collection[str] = ()
) -> dict[str, Axis]:
    """What to try for each setting: lists of values that make a grid, or ranges to sample from.

    ``auto`` takes the paper's grid for the loss; if there is none, the values of ``search``; if there are none, the
    ranges of the loss. A setting that is in ``fixed``, or differs from the recipe, was chosen by the user. It keeps its
    value unless ``search`` names it.

    Example:
        >>> from shortlist.program import recipes
        >>> search_axes(recipes.build("plantnet_table5_ldam_k5"), search=["loss.scale=30,50"])
        {'loss.max_margin': (0.2, 0.3, 0.4, 0.5), 'loss.scale': (30.0, 50.0)}
        >>> search_axes(recipes.build("plantnet_table5_noised_k5"), fixed=["loss.margin"])
        {'loss.epsilon': Range(low=0.01, high=10.0, log=True)}
    """
    loss = config.loss.name
    paper_grid: Mapping[str, Axis] = {f"loss.{name}": values for name, values in config.loss.paper_grid.items()}
    ranges: Mapping[str, Axis] = {f"loss.{name}": values for name, values in config.loss.ranges.items()}
    if grid == "paper" and not paper_grid:
        having = [name for name, kind in LOSSES.items() if kind.paper_grid]
        raise ShortlistError(f"the paper has no grid for {loss}, only for {', '.join(having)}")
    if grid == "given" and not search:
        raise ShortlistError("--grid given needs --search, such as --search loss.scale=30,50")
    given = parsed_search(config, search)
    if grid == "auto":
        grid = "paper" if paper_grid else "given" if given else "none"
    sampled = grid == "none"
    usual: Mapping[str, Axis] = {} if grid == "given" else ranges if sampled else paper_grid
    kept = [name for name in usual if name not in given and (name in fixed or _is_set_by_user(config, name))]
    asked = {name: spanned(values) if sampled else values for name, values in given.items()}
    axes = {name: axis for name, axis in usual.items() if name not in kept} | asked
    if kept and not axes:
        first, *_, last = _examples(usual[kept[0]])
        raise ShortlistError(
            f"{' and '.join(kept)} must stay as set, which leaves nothing of {loss} to search: list values to try, "
            f"such as --search {kept[0]}={first:g},{last:g}"
        )
    if not axes:
        raise ShortlistError(f"{loss} has no settings to search: name some, such as --search optim.lr=0.05,0.2")
    for point in grid_points({name: _examples(axis) for name, axis in axes.items()}):
        changed(config, point)  # raises an error for a bad value before any work
    return axes


def grid_points(axes: Mapping[str, Axis]) -> list[Settings]:
    """Every combination of the values, the last setting varying fastest. Empty if a setting is sampled.

    Example:
        >>> grid_points({"loss.tau": (0.1, 1.0), "optim.lr": (0.2, 0.4)})[1]
        {'loss.tau': 0.1, 'optim.lr': 0.4}
    """
    values = [axis for axis in axes.values() if not isinstance(axis, Range)]
    if len(values) < len(axes):
        return []
    return [dict(zip(axes, point, strict=True)) for point in itertools.product(*values)]


def _is_set_by_user(config: RunConfig, setting: str) -> bool:
    """True if the value differs from the recipe. False if there is no recipe to compare with."""
    if config.recipe not in recipes.RECIPES:
        return False
    value = operator.attrgetter(setting)
    recipe = recipes.with_loss(recipes.build(config.recipe), config.loss.name)
    return bool(value(config) != value(recipe))


def _examples(axis: Axis) -> tuple[float, ...]:
    return axis.examples if isinstance(axis, Range) else axis


def parsed_search(config: RunConfig, search: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Parse texts such as ``loss.scale=30,50``. The error names a bad setting or value."""
    given: dict[str, tuple[float, ...]] = {}
    for text in search:
        setting, equals, listed = text.partition("=")
        section, _, name = setting.replace("-", "_").partition(".")
        part = getattr(config, section, None)
        kinds = typing.get_type_hints(type(part)) if dataclasses.is_dataclass(part) else {}
        if equals and name in kinds and kinds[name] is not float:
            raise ShortlistError(
                f"search must name a setting that takes any number, such as optim.lr; {section}.{name} does not"
            )
        if equals and section == "loss" and name not in kinds:
            known = " and ".join(f"loss.{setting}" for setting in config.loss.settings()) or "none"
            raise ShortlistError(
                f"search must name a setting of the loss {config.loss.name}, which has {known}, got loss.{name}"
            )
        if not equals or name not in kinds:
            raise ShortlistError(
                f"search must name a number among the settings, such as loss.scale=30,50, got {text!r}"
            )
        if f"{section}.{name}" in given:
            raise ShortlistError(f"search names {section}.{name} twice: list all its values together")
        try:
            values = tuple(dict.fromkeys(float(value) for value in listed.split(",")))
        except ValueError:
            raise ShortlistError(f"search must list numbers, such as loss.scale=30,50, got {text!r}") from None
        given[f"{section}.{name}"] = values
    return given


def spanned(values: tuple[float, ...]) -> Axis:
    """The range between the values, logarithmic if they are positive. A single value stays fixed."""
    low, high = min(values), max(values)
    return Range(low, high, log=low > 0) if low < high else values
