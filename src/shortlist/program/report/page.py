"""The page: one file, nothing loaded from elsewhere, no script."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from shortlist import __version__
from shortlist.program.atomic_files import write_file
from shortlist.program.report.album import Album
from shortlist.program.report.confusions import confusions
from shortlist.program.report.examples import examples
from shortlist.program.report.figures import accuracy_against_k, accuracy_against_size, learning_curves
from shortlist.program.report.gather import Comparison, gather
from shortlist.program.report.headings import data_facts, data_name, outcome, page_title, subject
from shortlist.program.report.markup import Html, element
from shortlist.program.report.notes import Notes
from shortlist.program.report.origins import origins_table, settings_table
from shortlist.program.report.results import results_table, sizes_table
from shortlist.program.report.tables import folded
from shortlist.program.runs.folder import RunFolder

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
