"""Docstrings of shortlist as Griffe understands them."""

import re
from typing import Any

import griffe


class OurHabits(griffe.Extension):
    """Rewrites two habits of our docstrings that Griffe does not know.

    A line that describes several arguments, ``weight, reduction: As in ...``, becomes a line for each. ``Example:`` in
    front of a doctest becomes ``Examples:``.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(
                r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +.*)*)",
                lambda match: "\n".join(
                    f"{match['indent']}{name}: {match['text']}" for name in match["names"].split(", ")
                ),
                obj.docstring.value,
                flags=re.MULTILINE,
            )
            obj.docstring.value = re.sub(r"^Example:(?=\n +>>>)", "Examples:", text, flags=re.MULTILINE)
