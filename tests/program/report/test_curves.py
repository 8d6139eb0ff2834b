"""Accuracy against K and class size, learning curves, and the charts that show them."""

import csv
import json
import re
import statistics
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shortlist.program.config import TrainConfig
from shortlist.program.report.charts import Axis, Line, Point, count_axis, key, line_chart, number_axis, percent_axis
from shortlist.program.report.curves import macro_by_k, macro_in_bin, micro_by_k, size_axis, size_bins
from shortlist.program.report.gather import Comparison, gather
from shortlist.program.runs.folder import RunFolder
from tests.support.report_pages import KS, Node, finals_of, numbers_of, page_of, parsed, part_of, rows_of, spread_of
from tests.support.run_folders import World, make_run


def test_accuracy_against_k_rises_and_meets_the_table(comparison: Comparison) -> None:
    for run in comparison.runs:
        assert run.predictions is not None
        assert run.final is not None
        for average, by_k in (("micro", micro_by_k(run.predictions)), ("macro", macro_by_k(run.predictions))):
            assert len(by_k) == 10
            assert by_k == sorted(by_k)
            for k in KS:
                assert by_k[k - 1] == pytest.approx(run.final["test"][f"{average}_top{k}"], abs=1e-6)


class _Undecided(World):
    """Some images have equal scores for all classes, and some for the two best."""

    def scores(self, skill: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        scores, labels = super().scores(skill, seed)
        scores[:20] = 0
        best = scores[20:60].topk(2)
        scores[20:60] = scores[20:60].scatter(1, best.indices, best.values[:, :1].expand(-1, 2))
        return scores, labels


def test_accuracy_against_k_meets_the_table_where_scores_tie(world: World, tmp_path: Path) -> None:
    tied = _Undecided(world.names, world.train_images)
    (comparison,) = gather([make_run(tmp_path, tied, "focal", epochs=2)])
    test_accuracy_against_k_rises_and_meets_the_table(comparison)


def test_accuracy_against_k_leaves_out_unreadable_images(comparison: Comparison) -> None:
    predictions = comparison.runs[0].predictions
    assert predictions is not None
    labels = torch.cat([predictions.labels, torch.tensor([-1, -1])])
    suggestions = torch.cat([predictions.suggestions, torch.zeros(2, 10, dtype=torch.int64)])
    above = torch.cat([predictions.above, torch.zeros(2, dtype=torch.int64)])
    padded = replace(predictions, labels=labels, suggestions=suggestions, above=above)
    assert micro_by_k(padded) == micro_by_k(predictions)
    assert macro_by_k(padded) == macro_by_k(predictions)


def test_the_chart_against_k_has_the_numbers_of_the_table(page: Node, runs: list[RunFolder]) -> None:
    finals = [finals_of(runs, loss) for loss in ("cross_entropy", "ldam", "noised_topk_hinge")]
    for average, figure in zip(("micro", "macro"), part_of(page, "Accuracy against K").all("figure"), strict=True):
        numbers = numbers_of(figure)
        assert list(numbers) == [f"K = {k}" for k in range(1, 11)]
        for k in KS:
            of_runs = [[final["test"][f"{average}_top{k}"] for final in of_loss] for of_loss in finals]
            assert numbers[f"K = {k}"] == [spread_of(values) for values in of_runs]


def test_accuracy_against_class_size_is_that_of_the_classes(page: Node, runs: list[RunFolder]) -> None:
    with (runs[5].path / "test_per_class.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    small, large = part_of(page, "Accuracy against class size").all("figure")
    for k, figure in ((1, small), (5, large)):
        for place, cells in numbers_of(figure).items():
            low, high, classes = re.findall(r"\d+", place)
            inside = [float(line[f"top{k}"]) for line in lines if int(low) <= int(line["train_images"]) <= int(high)]
            assert len(inside) == int(classes)
            assert cells[2] == spread_of([statistics.fmean(inside)])


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=50))
@example([0, *(2**power for power in range(20))])
def test_every_class_is_in_one_bin(sizes: list[int]) -> None:
    bins = size_bins(sizes)
    assert len(bins) <= 12
    assert sum(size_bin.classes for size_bin in bins) == len(sizes)
    assert all(sum(size in size_bin.sizes for size_bin in bins) == 1 for size in sizes)
    octaves = [size_bin.octave for size_bin in bins]
    assert octaves == sorted(set(octaves))
    ticks = [at for at, _ in size_axis("", bins).ticks]
    assert bins[0].octave <= min(ticks)
    assert max(ticks) <= bins[-1].octave + bins[-1].octaves


def test_a_bin_whose_classes_do_not_occur_has_no_value(comparison: Comparison) -> None:
    accuracy = comparison.runs[0].class_accuracy
    assert accuracy is not None
    unseen = replace(accuracy, by_k={1: torch.full_like(accuracy.by_k[1], torch.nan)})
    assert macro_in_bin(unseen, 1, size_bins(comparison.train_images)[0]) is None


def test_classes_of_one_size_have_no_chart_against_size(tmp_path: Path) -> None:
    world = World(tuple("abcdefghijkl"), (30,) * 12)
    page = page_of([make_run(tmp_path / "run", world, "focal", epochs=2)], tmp_path)
    assert "Accuracy against class size" not in page.text
    assert "12 classes with 30 training images each, 360 in all" in page.text
    assert "few" not in page.all("thead")[0].text  # no class has few images


def test_learning_curves_show_every_epoch(page: Node, runs: list[RunFolder]) -> None:
    loss, metric = part_of(page, "Learning curves").all("figure")
    lines = runs[5].metrics()
    relative = [f"{line['train_loss'] / lines[0]['train_loss']:.3g}" for line in lines]
    assert [cells[2] for cells in numbers_of(loss).values()] == relative
    accuracy = [spread_of([line["val_macro_top5"]]) for line in lines]
    assert [cells[2] for cells in numbers_of(metric).values()] == accuracy
    (ring,) = metric.all("circle", "ring")  # of the one loss with a single seed
    (told,) = [
        point.all("title")[0].text
        for point in metric.all("g")
        for circle in point.all("circle", "target")[:1]
        if len(point.all("title")) == 1 and _place(circle) == _place(ring)
    ]
    assert f"epoch {runs[5].read_json('final.json')['best_epoch'] + 1}:" in told


def test_learning_curves_are_corrected_where_every_epoch_was_chosen_so(
    run: RunFolder, world: World, tmp_path: Path
) -> None:
    corrected = [line | {"corrected_val_macro_top5": 0.9 - line["val_macro_top5"] / 2} for line in run.metrics()]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in corrected))
    _, metric = part_of(page_of([run], tmp_path / "all"), "Learning curves").all("figure")
    expected = [spread_of([line["corrected_val_macro_top5"]]) for line in corrected]
    assert [cells[0] for cells in numbers_of(metric).values()] == expected
    assert "corrected for class sizes" in metric.text

    other = make_run(tmp_path / "other", world, "ldam")
    _, metric = part_of(page_of([run, other], tmp_path / "some"), "Learning curves").all("figure")
    expected = [spread_of([line["val_macro_top5"]]) for line in corrected]
    assert tuple(expected) in zip(*numbers_of(metric).values(), strict=True)
    assert "corrected" not in metric.text


def _place(circle: Node) -> tuple[str | None, str | None]:
    return circle.attributes["cx"], circle.attributes["cy"]


def test_losses_with_the_same_settings_are_drawn_in_their_own_units(world: World, tmp_path: Path) -> None:
    made = [
        make_run(tmp_path / str(batch), world, "ldam", train=TrainConfig(epochs=2, batch_size=batch))
        for batch in (64, 32)
    ]
    page = page_of(made, tmp_path)
    assert page.all("h1")[0].text == "Two set-ups on glyphs"
    assert set(rows_of(page)) == {"LDAM (train.batch_size = 64)", "LDAM (train.batch_size = 32)"}
    first = numbers_of(part_of(page, "Learning curves").all("figure")[0])["epoch 1"]
    assert first == [f"{made[0].metrics()[0]['train_loss']:.3g}"] * 2


@given(st.lists(st.floats(0, 1), min_size=1), st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(1, 10**5))
def test_axes_hold_their_values_and_their_ticks(shares: list[float], numbers: list[float], epochs: int) -> None:
    for axis, values in (
        (percent_axis("", shares), shares),
        (number_axis("", numbers), numbers),
        (count_axis("", 1, epochs), [1, epochs]),
    ):
        assert all(-1e-9 <= axis.along(value) <= 1 + 1e-9 for value in (*values, *(at for at, _ in axis.ticks)))
        assert 1 <= len(axis.ticks) <= 12
        assert len({text for _, text in axis.ticks}) == len(axis.ticks)


def test_charts_speak_to_those_who_cannot_see_them(page: Node) -> None:
    charts = page.all("svg", "chart")
    assert len(charts) == 6
    for chart in charts:
        assert chart.attributes["role"] == "img"
        assert "Cross-entropy" in (chart.attributes["aria-label"] or "")


def test_a_band_runs_along_its_line_and_stays_in_the_chart() -> None:
    axis = Axis("", 0.0, 1.0, ((0.0, "0"), (1.0, "1")))
    points = [Point(0.0, 0.1, "", 0.3), Point(0.5, 0.5, "", 0.1), Point(1.0, 0.9, "", 0.3)]
    chart = parsed(line_chart("", axis, axis, [Line(0, points)]))
    (band,) = [_coordinates(path) for path in chart.all("path", "band")]
    (line,) = [_coordinates(path) for path in chart.all("path", "line")]
    foot, head = (float(re.findall(r"[\d.]+", path.attributes["d"] or "")[1]) for path in chart.all("path", "grid"))
    forth, back = band[: len(line)], band[len(line) :][::-1]
    for (left, middle), above, below in zip(line, forth, back, strict=True):
        assert above[0] == below[0] == left
        assert head <= above[1] < middle < below[1] <= foot


def _coordinates(path: Node) -> list[tuple[float, float]]:
    numbers = [float(number) for number in re.findall(r"[\d.]+", path.attributes["d"] or "")]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_many_set_ups_look_different() -> None:
    swatches = [parsed(key("", style)) for style in range(28)]
    colours = [swatch.all("g")[0].attributes["class"] for swatch in swatches]
    dashes = [swatch.all("path")[0].attributes.get("stroke-dasharray") for swatch in swatches]
    markers = [swatch.all("path")[1].attributes["d"] for swatch in swatches]
    assert len(set(zip(colours, dashes, markers, strict=True))) == 28
    for few in (colours[:4], dashes[:4], markers[:4]):  # a few differ in every way
        assert len(set(few)) == 4


def test_series_stand_out_from_the_paper_in_light_and_dark() -> None:
    style = resources.files("shortlist.program.report").joinpath("page.css").read_text()

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    schemes = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): #(\w{6})", scheme))
        paper = luminance(colours["paper"])
        needed = {"ink": 7.0, "muted": 4.5, "accent": 4.5} | {f"series-{number}": 3.0 for number in range(7)}
        for name, least in needed.items():
            low, high = sorted((paper, luminance(colours[name])))
            assert (high + 0.05) / (low + 0.05) >= least, name
