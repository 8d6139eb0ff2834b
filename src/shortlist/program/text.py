"""Text for people: without passwords, safe for terminals and spreadsheets, and the phrases that messages share."""

import difflib
import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote

_HIDDEN = "***"
_NAMES = r"[\w-]*(?:password|passwd|passphrase|pwd|secret|token|api[_-]?key)"
# Up to the last @: a password should have it as %40, but people forget.
_IN_URL = re.compile(r"(://[^\s:/@'\"]*:)(\S*)@")
_BY_NAME = re.compile(rf"(\b{_NAMES}=)([^\s&;,'\"]+)", re.IGNORECASE)
_IN_WORD = re.compile(r"(://[^:/@]*:)(.*)@", re.DOTALL)
_BY_NAME_IN_WORD = re.compile(rf"(\b{_NAMES}=)([^&]+)", re.IGNORECASE)
_SHORTEST_SECRET = 3


def hide_passwords(text: str, url: str = "") -> str:
    """A text without the passwords in URLs and after names such as ``password=``.

    Args:
        text: Any text, such as the message of a library.
        url: A URL whose password may also occur on its own in the text.

    Example:
        >>> hide_passwords("cannot open postgresql://me:hunter2@host/db?sslpassword=x&a=1")
        'cannot open postgresql://me:***@host/db?sslpassword=***&a=1'
        >>> hide_passwords("no host hunter2", url="postgresql://me:hunter2@host/db")
        'no host ***'
    """
    for secret in _secrets(url):
        text = text.replace(secret, _HIDDEN)
    return _BY_NAME.sub(rf"\1{_HIDDEN}", _IN_URL.sub(rf"\1{_HIDDEN}@", text))


def hide_passwords_of_word(word: str) -> str:
    """The same for one word of a command line, in which a password may contain spaces.

    Example:
        >>> hide_passwords_of_word("--storage=mysql://me:open sesame@host/db")
        '--storage=mysql://me:***@host/db'
    """
    return _BY_NAME_IN_WORD.sub(rf"\1{_HIDDEN}", _IN_WORD.sub(rf"\1{_HIDDEN}@", word))


def _secrets(url: str) -> list[str]:
    """The passwords of a URL in every form that a message may quote, longest first: whole, decoded, split at @."""
    found = [match[2] for pattern in (_IN_WORD, _BY_NAME_IN_WORD) for match in pattern.finditer(url)]
    pieces = {piece for secret in found for part in (secret, unquote(secret)) for piece in (part, *part.split("@"))}
    return sorted((piece for piece in pieces if len(piece) >= _SHORTEST_SECRET), key=len, reverse=True)


# Control characters, line breaks of any kind, marks that change the text direction, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""A text on one line without control characters. File names and class names may contain anything.

    Example:
        >>> print(printable("owl\n\x1b[2J"))
        owl\n\x1b[2J
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def spreadsheet_cell(value: object) -> object:
    """A CSV cell that no spreadsheet takes for a formula; numbers stay numbers.

    Example:
        >>> [spreadsheet_cell(value) for value in ("=1+1", "-0.5", -0.5, "fir")]
        ["'=1+1", '-0.5', -0.5, 'fir']
    """
    text = str(value)
    if not text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) or _is_number(text):
        return value
    return f"'{text}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return not text.isspace()


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun.

    Example:
        >>> counted(1, "class", "classes"), counted(1200, "run")
        ('1 class', '1,200 runs')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def some_of(names: Sequence[str], at_most: int = 5) -> str:
    """The first few of many names, for a message.

    Example:
        >>> some_of(["a", "b", "c"], at_most=2)
        'a, b, ...'
    """
    return ", ".join([*names[:at_most], *(["..."] if len(names) > at_most else [])])


def did_you_mean(name: str, known: Iterable[str], at_most: int = 1) -> str:
    """The end of a message about an unknown name: the known names that are closest to it, if any.

    Case, hyphens and underscores do not count.

    Example:
        >>> did_you_mean("Cross-Entropi", ["focal", "cross_entropy"])
        ': did you mean cross_entropy?'
        >>> did_you_mean("resnet", ["focal"])
        ''
    """
    by_letters = {_letters(candidate): candidate for candidate in known}
    close = difflib.get_close_matches(_letters(name), by_letters, at_most)
    return f": did you mean {' or '.join(by_letters[letters] for letters in close)}?" if close else ""


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())
