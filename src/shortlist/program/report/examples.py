"""Test images with the suggestions of each set-up, side by side."""

from shortlist.program.report.album import Album
from shortlist.program.report.charts import key
from shortlist.program.report.gather import Comparison, Setup
from shortlist.program.report.markup import Html, element, name_of_class
from shortlist.program.report.tables import folded
from shortlist.program.training.thumbnails import example_images
from shortlist.program.wording import counted

_SHOWN_AT_ONCE = 8


def examples(comparison: Comparison, album: Album) -> Html | None:
    """A card for each example; None if no run has pictures."""
    reference = next((run.predictions for run in comparison.runs if run.predictions), None)
    if reference is None:
        return None
    cards = []
    for index in example_images(reference.labels):
        label = int(reference.labels[index])
        picture = album.image(index, comparison.class_name(label))
        if picture is not None:
            cards.append(_card(comparison, picture, index, label))
    if not cards:
        return None
    shown, more = cards[:_SHOWN_AT_ONCE], cards[_SHOWN_AT_ONCE:]
    rest = [folded(counted(len(more), "more example"), *more)] if more else []
    return element("div", *shown, *rest, class_="examples")


def _card(comparison: Comparison, picture: Html, index: int, label: int) -> Html:
    lists = [_suggestions(comparison, setup, index, label) for setup in comparison.leading]
    truth = element("div", picture, name_of_class(comparison.class_name(label)), class_="truth")
    return element("article", truth, *(each for each in lists if each))


def _suggestions(comparison: Comparison, setup: Setup, index: int, label: int) -> Html | None:
    """What the set-up's first run suggests; None if it has kept nothing about this image."""
    predictions = next((run.predictions for run in setup.finished if run.predictions), None)
    if predictions is None or index >= len(predictions.labels) or predictions.labels[index] != label:
        return None
    k = comparison.suggestions_shown
    suggested = predictions.suggestions[index, :k].tolist()
    items = [_item(comparison.class_name(each), right=each == label) for each in suggested]
    missed = [] if label in suggested else [element("p", f"not among {k}", class_="missed")]
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
