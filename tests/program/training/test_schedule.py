"""The learning rate over a run."""

from typing import Any

import pytest

from shortlist.program.config import OptimConfig
from shortlist.program.training.schedule import learning_rate


def rates(config: OptimConfig, epochs: int, steps: int) -> list[float]:
    return [learning_rate(config, epoch, step, steps, epochs) for epoch in range(epochs) for step in range(steps)]


def test_the_step_schedule_drops_at_the_start_of_its_milestones() -> None:
    config = OptimConfig(lr=1.0, schedule="step", milestones=(0.5, 0.75), decay=0.5)
    assert rates(config, 4, 2) == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("epochs", [1, 2, 3, 60, 300])
def test_the_rate_drops_at_the_same_shares_of_a_run_of_any_length(epochs: int) -> None:
    config = OptimConfig(lr=1.0, schedule="step", milestones=(0.5, 0.75), decay=0.1)
    drops = config.drop_epochs(epochs)
    assert drops == sorted({epoch for epoch in (round(epochs / 2), round(3 * epochs / 4)) if 0 < epoch < epochs})
    values = rates(config, epochs, 1)
    assert [epoch for epoch in range(1, epochs) if values[epoch] < values[epoch - 1]] == drops


def test_the_cosine_schedule_falls_from_the_rate_to_almost_nothing() -> None:
    values = rates(OptimConfig(lr=1.0, schedule="cosine"), 10, 10)
    assert values[0] == 1
    assert values[50] == pytest.approx(0.5)
    assert values == sorted(values, reverse=True)
    assert 0 < values[-1] < 1e-3


@pytest.mark.parametrize("schedule", ["step", "cosine", "constant"])
def test_the_warm_up_rises_to_the_rate(schedule: Any) -> None:
    values = rates(OptimConfig(lr=1.0, schedule=schedule, warmup_epochs=2), 4, 5)
    assert values[:10] == sorted(values[:10])
    assert 0 < values[0] < 0.2
    assert values[10] == pytest.approx(1.0)
