"""Running the suites: the clocks, and the file that the measurements go to."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shortlist as sl
from shortlist.program.bench import agreement, epochs, losses
from shortlist.program.bench.contenders import Bench
from shortlist.program.bench.measurements import (
    COLUMNS,
    QUICK_NOTE,
    Measurement,
    ResultsFile,
    latest,
    read_measurements,
)
from shortlist.program.bench.timing import QUICK, Pace, Step, Timing, interleaved_wall_times
from shortlist.program.cli import research
from shortlist.program.config import RunConfig
from tests.support.benching import measurement, run_quick, silent

CPU = torch.device("cpu")


def test_a_quick_run_passes_through_every_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    research.bench(["--quick", "--device", "cpu", "--out", "quick.csv"])
    shown = capsys.readouterr()
    assert shown.out == "quick.csv\n"
    assert [path.name for path in tmp_path.iterdir()] == ["quick.csv"]
    rows = read_measurements([tmp_path / "quick.csv"])
    assert list(dict.fromkeys(row.suite for row in rows)) == ["loss", "head", "hinge", "metrics", "epoch"]
    timed = [(row.wall_p20, row.wall_ms, row.wall_p80) for row in rows]
    assert all(p20 and median and p80 and 0 < p20 <= median <= p80 for p20, median, p80 in timed)
    assert all(row.note.startswith(QUICK_NOTE) for row in rows)
    entries = {row.entry for row in rows}
    assert {"cross-entropy", "pytopk", "shortlist", "shortlist, sparse gradient", "torch.sort alone"} <= entries
    assert "loop is left out" in shown.err


@pytest.mark.parametrize("measure", [epochs.measure_losses, epochs.measure_loops])
def test_both_loops_run_where_the_measurement_says(
    measure: Callable[[Bench], Iterator[Measurement]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class StartedError(Exception):
        pass

    def started(config: RunConfig, **options: Any) -> None:
        raise StartedError(config.train.device)

    monkeypatch.setattr(epochs, "train", started)
    monkeypatch.setattr(epochs, "_plain_epochs", lambda setup, problem, device: [float(device.type == "cpu")] * 2)
    here = Bench(torch.device("cpu"), quick=measure is epochs.measure_losses, say=silent)
    rows = measure(here)
    if measure is epochs.measure_loops:
        assert next(rows).wall_ms == 1000
    with pytest.raises(StartedError, match=r"^cpu$"):
        next(rows)


def test_an_unknown_suite_is_named(tmp_path: Path) -> None:
    with pytest.raises(sl.ShortlistError, match=r"some of loss, .*'lose'"):
        run_quick(tmp_path / "out.csv", "lose")


def test_a_file_grows_and_only_a_file_of_measurements_does(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    first = run_quick(out, "metrics")
    second = run_quick(out, "hinge")
    assert read_measurements([out]) == first + second
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(sl.ShortlistError, match=r"other.csv is not a file of measurements"):
        run_quick(other, "metrics")
    assert other.read_text() == "a,b\n1,2\n"
    out.write_text(out.read_text().replace(",16,60,", ",many,60,"))
    with pytest.raises(sl.ShortlistError, match=r"line 2 is damaged.*many"):
        read_measurements([out])


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = agreement.check_noised_hinge

    def stop_at_the_second_size(entry: str, scores: Tensor, *rest: Any, **settings: Any) -> None:
        if scores.shape == losses.QUICK.sizes[1]:
            raise KeyboardInterrupt
        right(entry, scores, *rest, **settings)

    monkeypatch.setattr(losses, "check_noised_hinge", stop_at_the_second_size)
    with pytest.raises(KeyboardInterrupt):
        run_quick(tmp_path / "out.csv", "loss")
    kept = read_measurements([tmp_path / "out.csv"])
    assert {(row.N, row.L) for row in kept} == {losses.QUICK.sizes[0]}
    assert "shortlist" in {row.entry for row in kept}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = [
        measurement(K=5, B=10, spread=0.1, epsilon=0.01, gpu_ms=1 / 3, wall_ms=2e-7, peak_mib=0.0),
        measurement("pytopk", note='out of memory: "tried", to allocate'),
    ]
    file = ResultsFile(tmp_path / "out.csv")
    for row in written:
        file.append(row)
    assert read_measurements([tmp_path / "out.csv"]) == written
    assert (tmp_path / "out.csv").read_text().startswith(",".join(COLUMNS) + "\n")


def test_the_last_measurement_counts_and_a_quick_one_does_not() -> None:
    old, new, other = measurement(wall_ms=1.0), measurement(wall_ms=2.0), measurement("pytopk", wall_ms=3.0)
    assert latest([old, other, new, measurement(wall_ms=9.0, note=f"{QUICK_NOTE}; more")]) == [new, other]


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
