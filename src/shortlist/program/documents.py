"""What the documents made from results share: pages with a generated part, and figures."""

import io
import re
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import write_file

END = "<!-- End of what was made. -->"


def begin_mark(command: str) -> str:
    return f"<!-- From here to the end mark: made by `{command}`. Edits would be lost. -->"


class MarkedPage:
    """A page written by hand, except for the part between two marks, which a command rewrites."""

    def __init__(self, path: Path, command: str) -> None:
        if not path.is_file():
            raise ShortlistError(
                f"there is no file {path}: work in a clone of the repository, or give its folder by --docs"
            )
        self.path, self._begin = path, begin_mark(command)
        self._before, begin, rest = path.read_text(encoding="utf-8").partition(self._begin)
        _, end, self._after = rest.partition(END)
        if not begin or not end:
            raise ShortlistError(f"{path} must hold the lines {self._begin} and {END}")

    def rewrite(self, made: str) -> None:
        write_file(self.path, f"{self._before}{self._begin}\n\n{made}\n\n{END}{self._after}".encode())


INK, FAINT = "#26323d", "#c9d1d8"
LOOK: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlecolor": INK,
    "grid.color": "#e9edf0",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "shortlist",  # the same numbers give the same file
}
"""For ``matplotlib.rc_context``, while a figure is drawn and saved. Sizes are up to each figure."""


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write the figure as SVG for print and as PNG for pages; the path has no suffix."""
    text, pixels = io.StringIO(), io.BytesIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    figure.savefig(pixels, format="png", dpi=160)
    svg, png = (path.with_name(f"{path.name}.{kind}") for kind in ("svg", "png"))
    # Two decimals of a point are finer than any print, and further digits are a third of the file.
    write_file(svg, re.sub(r"(\d\.\d\d)\d+", r"\1", text.getvalue()).encode())
    write_file(png, pixels.getvalue())
    return [svg, png]
