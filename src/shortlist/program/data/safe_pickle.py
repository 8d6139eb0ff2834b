"""Read the pickles of CIFAR without running code.

A pickle is a program. This reader knows dictionaries, lists, numbers and strings, and the three names by which numpy
stored arrays in 2009; for those it uses stand-ins of its own. Every other name is refused.
"""

import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ShortlistError


def load_plain_pickle(content: bytes, name: str) -> Any:
    """The containers, bytes and uint8 arrays in a pickle of Python 2; ``name`` is the file in error messages.

    Example:
        >>> load_plain_pickle(pickle.dumps({"a": [1, 2]}), "example")
        {'a': [1, 2]}
    """
    try:
        return _with_arrays(_PlainUnpickler(io.BytesIO(content), encoding="bytes").load())
    except ShortlistError as error:
        raise ShortlistError(f"{name} {error}") from None
    except Exception as error:  # broken pickles end in nearly any exception
        raise ShortlistError(f"{name} is damaged: {error}") from error


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        stand_ins = {
            ("numpy.core.multiarray", "_reconstruct"): _StoredArray,
            ("numpy", "ndarray"): "ndarray",
            ("numpy", "dtype"): _StoredType,
        }
        if (module, name) not in stand_ins:
            raise ShortlistError(f"asks for {module}.{name}, which plain data does not need: refused")
        return stand_ins[module, name]


class _StoredArray:
    """Takes the arguments of numpy's own reconstruction, and checks them."""

    array: NDArray[np.uint8]

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[int, tuple[int, ...], "_StoredType", bool, bytes]) -> None:
        _, shape, kind, column_major, pixels = state
        if kind.code != b"u1" or column_major:
            raise ShortlistError("holds an array that is not of plain bytes: refused")
        self.array = np.frombuffer(pixels, np.uint8).reshape(shape)


class _StoredType:
    def __init__(self, code: bytes, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass


def _with_arrays(value: Any) -> Any:
    if isinstance(value, _StoredArray):
        return value.array
    if isinstance(value, dict):
        return {key: _with_arrays(item) for key, item in value.items()}
    return value
