"""The page: one file, nothing loaded from elsewhere, no script."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from shortlist import __version__
from shortlist.report.album import Album
from shortlist.report.confusions import confusions
from shortlist.report.examples import examples
from shortlist.report.figures import accuracy_against_k, accuracy_against_size, learning_curves
from shortlist.report.gather import Comparison, gather
from shortlist.report.headings import data_facts, data_name, outcome, page_title, subject
from shortlist.report.markup import Html, element
from shortlist.report.origins import origins_table, settings_table
from shortlist.report.results import results_table, sizes_table
from shortlist.report.tables import folded
from shortlist.runs import RunFolder, write_whole

# Whatever a class name may hold, a browser will not run it, nor fetch anything for it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_RESULTS_NOTE = (
    "Accuracy on the test images in percent, with the weights of the epoch that did best on the validation images. "
    "Mean ± standard deviation over seeds, where there are several. The best of each column is bold."
)
_K_NOTE = "How often the right class is among the first K suggestions. Shaded: one standard deviation over seeds."
_SIZE_NOTE = "Mean accuracy of the classes with about as many training images. Grey bars: how many classes those are."
_LEARNING_NOTE = "A ring marks the epoch whose weights were kept."
_CONFUSED_NOTE = (
    "The left class, most often mistaken for the right one. Mistaken: share of its test images with the right one "
    "as first suggestion. Still in {k}: share of those whose true class is among their {k} suggestions all the same."
)
_EXAMPLES_NOTE = "Chosen by their labels alone, so the same for all runs on this data. With several seeds, the lowest."
_LEADING_NOTE = " Only the set-ups with the highest macro accuracy are shown."


def write_report(runs: list[RunFolder], out: Path) -> Path:
    """Write one self-contained HTML page that compares runs.

    Runs that share all settings but the seed are taken together; runs on different data are kept apart.

    Args:
        runs: Finished or not, e.g. from ``shortlist.runs.find_runs``.
        out: The file to write, or a folder for ``report.html``.

    Returns:
        The file.

    Raises:
        ShortlistError: No run at all, a damaged file, a place that cannot be written to.
    """
    path = out / "report.html" if out.is_dir() else out
    page = _page(gather(runs))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: file.write(page.encode()))
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
    k, album = comparison.suggestions_shown, Album(comparison.runs)
    sizes = [folded("By class size at every K", sizes_table(comparison))] if len(comparison.ks) > 1 else []
    yield _Part("Results", _RESULTS_NOTE, [results_table(comparison), *sizes])
    chosen = "" if len(comparison.leading) == len(comparison.finished) else _LEADING_NOTE
    drawn = {
        ("Accuracy against K", _K_NOTE): accuracy_against_k(comparison),
        ("Accuracy against class size", _SIZE_NOTE): accuracy_against_size(comparison),
        ("Learning curves", _LEARNING_NOTE): learning_curves(comparison),
        ("Most confused classes", _CONFUSED_NOTE.format(k=k) + chosen): confusions(comparison, album),
        ("Examples", _EXAMPLES_NOTE + chosen): examples(comparison, album),
    }
    for (title, note), content in drawn.items():
        if content is not None:
            yield _Part(title, note, [content])
    origins = [
        folded("All settings", settings_table(comparison)),
        folded("Folders and machines", origins_table(comparison)),
    ]
    yield _Part("Configuration", "", origins)
