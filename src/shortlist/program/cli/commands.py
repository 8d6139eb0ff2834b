"""The commands for training and using classifiers.

Commands check their arguments first, and import what takes seconds (torch, above all) after that.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import DownloadColumn, Progress
from rich.table import Table

from shortlist.errors import ShortlistError
from shortlist.program import recipes
from shortlist.program.cli.output import print_table, say, say_unpromised, show
from shortlist.program.cli.parsing import RecipeArguments, asks_for_help, option_names, parse, parse_recipe
from shortlist.program.config import differences
from shortlist.program.text import did_you_mean

if TYPE_CHECKING:
    from shortlist.program.predicting.predictor import Predictor, Suggestion
    from shortlist.program.runs.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class TrainArguments(RecipeArguments):
    resume: bool = False
    """Continue a run that was interrupted."""
    out: Path | None = None
    """Folder of the run, or of the runs of several seeds (default: runs/RECIPE/KEY-sSEED)."""
    seeds: tuple[int, ...] = ()
    """Train once for each of these seeds."""


_WHAT = {
    "train": "Train a classifier: a recipe is a full set of settings, and any of them can be changed.",
    "tune": "Search for the settings of a recipe that are best on the validation images.",
}
_TRAIN_EXAMPLES = (
    "shortlist train folder --data.root photos                  photos/CLASS/IMAGE, five suggestions",
    "shortlist train folder --data.root photos --loss.k 3 --train.epochs 10",
    "shortlist train folder_lite --data.root photos             weights from a package, without a model hub",
    "shortlist train folder --data.root photos --loss.name cross_entropy --out runs/baseline",
    "shortlist train embeddings --data.root vectors.npz --seeds 0 1 2",
    "shortlist train folder --data.root photos --resume         continue after Ctrl-C",
)


def train(arguments: list[str]) -> None:
    """Train a classifier: shortlist train RECIPE [--SETTING VALUE ...]"""
    if not arguments or asks_for_help(arguments[:1]):
        _list_recipes("train", _TRAIN_EXAMPLES)
        return
    parsed, config = parse_recipe(TrainArguments, arguments, "train", _TRAIN_EXAMPLES)

    from shortlist.program.runs.folder import RunFolder, default_folder
    from shortlist.program.runs.records import read_result
    from shortlist.program.training.loop import train

    for seed in parsed.seeds or (config.seed,):
        folder = parsed.out / f"s{seed}" if parsed.out and parsed.seeds else parsed.out
        seeded = dataclasses.replace(config, seed=seed)
        done = RunFolder(folder or default_folder(seeded))
        if parsed.seeds and parsed.resume and done.finished and not differences(done.config, seeded):
            say(f"{done.path} is already finished")
            continue
        run = train(seeded, folder=folder, resume=parsed.resume)
        if _is_first_rank():
            result = read_result(run)
            show(f"{run.path}  test {_percentages(result['test'])}")
            if "test_corrected" in result:
                show(f"{run.path}  test, corrected for class sizes: {_percentages(result['test_corrected'])}")


@dataclass(frozen=True, kw_only=True)
class TuneArguments(RecipeArguments):
    grid: Literal["auto", "paper", "given", "none"] = "auto"
    """paper: the paper's values for the loss. given: the values of --search. none: sample. auto: the first possible."""
    search: tuple[str, ...] = ()
    """More settings or values, such as loss.scale=30,50 optim.lr=0.05,0.2. Sampling draws from between the values."""
    trials: int | None = None
    """Number of trials of the study, over all processes (default: the whole grid, or 20 samples)."""
    storage: str = ""
    """Where the study is kept: a database such as sqlite:///study.db, or a file. Several processes may share it."""
    prune: bool = False
    """Stop trials that are worse than the median of the others at the same epoch."""
    csv: Path | None = None
    """File that lists the trials (default: in runs/tune/RECIPE)."""
    lost_after: float = 24.0
    """Hours without a finished epoch after which a trial of another machine counts as killed and is run again."""


_TUNE_EXAMPLES = (
    "shortlist tune folder --data.root photos --train.epochs 10",
    "shortlist tune folder --data.root photos --search optim.lr=0.001,0.01 --grid none --trials 30",
    "shortlist tune embeddings --data.root vectors.npz --storage sqlite:///study.db",
)


def tune(arguments: list[str]) -> None:
    """Search for good settings: shortlist tune RECIPE [--SETTING VALUE ...]"""
    if not arguments or asks_for_help(arguments[:1]):
        _list_recipes("tune", _TUNE_EXAMPLES)
        return
    options = option_names(arguments)
    if options.count("search") > 1:
        raise ShortlistError(
            "--search must be given once, followed by all settings: --search loss.scale=30,50 optim.lr=0.1,0.2"
        )
    parsed, config = parse_recipe(TuneArguments, arguments, "tune", _TUNE_EXAMPLES)

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
        say=say,
    )
    say(f"wrote {found.csv_path}")
    if elsewhere := sum(trial.state == "running" for trial in found.trials):
        say(f"{elsewhere} more are still running in other processes")
    if found.command is None:
        if elsewhere:
            return
        raise ShortlistError("no trial has finished")
    print_table(found.table)
    print()
    show(found.command)


@dataclass(frozen=True)
class EvaluateArguments:
    run: Annotated[Path, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional]
    """Folder of the run."""
    split: str = "test"
    """Which images: train, val or test."""
    ks: tuple[int, ...] = ()
    """Values of K to measure (default: those of the run)."""
    csv: Path | None = None
    """File for the accuracy of each class."""
    root: str = ""
    """Where the data is now, if it has moved."""
    correction: bool = True
    """Correct the scores for class sizes, if the run chose to."""
    device: str = "auto"
    """Device to compute on: auto, cpu, cuda or mps."""


def evaluate(arguments: list[str]) -> None:
    """Measure the accuracy of a run: shortlist evaluate RUN"""
    examples = (
        "shortlist evaluate runs/folder/1f2e3d4c5b-s0 --ks 1 5 10",
        "shortlist evaluate runs/baseline --split val --csv classes.csv",
    )
    parsed = parse(EvaluateArguments, arguments, "evaluate", examples)

    from shortlist.program.runs.folder import RunFolder

    run = RunFolder.existing(parsed.run)

    from shortlist.program.atomic_files import write_file
    from shortlist.program.runs.records import has_other_training_images, read_added, read_correction
    from shortlist.program.text import counted, some_of
    from shortlist.program.training.evaluate import evaluate_run

    result, problem = evaluate_run(run, split=parsed.split, ks=parsed.ks, root=parsed.root, device=parsed.device)
    if skipped := problem.split(parsed.split).skipped:
        say(f"left out {counted(len(skipped), 'unreadable image')}: {some_of(skipped)}")
    if parsed.correction and result.corrected:
        result = result.corrected
        on_these = "; it was chosen on the images evaluated here" if parsed.split == "val" else ""
        say(f"scores are corrected for class sizes: {read_correction(run)}{on_these}")
    if result.ties:
        say(result.ties)
    if added := read_added(run):
        say(
            f"no image here is of a class that was added after training, such as {added.classes[0]}: this is the "
            "accuracy of the other classes beside them"
        )
    if has_other_training_images(problem, run):
        say(
            f"the training images have changed since {run.path} was trained: "
            "the images evaluated here may be among those it was trained on"
        )
    print(json.dumps({**result.metrics, **_certainty(run, parsed.split)}, indent=1))
    if parsed.csv is not None:
        write_file(parsed.csv, result.per_class_csv(problem).encode())
        say(f"wrote {parsed.csv}")


def _certainty(run: "RunFolder", split: str) -> dict[str, Any]:
    """What the probabilities and sets of a calibrated run are worth, from the scores that it kept."""
    from shortlist.program.predicting.calibration import read_calibration
    from shortlist.program.predicting.certainty import measured_certainty
    from shortlist.program.runs.scores import FILE
    from shortlist.program.text import counted

    calibration = read_calibration(run) if split == "test" else None
    if calibration is None:
        return {}
    if not run.has(FILE):
        say(f"{run.path} has no {FILE}, so what its probabilities and sets are worth is not measured")
        return {}
    found = measured_certainty(run, calibration)
    say(
        f"calibration_error, reliability and sets are those of {counted(found.images, 'test image')}: the sets rest on "
        "the others"
    )
    return {
        "calibration_error": found.error,
        "reliability": {
            group: [dataclasses.asdict(item) for item in bins] for group, bins in found.reliability.items()
        },
        "sets": [dataclasses.asdict(item) for item in found.sets],
    }


@dataclass(frozen=True)
class PredictArguments:
    run: Annotated[Path, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional]
    """Folder of the run, or its address on the hub, hf://OWNER/NAME."""
    inputs: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="IMAGE ..."), tyro.conf.Positional]
    """Image files, or folders of them; for a run on embeddings, files of vectors (.npy, .npz, .safetensors)."""
    k: Annotated[int | None, tyro.conf.arg(aliases=["-k"])] = None
    """Number of suggestions (default: the K that the run was trained for)."""
    coverage: float | None = None
    """Suggest sets that contain the right class with this probability, such as 0.9, instead of K classes."""
    of: Literal["classes", "photos"] = "classes"
    """What the coverage is of: classes on average, each counting the same, or photos."""
    average_k: float | None = None
    """Suggest sets of this mean size instead of K classes."""
    max_k: int | None = None
    """At most so many classes in a set; the coverage is then not promised."""
    json: bool = False
    """Print one JSON object for each image instead of a table."""
    correction: bool = True
    """Correct the scores for class sizes, if the run chose to."""
    device: str = "auto"
    """Device to compute on: auto, cpu, cuda or mps."""

    @property
    def asks_for_sets(self) -> bool:
        return self.coverage is not None or self.average_k is not None


def predict(arguments: list[str]) -> None:
    """Suggest K classes for images: shortlist predict RUN IMAGE ..."""
    examples = (
        "shortlist predict runs/folder/1f2e3d4c5b-s0 leaf.jpg",
        "shortlist predict runs/baseline new_photos -k 10 --json > suggestions.jsonl",
        "shortlist predict runs/birds photo.jpg --coverage 0.9   # after shortlist calibrate runs/birds",
    )
    parsed = parse(PredictArguments, arguments, "predict", examples)

    from shortlist.program.predicting.hub_runs import hub_address, open_run

    run = None if hub_address(parsed.run) else open_run(parsed.run)
    _check_sets(parsed)
    if not parsed.inputs:
        raise ShortlistError("no images given: name image files, or folders of them")
    for path in parsed.inputs:
        if not path.exists():
            raise ShortlistError(f"there is no file {path}")
    run = run or open_run(parsed.run)  # only now: a download takes its time

    from shortlist.program.predicting.predictor import Predictor
    from shortlist.program.runs.records import read_correction

    predictor = Predictor(run, parsed.device, correct=parsed.correction)
    if parsed.correction and (chosen := read_correction(run)):
        say(f"scores are corrected for class sizes: {chosen}")
    if parsed.coverage is not None and predictor.unpromised:
        say_unpromised(predictor.unpromised)
    k = predictor.suggested if parsed.k is None else parsed.k
    if k < 1:
        raise ShortlistError(f"-k must be at least 1, got {k}")
    places = range(min(k, len(predictor.classes)))  # a K that is too large is refused by suggest
    headings = ["set"] if parsed.asks_for_sets else [f"{place + 1}" for place in places]
    table = Table("input", *headings, box=None, pad_edge=False)
    unreadable: list[ShortlistError] = []
    inputs = _vectors(parsed.inputs) if predictor.channels == 0 else _images(parsed.inputs, predictor, unreadable)
    for names, group in inputs:
        if parsed.asks_for_sets:
            coverage = 0.9 if parsed.coverage is None else parsed.coverage
            found = predictor.sets(group, coverage, of=parsed.of, average_k=parsed.average_k, max_k=parsed.max_k)
        else:
            found = predictor.suggest(group, k)
        for name, suggestions in zip(names, found, strict=True):
            remark = _remark(len(suggestions), len(predictor.classes)) if parsed.asks_for_sets else ""
            if parsed.json:
                told = {"remark": remark} if remark else {}
                line = {**name, "suggestions": [_as_json(item) for item in suggestions], **told}
                print(json.dumps(line, allow_nan=False))
            else:
                cells = [_as_text(item) for item in suggestions]
                shown = [remark or ", ".join(cells)] if parsed.asks_for_sets else cells
                table.add_row(":".join(map(str, name.values())), *shown)
    if not parsed.json:
        print_table(table)
    if unreadable:
        raise ShortlistError("; ".join(map(str, unreadable)))


def _check_sets(parsed: PredictArguments) -> None:
    if parsed.coverage is not None and parsed.average_k is not None:
        raise ShortlistError("--coverage and --average-k exclude each other: give one of them")
    if parsed.asks_for_sets and parsed.k is not None:
        raise ShortlistError("-k is for suggestions of a fixed number: sets take --max-k")
    if parsed.max_k is not None and not parsed.asks_for_sets:
        raise ShortlistError("--max-k is for sets: add --coverage 0.9 or --average-k 3, or use -k")


def _remark(size: int, classes: int) -> str:
    """What to say of a set that tells nothing."""
    if size == 0:
        return "empty: no class is likely enough"
    return f"all {classes:,} classes: nothing can be ruled out" if size == classes else ""


def _as_text(item: "Suggestion") -> str:
    certainty = f"{item.score:.3f}" if item.probability is None else f"{100 * item.probability:.1f} %"
    return f"{item.name} ({certainty})"


def _as_json(item: "Suggestion") -> dict[str, Any]:
    # JSON has no NaN.
    numbers = {"score": item.score, "probability": item.probability}
    known = {name: value if value is None or isfinite(value) else None for name, value in numbers.items()}
    if item.probability is None:
        del known["probability"]
    return {"name": item.name, "index": item.index, **known}


def _images(
    paths: Sequence[Path], predictor: "Predictor", unreadable: list[ShortlistError]
) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    """Groups of image files: what each is called in the result, and the images."""
    from shortlist.program.predicting.inputs import image_files, readable_images
    from shortlist.program.predicting.predictor import AT_ONCE
    from shortlist.program.text import counted, some_of

    files, unused = image_files(paths)
    if unused:
        which = counted(len(unused), "file that is not an image", "files that are not images")
        say(f"left out {which}: {some_of([str(path) for path in unused])}")
    for found, images in readable_images(files, predictor.channels, AT_ONCE, unreadable.append):
        yield [{"image": str(file)} for file in found], images


def _vectors(paths: Sequence[Path]) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    """Files of vectors: what each row is called in the result, and the vectors."""
    from shortlist.program.predicting.inputs import read_vectors

    for path in paths:
        vectors = read_vectors(path)
        rows = vectors.unsqueeze(0) if vectors.dim() == 1 else vectors
        yield [{"file": str(path), "row": row} for row in range(len(rows))], rows


@dataclass(frozen=True)
class CalibrateArguments:
    run: Annotated[Path, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional]
    """Folder of the run."""
    coverage: float = 0.9
    """The coverage of the sets that are tried out."""
    seed: int = 0
    """Which half of the test images the sets rest on."""
    divisions: int = 0
    """Divide the test images anew this many times, such as 100, and tell whether the coverage is kept on average."""


def calibrate(arguments: list[str]) -> None:
    """Learn how sure a run is, for probabilities and sets: shortlist calibrate RUN"""
    examples = ("shortlist calibrate runs/birds", "shortlist predict runs/birds photo.jpg --coverage 0.9")
    parsed = parse(CalibrateArguments, arguments, "calibrate", examples)
    if not 0 < parsed.coverage < 1:
        raise ShortlistError(f"--coverage must be between 0 and 1, such as 0.9, got {parsed.coverage}")
    if parsed.divisions < 0 or parsed.divisions == 1:
        raise ShortlistError(f"--divisions must be 2 or more, such as 100, got {parsed.divisions}")

    from shortlist.program.runs.folder import RunFolder

    run = RunFolder.existing(parsed.run)

    from shortlist.program.predicting import calibration
    from shortlist.program.predicting.certainty import kept_promises, measured_certainty
    from shortlist.program.runs.records import read_classes

    found = calibration.calibrate(run, parsed.seed)
    say(f"wrote {run.path / calibration.FILE}")
    if found.unseen:
        names = read_classes(run).names
        say_unpromised([names[label] for label in found.unseen])
    seen = len(found.set_images)
    print(f"temperature {found.temperature:.3g}, prior {found.prior:.2f}, from {found.val_images:,} validation images")
    print(f"sets rest on {seen:,} test images; the numbers below are of the others\n")
    errors = Table("calibration error, %", *found.error, box=None, pad_edge=False)
    for name, values in (("plain softmax", found.error_before), ("calibrated", found.error)):
        errors.add_row(name, *("-" if value is None else f"{100 * value:.1f}" for value in values.values()))
    print_table(errors)
    print()
    sizes = Table(f"sets of {100 * parsed.coverage:g} %", *_SET_COLUMNS.values(), box=None, pad_edge=False)
    for sets in measured_certainty(run, found, [parsed.coverage]).sets:
        sizes.add_row(f"of {sets.of}", *(_set_cell(name, sets.metrics[name]) for name in _SET_COLUMNS))
        size = _set_cell("mean_size", sets.metrics["mean_size"])
        plain = sets.top_k | {"mean_size": sets.metrics["mean_size"], "empty": None}
        sizes.add_row(f"  first {size} suggestions", *(_set_cell(name, plain[name]) for name in _SET_COLUMNS))
    print_table(sizes)
    if parsed.divisions:
        columns = ("covered, %", "standard error", "promised, %", "mean size", "kept")
        promises = Table(f"over {parsed.divisions:,} divisions", *columns, box=None, pad_edge=False)
        for promise in kept_promises(run, found, parsed.coverage, parsed.divisions):
            promised = f"{100 * promise.lowest:.2f} to {100 * promise.highest:.2f}"
            numbers = (f"{100 * promise.coverage:.2f}", f"{100 * promise.standard_error:.2f}", promised)
            kept = "yes" if promise.is_kept else "no"
            promises.add_row(f"of {promise.of}", *numbers, f"{promise.mean_size:.2f}", kept)
        print()
        print_table(promises)


_SET_COLUMNS = {
    "mean_size": "mean size",
    "micro_coverage": "photos covered, %",
    "macro_coverage": "classes covered, %",
    "few_coverage": "few",
    "medium_coverage": "medium",
    "many_coverage": "many",
    "empty": "empty, %",
}


def _set_cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if name == "mean_size" else f"{100 * value:.1f}"


@dataclass(frozen=True)
class ReportArguments:
    runs: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN ..."), tyro.conf.Positional]
    """Folders of runs, or folders that contain runs."""
    out: Path = Path("report.html")
    """The page to write."""


def report(arguments: list[str]) -> None:
    """Compare runs on one HTML page: shortlist report RUN ..."""
    examples = ("shortlist report runs/folder", "shortlist report runs/baseline runs/noised --out comparison.html")
    parsed = parse(ReportArguments, arguments, "report", examples)

    from shortlist.program.runs.folder import find_runs

    runs = find_runs(list(parsed.runs))

    from shortlist.program.report.page import write_report

    show(write_report(runs, parsed.out))


@dataclass(frozen=True)
class DatasetsArguments:
    name: Annotated[str, tyro.conf.arg(metavar="NAME"), tyro.conf.Positional] = ""
    """Describe this data set alone, and check whether yours is complete."""
    root: str = ""
    """Where the data is, or where to download it to (default: $SHORTLIST_DATA, or a cache folder)."""
    download: bool = False
    """Download the data set, if its source allows that."""


def datasets(arguments: list[str]) -> None:
    """List data sets, and check yours: shortlist datasets [NAME]"""
    examples = ("shortlist datasets folder --root photos", "shortlist datasets cifar100 --download --root data")
    parsed = parse(DatasetsArguments, arguments, "datasets", examples)

    from shortlist.program.data.catalogue import CATALOGUE, check, fetch

    if parsed.name and parsed.name not in CATALOGUE:
        hint = did_you_mean(parsed.name, CATALOGUE) or f": the data sets are {', '.join(CATALOGUE)}"
        raise ShortlistError(f"there is no data set {parsed.name!r}{hint}")
    if parsed.download:
        if not parsed.name:
            raise ShortlistError("name the data set to download, e.g. shortlist datasets cifar100 --download")
        with Progress(*Progress.get_default_columns(), DownloadColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(parsed.name, total=None)
            path = fetch(parsed.name, parsed.root, lambda done, total: bar.update(task, completed=done, total=total))
        say(f"wrote {path}")
    for entry in [CATALOGUE[parsed.name]] if parsed.name else CATALOGUE.values():
        print(f"{entry.name}\n  {entry.what}\n  size:   {entry.size}\n  terms:  {entry.terms}")
        print(f"  fetch:  {entry.fetch}\n  put:    {entry.put}\n")
    if parsed.name:
        if problems := check(parsed.name, parsed.root):
            raise ShortlistError("; ".join(problems))
        print(f"{parsed.name} is complete")


@dataclass(frozen=True)
class DemoArguments:
    out: Path = Path("demo")
    """Folder for the runs and the page."""


def demo(arguments: list[str]) -> None:
    """Compare four losses on built-in data, about five minutes on two cores: shortlist demo"""
    parsed = parse(DemoArguments, arguments, "demo", ("shortlist demo --out demo",))

    from shortlist.program.cli.demo import run_demo

    table, page = run_demo(parsed.out, say)
    print_table(table)
    print()
    show(f"open {page}")


def _list_recipes(command: str, examples: Sequence[str]) -> None:
    print(f"usage: shortlist {command} RECIPE [--SETTING VALUE ...]\n\n{_WHAT[command]}")
    for heading, lines in recipes.overview().items():
        print(f"\n{heading}:")
        width = max(len(name) for name, _ in lines)
        for name, text in lines:
            print(f"  {name:{width}}  {text}")
    print(f"\nshortlist {command} RECIPE --help lists the settings of a recipe.\n\nExamples:")
    for example in examples:
        print(f"  {example}")


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"  # set by torchrun


def _percentages(metrics: dict[str, float | None]) -> str:
    shown = (name for name in metrics if name.startswith(("micro", "macro")))
    return "  ".join(f"{name} {100 * (metrics[name] or 0):.2f}%" for name in shown)
