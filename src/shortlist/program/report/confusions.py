"""The classes most often mistaken for each other, with pictures."""

from collections import defaultdict

from shortlist.program.report.album import Album
from shortlist.program.report.charts import key
from shortlist.program.report.formats import ABSENT
from shortlist.program.report.gather import Comparison, Setup
from shortlist.program.report.markup import Html, element, name_of_class
from shortlist.program.training.thumbnails import confused_pairs

_PAIRS = 9


def confusions(comparison: Comparison, album: Album) -> Html | None:
    """A card for each of the most confused pairs; None if there is none, or no run has kept its suggestions."""
    cards = [_card(comparison, album, *pair) for pair in most_confused(comparison)[:_PAIRS]]
    return element("div", *cards, class_="cards") if cards else None


def most_confused(comparison: Comparison) -> list[tuple[int, int]]:
    """Pairs (true class, wrong first suggestion), by how often a run of each set-up confuses them, added up."""
    total: defaultdict[tuple[int, int], float] = defaultdict(float)
    for setup in comparison.finished:
        kept = [run.predictions for run in setup.finished if run.predictions]
        for predictions in kept:
            pairs, counts = confused_pairs(predictions.labels, predictions.suggestions[:, 0])
            for (true, mistaken_for), count in zip(pairs.tolist(), counts.tolist(), strict=True):
                total[true, mistaken_for] += count / len(kept)
    return sorted(total, key=lambda pair: (-total[pair], pair))


def _card(comparison: Comparison, album: Album, true: int, mistaken_for: int) -> Html:
    names = [comparison.class_name(true), comparison.class_name(mistaken_for)]
    k = comparison.suggestions_shown
    rows = [_row(setup, true, mistaken_for, k) for setup in comparison.leading if setup.has_predictions]
    head = [element("th", title, scope="col") for title in ("", "mistaken", f"still in {k}")]
    return element(
        "article",
        element(
            "div",
            _half(album.of_class(true, mistaken_for, names[0]), names[0]),
            element("span", "→", class_="arrow", aria_label="mistaken for"),
            _half(album.of_class(mistaken_for, mistaken_for, names[1]), names[1]),
            class_="pair",
        ),
        element("table", element("thead", element("tr", *head)), element("tbody", *rows)),
    )


def _half(picture: Html, name: str) -> Html:
    return element("div", picture, name_of_class(name))


def _row(setup: Setup, true: int, mistaken_for: int, k: int) -> Html:
    images = mistaken = still_listed = 0
    for predictions in (run.predictions for run in setup.finished if run.predictions):
        suggestions = predictions.suggestions[predictions.labels == true]
        of_mistaken = suggestions[suggestions[:, 0] == mistaken_for]
        images += len(suggestions)
        mistaken += len(of_mistaken)
        still_listed += int((of_mistaken[:, :k] == true).any(1).sum())
    return element(
        "tr",
        element("th", key(setup.label, setup.style), scope="row"),
        element("td", _share(mistaken, images)),
        element("td", _share(still_listed, mistaken)),
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}\N{NARROW NO-BREAK SPACE}%" if whole else ABSENT
