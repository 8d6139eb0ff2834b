"""Argument checks. Each runs before any work, and its message names the argument, the rule and the value.

Checks of shapes, types and plain numbers always run. Checks of tensor *values* run only where reading them is free
(``can_read``). Elsewhere an invalid value must produce NaN or an error on the device, never a plausible number.
"""

import math
import operator
from collections.abc import Sequence
from numbers import Integral, Rational, Real

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from shortlist.errors import ShortlistError

ClassCounts = Tensor | Sequence[int] | Sequence[float]
Ks = int | tuple[int, ...]


def can_read(tensor: Tensor) -> bool:
    """True if reading the values neither waits for a GPU nor breaks a graph or a functional transform."""
    if torch.compiler.is_compiling():
        return False
    if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_floating(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in _FLOAT_DTYPES:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ShortlistError(f"{name} must be a floating-point tensor of 16, 32 or 64 bits, got {got}")


def check_features(features: Tensor, in_features: int) -> None:
    check_floating("features", features)
    if features.dim() == 0 or features.shape[-1] != in_features:
        raise ShortlistError(f"features must have shape (..., {in_features}), got {tuple(features.shape)}")


def check_integer(name: str, value: int, rule: str = "") -> None:
    """``rule`` continues the message. A bool is not accepted: passing True for a number is a mistake."""
    try:
        operator.index(value)
        is_integer = not isinstance(value, bool) and getattr(value, "dtype", None) != torch.bool
    except TypeError:
        is_integer = False
    if not is_integer:
        raise ShortlistError(f"{name} must be an integer{rule}, got {value!r}")
    if not -(2**63) <= value < 2**63:
        raise ShortlistError(f"{name} must be an integer of at most 64 bits, got {_short(value)}")


def check_at_least_one(name: str, value: int) -> None:
    check_integer(name, value)
    if value < 1:
        raise ShortlistError(f"{name} must be at least 1, got {value}")


def check_k(k: int, largest: int, num_classes: int) -> None:
    """``largest`` is L for functions of the K largest scores, and L - 1 for functions of the (K+1)-th largest."""
    check_integer("k", k)
    if not 1 <= k <= largest:
        raise ShortlistError(f"k must be in [1, {largest}] for {num_classes} classes, got {k}")


def sorted_ks(k: Ks, largest: int | None = None, num_classes: int | None = None) -> tuple[int, ...]:
    """One K or several different ones, checked, in ascending order; ``largest`` is as in ``check_k``, if known."""
    several = k if isinstance(k, tuple) else (k,)
    if not several:
        raise ShortlistError("k must be an integer or several, such as (1, 3, 5), got ()")
    for one in several:
        check_integer("k", one, " or several, such as (1, 3, 5)")
        if largest is None or num_classes is None:
            check_at_least_one("k", one)
        else:
            check_k(one, largest, num_classes)
    ks = tuple(sorted(int(one) for one in several))
    if len(set(ks)) < len(ks):
        raise ShortlistError(f"k must be different integers, got {k}")
    return ks


def check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ShortlistError(f"{name} must be True or False, got {value!r}")


def check_not_negative(name: str, value: float, dtype: torch.dtype | None = None) -> None:
    """``dtype`` is that of the computation, if known: the value must be finite in it."""
    _check_real(name, value, ">= 0", dtype)
    if not value >= 0:
        raise ShortlistError(f"{name} must be a finite number >= 0, got {value!r}")


def check_positive(name: str, value: float, dtype: torch.dtype | None = None) -> None:
    _check_real(name, value, "> 0", dtype)
    if not value > 0:
        raise ShortlistError(f"{name} must be a finite number > 0, got {value!r}")


def _check_real(name: str, value: float, rule: str, dtype: torch.dtype | None) -> None:
    # Torch cannot compute with fractions. Comparisons instead of math.isfinite: torch.compile can trace them.
    is_number = isinstance(value, Real) and (isinstance(value, Integral) or not isinstance(value, Rational))
    if not is_number or isinstance(value, bool) or not value < math.inf:
        raise ShortlistError(f"{name} must be a finite number {rule}, got {value!r}")
    largest = torch.finfo(dtype or torch.float64).max
    # NumPy compares in its own dtype. A tuple of types: torch 2.8 cannot trace int | float.
    number = value if isinstance(value, (int, float)) else float(value)
    if number > largest:
        in_dtype = "" if dtype is None else f" for arithmetic in {dtype}"
        raise ShortlistError(f"{name} must be at most {largest:.2g}{in_dtype}, got {_short(value)}")


def _short(value: float) -> str:
    """Python refuses to convert integers with thousands of digits to text."""
    return f"an integer of {value.bit_length()} bits" if isinstance(value, int) and value >> 128 else repr(value)


_MAX_SAMPLES = 2**24  # beyond this, float32 cannot represent every count


def check_n_samples(n_samples: float, name: str = "n_samples") -> None:
    rule = " >= 1, or math.inf for the expectation"
    if isinstance(n_samples, float) and n_samples == math.inf:
        return
    check_integer(name, n_samples, rule)  # type: ignore[arg-type]
    if n_samples < 1:
        raise ShortlistError(f"{name} must be an integer{rule}, got {n_samples}")
    if n_samples > _MAX_SAMPLES:
        raise ShortlistError(
            f"{name} must be at most {_MAX_SAMPLES}, or math.inf for the expectation without draws, got {n_samples}"
        )


def check_noise(noise: Tensor | None, x: Tensor, generator: torch.Generator | None) -> None:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ShortlistError(f"generator must be a torch.Generator, got {generator!r}")
    if noise is None:
        return
    if generator is not None:
        raise ShortlistError("noise and generator exclude each other: give one of them")
    check_floating("noise", noise)
    if noise.shape[:-1] != x.shape or noise.dim() != x.dim() + 1 or noise.shape[-1] < 1:
        want = ", ".join([*map(str, x.shape), "B"])
        raise ShortlistError(f"noise must have shape ({want}) with B >= 1 draws, got {tuple(noise.shape)}")
    if noise.device != x.device:
        raise ShortlistError(f"noise must be on the device of the scores, {x.device}, got {noise.device}")


def check_per_class(name: str, values: Tensor, num_classes: int | None) -> None:
    if values.dim() != 1 or len(values) == 0 or (num_classes is not None and len(values) != num_classes):
        want = f"({num_classes},)" if num_classes is not None else "(L,)"
        raise ShortlistError(f"{name} must have one entry per class, shape {want}, got {tuple(values.shape)}")


def check_weight(weight: Tensor, num_classes: int | None) -> None:
    check_floating("weight", weight)
    check_per_class("weight", weight, num_classes)


def _as_tensor(class_counts: ClassCounts) -> Tensor:
    try:
        counts = torch.as_tensor(class_counts)
        if counts.is_meta:  # inside ``with torch.device("meta")``, which would lose the values
            counts = torch.as_tensor(class_counts, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        what = "numbers in the order of the classes, such as [500, 20, 3]"
        raise ShortlistError(f"class_counts must be {what}, got {type(class_counts).__name__}") from None
    return counts


def checked_class_counts(
    class_counts: ClassCounts, num_classes: int | None = None, *, allow_zero: bool = False
) -> Tensor:
    """The counts as a tensor; all positive, or not negative with ``allow_zero``."""
    counts = class_counts if isinstance(class_counts, Tensor) else _as_tensor(class_counts)
    check_per_class("class_counts", counts, num_classes)
    if counts.dtype == torch.bool or counts.is_complex():
        raise ShortlistError(f"class_counts must be numbers, got {counts.dtype}")
    if can_read(counts):
        is_invalid = ~counts.isfinite() | ((counts < 0) if allow_zero else (counts <= 0))
        if is_invalid.any():
            index = int(is_invalid.nonzero()[0])
            rule = ">= 0" if allow_zero else "> 0"
            raise ShortlistError(
                f"class_counts must be finite and {rule}, got {counts[index].item()} for class {index}"
            )
    return counts
