"""The report: one HTML file that loads nothing and runs no script."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from shortlist import __version__
from shortlist.program.atomic_files import write_file
from shortlist.program.config import DataConfig
from shortlist.program.report.certainty import FEWEST_IN_BIN, coverage_against_size, reliability_diagrams
from shortlist.program.report.curves import accuracy_against_k, accuracy_against_size, learning_curves
from shortlist.program.report.gather import Comparison, gather
from shortlist.program.report.markup import Html, element, folded, joined
from shortlist.program.report.pictures import Pictures, confusions, examples
from shortlist.program.report.run_tables import origins_table, results_table, settings_table, sizes_table
from shortlist.program.report.summary import percent_spread
from shortlist.program.runs.folder import RunFolder
from shortlist.program.text import counted

# Whatever a class name holds, the browser runs and fetches nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_PERCENT = "\N{NARROW NO-BREAK SPACE}%"
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def write_report(runs: list[RunFolder], out: Path, opening: Html | None = None) -> Path:
    """Write one self-contained HTML page that compares runs.

    Runs that differ only in the seed are averaged; of runs with the same seed one counts. Runs on different data are
    compared separately.

    Args:
        runs: Finished or not, e.g. from ``shortlist.program.runs.folder.find_runs``.
        out: The file to write, or a folder for ``report.html``.
        opening: What the page starts with.

    Returns:
        The file.

    Raises:
        ShortlistError: There is no run, a file is damaged, or the page cannot be written.
    """
    path = out / "report.html" if out.is_dir() else out
    page = _page(gather(runs), opening)
    write_file(path, page.encode())
    return path


def _page(comparisons: list[Comparison], opening: Html | None) -> str:
    title = page_title(comparisons)
    style = Html(resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8"))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", style),
    )
    several = len(comparisons) > 1
    sections = [
        _section(comparison, f"data-{number}", titled=several) for number, comparison in enumerate(comparisons, 1)
    ]
    body = element(
        "body",
        element("header", element("p", "shortlist report", class_="overline"), element("h1", title)),
        element("main", *([opening] if opening else []), *sections),
        element("footer", element("p", f"Made by shortlist {__version__} from the run folders.")),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _section(comparison: Comparison, name: str, *, titled: bool) -> Html:
    lead, parts = outcome(comparison), list(_parts(comparison))
    links = [element("a", part.title, href=f"#{name}-{number}") for number, part in enumerate(parts)]
    return element(
        "section",
        *([element("h2", f"{data_name(comparison.data)}: {subject(comparison)}")] if titled else []),
        element("p", data_facts(comparison), class_="facts"),
        *([element("p", lead, class_="lead")] if lead else []),
        element("nav", *links, aria_label="Parts"),
        *(
            element(
                "section",
                element("h3" if titled else "h2", part.title, class_="part"),
                *([element("p", part.note, class_="note")] if part.note else []),
                *part.content,
                id=f"{name}-{number}",
            )
            for number, part in enumerate(parts)
        ),
    )


@dataclass(frozen=True)
class _Part:
    title: str
    note: str
    content: list[Html]


def _parts(comparison: Comparison) -> Iterator[_Part]:
    """The parts of a comparison; one that the runs have no data for is left out."""
    notes, pictures = _notes(comparison), Pictures(comparison.runs)
    sizes = [folded("By class size at every K", sizes_table(comparison))] if len(comparison.ks) > 1 else []
    contents: dict[str, list[Html | None]] = {
        "Results": [results_table(comparison), *sizes],
        "Accuracy against K": [accuracy_against_k(comparison)],
        "Accuracy against class size": [accuracy_against_size(comparison)],
        "How sure it is": [reliability_diagrams(comparison)],
        "Sets of varying size": [coverage_against_size(comparison)],
        "Learning curves": [learning_curves(comparison)],
        "Most confused classes": [confusions(comparison, pictures)],
        "Examples": [examples(comparison, pictures)],
    }
    for title, content in contents.items():
        if shown := [part for part in content if part is not None]:
            yield _Part(title, notes[title], shown)
    settings = folded("All settings", settings_table(comparison))
    yield _Part("Configuration", "", [settings, folded("Folders and machines", origins_table(comparison))])


def page_title(comparisons: list[Comparison]) -> str:
    """What is compared, and on which data."""
    if len(comparisons) > 1:
        return f"Runs on {_listed(list(dict.fromkeys(data_name(comparison.data) for comparison in comparisons)))}"
    what = subject(comparisons[0])
    return f"{what[0].upper()}{what[1:]} on {data_name(comparisons[0].data)}"


def data_name(data: DataConfig) -> str:
    """The name of the data set, or of its folder or file."""
    return Path(data.root).name or data.name if data.is_named_by_root else data.name


def subject(comparison: Comparison) -> str:
    """What is compared: losses, or set-ups if some share a loss."""
    setups = comparison.setups
    if len(setups) == 1:
        return setups[0].label
    losses = {setup.config.loss.name for setup in setups}
    return f"{_in_words(len(setups))} {'losses' if len(losses) == len(setups) else 'set-ups'}"


def data_facts(comparison: Comparison) -> str:
    """Size of the data, changes to it, and number of runs."""
    data, sizes = comparison.data, comparison.train_images
    facts = []
    if sizes:
        classes = counted(len(sizes), "class", "classes")
        facts.append(f"{classes} with {_span(sizes)} training images each, {sum(sizes):,} in all")
    facts += _test_images(comparison)
    if data.imbalance != 1:
        facts.append(f"{data.imbalance_kind} imbalance {data.imbalance:g}")
    if data.label_noise:
        facts.append(f"label noise {data.label_noise:g} within {data.noise_groups} groups")
    finished, unfinished = len(comparison.runs), sum(len(setup.unfinished) for setup in comparison.setups)
    facts.append(f"{counted(finished, 'finished run')}" + (f", {unfinished} unfinished" if unfinished else ""))
    if copies := sum(len(setup.copies) for setup in comparison.setups):
        facts.append(f"{counted(copies, 'run')} left out: same settings and seed as another")
    return "; ".join(facts) + "."


def _test_images(comparison: Comparison) -> list[str]:
    """How many images were tested and how many were unreadable; empty if no run has predictions."""
    is_readable = [run.predictions.labels >= 0 for run in comparison.runs if run.predictions]
    if not is_readable:
        return []
    tested = [int(readable.sum()) for readable in is_readable]
    left_out = [int((~readable).sum()) for readable in is_readable]
    text = f"{_span(tested)} test image{'' if max(tested) == 1 else 's'}"
    return [f"{text}, {_span(left_out)} more unreadable" if any(left_out) else text]


def _span(numbers: Sequence[int]) -> str:
    smallest, largest = min(numbers), max(numbers)
    return f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"


def outcome(comparison: Comparison) -> Html | None:
    """The best set-up, in one sentence, and in another after the correction; None if there is nothing to compare."""
    k = comparison.main_k
    sentences = [
        _best_of(comparison, f"Highest macro top-{k} accuracy: ", corrected=False),
        _best_of(comparison, " Corrected for class sizes: ", corrected=True),
    ]
    shown = [sentence for sentence in sentences if sentence is not None]
    return joined(shown) if k is not None and shown else None


def _best_of(comparison: Comparison, beginning: str, *, corrected: bool) -> Html | None:
    name = f"macro_top{comparison.main_k}"
    scores = {setup.label: setup.test_metric(name, corrected=corrected) for setup in comparison.finished}
    ranked = sorted((item for item in scores.items() if item[1]), key=lambda item: -item[1].mean if item[1] else 0)
    written = {label: percent_spread(score) for label, score in ranked if score}
    if len(written) < 2:
        return None
    best = next(iter(written.values()))
    # Set-ups that look equal in the table are not ranked here.
    leaders = [label for label, text in written.items() if text == best]
    followers = [f"; next {label}, {text}{_PERCENT}" for label, text in written.items() if text != best]
    lead = element("strong", f"{_listed(leaders)}, {best}{_PERCENT}")
    return joined([beginning, lead, *followers[:1], "."])


def _in_words(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else f"{number:,}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _notes(comparison: Comparison) -> dict[str, str]:
    """The notes below the headings. They only explain what is there: seeds, for example, if there are several."""
    seeds = {len(setup.finished) for setup in comparison.finished}
    several_seeds, k = max(seeds, default=0) > 1, comparison.suggestions_shown
    shaded = several_seeds and "Shaded: one standard deviation over seeds."
    all_shown = len(comparison.leading) == len(comparison.finished)
    chosen = not all_shown and "Only the set-ups with the highest macro accuracy are shown."
    corrected, plain = comparison.has_corrections, comparison.has_corrections and "Scores are not corrected here."
    notes: dict[str, tuple[str | bool, ...]] = {
        "Results": (
            "Test accuracy in percent, with the weights of the best epoch on the validation images.",
            corrected
            and "Corrected for class sizes: the scores less τ times the logarithm of the class's share of the "
            "training images, as evaluate and predict use them by default.",
            several_seeds and "With several seeds: mean ± standard deviation.",
            len(comparison.finished) > 1 and "The best value of each column is bold.",
        ),
        "Accuracy against K": ("How often the right class is among the first K suggestions.", plain, shaded),
        "Accuracy against class size": (
            "Mean accuracy of classes with a similar number of training images. Grey bars: number of classes.",
            plain,
            shaded,
        ),
        "How sure it is": (
            "How often the best class is right, by its calibrated probability, on the test images that sets do not "
            "rest on. On the dotted line, a probability means what it says.",
            f"A point rests on at least {FEWEST_IN_BIN} images of a run.",
            shaded,
        ),
        "Sets of varying size": (
            "Sets hold as many classes as it takes to contain the right one with a chosen probability, the coverage. "
            "First K: plain suggestions, as many for every image as the sets have on average; between two whole "
            "numbers, one or the other.",
            shaded,
        ),
        "Learning curves": (1 in seeds and "A ring marks the epoch whose weights were kept.", shaded),
        "Most confused classes": (
            "Test images of the first class whose top suggestion is the second. Mistaken: their share of the first "
            f"class. Still in {k}: the share of them with the true class among their {k} suggestions.",
            plain,
            chosen,
        ),
        "Examples": (
            "Chosen by label only, so they are the same for all runs on this data.",
            plain,
            several_seeds and "With several seeds: the run with the lowest one.",
            chosen,
        ),
    }
    return {title: " ".join(text for text in texts if isinstance(text, str)) for title, texts in notes.items()}
