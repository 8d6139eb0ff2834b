"""The ``shortlist`` command. The only file that imports the CLI library.

Tables and results go to standard output, progress and messages to standard error. A failure exits with 1, a wrong
command line with 2, an interruption with 130.

Commands check their arguments first, and import what takes seconds (torch, above all) after that.
"""

import dataclasses
import difflib
import errno
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import DownloadColumn, Progress
from rich.table import Table

from shortlist import __version__
from shortlist.errors import ShortlistError
from shortlist.program import recipes
from shortlist.program.bench import Suite
from shortlist.program.config import SETTINGS_OF, OptimConfig, RunConfig, differences
from shortlist.program.reproduce import Scale
from shortlist.program.text import hide_passwords, hide_passwords_of_word, printable

if TYPE_CHECKING:
    from shortlist.program.reproduce.experiment import Experiment

_WIDEST_TABLE = 10**6  # columns


@dataclass(frozen=True, kw_only=True)
class _RecipeArguments(RunConfig):
    recipe: tyro.conf.Suppress[str] = "custom"

    def __post_init__(self) -> None:
        """No check here, as tyro would tell what is wrong under the name of this class: ``_parse_recipe`` does."""


@dataclass(frozen=True, kw_only=True)
class _TrainArguments(_RecipeArguments):
    resume: bool = False
    """Go on with a run that was interrupted."""
    out: Path | None = None
    """Folder of the run, or of the runs of several seeds; by default runs/<recipe>/<key>-s<seed>."""
    seeds: tuple[int, ...] = ()
    """Train once for each of these seeds, one after another."""


def train(arguments: list[str]) -> None:
    """Train a recipe: shortlist train RECIPE [--field value ...]"""
    if not arguments or arguments[0] in ("-h", "--help"):
        _list_recipes("train")
        return
    parsed, config = _parse_recipe(_TrainArguments, arguments, "train")

    from shortlist.program.runs.folder import RunFolder, default_folder
    from shortlist.program.runs.records import read_result
    from shortlist.program.training.loop import train

    for seed in parsed.seeds or (config.seed,):
        folder = parsed.out / f"s{seed}" if parsed.out and parsed.seeds else parsed.out
        seeded = dataclasses.replace(config, seed=seed)
        done = RunFolder(folder or default_folder(seeded))
        if parsed.seeds and parsed.resume and done.finished and not differences(done.config, seeded):
            _say(f"{done.path} has finished before")
            continue
        run = train(seeded, folder=folder, resume=parsed.resume)
        if _is_first_rank():
            _show(f"{run.path}  test {_percentages(read_result(run)['test'])}")


@dataclass(frozen=True)
class _EvaluateArguments:
    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    split: str = "test"
    """Which images: train, val or test."""
    ks: tuple[int, ...] = ()
    """The K; by default those of the run."""
    csv: Path | None = None
    """Write the accuracy of each class here."""
    root: str = ""
    """Where the data is now, if it has moved."""
    device: str = "auto"
    """Where to compute."""


def evaluate(arguments: list[str]) -> None:
    """Evaluate a run on any split and K: shortlist evaluate RUN"""
    parsed = _parse(_EvaluateArguments, arguments, "evaluate")

    from shortlist.program.runs.folder import RunFolder

    run = RunFolder.existing(parsed.run)

    from shortlist.program.atomic_files import write_file
    from shortlist.program.runs.recorded_data import has_other_training_images
    from shortlist.program.training.evaluate import evaluate_run
    from shortlist.program.wording import some_of

    result, problem = evaluate_run(run, split=parsed.split, ks=parsed.ks, root=parsed.root, device=parsed.device)
    if skipped := problem.split(parsed.split).skipped:
        _say(f"left out, as they could not be read: {len(skipped)}: {some_of(skipped)}")
    if result.ties:
        _say(result.ties)
    if has_other_training_images(problem, run):
        _say(f"the training images are not those that {run.path} was trained on: these may be among them")
    print(json.dumps(result.metrics, indent=1))
    if parsed.csv is not None:
        write_file(parsed.csv, result.per_class_csv(problem).encode())
        _say(f"wrote {parsed.csv}")


@dataclass(frozen=True)
class _PredictArguments:
    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    images: tyro.conf.Positional[tuple[Path, ...]]
    """Image files, or folders of them."""
    k: Annotated[int | None, tyro.conf.arg(aliases=["-k"])] = None
    """Number of suggestions; by default the K that the run was trained for."""
    json: bool = False
    """Print JSON, one object an image, instead of a table."""
    device: str = "auto"
    """Where to compute."""


def predict(arguments: list[str]) -> None:
    """K suggestions for images: shortlist predict RUN IMAGES..."""
    parsed = _parse(_PredictArguments, arguments, "predict")

    from shortlist.program.runs.folder import RunFolder

    run = RunFolder.existing(parsed.run)
    if not parsed.images:
        raise ShortlistError("name image files, or folders of them")
    for path in parsed.images:
        if not path.exists():
            raise ShortlistError(f"there is no file {path}")

    from shortlist.program.training.predict import Predictor, image_files
    from shortlist.program.wording import some_of

    files, unused = image_files(parsed.images)
    if unused:
        _say(f"not used, as they are no image files: {len(unused)}: {some_of([str(path) for path in unused])}")
    k = run.config.loss.k if parsed.k is None else parsed.k
    if k < 1:
        raise ShortlistError(f"-k must be at least 1, got {k}")
    predictor = Predictor(run, parsed.device)
    places = range(min(k, len(predictor.classes)))  # a K that is too large is an error as soon as anything is suggested
    table = Table("image", *(f"{place + 1}" for place in places), box=None, pad_edge=False)
    unreadable: list[ShortlistError] = []
    for path, suggestions in predictor.suggest(files, k, unreadable.append):
        if parsed.json:
            # JSON has no NaN.
            found = [{"name": each.name, "score": each.score if isfinite(each.score) else None} for each in suggestions]
            print(json.dumps({"image": str(path), "suggestions": found}, allow_nan=False))
        else:
            table.add_row(str(path), *(f"{each.name} ({each.score:.3f})" for each in suggestions))
    if not parsed.json:
        _print_table(table)
    if unreadable:
        raise ShortlistError("; ".join(map(str, unreadable)))


@dataclass(frozen=True)
class _ReportArguments:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or folders that hold runs."""
    out: Path = Path("report.html")
    """The page to write."""


def report(arguments: list[str]) -> None:
    """One HTML page that compares runs: shortlist report RUN..."""
    parsed = _parse(_ReportArguments, arguments, "report")

    from shortlist.program.runs.folder import find_runs

    runs = find_runs(list(parsed.runs))

    from shortlist.program.report.page import write_report

    _show(write_report(runs, parsed.out))


@dataclass(frozen=True)
class _DatasetsArguments:
    name: tyro.conf.Positional[str] = ""
    """Tell only of this data set, and check what is there of it."""
    root: str = ""
    """Where to look or download to; by default $SHORTLIST_DATA, or else a cache folder."""
    download: bool = False
    """Fetch it, where its source allows that."""


def datasets(arguments: list[str]) -> None:
    """What data there is, where to get it, and whether yours is complete: shortlist datasets [NAME]"""
    parsed = _parse(_DatasetsArguments, arguments, "datasets")

    from shortlist.program.data.catalogue import CATALOGUE, check, fetch

    if parsed.name and parsed.name not in CATALOGUE:
        raise ShortlistError(f"there is no data set {parsed.name!r}: {_close_to(parsed.name, CATALOGUE)}")
    if parsed.download:
        if not parsed.name:
            raise ShortlistError("name the data set to download, e.g. shortlist datasets cifar100 --download")
        with Progress(*Progress.get_default_columns(), DownloadColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(parsed.name, total=None)
            path = fetch(parsed.name, parsed.root, lambda done, total: bar.update(task, completed=done, total=total))
        _say(f"wrote {path}")
    for entry in [CATALOGUE[parsed.name]] if parsed.name else CATALOGUE.values():
        print(f"{entry.name}\n  {entry.what}\n  size:   {entry.size}\n  terms:  {entry.terms}")
        print(f"  fetch:  {entry.fetch}\n  put:    {entry.put}\n")
    if parsed.name:
        wrong = check(parsed.name, parsed.root)
        if wrong:
            raise ShortlistError("; ".join(wrong))
        print(f"{parsed.name} is complete")


@dataclass(frozen=True)
class _DemoArguments:
    out: Path = Path("demo")
    """Folder for the runs and the page."""


def demo(arguments: list[str]) -> None:
    """Train four losses on built-in data, about three minutes on two cores: shortlist demo"""
    parsed = _parse(_DemoArguments, arguments, "demo")

    from shortlist.program.cli.demo import run_demo

    table, page = run_demo(parsed.out, _say)
    _print_table(table)
    print()
    _show(f"open {page}")


@dataclass(frozen=True)
class _BenchArguments:
    suites: tyro.conf.Positional[tuple[Suite, ...]] = ()
    """What to measure; by default everything."""
    quick: bool = False
    """Tiny cases, in seconds: whether all works and is right, not how fast it is."""
    out: Path = Path("bench.csv")
    """The measurements, a row each; rows that it already has stay."""
    device: str = "auto"
    """Where to measure."""
    document: tuple[Path, ...] | None = None
    """Measure nothing: make the tables and plots of performance.md from these CSV files."""
    docs: Path = Path("docs")
    """Folder of performance.md; plots go to performance/ in it."""


def bench(arguments: list[str]) -> None:
    """Measure every speed figure beside its peers: shortlist bench [SUITE ...]"""
    parsed = _parse(_BenchArguments, arguments, "bench")
    if parsed.document is not None:
        from shortlist.program.bench.document import write_performance

        _show(write_performance(parsed.document, parsed.docs))
        return

    from shortlist.program.bench.running import run

    run(parsed.suites, parsed.quick, parsed.out, device=parsed.device, say=_say)
    _show(parsed.out)


@dataclass(frozen=True)
class _ReproduceArguments:
    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Tables and figures."""
    scale: Scale = "short"
    """smoke: tiny data, in seconds; short: the real data for fewer epochs; paper: as long as the paper."""
    seeds: tuple[int, ...] = (0,)
    """Run each cell once for each of these seeds."""
    only: tuple[str, ...] = ()
    """Only the cells that one of these patterns means: a row, a column, or both, e.g. '0.4' 'nois*' '0.4/noised'."""
    runs_root: Path = Path("runs")
    """Folder of all runs: those that have finished are not repeated."""
    results: Path = Path("results")
    """Folder of the CSV files."""
    docs: Path = Path("docs")
    """Folder of reproduction.md; figures go to reproduction/ in it, at the scale smoke to smoke/ among the results."""
    document: bool = False
    """Run nothing: make the tables of reproduction.md from the CSV files."""


def reproduce(arguments: list[str]) -> None:
    """The paper's tables and figures, redone: shortlist reproduce TABLE|FIGURE ..."""
    if not arguments:
        _list_experiments()
        return
    parsed = _parse(_ReproduceArguments, arguments, "reproduce")

    if parsed.document:
        if parsed.names:
            raise ShortlistError("--document makes all tables of reproduction.md: give it without names")
        from shortlist.program.reproduce.document import write_reproduction

        _show(write_reproduction(parsed.results, parsed.docs))
        return

    from shortlist.program.reproduce.figures import FIGURES
    from shortlist.program.reproduce.registry import EXPERIMENTS

    known = [*EXPERIMENTS, *FIGURES]
    if not parsed.names:
        raise ShortlistError(f"name a table or figure: there are {', '.join(known)}")
    for name in parsed.names:
        if name not in known:
            raise ShortlistError(f"there is no table or figure {name!r}: {_close_to(name, known)}")
    _check_patterns(parsed.only, [EXPERIMENTS[name] for name in parsed.names if name in EXPERIMENTS])

    from shortlist.program.reproduce.document import figures_folder
    from shortlist.program.reproduce.figures import from_results
    from shortlist.program.reproduce.running import reproduce
    from shortlist.program.reproduce.tables import terminal_table

    failures: list[str] = []
    pictures = parsed.results / "smoke" if parsed.scale == "smoke" else figures_folder(parsed.docs)
    for name in parsed.names:
        if name in FIGURES:
            for path in FIGURES[name](pictures, parsed.scale):
                _show(path)
            continue
        if parsed.only and not any(map(EXPERIMENTS[name].has_cell, parsed.only)):
            _say(f"--only leaves nothing of {name}")
            continue
        found, wrong = reproduce(
            EXPERIMENTS[name],
            scale=parsed.scale,
            seeds=parsed.seeds,
            only=parsed.only,
            runs_root=parsed.runs_root,
            results=parsed.results,
            say=_say,
        )
        failures += wrong
        if found:
            print(EXPERIMENTS[name].title)
            _print_table(terminal_table(EXPERIMENTS[name], found))
            for path in from_results.draw(name, found, pictures):
                _show(path)
    if failures:
        for failure in failures[:-1]:
            _say(failure)
        raise ShortlistError(failures[-1])


def _check_patterns(patterns: Sequence[str], experiments: "Sequence[Experiment]") -> None:
    """Each of them must mean something in one of the experiments."""
    for pattern in patterns:
        if any(experiment.has_cell(pattern) for experiment in experiments):
            continue
        if len(experiments) == 1:
            experiments[0].selected([pattern])  # which tells what there is
        names = ", ".join(each.name for each in experiments)
        raise ShortlistError(f"--only {pattern} means no cell" + (f" of {names}" if names else ": figures have none"))


@dataclass(frozen=True, kw_only=True)
class _TuneArguments(_RecipeArguments):
    grid: Literal["auto", "paper", "given", "none"] = "auto"
    """paper: its values; given: those of --search alone; none: sample; auto: the first of these that there is."""
    search: tuple[str, ...] = ()
    """Further settings or values, e.g. loss.scale=30,50 optim.lr=0.05,0.2; when sampling, the range between them."""
    trials: int | None = None
    """How many in the whole study, over all processes; by default the whole grid, or 20 samples."""
    storage: str = ""
    """Where the study is, shared by many machines if need be: a database, e.g. sqlite:///study.db, or a plain file."""
    prune: bool = False
    """End trials that are worse than the median of the others at the same epoch."""
    csv: Path | None = None
    """List the trials here; by default in runs/tune/RECIPE."""
    lost_after: float = 24.0
    """Hours without a finished epoch after which a trial of another machine counts as killed, and is run again."""


def tune(arguments: list[str]) -> None:
    """Search a recipe's hyper-parameters: shortlist tune RECIPE [--field value ...]"""
    if not arguments or arguments[0] in ("-h", "--help"):
        _list_recipes("tune")
        return
    options = _options(arguments)
    if options.count("search") > 1:
        raise ShortlistError(
            "give --search once, and all settings behind it: --search loss.scale=30,50 optim.lr=0.1,0.2"
        )
    parsed, config = _parse_recipe(_TuneArguments, arguments, "tune")

    from shortlist.program.tuning.study import tune

    found = tune(
        config,
        grid=parsed.grid,
        search=parsed.search,
        fixed=options,
        trials=parsed.trials,
        storage=parsed.storage,
        prune=parsed.prune,
        csv_path=parsed.csv,
        lost_after=parsed.lost_after,
        say=_say,
    )
    _say(f"wrote {found.csv_path}")
    if elsewhere := sum(trial.state == "running" for trial in found.trials):
        _say(f"{elsewhere} more still running elsewhere")
    if found.command is None:
        if elsewhere:
            return
        raise ShortlistError("no trial has come to its end")
    _print_table(found.table)
    print()
    _show(found.command)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "tune": tune,
    "evaluate": evaluate,
    "predict": predict,
    "report": report,
    "reproduce": reproduce,
    "bench": bench,
    "datasets": datasets,
    "demo": demo,
}


def main() -> None:
    """Run the command that the arguments name."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: names of files can be what is no text
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    name, *arguments = sys.argv[1:] or ["help"]
    try:
        try:
            _run(name, arguments)
        finally:
            sys.stdout.flush()  # here, and not when Python exits, a failure can still be handled
        if "TORCHELASTIC_RUN_ID" in os.environ:  # one of torchrun's ranks
            _leave()
    except ShortlistError as wrong:
        _say(f"shortlist {name}: {wrong}")
        sys.exit(1)
    except BrokenPipeError:  # whoever read the output has seen enough, as ``head`` does
        _forget_output()
        sys.exit(1)
    except OSError as wrong:
        if wrong.filename is not None:
            _say(f"shortlist {name}: cannot use {wrong.filename}: {wrong.strerror}")
        elif wrong.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):  # all files of ours have names
            _forget_output()
            _say(f"shortlist {name}: cannot write the output: {wrong.strerror}")
        else:
            raise
        sys.exit(1)
    except RuntimeError as wrong:
        # Raised by a signal handler of torch's, wherever the program is at that moment.
        if not str(wrong).startswith("DataLoader worker"):
            raise
        _say(
            f"shortlist {name}: a process that reads images was killed, perhaps for want of memory ({wrong}); "
            "try fewer --data.workers, and shortlist train with --resume goes on from the last checkpoint"
        )
        sys.exit(1)
    except KeyboardInterrupt as stopped:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # one more ends the process at once, without a traceback
        _say(f"shortlist {name}: {str(stopped) or 'stopped'}")
        sys.exit(130)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but during an import end the process: a half-imported package fails in odd ways."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _run(name: str, arguments: list[str]) -> None:
    if name == "--version":
        print(f"shortlist {__version__}")
    elif name in ("help", "-h", "--help"):
        if arguments:
            _run(arguments[0], ["--help"])
            return
        print("shortlist: train classifiers whose K suggestions contain the right answer\n")
        for command in COMMANDS.values():
            text, _, usage = (command.__doc__ or "").partition(": ")
            print(f"  {usage:44} {text}")
        print("\nshortlist help COMMAND, or COMMAND --help, tells more; shortlist --version tells the version.")
    elif name in COMMANDS:
        COMMANDS[name](arguments)
    else:
        _say(f"shortlist: there is no command {name!r}: {_close_to(name, [*COMMANDS, 'help', '--version'])}")
        sys.exit(2)


def _forget_output() -> None:
    """Send the rest of the output nowhere: at its exit Python would try to write it, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave() -> None:
    """End the process here and now.

    Threads of its process group may outlive the objects that own them, and then abort it in its very last moment,
    whereupon torchrun kills the others: that was seen in one of ten runs of two ranks on a busy machine.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _parse(kind: type[Any], arguments: list[str], name: str, **options: Any) -> Any:
    hidden = [hide_passwords_of_word(word) for word in arguments]
    if hidden != arguments:  # a mistake in these is found in these, and tyro prints no password
        tyro.cli(kind, args=hidden, prog=f"shortlist {name}", **options)
    return tyro.cli(kind, args=arguments, prog=f"shortlist {name}", **options)


def _print_table(table: Table) -> None:
    """As wide as it takes: a window can wrap its lines, but not bring back what was cut off."""
    shown = Table(box=table.box, pad_edge=table.pad_edge)
    for column in table.columns:
        shown.add_column(column.header, justify=column.justify, overflow=column.overflow, no_wrap=column.no_wrap)
    for row in zip(*(column.cells for column in table.columns), strict=True):
        shown.add_row(*(printable(str(cell)) for cell in row))
    Console(highlight=False, markup=False, emoji=False, width=_WIDEST_TABLE).print(shown)


def _parse_recipe(kind: type[_RecipeArguments], arguments: list[str], command: str) -> tuple[Any, RunConfig]:
    """What follows the command: a recipe's name, then fields; parsed, and the configuration alone."""
    recipe = recipes.build(arguments[0])
    names = [field.name for field in dataclasses.fields(recipe)]
    default = kind(**{name: getattr(recipe, name) for name in names})
    parsed = _parse(kind, arguments[1:], f"{command} {arguments[0]}", default=default)
    settings = {name: getattr(parsed, name) for name in names}
    if "optim.milestones" not in _options(arguments):
        settings["optim"] = _slowed_down_as(recipe, parsed)
    _say_what_another_loss_inherits(recipe, parsed, _options(arguments))
    try:
        return parsed, RunConfig(**settings)
    except ShortlistError as wrong:
        _say(f"shortlist {command}: {wrong}")
        sys.exit(2)


def _say_what_another_loss_inherits(recipe: RunConfig, arguments: RunConfig, typed: Sequence[str]) -> None:
    """The recipe's settings were chosen for its own loss, and may be far off for another."""
    loss = arguments.loss
    names = [name for name in SETTINGS_OF[loss.name] if name != "k" and f"loss.{name}" not in typed]
    if names and loss.name != recipe.loss.name and _is_first_rank():
        kept = ", ".join(f"loss.{name} = {getattr(loss, name):g}" for name in names)
        _say(f"{kept} as in the recipe, whose loss is {recipe.loss.name}: {loss.name} may need others")


def _options(arguments: list[str]) -> list[str]:
    """Names of what was typed, as the fields are called; tyro does not tell a default from the same value typed."""
    return [each[2:].partition("=")[0].replace("-", "_") for each in arguments if each.startswith("--")]


def _slowed_down_as(recipe: RunConfig, arguments: RunConfig) -> OptimConfig:
    """With the recipe's milestones: in a run of another length at the same shares of it."""
    if arguments.optim.schedule != "step":
        return arguments.optim
    scaled = recipes.scaled_milestones(recipe, arguments.train.epochs)
    if scaled != list(recipe.optim.milestones) and _is_first_rank():
        epochs = f"epoch{'s' if len(scaled) > 1 else ''} {', '.join(map(str, scaled))}"
        what = f"falls after {epochs}, in proportion to the recipe's" if scaled else "does not fall in so few epochs"
        _say(f"the learning rate {what}")
    return dataclasses.replace(arguments.optim, milestones=tuple(scaled))


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"  # set by torchrun


def _list_recipes(command: str) -> None:
    print(f"{COMMANDS[command].__doc__}\n\nRecipes (shortlist {command} RECIPE --help lists the fields):\n")
    width = max(map(len, recipes.HELP))
    for name, text in recipes.HELP.items():
        print(f"  {name:{width}}  {text}")


def _list_experiments() -> None:
    from shortlist.program.reproduce.figures import FIGURES
    from shortlist.program.reproduce.registry import EXPERIMENTS

    print(f"{reproduce.__doc__}\n\nTables and figures (shortlist reproduce --help lists the options):\n")
    titles = {name: experiment.title for name, experiment in EXPERIMENTS.items()}
    titles |= {name: f"{name.replace('-', ' ').capitalize()}, a figure without training" for name in FIGURES}
    width = max(map(len, titles))
    for name, title in titles.items():
        print(f"  {name:{width}}  {title}")


def _close_to(name: str, known: Iterable[str]) -> str:
    """What was perhaps meant, however it is written, or all that there is."""
    spelt = {_letters(each): each for each in known}
    close = difflib.get_close_matches(_letters(name), spelt, 1)
    return f"perhaps {spelt[close[0]]}?" if close else f"there are {', '.join(known)}"


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _percentages(metrics: dict[str, float | None]) -> str:
    shown = (name for name in metrics if name.startswith(("micro", "macro")))
    return "  ".join(f"{name} {100 * (metrics[name] or 0):.2f}%" for name in shown)


def _show(result: object) -> None:
    """A line on standard output."""
    print(printable(str(result)))


def _say(message: str) -> None:
    """A line on standard error."""
    print(printable(hide_passwords(message)), file=sys.stderr)
