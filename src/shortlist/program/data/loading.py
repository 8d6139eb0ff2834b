"""From a configuration to its data. Only the module of the chosen data set is imported."""

from collections.abc import Callable
from importlib import import_module
from typing import cast

from shortlist.program.config import DataConfig
from shortlist.program.data.base import Problem


def load_problem(config: DataConfig) -> Problem:
    """Read, or make, the data that the configuration names.

    Raises ``ShortlistError`` with what to do about it when the data is not there or not as it should be.
    """
    module = import_module(f"shortlist.program.data.sets.{config.name}")
    load = cast(Callable[[DataConfig], Problem], module.load)
    return load(config)
