"""The report: one HTML file that loads nothing and runs no script."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from shortlist import __version__
from shortlist.program.atomic_files import write_file
from shortlist.program.config import DataConfig
from shortlist.program.report.curves import accuracy_against_k, accuracy_against_size, learning_curves
from shortlist.program.report.gather import Comparison, gather
from shortlist.program.report.markup import Html, element, folded, joined
from shortlist.program.report.pictures import Album, confusions, examples
from shortlist.program.report.run_tables import origins_table, results_table, settings_table, sizes_table
from shortlist.program.report.summary import percent_spread
from shortlist.program.runs.folder import RunFolder
from shortlist.program.wording import counted

# Whatever a class name may hold, a browser will not run it, nor fetch anything for it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(runs: list[RunFolder], out: Path) -> Path:
    """Write one self-contained HTML page that compares runs.

    Runs that share all settings but the seed are taken together, and of those that share it too one is counted;
    runs on different data are kept apart.

    Args:
        runs: Finished or not, e.g. from ``shortlist.program.runs.folder.find_runs``.
        out: The file to write, or a folder for ``report.html``.

    Returns:
        The file.

    Raises:
        ShortlistError: No run at all, a damaged file, a place that cannot be written to.
    """
    path = out / "report.html" if out.is_dir() else out
    page = _page(gather(runs))
    write_file(path, page.encode())
    return path


def _page(comparisons: list[Comparison]) -> str:
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
    sections = [_section(each, f"data-{number}", titled=several) for number, each in enumerate(comparisons, 1)]
    body = element(
        "body",
        element("header", element("p", "shortlist report", class_="overline"), element("h1", title)),
        element("main", *sections),
        element("footer", element("p", f"Made by shortlist {__version__} from the folders of the runs alone.")),
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
    """What there is to show: a part that the runs hold nothing for is left out."""
    notes, album = Notes(comparison), Album(comparison.runs)
    sizes = [folded("By class size at every K", sizes_table(comparison))] if len(comparison.ks) > 1 else []
    yield _Part("Results", notes.results, [results_table(comparison), *sizes])
    for title, note, content in (
        ("Accuracy against K", notes.accuracy_against_k, accuracy_against_k(comparison)),
        ("Accuracy against class size", notes.accuracy_against_size, accuracy_against_size(comparison)),
        ("Learning curves", notes.learning_curves, learning_curves(comparison)),
        ("Most confused classes", notes.confusions, confusions(comparison, album)),
        ("Examples", notes.examples, examples(comparison, album)),
    ):
        if content is not None:
            yield _Part(title, note, [content])
    settings = folded("All settings", settings_table(comparison))
    yield _Part("Configuration", "", [settings, folded("Folders and machines", origins_table(comparison))])


_PERCENT = "\N{NARROW NO-BREAK SPACE}%"
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def page_title(comparisons: list[Comparison]) -> str:
    """Which data, and what is compared."""
    if len(comparisons) > 1:
        return f"Runs on {_listed(list(dict.fromkeys(data_name(each.data) for each in comparisons)))}"
    what = subject(comparisons[0])
    return f"{what[0].upper()}{what[1:]} on {data_name(comparisons[0].data)}"


def data_name(data: DataConfig) -> str:
    """The data's own name, or that of its folder or file."""
    return Path(data.root).name or data.name if data.is_named_by_root else data.name


def subject(comparison: Comparison) -> str:
    """What is compared: losses, or set-ups where some share a loss."""
    setups = comparison.setups
    if len(setups) == 1:
        return setups[0].label
    losses = {setup.config.loss.name for setup in setups}
    return f"{_in_words(len(setups))} {'losses' if len(losses) == len(setups) else 'set-ups'}"


def data_facts(comparison: Comparison) -> str:
    """How large the data is and what was done to it."""
    data, sizes = comparison.data, comparison.train_images
    facts = []
    if sizes:
        classes = counted(len(sizes), "class", "classes")
        facts.append(f"{classes} of {_span(sizes)} training images, {sum(sizes):,} in all")
    facts += _test_images(comparison)
    if data.imbalance != 1:
        facts.append(f"{data.imbalance_kind} imbalance {data.imbalance:g}")
    if data.label_noise:
        facts.append(f"label noise {data.label_noise:g} within {data.noise_groups} groups")
    finished, unfinished = len(comparison.runs), sum(len(setup.unfinished) for setup in comparison.setups)
    facts.append(f"{counted(finished, 'finished run')}" + (f", {unfinished} unfinished" if unfinished else ""))
    if copies := sum(len(setup.copies) for setup in comparison.setups):
        facts.append(f"{counted(copies, 'run')} left out: settings and seed are those of another")
    return "; ".join(facts) + "."


def _test_images(comparison: Comparison) -> list[str]:
    """How many were looked at, and how many could not be read; nothing where no run has kept its suggestions."""
    could_be_read = [run.predictions.labels >= 0 for run in comparison.runs if run.predictions]
    if not could_be_read:
        return []
    tested = [int(each.sum()) for each in could_be_read]
    left_out = [int((~each).sum()) for each in could_be_read]
    text = f"{_span(tested)} test image{'' if max(tested) == 1 else 's'}"
    return [f"{text}, {_span(left_out)} more could not be read" if any(left_out) else text]


def _span(numbers: Sequence[int]) -> str:
    smallest, largest = min(numbers), max(numbers)
    return f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"


def outcome(comparison: Comparison) -> Html | None:
    """Which set-up leads, in one sentence; None where there is nothing to compare."""
    k = comparison.main_k
    scores = {setup.label: setup.test_metric(f"macro_top{k}") for setup in comparison.ranking}
    written = {label: percent_spread(score) for label, score in scores.items() if score}
    if k is None or len(written) < 2:
        return None
    best = next(iter(written.values()))
    # What looks the same in the table is not put in an order here.
    leaders = [label for label, text in written.items() if text == best]
    followers = [f"; next {label}, {text}{_PERCENT}" for label, text in written.items() if text != best]
    lead = element("strong", f"{_listed(leaders)}, {best}{_PERCENT}")
    return joined([f"Highest macro top-{k} accuracy: ", lead, *followers[:1], "."])


def _in_words(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else f"{number:,}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


class Notes:
    """The sentences under the headings."""

    def __init__(self, comparison: Comparison) -> None:
        runs = {len(setup.finished) for setup in comparison.finished}
        self._several_seeds = any(count > 1 for count in runs)
        self._single_seeds = 1 in runs
        self._all_shown = len(comparison.leading) == len(comparison.finished)
        self._several = len(comparison.finished) > 1
        self._k = comparison.suggestions_shown

    @property
    def results(self) -> str:
        return _sentences(
            "Accuracy on the test images in percent, with the weights of the epoch that did best on the validation "
            "images.",
            self._several_seeds and "Where there are several seeds: mean ± standard deviation.",
            self._several and "The best of each column is bold.",
        )

    @property
    def accuracy_against_k(self) -> str:
        return _sentences("How often the right class is among the first K suggestions.", self._shaded)

    @property
    def accuracy_against_size(self) -> str:
        return _sentences(
            "Mean accuracy of the classes with about as many training images. Grey bars: how many classes those are.",
            self._shaded,
        )

    @property
    def learning_curves(self) -> str:
        return _sentences(self._single_seeds and "A ring marks the epoch whose weights were kept.", self._shaded)

    @property
    def confusions(self) -> str:
        return _sentences(
            "The left class is taken for the right one. Mistaken: share of its test images with the right one as first "
            f"suggestion. Still in {self._k}: share of those whose true class is among their {self._k} suggestions "
            "all the same.",
            self._chosen,
        )

    @property
    def examples(self) -> str:
        return _sentences(
            "Chosen by their labels alone, so the same for all runs on this data.",
            self._several_seeds and "Where there are several seeds: the lowest.",
            self._chosen,
        )

    @property
    def _shaded(self) -> str | bool:
        return self._several_seeds and "Shaded: one standard deviation over seeds."

    @property
    def _chosen(self) -> str | bool:
        return not self._all_shown and "Only the set-ups with the highest macro accuracy are shown."


def _sentences(*sentences: str | bool) -> str:
    return " ".join(sentence for sentence in sentences if isinstance(sentence, str))
