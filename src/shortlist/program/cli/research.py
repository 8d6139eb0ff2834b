"""The commands for research: the paper's tables and figures, and measurements of speed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shortlist.errors import ShortlistError
from shortlist.program.bench import Suite
from shortlist.program.cli.output import print_table, say, show
from shortlist.program.cli.parsing import parse
from shortlist.program.reproduce import Scale
from shortlist.program.text import did_you_mean

if TYPE_CHECKING:
    from shortlist.program.reproduce.comparisons import Comparison
    from shortlist.program.reproduce.experiment import Experiment


_HEADS = "rare-heads"
_ADD_CLASS = "add-class"


@dataclass(frozen=True)
class BenchArguments:
    suites: Annotated[tuple[Suite, ...], tyro.conf.arg(metavar="SUITE ..."), tyro.conf.Positional] = ()
    """What to measure (default: everything)."""
    quick: bool = False
    """Measure tiny cases in seconds: shows that everything works and agrees, not how fast it is."""
    out: Path = Path("bench.csv")
    """File of the measurements; new rows are added to it."""
    device: str = "auto"
    """Device to measure on: auto, cpu or cuda."""
    document: tuple[Path, ...] | None = None
    """Measure nothing; rebuild the tables and plots of performance.md from these CSV files."""
    docs: Path = Path("docs")
    """Folder of performance.md; its plots go to performance/ in it."""


def bench(arguments: list[str]) -> None:
    """Measure speed beside other libraries: shortlist bench [SUITE ...]"""
    parsed = parse(BenchArguments, arguments, "bench", ("shortlist bench --quick", "shortlist bench loss head"))
    if parsed.document is not None:
        from shortlist.program.bench.document import write_performance

        show(write_performance(parsed.document, parsed.docs))
        return

    from shortlist.program.bench.running import run

    run(parsed.suites, parsed.quick, parsed.out, device=parsed.device, say=say)
    show(parsed.out)


@dataclass(frozen=True)
class ReproduceArguments:
    names: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ..."), tyro.conf.Positional] = ()
    """Tables and figures; shortlist reproduce lists them."""
    scale: Scale = "short"
    """smoke: tiny data, in seconds. short: the real data, for fewer epochs. paper: the length of the paper."""
    seeds: tuple[int, ...] = ()
    """Run each cell once for each of these seeds (default: 0; for comparisons: 0 1 2 3 4)."""
    only: tuple[str, ...] = ()
    """Run only what matches a pattern: a row, a column, or both, such as '0.4' 'nois*' '0.4/noised'; or a loss."""
    runs_root: Path = Path("runs")
    """Folder of all runs; those that have finished are not repeated. Comparisons always use runs."""
    results: Path = Path("results")
    """Folder of the files of results."""
    docs: Path = Path("docs")
    """Folder of the documents; figures go to reproduction/ in it (for the scale smoke: to smoke/ in the results)."""
    document: bool = False
    """Run nothing; rebuild the tables of reproduction.md and rare-classes.md from the files of results."""


def reproduce(arguments: list[str]) -> None:
    """Redo the paper's tables and figures: shortlist reproduce TABLE|FIGURE ..."""
    if not arguments:
        _list_experiments()
        return
    examples = (
        "shortlist reproduce cifar100-top5 --scale smoke",
        "shortlist reproduce cifar100-top5 --scale paper --only 0.4/noised --seeds 0 1 2",
        "shortlist reproduce --document",
    )
    parsed = parse(ReproduceArguments, arguments, "reproduce", examples)

    if parsed.document:
        if parsed.names:
            raise ShortlistError("--document rebuilds all tables of both documents and takes no names")
        from shortlist.program.reproduce.document import write_reproduction
        from shortlist.program.reproduce.rare_classes import write_rare_classes

        show(write_reproduction(parsed.results, parsed.docs))
        show(write_rare_classes(parsed.results, parsed.docs))
        return

    from shortlist.program.reproduce.comparisons import COMPARISONS
    from shortlist.program.reproduce.figures import FIGURES
    from shortlist.program.reproduce.registry import EXPERIMENTS

    known = [*EXPERIMENTS, *COMPARISONS, _HEADS, _ADD_CLASS, *FIGURES]
    if not parsed.names:
        raise ShortlistError(f"name a table or figure: {', '.join(known)}")
    for name in parsed.names:
        if name not in known:
            hint = did_you_mean(name, known) or f": the tables and figures are {', '.join(known)}"
            raise ShortlistError(f"there is no table or figure {name!r}{hint}")
    for name in parsed.names:
        if name in COMPARISONS:
            _reproduce_comparison(COMPARISONS[name], parsed)
    if _HEADS in parsed.names:
        _reproduce_heads(parsed)
    if _ADD_CLASS in parsed.names:
        _reproduce_additions(parsed)
    others = [name for name in parsed.names if name not in (*COMPARISONS, _HEADS, _ADD_CLASS)]
    if others:
        _reproduce_tables(others, parsed)


def _reproduce_tables(names: Sequence[str], parsed: ReproduceArguments) -> None:
    """The tables and figures of docs/reproduction.md."""
    from shortlist.program.reproduce.figures import FIGURES
    from shortlist.program.reproduce.registry import EXPERIMENTS

    _check_patterns(parsed.only, [EXPERIMENTS[name] for name in names if name in EXPERIMENTS])

    from shortlist.program.reproduce.document import figures_folder
    from shortlist.program.reproduce.figures import from_results
    from shortlist.program.reproduce.running import reproduce
    from shortlist.program.reproduce.tables import terminal_table

    failures: list[str] = []
    pictures = parsed.results / "smoke" if parsed.scale == "smoke" else figures_folder(parsed.docs)
    for name in names:
        if name in FIGURES:
            for path in FIGURES[name](pictures, parsed.scale):
                show(path)
            continue
        if parsed.only and not any(map(EXPERIMENTS[name].has_cell, parsed.only)):
            say(f"--only matches no cell of {name}")
            continue
        found, failed = reproduce(
            EXPERIMENTS[name],
            scale=parsed.scale,
            seeds=parsed.seeds or (0,),
            only=parsed.only,
            runs_root=parsed.runs_root,
            results=parsed.results,
            say=say,
        )
        failures += failed
        if found:
            print(EXPERIMENTS[name].title)
            print_table(terminal_table(EXPERIMENTS[name], found))
            for path in from_results.draw(name, found, pictures):
                show(path)
    if failures:
        for failure in failures[:-1]:
            say(failure)
        raise ShortlistError(failures[-1])


def _reproduce_comparison(comparison: "Comparison", parsed: ReproduceArguments) -> None:
    from shortlist.program.compare.results import notes, table, verdict
    from shortlist.program.reproduce.comparison_results import run_comparison
    from shortlist.program.reproduce.comparisons import SEEDS

    if parsed.runs_root != Path("runs"):
        raise ShortlistError(f"{comparison.name} keeps its runs in runs: leave out --runs-root")
    seeds = parsed.seeds or SEEDS
    standings = run_comparison(
        comparison, scale=parsed.scale, seeds=seeds, only=parsed.only, results=parsed.results, say=say
    )
    print(comparison.title)
    print_table(table(standings))
    for text in (*notes(standings), *verdict(standings)):
        show(text)


def _reproduce_heads(parsed: ReproduceArguments) -> None:
    from shortlist.program.reproduce.comparison_results import comparison_file, read_comparison
    from shortlist.program.reproduce.comparisons import COMPARISONS, SEEDS
    from shortlist.program.reproduce.heads import COMPARISON, train_heads

    if parsed.scale == "smoke":
        raise ShortlistError(f"{_HEADS} has no tiny version: it needs trained networks")
    comparison = COMPARISONS[COMPARISON]
    found = read_comparison(comparison, comparison_file(parsed.results, comparison, parsed.scale))
    show(train_heads(found, seeds=parsed.seeds or SEEDS, results=parsed.results, say=say))


def _reproduce_additions(parsed: ReproduceArguments) -> None:
    from shortlist.program.reproduce.add_class import LOSSES, SEEDS, measure_additions, table

    if parsed.scale == "smoke":
        raise ShortlistError(f"{_ADD_CLASS} has no tiny version: it needs the images of feathers")
    if unknown := {*parsed.only} - {*LOSSES}:
        raise ShortlistError(f"--only takes the losses of {_ADD_CLASS}, {', '.join(LOSSES)}, got {min(unknown)}")
    found = measure_additions(
        "", results=parsed.results, seeds=parsed.seeds or SEEDS, losses=parsed.only or LOSSES, say=say
    )
    print_table(table(found))


def _check_patterns(patterns: Sequence[str], experiments: "Sequence[Experiment]") -> None:
    """Raise an error for a pattern that matches no cell of any experiment."""
    for pattern in patterns:
        if any(experiment.has_cell(pattern) for experiment in experiments):
            continue
        if len(experiments) == 1:
            experiments[0].selected([pattern])  # raises an error that lists the cells
        names = ", ".join(experiment.name for experiment in experiments)
        raise ShortlistError(f"--only {pattern} matches no cell" + (f" of {names}" if names else ": figures have none"))


def _list_experiments() -> None:
    from shortlist.program.reproduce.comparisons import COMPARISONS
    from shortlist.program.reproduce.figures import FIGURES
    from shortlist.program.reproduce.registry import EXPERIMENTS

    print(f"{reproduce.__doc__}\n\nTables and figures (shortlist reproduce --help shows the options):\n")
    titles = {name: experiment.title for name, experiment in EXPERIMENTS.items()}
    titles |= {name: f"Losses compared: {comparison.title}" for name, comparison in COMPARISONS.items()}
    titles |= {_HEADS: "Every last layer on every network of rare-cifar100-lt"}
    titles |= {_ADD_CLASS: "Classes added after training, beside a training with them, on feathers"}
    titles |= {name: f"{name.replace('-', ' ').capitalize()}, a figure without training" for name in FIGURES}
    width = max(map(len, titles))
    for name, title in titles.items():
        print(f"  {name:{width}}  {title}")
