"""Docstrings of shortlist as Griffe understands them."""

import re
from typing import Any

import griffe


class SharedDescriptions(griffe.Extension):
    """Splits a line that describes several arguments, ``weight, reduction: As in ...``, into a line for each."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +.*)*)",
                lambda match: "\n".join(
                    f"{match['indent']}{name}: {match['text']}" for name in match["names"].split(", ")
                ),
                obj.docstring.value,
                flags=re.MULTILINE,
            )
