"""The benchmark: what is wrong is not timed, what was measured is kept, and the document is the file's own."""

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shortlist as sl
from shortlist import functional, metrics
from shortlist.heads.noised import NoisedTopKHead
from shortlist.program.bench import agreement, epochs, losses, running
from shortlist.program.bench.contenders import Bench
from shortlist.program.bench.document import loop_tables, write_performance
from shortlist.program.bench.measurements import (
    COLUMNS,
    NOT_CAPTURED,
    QUICK_NOTE,
    Measurement,
    ResultsFile,
    Selection,
    latest,
    read_measurements,
)
from shortlist.program.bench.plots import _pushed_apart
from shortlist.program.bench.timing import QUICK, Pace, Step, Timing, interleaved_wall_times
from shortlist.program.config import RunConfig
from shortlist.program.documents import END, begin_mark

BEGIN = begin_mark("shortlist bench --document")
CPU = torch.device("cpu")
noised_topk_hinge = functional.noised_topk_hinge


def silent(message: str) -> None:
    pass


def run_quick(out: Path, *suites: str) -> list[Measurement]:
    return running.run(suites, quick=True, out=out, device="cpu", say=silent)


# The command


def test_a_quick_run_passes_through_every_suite(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shortlist", "bench", "--quick", "--device", "cpu", "--out", "quick.csv"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for a busy core would take most of the time
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path, env=alone)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "quick.csv\n"
    assert [path.name for path in tmp_path.iterdir()] == ["quick.csv"]
    rows = read_measurements([tmp_path / "quick.csv"])
    assert list(dict.fromkeys(row.suite for row in rows)) == ["loss", "head", "hinge", "metrics", "epoch"]
    timed = [(row.wall_p20, row.wall_ms, row.wall_p80) for row in rows]
    assert all(p20 and median and p80 and 0 < p20 <= median <= p80 for p20, median, p80 in timed)
    assert all(row.note.startswith(QUICK_NOTE) for row in rows)
    entries = {row.entry for row in rows}
    assert {"cross-entropy", "pytopk", "shortlist", "shortlist, sparse gradient", "torch.sort alone"} <= entries
    assert "loop is left out" in done.stderr


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


@pytest.mark.gpu
def test_all_of_ours_runs_as_a_cuda_graph(tmp_path: Path) -> None:
    rows = running.run(["loss", "head", "hinge", "metrics"], quick=True, out=tmp_path / "gpu.csv", device="cuda")
    ours = [row for row in rows if row.entry.startswith("shortlist") and "sparse" not in row.entry]
    assert ours
    assert [row for row in ours if row.gpu_ms is None or NOT_CAPTURED in row.note] == []


def test_an_unknown_suite_is_named(tmp_path: Path) -> None:
    with pytest.raises(sl.ShortlistError, match=r"some of loss, .*'lose'"):
        run_quick(tmp_path / "out.csv", "lose")


# Twins


def of_the_next_rank(scores: Tensor, target: Tensor, k: int, **settings: Any) -> Tensor:
    return noised_topk_hinge(scores, target, k + 1, **settings)


def too_noisy(scores: Tensor, target: Tensor, k: int, *, epsilon: float, **settings: Any) -> Tensor:
    """Right on noise that is given, and in the limit."""
    own_noise = "noise" not in settings and settings["n_samples"] != math.inf
    return noised_topk_hinge(scores, target, k, epsilon=(1.5 if own_noise else 1) * epsilon, **settings)


def with_the_same_noise_always(scores: Tensor, target: Tensor, k: int, **settings: Any) -> Tensor:
    if "noise" not in settings and settings["n_samples"] != math.inf:
        settings["generator"] = torch.Generator().manual_seed(3)
    return noised_topk_hinge(scores, target, k, **settings)


class _HalvedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


def with_half_its_gradient(scores: Tensor, target: Tensor, k: int, **settings: Any) -> Tensor:
    value: Tensor = _HalvedGradient.apply(noised_topk_hinge(scores, target, k, **settings))
    return value


def with_a_dense_gradient(scores: Tensor, target: Tensor, k: int, **settings: Any) -> Tensor:
    """Right on noise that is given; the value is right everywhere."""
    value = noised_topk_hinge(scores, target, k, **settings)
    return value if "noise" in settings else value + 0 * scores.mean() + (scores - scores.detach()).mean()


def off_by_a_little_on_its_own_noise(scores: Tensor, target: Tensor, k: int, **settings: Any) -> Tensor:
    value = noised_topk_hinge(scores, target, k, **settings)
    own_noise = "noise" not in settings and settings["n_samples"] != math.inf
    return value + 0.1 if own_noise else value


WRONG = [
    of_the_next_rank,
    too_noisy,
    with_the_same_noise_always,
    with_half_its_gradient,
    with_a_dense_gradient,
    off_by_a_little_on_its_own_noise,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda function: function.__name__)
def test_a_wrong_loss_is_not_timed(
    wrong: Callable[..., Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "noised_topk_hinge", wrong)
    with pytest.raises(sl.ShortlistError, match=r"noised_topk_hinge \(8 x 40 .* differs from its reference"):
        run_quick(tmp_path / "out.csv", "loss")
    assert not (tmp_path / "out.csv").exists()


def test_a_wrong_smoothed_hinge_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = functional.smooth_topk_hinge

    def only_in_float64(scores: Tensor, target: Tensor, k: int) -> Tensor:
        return right(scores, target, k) * (1 if scores.dtype == torch.float64 else 1.001)

    monkeypatch.setattr(functional, "smooth_topk_hinge", only_in_float64)
    with pytest.raises(sl.ShortlistError, match=r"smooth_topk_hinge .* differs from its reference"):
        run_quick(tmp_path / "out.csv", "hinge")


def test_wrong_metrics_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = metrics.TopKMetrics.update
    monkeypatch.setattr(metrics.TopKMetrics, "update", lambda self, scores, target: right(self, -scores, target))
    with pytest.raises(sl.ShortlistError, match=r"TopKMetrics.update .* differs from its reference"):
        run_quick(tmp_path / "out.csv", "metrics")


@pytest.mark.parametrize("factor", [0.5, 1.01])
def test_a_wrong_head_is_not_timed(factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = NoisedTopKHead.forward

    def wrong(self: NoisedTopKHead, features: Tensor, target: Tensor, **settings: Any) -> Tensor:
        return factor * right(self, features, target, **settings)

    monkeypatch.setattr(NoisedTopKHead, "forward", wrong)
    with pytest.raises(sl.ShortlistError, match=r"NoisedTopKHead .* differs from its reference"):
        run_quick(tmp_path / "out.csv", "head")


# The file


def measurement(entry: str = "shortlist", **changes: Any) -> Measurement:
    plain = Measurement(
        suite="loss", entry=entry, device="cpu", machine="CPU, 2 threads", dtype="float32", N=64, L=1_000
    )
    return replace(plain, date="2030-01-01T00:00:00+00:00", versions="torch=1", **changes)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = [
        measurement(K=5, B=10, spread=0.1, epsilon=0.01, gpu_ms=1 / 3, wall_ms=2e-7, peak_mib=0.0),
        measurement("pytopk", note='out of memory: "tried", to allocate'),
    ]
    file = ResultsFile(tmp_path / "out.csv")
    for each in written:
        file.append(each)
    assert read_measurements([tmp_path / "out.csv"]) == written
    assert (tmp_path / "out.csv").read_text().startswith(",".join(COLUMNS) + "\n")


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


def test_the_last_measurement_counts_and_a_quick_one_does_not() -> None:
    old, new, other = measurement(wall_ms=1.0), measurement(wall_ms=2.0), measurement("pytopk", wall_ms=3.0)
    assert latest([old, other, new, measurement(wall_ms=9.0, note=f"{QUICK_NOTE}; more")]) == [new, other]


# The clocks


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


# The document


def some_measurements() -> list[Measurement]:
    """Made up: cross-entropy takes 1 ms, 0.8 compiled, and ours 0.4 to 1.2."""
    found = []
    for machine, device, clocks in (
        ("Made-up GPU", "cuda", ("gpu_ms", "wall_ms")),
        ("CPU, 2 threads", "cpu", ("wall_ms",)),
    ):
        here: dict[str, Any] = {"machine": machine, "device": device}
        for num_classes in (100, 10_000):
            size = here | {"L": num_classes, "spread": 1.0}
            for entry, time in (("cross-entropy", 1.0), ("cross-entropy, compiled", 0.8)):
                found.append(measurement(entry, **size | dict.fromkeys(clocks, time)))
            settings = size | {"K": 5, "B": 10, "epsilon": 0.2}
            found.append(measurement("pytopk", **settings | dict.fromkeys(clocks, 20.0)))
            for spread, time in ((0.1, 0.4), (1.0, 0.6), (3.0, 1.2)):
                found.append(measurement(**settings | {"spread": spread} | dict.fromkeys(clocks, time)))
    head: dict[str, Any] = {
        "suite": "head",
        "machine": "Made-up GPU",
        "device": "cuda",
        "d": 512,
        "N": 1024,
        "L": 10**6,
    }
    found += [
        measurement("linear + cross-entropy", **head, gpu_ms=8.0, wall_ms=8.1, peak_mib=1000.0),
        measurement("Liger", **head, wall_ms=99.0, note=f"{NOT_CAPTURED}: it waits"),
        measurement(**head, K=5, B=5, gpu_ms=3.0, wall_ms=3.1, peak_mib=1.0),
    ]
    return found


def write_csv(path: Path, measurements: list[Measurement]) -> Path:
    file = ResultsFile(path)
    for each in measurements:
        file.append(each)
    return path


def new_docs(folder: Path) -> Path:
    folder.mkdir()
    (folder / "performance.md").write_text(f"# Speed\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_document_is_rebuilt_exactly_from_the_file(tmp_path: Path) -> None:
    csv = write_csv(tmp_path / "one.csv", some_measurements())
    first, second = new_docs(tmp_path / "first"), new_docs(tmp_path / "second")
    page = write_performance([csv], first).read_text()
    assert page.startswith(f"# Speed\n\nBefore.\n\n{BEGIN}\n")
    assert page.endswith(f"{END}\n\nAfter.\n")
    assert "old" not in page
    made = contents(first)
    assert {name for name in made if name.endswith(".svg")} == {
        "performance/loss-made-up-gpu.svg",
        "performance/loss-cpu-2-threads.svg",
        "performance/head-made-up-gpu.svg",
    }
    for name in made:
        if name.endswith(".svg"):
            assert f"{name[:-4]}.png" in made
            assert f"({name[:-4]}.png)" in page, "every plot is shown"
    write_performance([csv.rename(tmp_path / "two.csv")], second)
    csv = tmp_path / "two.csv"
    write_performance([csv], first)
    assert contents(second) == contents(first) == made


def test_the_tables_say_what_the_file_says(tmp_path: Path) -> None:
    docs = new_docs(tmp_path / "docs")
    page = write_performance([write_csv(tmp_path / "out.csv", some_measurements())], docs).read_text()
    # Against the faster of plain and compiled: 0.6 / 0.8 in the median, 1.2 / 0.8 at worst.
    assert page.count("| 64 × 10k | 0.800 | 0.75× / 1.50× |") == 3  # noqa: RUF001
    assert "met in 4 of 6 cases" in page
    assert "| linear + cross-entropy | 8.00 (1,000) |" in page
    assert "| Liger | 99.0 (wall) |" in page
    assert "| **shortlist / fastest peer** | 0.38× |" in page  # noqa: RUF001
    assert f"- head, Liger, 1,024 × 1M: {NOT_CAPTURED}: it waits" in page  # noqa: RUF001


def test_the_faster_loop_is_faster_by_how_much_longer_the_other_takes() -> None:
    rows = [measurement("plain", suite="loop", wall_ms=3000.0), measurement("ours", suite="loop", wall_ms=1500.0)]
    (table,) = loop_tables(Selection(rows))
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[-2:]]
    assert [(entry, seconds, factor[:-1]) for entry, seconds, factor in cells] == [
        ("plain", "3.00", "1.00"),
        ("ours", "1.50", "2.00"),
    ]


def test_a_document_without_marks_is_left_alone(tmp_path: Path) -> None:
    csv = write_csv(tmp_path / "out.csv", [measurement(wall_ms=1.0)])
    (tmp_path / "performance.md").write_text("mine")
    with pytest.raises(sl.ShortlistError, match="must hold the lines"):
        write_performance([csv], tmp_path)
    assert (tmp_path / "performance.md").read_text() == "mine"


def test_a_document_is_not_emptied(tmp_path: Path) -> None:
    docs = new_docs(tmp_path / "docs")
    before = (docs / "performance.md").read_text()
    csv = write_csv(tmp_path / "out.csv", [measurement(wall_ms=1.0, note=QUICK_NOTE)])
    with pytest.raises(sl.ShortlistError, match="nothing to show"):
        write_performance([csv], docs)
    assert (docs / "performance.md").read_text() == before
    with pytest.raises(sl.ShortlistError, match="cannot read"):
        write_performance([tmp_path / "nowhere.csv"], docs)


def test_the_published_document_can_be_rebuilt() -> None:
    page = (Path(__file__).parents[3] / "docs" / "performance.md").read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    assert page.index(BEGIN) < page.index(END)


@pytest.mark.parametrize("heights", [[], [1.0], [0.0, 0.0, 0.0], [0.0, 0.5, 5.0], [0.0, 0.9, 1.8, 2.7, 9.0]])
def test_labels_are_pushed_apart_no_further_than_it_takes(heights: list[float]) -> None:
    moved = _pushed_apart(heights, 1.0)
    assert all(high - low >= 1 - 1e-9 for low, high in itertools.pairwise(moved))
    assert sum(moved) == pytest.approx(sum(heights)), "clusters stay around their mean"
    if all(high - low >= 1 for low, high in itertools.pairwise(heights)):
        assert moved == heights
