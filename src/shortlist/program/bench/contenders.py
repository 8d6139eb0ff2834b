"""The contenders of a measurement, and how they are measured: first checked, then timed."""

import importlib.metadata
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import torch

import shortlist
from shortlist.program.bench import Suite
from shortlist.program.bench.measurements import NOT_CAPTURED, QUICK_NOTE, Case, Measurement
from shortlist.program.bench.timing import (
    QUICK,
    CannotCaptureError,
    Pace,
    Step,
    Timing,
    gpu_time,
    interleaved_wall_times,
    peak_extra_mib,
    wall_time,
    warm_up,
)
from shortlist.program.text import counted

_PACKAGES = ("torch", "triton", "pytopk", "cut-cross-entropy", "liger-kernel")
# Inputs that rotate must together exceed the second-level cache (60 MB on an H200), or the cache is timed instead.
_OUT_OF_CACHE = 200e6
_MOST_SETS = 8


@dataclass(frozen=True)
class Contender:
    """One implementation on one case."""

    entry: str
    case: Case
    steps: tuple[Step, ...]
    """The same step on different inputs, which together exceed the cache."""
    check: Callable[[], None] | None = None
    """Raises ``ShortlistError`` if the results differ from the reference. Only our implementations have one."""


@dataclass(frozen=True)
class Bench:
    """Where and how thoroughly to measure."""

    device: torch.device
    quick: bool
    say: Callable[[str], None]

    @property
    def pace(self) -> Pace:
        return QUICK if self.quick else Pace()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def input_sets(self, bytes_each: int) -> int:
        """How many inputs to rotate among: enough to exceed the GPU's cache, up to a limit."""
        return min(_MOST_SETS, math.ceil(_OUT_OF_CACHE / bytes_each)) if self.on_gpu else 1

    def row(
        self,
        suite: Suite,
        entry: str,
        case: Case,
        *,
        gpu: Timing | None = None,
        wall: Timing | None = None,
        peak_mib: float | None = None,
        note: str = "",
    ) -> Measurement:
        """A measurement, with machine, versions and date filled in."""
        gpu_ms, gpu_p20, gpu_p80 = _statistics(gpu)
        wall_ms, wall_p20, wall_p80 = _statistics(wall)
        return Measurement(
            suite=suite,
            entry=entry,
            device=self.device.type,
            machine=_machine(self.device),
            **asdict(case),
            gpu_ms=gpu_ms,
            gpu_p20=gpu_p20,
            gpu_p80=gpu_p80,
            wall_ms=wall_ms,
            wall_p20=wall_p20,
            wall_p80=wall_p80,
            peak_mib=peak_mib,
            note="; ".join(filter(None, (QUICK_NOTE if self.quick else "", note))),
            versions=_versions(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def measure(self, suite: Suite, contenders: Sequence[Contender]) -> Iterator[Measurement]:
        """Time contenders on one case: on a GPU one after another, on a CPU in turns.

        Raises:
            ShortlistError: A check failed; that contender and those after it are not timed.
        """
        if not self.on_gpu:
            yield from self._measure_in_turns(suite, contenders)
            return
        for contender in contenders:
            yield self._measure_on_gpu(suite, contender)
            torch.cuda.empty_cache()  # so that the next one starts with free memory

    def _measure_in_turns(self, suite: Suite, contenders: Sequence[Contender]) -> Iterator[Measurement]:
        able, failed = [], []
        for contender in contenders:
            _check(contender)
            try:
                warm_up(contender.steps, self.pace, self.device)
                able.append(contender)
            except Exception as error:  # such as out of memory, no compiler, a peer that does not run here
                failed.append((contender, _first_line(error)))
        times = interleaved_wall_times([contender.steps for contender in able], self.pace, self.device)
        for contender, wall in zip(able, times, strict=True):
            yield self.row(suite, contender.entry, contender.case, wall=wall)
        for contender, note in failed:
            yield self.row(suite, contender.entry, contender.case, note=note)

    def _measure_on_gpu(self, suite: Suite, contender: Contender) -> Measurement:
        _check(contender)
        gpu = wall = peak_mib = None
        note, steps = "", contender.steps
        try:
            warm_up(steps, self.pace, self.device)
            peak_mib = peak_extra_mib(steps[0], self.device)
            wall = wall_time(steps, self.pace, self.device)
            gpu = gpu_time(steps, self.pace, self.device)
        except CannotCaptureError as error:
            note = f"{NOT_CAPTURED}: {error}"
        except Exception as error:  # such as out of memory, no compiler, a peer that does not run here
            note = _first_line(error)
        finally:
            for step in steps:
                step.release()
        return self.row(suite, contender.entry, contender.case, gpu=gpu, wall=wall, peak_mib=peak_mib, note=note)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def say_to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def describe(measurement: Measurement) -> str:
    """One line about a measurement."""
    case = {name: getattr(measurement, name) for name in ("d", "K", "B", "spread", "epsilon")}
    settings = " ".join(f"{name}={value:g}" for name, value in case.items() if value is not None)
    clocks = {"gpu": measurement.gpu_ms, "wall": measurement.wall_ms}
    times = ", ".join(f"{name} {value:.4g} ms" for name, value in clocks.items() if value is not None)
    what = f"{measurement.suite}: {measurement.entry}, {measurement.N} x {measurement.L} {measurement.dtype} {settings}"
    return f"{what.strip()}: {'; '.join(filter(None, (times, measurement.note)))}"


def _check(contender: Contender) -> None:
    if contender.check is not None:
        contender.check()


def _statistics(timing: Timing | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if timing is None else (timing.median, timing.p20, timing.p80)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type.upper()}, {counted(torch.get_num_threads(), 'thread')}"


def _versions() -> str:
    found: Iterable[tuple[str, str]] = [("shortlist", shortlist.__version__), *_installed()]
    return " ".join(f"{name}={version}" for name, version in found)


def _installed() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            yield package, importlib.metadata.version(package)
