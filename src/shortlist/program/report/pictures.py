"""The parts of the page with pictures: the most confused classes, and examples."""

import base64
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from shortlist.program.report.charts import key
from shortlist.program.report.gather import Comparison, Run, Setup
from shortlist.program.report.markup import Html, element, folded, name_of_class
from shortlist.program.report.summary import ABSENT
from shortlist.program.text import counted
from shortlist.program.training.thumbnails import FOLDER, confused_pairs, example_images

_PNG = b"\x89PNG\r\n\x1a\n"
_LARGEST = 1 << 20  # bytes; the pictures of a run are far smaller


@dataclass(frozen=True)
class _Saved:
    path: Path
    label: int
    first_suggestion: int


class Pictures:
    """The pictures saved by runs on the same data, by number of the test image and by label and first suggestion."""

    def __init__(self, runs: list[Run]) -> None:
        self._pictures: list[_Saved] = []
        self._by_index: dict[int, Path] = {}
        for run in runs:
            for path in _pictures_of(run):
                index = int(path.stem)
                if run.predictions and index < len(run.predictions.labels):
                    self._by_index.setdefault(index, path)
                    label, first = run.predictions.labels[index], run.predictions.suggestions[index, 0]
                    self._pictures.append(_Saved(path, int(label), int(first)))

    def image(self, index: int, name: str) -> Html | None:
        """The test image with this number; None if no run saved it."""
        return _embedded(self._by_index[index], name) if index in self._by_index else None

    def of_class(self, label: int, suggested: int, name: str) -> Html:
        """An image of the class, if possible one with this first suggestion.

        If there is none, an empty frame; if there are no pictures at all, nothing.
        """
        of_class = [picture for picture in self._pictures if picture.label == label]
        best = sorted(of_class, key=lambda picture: picture.first_suggestion != suggested)
        if best:
            return _embedded(best[0].path, name)
        return element("span", class_="picture") if self._pictures else Html("")


def _pictures_of(run: Run) -> list[Path]:
    """The pictures of the run. Links are not followed: they could put any file of this machine into the page."""
    folder = run.folder.path / FOLDER
    if folder.is_symlink():
        return []
    return [path for path in sorted(folder.glob("*.png")) if path.stem.isdecimal() and _is_picture(path)]


def _is_picture(path: Path) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST:
        return False
    with path.open("rb") as file:
        return file.read(len(_PNG)) == _PNG


def _embedded(path: Path, name: str) -> Html:
    content = base64.b64encode(path.read_bytes()).decode()
    return element("img", src=f"data:image/png;base64,{content}", alt=name, class_="picture")


_PAIRS = 9


def confusions(comparison: Comparison, pictures: Pictures) -> Html | None:
    """A card for each of the most confused pairs; None if there are none, or no run has predictions."""
    cards = [_confusion_card(comparison, pictures, *pair) for pair in most_confused(comparison)[:_PAIRS]]
    return element("div", *cards, class_="cards") if cards else None


def most_confused(comparison: Comparison) -> list[tuple[int, int]]:
    """Pairs (true class, wrong first suggestion), by how often a run confuses them, summed over the set-ups."""
    total: defaultdict[tuple[int, int], float] = defaultdict(float)
    for setup in comparison.finished:
        kept = [run.predictions for run in setup.finished if run.predictions]
        for predictions in kept:
            pairs, counts = confused_pairs(predictions.labels, predictions.suggestions[:, 0])
            for (true, mistaken_for), count in zip(pairs.tolist(), counts.tolist(), strict=True):
                total[true, mistaken_for] += count / len(kept)
    return sorted(total, key=lambda pair: (-total[pair], pair))


def _confusion_card(comparison: Comparison, pictures: Pictures, true: int, mistaken_for: int) -> Html:
    names = [comparison.class_name(true), comparison.class_name(mistaken_for)]
    k = comparison.suggestions_shown
    rows = [_row(setup, true, mistaken_for, k) for setup in comparison.leading if setup.has_predictions]
    head = [element("th", title, scope="col") for title in ("", "mistaken", f"still in {k}")]
    return element(
        "article",
        element(
            "div",
            _half(pictures.of_class(true, mistaken_for, names[0]), names[0]),
            element("span", "→", class_="arrow", aria_label="mistaken for"),
            _half(pictures.of_class(mistaken_for, mistaken_for, names[1]), names[1]),
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


_SHOWN_AT_ONCE = 8


def examples(comparison: Comparison, pictures: Pictures) -> Html | None:
    """A card for each example; None if there are no pictures."""
    reference = next((run.predictions for run in comparison.runs if run.predictions), None)
    if reference is None:
        return None
    cards = []
    for index in example_images(reference.labels):
        label = int(reference.labels[index])
        picture = pictures.image(index, comparison.class_name(label))
        if picture is not None:
            cards.append(_example_card(comparison, picture, index, label))
    if not cards:
        return None
    shown, more = cards[:_SHOWN_AT_ONCE], cards[_SHOWN_AT_ONCE:]
    rest = [folded(counted(len(more), "more example"), *more)] if more else []
    return element("div", *shown, *rest, class_="examples")


def _example_card(comparison: Comparison, picture: Html, index: int, label: int) -> Html:
    lists = [_suggestions(comparison, setup, index, label) for setup in comparison.leading]
    truth = element("div", picture, name_of_class(comparison.class_name(label)), class_="truth")
    return element("article", truth, *filter(None, lists))


def _suggestions(comparison: Comparison, setup: Setup, index: int, label: int) -> Html | None:
    """The suggestions of the set-up's first run; None if it has none for this image."""
    predictions = next((run.predictions for run in setup.finished if run.predictions), None)
    if predictions is None or index >= len(predictions.labels) or predictions.labels[index] != label:
        return None
    k = comparison.suggestions_shown
    suggested = predictions.suggestions[index, :k].tolist()
    items = [_item(comparison.class_name(suggestion), right=suggestion == label) for suggestion in suggested]
    missed = [] if label in suggested else [element("p", f"not in the top {k}", class_="missed")]
    return element("div", element("h4", key(setup.label, setup.style)), element("ol", *items), *missed)


def _item(name: str, *, right: bool) -> Html:
    if not right:
        return element("li", name_of_class(name))
    return element(
        "li",
        name_of_class(name),
        element("span", "\N{NO-BREAK SPACE}✓", role="img", aria_label="right"),
        class_="right",
    )
