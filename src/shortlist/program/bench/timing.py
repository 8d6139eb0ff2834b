"""Time by the GPU's clock and by the wall clock, and peak memory.

The wall clock is what a training script waits; the GPU's clock is what a kernel takes. For small steps they differ
tenfold, because the host needs longer to launch a kernel than the GPU to run it. So both are reported.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

_MILLISECOND = 1e-3
_MIB = 2**20


@dataclass(frozen=True)
class Step:
    """One forward and backward pass, as in a training script; without leaves, the forward pass alone."""

    forward: Callable[[], object]
    leaves: tuple[Tensor, ...] = ()

    def __call__(self) -> None:
        self.release()
        value = self.forward()
        if self.leaves:
            assert isinstance(value, Tensor)
            torch.autograd.backward(value)

    def release(self) -> None:
        """Drop the gradients, so that the next step does not add to them."""
        for leaf in self.leaves:
            leaf.grad = None


@dataclass(frozen=True)
class Pace:
    """How much time to spend on a measurement."""

    warm_up_steps: int = 3
    seconds: float = 0.2
    """For each clock of a contender, unless the fewest samples take longer."""
    fewest: int = 5
    most: int = 60
    """Samples to take the median of."""
    sample_seconds: float = 2e-3
    """Steps are repeated until a sample lasts this long, as reading a clock takes microseconds."""


QUICK = Pace(warm_up_steps=1, seconds=0.0, fewest=2, sample_seconds=0.0)


@dataclass(frozen=True)
class Timing:
    """Milliseconds a step: median, 20th and 80th percentile of the samples."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        samples = sorted(sample / _MILLISECOND for sample in seconds)
        p20, *_, p80 = statistics.quantiles(samples, n=5, method="inclusive") if len(samples) > 1 else samples * 2
        return cls(statistics.median(samples), p20, p80)


class CannotCaptureError(RuntimeError):
    """A step that a CUDA graph cannot record."""


def warm_up(steps: Sequence[Step], pace: Pace, device: torch.device) -> None:
    """Get compilation, autotuning and the first memory requests out of the way."""
    for _ in range(pace.warm_up_steps):
        for step in steps:
            step()
    wait(device)


def gpu_time(steps: Sequence[Step], pace: Pace, device: torch.device) -> Timing:
    """Time on the GPU alone, without the host: the steps are captured as one CUDA graph and replayed.

    Raises:
        CannotCaptureError: A step waits for the GPU, or cannot be captured for another reason.
    """
    _refuse_waiting(steps[0])
    graph = _captured(steps, device)
    try:
        graph.replay()
        once = _event_seconds(graph, 1)
        replays = _at_least_one(pace.sample_seconds / once)
        samples = [_event_seconds(graph, replays) for _ in range(_sample_count(pace, replays * once))]
    finally:
        graph.reset()
        for step in steps:
            step.release()
    return Timing.of([sample / len(steps) for sample in samples])


def wall_time(steps: Sequence[Step], pace: Pace, device: torch.device) -> Timing:
    """Wall-clock time in plain use: batches of steps, waiting for the GPU only after each batch."""
    (timing,) = interleaved_wall_times([steps], pace, device)
    return timing


def interleaved_wall_times(rivals: Sequence[Sequence[Step]], pace: Pace, device: torch.device) -> list[Timing]:
    """``wall_time`` of several rivals in turns, so that other load on the machine affects them alike."""
    once = [_wall_seconds(steps, len(steps), device) for steps in rivals]
    repeats = [
        _at_least_one(pace.sample_seconds / seconds) * len(steps) for seconds, steps in zip(once, rivals, strict=True)
    ]
    rounds = _sample_count(pace, sum(map(max, once, [pace.sample_seconds] * len(once))) / len(once))
    samples: list[list[float]] = [[] for _ in rivals]
    for _ in range(rounds):
        for steps, repeat, sample in zip(rivals, repeats, samples, strict=True):
            sample.append(_wall_seconds(steps, repeat, device) / repeat)
            for step in steps:
                step.release()
    return [Timing.of(sample) for sample in samples]


def peak_extra_mib(step: Step, device: torch.device) -> float:
    """Peak memory of one step beyond what was allocated before: activations, workspaces, gradients."""
    step.release()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    step.release()
    return peak / _MIB


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wall_seconds(steps: Sequence[Step], repeat: int, device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    for number in range(repeat):
        steps[number % len(steps)]()
    wait(device)
    return time.perf_counter() - began


def _event_seconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    for _ in range(replays):
        graph.replay()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) * _MILLISECOND / replays


def _captured(steps: Sequence[Step], device: torch.device) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # torch requires a warm-up on another stream before a capture
        for step in steps:
            step()
    torch.cuda.current_stream(device).wait_stream(stream)
    for step in steps:
        step.release()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for step in steps:
                step()
    except RuntimeError as error:
        # After a failed capture the default generator still counts as captured.
        fresh = torch.Generator(device).manual_seed(0)
        torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(fresh)
        for step in steps:
            step.release()
        raise CannotCaptureError(str(error).partition("\n")[0]) from error
    return graph


def _refuse_waiting(step: Step) -> None:
    """Fail before the capture begins if the step waits for the GPU: a failed capture is hard to recover from."""
    try:
        with waits_are_errors():
            step()
    except RuntimeError as error:
        raise CannotCaptureError(str(error).partition("\n")[0]) from error
    finally:
        step.release()


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Raise a RuntimeError whenever the host would wait for the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _at_least_one(count: float) -> int:
    return max(1, round(count))


def _sample_count(pace: Pace, seconds_each: float) -> int:
    return min(pace.most, max(pace.fewest, round(pace.seconds / max(seconds_each, 1e-9))))
