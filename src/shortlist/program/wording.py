"""How messages and pages put things: what is counted, and the first of many names."""

from collections.abc import Sequence


def counted(number: int, one: str, many: str = "") -> str:
    """A number and what it counts.

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
