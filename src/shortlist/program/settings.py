"""Frozen dataclasses of settings: checks of their values, and the way to and from plain JSON values."""

import dataclasses
import functools
import math
import types
import typing
from typing import Any, ClassVar, Literal, Protocol, get_args

from shortlist.errors import ShortlistError
from shortlist.program.text import did_you_mean

# A larger whole number has no float.
_LARGEST = 2**1023


class Section(Protocol):
    """A dataclass of settings that has a name on the command line, such as ``loss`` in ``--loss.k``."""

    section: ClassVar[str]


def check_within(settings: Section, name: str, low: float, high: float = math.inf) -> None:
    value = getattr(settings, name)
    if not (isinstance(value, int | float) and low <= value <= min(high, _LARGEST)):
        limits = f"in [{low}, {high}]" if high < math.inf else f"finite and >= {low}"
        raise ShortlistError(f"{settings.section}.{name} must be {limits}, got {value!r}")


def check_choices(settings: Section, *names: str) -> None:
    """Check fields whose type is a ``Literal``."""
    fields = _field_types(type(settings))
    for name in names:
        choices, value = get_args(fields[name]), getattr(settings, name)
        if value not in choices:
            raise ShortlistError(
                f"{settings.section}.{name} must be one of {', '.join(choices)}, got {value!r}"
                f"{did_you_mean(str(value), choices)}"
            )


def to_plain(value: Any) -> Any:
    """A dataclass as dicts, lists, strings and finite numbers: JSON has no infinity."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return "inf" if value == math.inf else value


def from_plain(kind: Any, value: Any, path: str = "") -> Any:
    """The inverse of ``to_plain``. A missing field gets its default; an unknown one, or a wrong type, is named.

    A dataclass that stands for several kinds of settings, told apart by their ``name``, has a method
    ``kind_called(name)``.

    Args:
        kind: Type of the value.
        value: Plain values.
        path: Name of the setting, for messages.
    """
    name = path or "the configuration"
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ShortlistError(f"{name} must hold named fields, got {value!r}")
        if hasattr(kind, "kind_called") and "name" in value:
            kind = kind.kind_called(value["name"])
        fields = _field_types(kind)
        for field in value:
            if field not in fields:
                raise ShortlistError(f"there is no setting {_joined(path, field)}{did_you_mean(field, fields)}")
        return kind(**{field: from_plain(fields[field], item, _joined(path, field)) for field, item in value.items()})
    if isinstance(kind, types.UnionType):  # one number, or a list of them
        one, several = get_args(kind)
        kind = several if isinstance(value, list | tuple) else one
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ShortlistError(f"{name} must be a list, got {value!r}")
        return tuple(from_plain(get_args(kind)[0], item, path) for item in value)
    if kind in (int, float) and isinstance(value, bool):  # Python takes True for 1
        raise ShortlistError(f"{name} must be a number, got {value!r}")
    if kind is float:
        try:
            return float(value)
        except (OverflowError, TypeError, ValueError):
            raise ShortlistError(f"{name} must be a number, got {value!r}") from None
    if typing.get_origin(kind) is not Literal and not isinstance(value, kind):
        raise ShortlistError(f"{name} must be of type {kind.__name__}, got {value!r}")
    return value


@functools.cache  # type hints take a hundred times longer than a configuration
def _field_types(kind: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _joined(path: str, field: Any) -> str:
    return f"{path}.{field}" if path else str(field)
