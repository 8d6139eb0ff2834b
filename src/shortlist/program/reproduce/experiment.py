"""What an experiment is: cells of a table, each of them one run of a recipe, at one of three scales."""

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
# What makes a GPU fast and leaves the loss, the metrics and the last layer in float32.
_FAST: Changes = {"train.precision": "bf16-mixed", "train.channels_last": True, "train.compile": True}
_TINY: Changes = {
    "data.name": "embeddings",
    "data.noise_groups": "consecutive",  # embeddings have no superclasses
    "model.name": "none",
    "model.pretrained": False,
    "train.batch_size": 128,
    "train.device": "cpu",
}


@dataclass(frozen=True)
class Cell:
    """A place in a table, and the run that fills it. The configuration is built only when it is asked for."""

    row: str
    column: str
    k: int
    """The K at which it is measured."""
    recipe: str
    changes: Changes = field(default_factory=dict)
    """What differs from the recipe."""

    @property
    def label(self) -> str:
        return f"{self.row}/{self.column}"

    def matches(self, pattern: str) -> bool:
        """Whether the pattern means this cell, its row or its column.

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
    """What is read from a run: a split and an average as in ``test_macro``, seconds, or gradients. The first is the
    number of the table, the others stand beside it in parentheses."""
    row_heading: str
    short_epochs: int
    """Length at the scale ``short``."""
    paper_epochs: int | None = None
    """Length at the scale ``paper``; None takes the recipe's."""
    settings: Changes = field(default_factory=dict)
    """What all runs of the experiment change in their recipes."""
    source: str = ""
    """Label of the table or figure in the paper; empty for those of our own."""
    paper_seeds: int | None = None
    """Seeds behind the paper's numbers, where it says so."""
    decimals: int = 1
    remarks: str = ""
    """What else a reader must know to compare the numbers."""

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(cell.column for cell in self.cells))

    def has_cell(self, pattern: str) -> bool:
        """Whether the pattern means one of the cells."""
        return any(cell.matches(pattern) for cell in self.cells)

    def selected(self, patterns: Sequence[str]) -> list[Cell]:
        """The cells that one of the patterns means; all if there is none."""
        found = [cell for cell in self.cells if not patterns or any(map(cell.matches, patterns))]
        if not found:
            raise ShortlistError(
                f"--only {' '.join(patterns)} leaves nothing of {self.name}: its rows are {', '.join(self.rows)} "
                f"and its columns {', '.join(self.columns)}"
            )
        return found

    def config(self, cell: Cell, scale: Scale, runs_root: Path) -> RunConfig:
        """The run of a cell, with the seed 0. ``runs_root`` also holds the tiny data of the scale ``smoke``."""
        recipe = recipes.build(cell.recipe)
        full = self.paper_epochs or recipe.train.epochs
        epochs = {"smoke": min(_SMOKE_EPOCHS, full), "short": self.short_epochs, "paper": full}[scale]
        if scale == "smoke":
            from shortlist.program.reproduce import tiny_data  # here: the list of tables does not wait for torch

            tiny = {**_TINY, "data.root": str(tiny_data.path(runs_root))}
            return changed(recipe, {"train.epochs": epochs, **cell.changes, **tiny})
        return changed(recipe, {"train.epochs": epochs, **_FAST, **self.settings, **cell.changes})
