"""A strict parser of report pages, and what tests read from them."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from shortlist.program.report.page import write_report
from shortlist.program.runs.folder import RunFolder

ODD_NAMES = ('<script>alert("1")</script>', "</bdi></td>&amp;'\"", "\u202eurdu\u05d0 漢字 \U0001f98b", "x" * 300, "  ")
KS = (1, 3, 5)
METRICS = [f"{average}_top{k}" for average in ("micro", "macro") for k in KS] + ["few_top5", "medium_top5", "many_top5"]


@dataclass
class Node:
    """An element of a parsed page."""

    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list["Node | str"] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, tag: str, class_: str | None = None) -> list["Node"]:
        return [
            node for node in self if node.tag == tag and class_ in (None, *(node.attributes.get("class") or "").split())
        ]

    def __iter__(self) -> Iterator["Node"]:
        for child in self.children:
            if isinstance(child, Node):
                yield child
                yield from child


class StrictParser(HTMLParser):
    """Builds a tree. An unclosed element is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.open = [Node("")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in ("meta", "img"):
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parsed(text: str) -> Node:
    parser = StrictParser()
    parser.feed(text)
    parser.close()
    assert len(parser.open) == 1, f"{parser.open[-1].tag} is not closed"
    return parser.open[0]


def finals_of(runs: list[RunFolder], loss: str) -> list[dict[str, Any]]:
    return [run.read_json("final.json") for run in runs if run.finished and run.config.loss.name == loss]


def rows_of(page: Node) -> dict[str, Node]:
    """The rows of the first table by loss."""
    (body,) = page.all("table", "results")[0].all("tbody")
    return {row.all("span", "key")[0].text: row for row in body.all("tr")}


def part_of(page: Node, title: str) -> Node:
    """The section with this heading."""
    (found,) = [section for section in page.all("section") if next(iter(section)).text == title]
    return found


def numbers_of(figure: Node) -> dict[str, list[str]]:
    """The cells of the table below a chart, by row name."""
    (body,) = figure.all("tbody")
    return {row.all("th")[0].text: [cell.text for cell in row.all("td")] for row in body.all("tr")}


def spread_of(values: list[float]) -> str:
    mean = f"{100 * statistics.fmean(values):.1f}"
    return f"{mean}\xa0±\xa0{100 * statistics.stdev(values):.1f}" if len(values) > 1 else mean


def page_of(runs: list[RunFolder], folder: Path) -> Node:
    """The page of some runs, written into a folder."""
    return parsed(write_report(runs, folder / "page.html").read_text(encoding="utf-8"))
