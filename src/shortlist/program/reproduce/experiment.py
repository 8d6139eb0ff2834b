"""Experiments: the cells of a table, each filled by the run of a recipe, at one of three scales."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program import recipes
from shortlist.program.config import Changes, RunConfig, changed
from shortlist.program.reproduce import Scale

NONZERO_GRADIENTS = "nonzero_gradients"
EPOCH_SECONDS = "epoch_seconds"

_SMOKE_EPOCHS = 2
# Fast on a GPU; the loss, the metrics and the last layer stay in float32.
FAST: Changes = {"train.precision": "bf16-mixed", "train.channels_last": True, "train.compile": True}
TINY: Changes = {
    "data.name": "embeddings",
    "data.noise_groups": "consecutive",  # embeddings have no superclasses
    "model.name": "none",
    "model.pretrained": False,
    "train.batch_size": 128,
    "train.device": "cpu",
}


@dataclass(frozen=True)
class Cell:
    """A place in a table and the run that fills it. Its configuration is built on demand."""

    row: str
    column: str
    k: int
    """The K that is measured."""
    recipe: str
    changes: Changes = field(default_factory=dict)
    """Settings that differ from the recipe."""

    @property
    def label(self) -> str:
        return f"{self.row}/{self.column}"

    def matches(self, pattern: str) -> bool:
        """True if the pattern matches this cell, its row or its column.

        Example:
            >>> cell = Cell("0.4", "noised", 5, "cifar100_table4_noised_p40")
            >>> [cell.matches(pattern) for pattern in ("0.4", "nois*", "0.4/noised", "0.?/smooth")]
            [True, True, True, False]
        """
        return any(fnmatch(name, pattern) for name in (self.row, self.column, self.label))


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or a figure."""

    name: str
    title: str
    cells: Sequence[Cell]
    metrics: tuple[str, ...]
    """What is read from a run: a split and an average such as ``test_macro``, seconds, or gradients. The first is the
    number of the table; the others follow in parentheses."""
    row_heading: str
    short_epochs: int
    """Number of epochs at the scale ``short``."""
    paper_epochs: int | None = None
    """Number of epochs at the scale ``paper``; None means that of the recipe."""
    settings: Changes = field(default_factory=dict)
    """Settings that all runs of the experiment change."""
    source: str = ""
    """Label of the table or figure in the paper; empty if it is ours."""
    paper_seeds: int | None = None
    """Number of seeds behind the paper's numbers, if it says so."""
    decimals: int = 1
    remarks: str = ""
    """What a reader must know to compare the numbers."""

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(cell.column for cell in self.cells))

    def has_cell(self, pattern: str) -> bool:
        """True if the pattern matches a cell."""
        return any(cell.matches(pattern) for cell in self.cells)

    def selected(self, patterns: Sequence[str]) -> list[Cell]:
        """The cells that match a pattern; all cells if there are no patterns."""
        found = [cell for cell in self.cells if not patterns or any(map(cell.matches, patterns))]
        if not found:
            raise ShortlistError(
                f"--only {' '.join(patterns)} matches no cell of {self.name}: its rows are {', '.join(self.rows)} "
                f"and its columns {', '.join(self.columns)}"
            )
        return found

    def config(self, cell: Cell, scale: Scale, runs_root: Path) -> RunConfig:
        """The run of a cell, with seed 0. ``runs_root`` also holds the tiny data of the scale ``smoke``."""
        recipe = recipes.build(cell.recipe)
        full = self.paper_epochs or recipe.train.epochs
        epochs = {"smoke": min(_SMOKE_EPOCHS, full), "short": self.short_epochs, "paper": full}[scale]
        if scale == "smoke":
            from shortlist.program.reproduce import (
                tiny_data,
            )  # imported here, because listing the tables must not wait for torch

            tiny = {**TINY, "data.root": str(tiny_data.path(runs_root))}
            return changed(recipe, {"train.epochs": epochs, **cell.changes, **tiny})
        return changed(recipe, {"train.epochs": epochs, **FAST, **self.settings, **cell.changes})
