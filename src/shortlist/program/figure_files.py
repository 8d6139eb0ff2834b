"""What all figures have in common: colours of ink, typeface, and how they get onto the disk."""

import io
import re
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from shortlist.program.atomic_files import write_file

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
"""For ``matplotlib.rc_context``, while a figure is drawn and while it is saved; sizes are the figure's own choice."""


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """As SVG for print and as PNG for pages."""
    text, pixels = io.StringIO(), io.BytesIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    figure.savefig(pixels, format="png", dpi=160)
    svg, png = (path.with_name(f"{path.name}.{kind}") for kind in ("svg", "png"))
    # A hundredth of a point is finer than any print, and a third of the file is further digits.
    write_file(svg, re.sub(r"(\d\.\d\d)\d+", r"\1", text.getvalue()).encode())
    write_file(png, pixels.getvalue())
    return [svg, png]
