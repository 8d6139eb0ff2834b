"""The characters of the built-in data, and the fonts of matplotlib that can draw each."""

import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
)
"""Without Computer Modern: it has only Latin letters, and would tell them from their look-alikes."""

_SYMBOLS = (
    "FOR ALL",
    "PARTIAL DIFFERENTIAL",
    "THERE EXISTS",
    "EMPTY SET",
    "INCREMENT",
    "NABLA",
    "ELEMENT OF",
    "CONTAINS AS MEMBER",
    "N-ARY PRODUCT",
    "N-ARY COPRODUCT",
    "N-ARY SUMMATION",
    "RING OPERATOR",
    "SQUARE ROOT",
    "PROPORTIONAL TO",
    "INFINITY",
    "ANGLE",
    "DIVIDES",
    "PARALLEL TO",
    "LOGICAL AND",
    "LOGICAL OR",
    "INTERSECTION",
    "UNION",
    "INTEGRAL",
    "NOT EQUAL TO",
    "IDENTICAL TO",
    "LESS-THAN OR EQUAL TO",
    "GREATER-THAN OR EQUAL TO",
    "SUBSET OF",
    "SUPERSET OF",
    "CIRCLED PLUS",
    "CIRCLED TIMES",
    "CIRCLED DOT OPERATOR",
    "RIGHT TACK",
    "LEFT TACK",
    "DOWN TACK",
    "UP TACK",
    "OHM SIGN",
    "KELVIN SIGN",
)

_NUMERALS = ("ONE", "FIVE", "TEN", "FIFTY", "ONE HUNDRED", "FIVE HUNDRED", "ONE THOUSAND")


def _codes(*names: str) -> tuple[range, ...]:
    return tuple(range(code, code + 1) for code in map(ord, map(unicodedata.lookup, names)))


_SCRIPTS: dict[str, tuple[range, ...]] = {
    "Latin": (range(0x41, 0x5B), range(0x61, 0x7B)),
    "Greek": (range(0x391, 0x3CA), range(0x3F2, 0x3F4), range(0x3F9, 0x3FA)),
    "Cyrillic": (range(0x400, 0x460), range(0x4AE, 0x4B0), range(0x4BA, 0x4BC), range(0x4C0, 0x4C1)),
    "Armenian": (range(0x531, 0x557), range(0x561, 0x587)),
    "Georgian": (range(0x10D0, 0x10F1),),
    "Roman numerals": _codes(*(f"{case}ROMAN NUMERAL {value}" for case in ("", "SMALL ") for value in _NUMERALS)),
    "Mathematical": _codes(*_SYMBOLS),
}


@dataclass(frozen=True)
class Character:
    text: str
    script: str

    @property
    def name(self) -> str:
        """
        Example:
            >>> Character("A", "Latin").name
            'LATIN CAPITAL LETTER A A'
        """
        return f"{unicodedata.name(self.text)} {self.text}"


def characters() -> tuple[Character, ...]:
    """All classes, script by script, in the order of Unicode."""
    return tuple(
        Character(chr(code), script)
        for script, ranges in _SCRIPTS.items()
        for codes in ranges
        for code in codes
        if unicodedata.name(chr(code), "")  # the ranges have holes
    )


def fonts_with(character: Character) -> tuple[Path, ...]:
    """The font files that can draw a character."""
    return tuple(path for path, codes in _drawable().items() if ord(character.text) in codes)


@cache
def _drawable() -> dict[Path, frozenset[int]]:
    # Slow to import, and needed only if there is no cached copy of the images.
    from matplotlib import get_data_path
    from matplotlib.ft2font import FT2Font

    paths = [Path(get_data_path(), "fonts", "ttf", f"{font}.ttf") for font in FONTS]
    return {path: frozenset(FT2Font(str(path)).get_charmap()) for path in paths}
