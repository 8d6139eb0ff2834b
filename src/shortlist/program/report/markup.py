"""HTML that its content cannot break: text is escaped unless it is known to be HTML."""

import html
import re
from collections.abc import Iterable, Sequence

_VOID = {"img", "meta", "link"}
# Characters that HTML forbids even escaped: controls, halves of surrogate pairs, noncharacters.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: str | float | None) -> Html:
    """An element; children that are plain text are escaped.

    In attribute names ``_`` stands for ``-``, and a final ``_`` is dropped (``class_``). None leaves an attribute out.

    Example:
        >>> element("p", "a < b", element("b", "!"), class_="note", aria_label='"x"')
        '<p class="note" aria-label="&quot;x&quot;">a &lt; b<b>!</b></p>'
    """
    opening = name
    for key, value in attributes.items():
        if value is not None:
            opening += f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
    if name in _VOID:
        return Html(f"<{opening}>")
    return Html(f"<{opening}>{joined(children)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """Join parts; plain text is escaped."""
    return Html("".join(part if isinstance(part, Html) else escaped(part) for part in parts))


def escaped(text: str) -> str:
    """Escape for use as text or in a quoted attribute."""
    return html.escape(_FORBIDDEN.sub("\ufffd", text))


def name_of_class(name: str) -> Html:
    """A class name, isolated so that right-to-left script does not affect the text around it."""
    return element("bdi", name)


def plain_table(label: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> Html:
    """A table of plain text.

    Args:
        label: What the table shows, for screen readers.
        columns: Headings; the first is that of the row names.
        rows: Name and cells of each row.
    """
    head = element("tr", *(element("th", title, scope="col") for title in columns))
    body = (
        element("tr", element("th", name, scope="row"), *(element("td", cell) for cell in cells))
        for name, cells in rows
    )
    return scrolling(label, element("table", element("thead", head), element("tbody", *body)))


def scrolling(label: str, table: Html) -> Html:
    """A box in which a wide table scrolls, so that the page does not. It can be reached with the keyboard."""
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=label)


def folded(summary: str, *content: Html) -> Html:
    """Content that opens on a click."""
    return element("details", element("summary", summary), *content)
