"""The clocks."""

from dataclasses import replace

import pytest
import torch

from shortlist.program.bench.timing import QUICK, Pace, Step, Timing, interleaved_wall_times

CPU = torch.device("cpu")


def test_rivals_run_in_turns() -> None:
    order: list[str] = []
    rivals = [[Step(lambda name=name: order.append(name))] for name in "abc"]  # type: ignore[misc]
    times = interleaved_wall_times(rivals, replace(QUICK, fewest=4), CPU)
    assert "".join(order) == "abc" * 5, "once to see how long it takes, then four rounds"
    assert len(times) == 3


def test_a_step_leaves_one_gradient_not_a_sum() -> None:
    leaf = torch.ones(3, requires_grad=True)
    step = Step(lambda: (2 * leaf).sum(), (leaf,))
    step()
    step()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2, 2]
    step.release()
    assert leaf.grad is None


def test_a_step_that_was_disturbed_leaves_the_timing_alone() -> None:
    assert Timing.of([0.003, 0.001, 0.004, 0.002, 10.0]).median == pytest.approx(3.0)


def test_a_timing_is_in_milliseconds_a_step() -> None:
    assert Timing.of([0.005, 0.001, 0.002, 0.003, 0.004, 0.006]) == pytest.approx(Timing(3.5, 2.0, 5.0))
    (timing,) = interleaved_wall_times([[Step(lambda: sum(range(100_000)))] * 2], Pace(seconds=0.01), CPU)
    assert 0.01 < timing.median < 1000
