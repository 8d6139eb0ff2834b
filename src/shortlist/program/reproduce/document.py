"""Rewrites the generated part of docs/reproduction.md from results/*.csv."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.ops.class_counts import FEW_BELOW, MANY_ABOVE
from shortlist.program.config import RunConfig
from shortlist.program.documents import MarkedPage
from shortlist.program.report.names import loss_settings, shown
from shortlist.program.reproduce.experiment import Experiment
from shortlist.program.reproduce.figures import FIGURES, from_results
from shortlist.program.reproduce.registry import COLUMN_NAMES, EXPERIMENTS
from shortlist.program.reproduce.results import Result, read_results, results_file
from shortlist.program.reproduce.tables import (
    latest_setups,
    markdown_table,
    markdown_table_of_runs,
    shorter_runs,
)
from shortlist.program.text import counted

_NAME = "reproduction"
_CLASS_SIZES = (
    f"In parentheses: classes with few (below {FEW_BELOW}), a medium number of, and many (above {MANY_ABOVE}) "
    "training images."
)


def figures_folder(docs: Path) -> Path:
    """The folder of the document's figures."""
    return docs / _NAME


def write_reproduction(results: Path, docs: Path) -> Path:
    """Rewrite the tables of ``docs/reproduction.md``, and draw the results that the paper shows as figures.

    Args:
        results: Folder of the CSV files; an experiment without a file gets a table with empty cells.
        docs: The folder of the document, which must hold the two marks.

    Returns:
        The document.
    """
    if not any(results_file(results, experiment, "paper").is_file() for experiment in EXPERIMENTS.values()):
        raise ShortlistError(
            f"there are no results in {results}: work in a clone of the repository, or give a folder by --results"
        )
    page = MarkedPage(docs / f"{_NAME}.md", "shortlist reproduce --document")
    found = {name: _results_of(experiment, results) for name, experiment in EXPERIMENTS.items()}
    page.rewrite("\n\n".join([*_tables(found, docs), *_figures(docs), *_appendix(found)]))
    return page.path


def _results_of(experiment: Experiment, folder: Path) -> list[Result]:
    path = results_file(folder, experiment, "paper")
    return latest_setups(read_results(path)) if path.is_file() else []


def _tables(results: Mapping[str, Sequence[Result]], docs: Path) -> Iterator[str]:
    for experiment in EXPERIMENTS.values():
        found = results[experiment.name]
        shorter = shorter_runs(found)
        origin = f"`{experiment.source}` of the paper." if experiment.source else "Not in the paper."
        yield f"## {experiment.title}"
        yield f"{origin} `shortlist reproduce {experiment.name}`"
        yield markdown_table(experiment, [result for result in found if result not in shorter])
        if from_results.draw(experiment.name, found, figures_folder(docs)):
            yield _picture(experiment.name)
        yield "\n".join(f"- {note}" for note in _notes(experiment, found))


def _notes(experiment: Experiment, results: Sequence[Result]) -> Iterator[str]:
    """What the numbers are, and how they were obtained."""
    if experiment.remarks:
        yield experiment.remarks
    if "test_few" in experiment.metrics:
        yield _CLASS_SIZES
    yield _protocol(experiment)
    if len(experiment.columns) > 1:
        others = "; other rows differ in the setting that they name" if len(experiment.rows) > 1 else ""
        yield f"Recipes of the first row with each column{others}: {'; '.join(_losses(experiment))}."
    if results:
        machines = ", ".join(dict.fromkeys(result.gpu for result in results))
        days = sorted(result.date[:10] for result in results)
        period = " to ".join(dict.fromkeys((days[0], days[-1])))
        commits = ", ".join(dict.fromkeys(commit for result in results for commit in result.commit.split()))
        yield f"Run {period} on {machines}{commits and f', commit {commits}'}."
    else:
        yield "Not run yet."


def _protocol(experiment: Experiment) -> str:
    configs = [experiment.config(cell, "paper", Path()) for cell in experiment.cells]
    first = configs[0]
    sentences = [
        f"{first.model.name} in bfloat16 with the loss in float32, batches of {first.train.batch_size}, "
        f"learning rate {_distinct(config.optim.lr for config in configs)}, "
        f"weight decay {_distinct(config.optim.weight_decay for config in configs)}."
    ]
    short, full = _length(first, experiment.short_epochs), _length(first, first.train.epochs)
    if short == full:
        sentences.append(f"At both scales {full}.")
    else:
        sentences.append(f"At `--scale short` {short}. At `--scale paper` {full}.")
    if experiment.metrics[0].startswith(("val_", "test_")):
        chosen = (
            "macro top-K" if first.train.select == "auto" else _distinct(config.select_metric for config in configs)
        )
        sentences.append(f"The epoch with the best {chosen} on the validation images is reported.")
    return " ".join(sentences)


def _length(recipe: RunConfig, epochs: int) -> str:
    """Number of epochs, and the course of the learning rate."""
    optim = recipe.optim
    changes = [f"rising until {shown(optim.warmup_epochs)}"] if optim.warmup_epochs else []
    if drops := optim.drop_epochs(epochs):
        changes.append(f"falling to {shown(optim.decay)} of itself at {', '.join(map(str, drops))}")
    return counted(epochs, "epoch") + (f", the learning rate {' and '.join(changes)}" if changes else "")


def _distinct(values: Iterable[object]) -> str:
    """The distinct values, in order of appearance."""
    return " or ".join(dict.fromkeys(shown(value) for value in values))


def _losses(experiment: Experiment) -> Iterator[str]:
    """Recipe and settings of each column, from the first row that has it."""
    for column in experiment.columns:
        cell = next(cell for cell in experiment.cells if cell.column == column)
        settings = [loss_settings(experiment.config(cell, "paper", Path()).loss)]
        settings += [f"{name} = {shown(value)}" for name, value in cell.changes.items() if not name.startswith("loss.")]
        described = ", ".join(filter(None, settings))
        yield f"{COLUMN_NAMES.get(column, column)}: `{cell.recipe}`" + (f" ({described})" if described else "")


def _appendix(results: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    shorter = {name: shorter_runs(found) for name, found in results.items()}
    if any(shorter.values()):
        yield "## Appendix: shorter runs"
        yield "Lines whose cells have all been run at a greater length too. The tables above have that length."
    for name, found in shorter.items():
        if found:
            yield f"### {EXPERIMENTS[name].title}, shorter"
            yield markdown_table_of_runs(EXPERIMENTS[name], found)


def _figures(docs: Path) -> Iterator[str]:
    drawn = [name for name in FIGURES if (figures_folder(docs) / f"{name}.png").is_file()]
    if drawn:
        yield "## Figures without training"
    for name in drawn:
        yield f"`shortlist reproduce {name} --scale paper`"
        yield _picture(name)


def _picture(name: str) -> str:
    return f"![{name.replace('-', ' ')}]({_NAME}/{name}.png)"
