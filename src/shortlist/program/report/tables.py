"""How any table of the page is made: it scrolls in a box of its own, and its rows and columns have headings."""

from collections.abc import Iterable, Sequence

from shortlist.program.report.markup import Html, element


def plain_table(label: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> Html:
    """Text in rows and columns.

    Args:
        label: What the table is, for those who cannot see it.
        columns: Headings, that of the rows' own names first.
        rows: The name and the cells of each.
    """
    head = element("tr", *(element("th", title, scope="col") for title in columns))
    body = (
        element("tr", element("th", name, scope="row"), *(element("td", cell) for cell in cells))
        for name, cells in rows
    )
    return scrolling(label, element("table", element("thead", head), element("tbody", *body)))


def scrolling(label: str, table: Html) -> Html:
    """A box that a wide table scrolls in, so that the page does not; it can be reached with the keyboard."""
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=label)


def folded(summary: str, *content: Html) -> Html:
    """Shown when asked for."""
    return element("details", element("summary", summary), *content)
