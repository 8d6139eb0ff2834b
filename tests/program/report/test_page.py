"""The page that compares runs: its numbers are those of the runs, and a browser shows it on any screen."""

import base64
import csv
import json
import re
import shutil
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from shortlist.program.losses import LOSSES, FocalConfig, NoisedTopKHingeConfig
from shortlist.program.report.charts import Axis, Line, Point, count_axis, key, line_chart, number_axis, percent_axis
from shortlist.program.report.curves import macro_by_k, macro_in_bin, micro_by_k, size_axis, size_bins
from shortlist.program.report.gather import Comparison, gather
from shortlist.program.report.markup import element
from shortlist.program.report.names import short_labels
from shortlist.program.report.page import data_facts, data_name, write_report
from shortlist.program.report.pictures import most_confused
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.thumbnails import example_images
from tests.support.run_folders import World, make_run, small_world

NASTY = ('<script>alert("1")</script>', "</bdi></td>&amp;'\"", "\u202eurdu\u05d0 漢字 \U0001f98b", "x" * 300, "  ")
KS = (1, 3, 5)
NUMBERS = [f"{average}_top{k}" for average in ("micro", "macro") for k in KS] + ["few_top5", "medium_top5", "many_top5"]


@dataclass
class Node:
    """An element of a parsed page."""

    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list["Node | str"] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, tag: str, class_: str | None = None) -> list["Node"]:
        return [
            node for node in self if node.tag == tag and class_ in (None, *(node.attributes.get("class") or "").split())
        ]

    def __iter__(self) -> Iterator["Node"]:
        for child in self.children:
            if isinstance(child, Node):
                yield child
                yield from child


class StrictParser(HTMLParser):
    """Builds a tree; an element that is not closed where it must be is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.open = [Node("")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in ("meta", "img"):
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parsed(text: str) -> Node:
    parser = StrictParser()
    parser.feed(text)
    parser.close()
    assert len(parser.open) == 1, f"{parser.open[-1].tag} is not closed"
    return parser.open[0]


@pytest.fixture(scope="module")
def world() -> World:
    return small_world(*NASTY)


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Three seeds of one loss, two of another, one of a third, and a run that has not finished."""
    root = tmp_path_factory.mktemp("runs")
    made = [make_run(root / f"ce-{seed}", world, "cross_entropy", seed, skill=3.0) for seed in (0, 1, 2)]
    made += [make_run(root / f"ldam-{seed}", world, "ldam", seed, skill=2.0) for seed in (0, 1)]
    made.append(make_run(root / "noised", world, NoisedTopKHingeConfig(epsilon=0.3), skill=4.0))
    made.append(make_run(root / "focal", world, "focal", finished=False))
    return made


@pytest.fixture(scope="module")
def comparison(runs: list[RunFolder]) -> Comparison:
    (only,) = gather(runs)
    return only


@pytest.fixture(scope="module")
def page_path(runs: list[RunFolder], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(runs, tmp_path_factory.mktemp("page") / "compared.html")


@pytest.fixture(scope="module")
def page(page_path: Path) -> Node:
    return parsed(page_path.read_text(encoding="utf-8"))


def _finals(runs: list[RunFolder], loss: str) -> list[dict[str, Any]]:
    return [run.read_json("final.json") for run in runs if run.finished and run.config.loss.name == loss]


def _rows(page: Node) -> dict[str, Node]:
    """Rows of the first table by the name of their loss."""
    (body,) = page.all("table", "results")[0].all("tbody")
    return {row.all("span", "key")[0].text: row for row in body.all("tr")}


def _part(page: Node, title: str) -> Node:
    """The section under a heading."""
    (found,) = [section for section in page.all("section") if _first(section).text == title]
    return found


def _first(node: Node) -> Node:
    child = node.children[0]
    assert isinstance(child, Node)
    return child


def _numbers(figure: Node) -> dict[str, list[str]]:
    """The table below a chart: its cells by the name of their row."""
    (body,) = figure.all("tbody")
    return {row.all("th")[0].text: [cell.text for cell in row.all("td")] for row in body.all("tr")}


def _spread(values: list[float]) -> str:
    mean = f"{100 * statistics.fmean(values):.1f}"
    return f"{mean}\xa0±\xa0{100 * statistics.stdev(values):.1f}" if len(values) > 1 else mean


@pytest.mark.parametrize("loss", ["cross_entropy", "ldam", "noised_topk_hinge"])
def test_every_number_in_the_table_is_that_of_the_runs(page: Node, runs: list[RunFolder], loss: Any) -> None:
    finals = _finals(runs, loss)
    expected = [[final["test"][name] for final in finals] for name in NUMBERS]
    expected += [[final["train_seconds"] for final in finals], [final["best_epoch"] + 1 for final in finals]]
    row = _rows(page)[LOSSES[loss].label]
    cells = row.all("td")
    assert len(cells) == len(expected)
    for cell, values in zip(cells, expected, strict=True):
        exact = [float(data.attributes["value"] or "") for data in cell.all("data")]
        assert exact[0] == pytest.approx(statistics.mean(values), rel=1e-12)
        assert exact[1:] == ([pytest.approx(statistics.stdev(values), rel=1e-9)] if len(values) > 1 else [])
    shown = [float(cell.all("data")[0].text) for cell in cells[: len(NUMBERS)]]
    assert shown == [pytest.approx(100 * statistics.mean(values), abs=0.0501) for values in expected[: len(NUMBERS)]]
    assert (f"{len(finals)} seeds" if len(finals) > 1 else "1 seed") in row.text


def test_the_columns_are_named(page: Node) -> None:
    upper, lower = page.all("table", "results")[0].all("thead")[0].all("tr")
    groups = [(head.text, int(head.attributes.get("colspan") or 1)) for head in upper.all("th")]
    assert groups == [
        ("loss", 1),
        ("micro accuracy", 3),
        ("macro accuracy", 3),
        ("macro top-5 by training images", 3),
        ("training", 2),
    ]
    tops = ["top-1", "top-3", "top-5"]
    sizes = ["fewunder 20", "medium20 to 100", "manyover 100"]
    assert [head.text for head in lower.all("th")] == [*tops, *tops, *sizes, "seconds", "best epoch"]


def test_the_best_of_each_column_is_bold(page: Node) -> None:
    rows = [row.all("td") for name, row in _rows(page).items() if name != "Focal"]
    for place, column in enumerate(zip(*rows, strict=True)):
        values = [float(cell.all("data")[0].text) for cell in column]
        bold = [bool(cell.all("strong")) for cell in column]
        best = min(values) if place == len(NUMBERS) else max(values)
        assert bold == [place <= len(NUMBERS) and value == best for value in values]


def test_unfinished_runs_are_named_and_have_no_numbers(page: Node) -> None:
    row = _rows(page)["Focal"]
    (cell,) = row.all("td")
    assert cell.text == "unfinished: 2 of 6 epochs done"
    assert not row.all("data")
    for title in ("Accuracy against K", "Accuracy against class size", "Learning curves", "Examples"):
        assert "Focal" not in _part(page, title).text


def test_the_heading_says_what_is_compared_on_which_data(page: Node) -> None:
    assert page.all("h1")[0].text == page.all("title")[0].text == "Four losses on glyphs"
    facts = page.all("p", "facts")[0].text
    assert "30 classes with 3 to 300 training images" in facts
    assert "180 test images" in facts
    assert "6 finished runs, 1 unfinished" in facts
    assert "Highest macro top-5 accuracy: Noised top-K hinge" in page.all("p", "lead")[0].text


def test_test_images_that_could_not_be_read_are_not_counted_but_told(runs: list[RunFolder], tmp_path: Path) -> None:
    damaged = RunFolder(shutil.copytree(runs[0].path, tmp_path / "run"))
    file = damaged.path / "test_predictions.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["labels"][[3, 7]] = -1
    safetensors.torch.save_file(tensors, file)
    alone, beside = gather([damaged])[0], gather([damaged, runs[1]])[0]
    assert "in all; 178 test images, 2 more unreadable; 1 finished run." in data_facts(alone)
    assert "; 178 to 180 test images, 0 to 2 more unreadable; " in data_facts(beside)
    assert "; 180 test images; " in data_facts(gather(runs)[0])


def test_equals_lead_together(world: World, tmp_path: Path) -> None:
    made = [make_run(tmp_path / name, world, name, skill=2.0, epochs=2) for name in ("focal", "ldam")]
    made.append(make_run(tmp_path / "worse", world, "cross_entropy", skill=0.5, epochs=2))
    lead = parsed(write_report(made, tmp_path / "page.html").read_text()).all("p", "lead")[0].text
    assert re.match(r"Highest macro top-5 accuracy: Focal and LDAM, [\d.]+\W%; next Cross-entropy, ", lead)


def test_the_page_loads_nothing_and_runs_nothing(page: Node, page_path: Path) -> None:
    for node in page:
        assert node.tag not in ("script", "link", "iframe", "object", "base", "form")
        assert not any(name.startswith("on") for name in node.attributes)
        assert (node.attributes.get("src") or "data:image/png;base64,").startswith("data:image/png;base64,")
        assert (node.attributes.get("href") or "#").startswith("#")
    assert "url(" not in page_path.read_text()
    assert "@import" not in page_path.read_text()
    (policy,) = [meta for meta in page.all("meta") if meta.attributes.get("http-equiv") == "Content-Security-Policy"]
    assert (policy.attributes["content"] or "").startswith("default-src 'none';")


def test_links_lead_to_parts_of_the_page(page: Node) -> None:
    identifiers = [node.attributes["id"] for node in page if "id" in node.attributes]
    assert len(set(identifiers)) == len(identifiers)
    assert [link.attributes["href"] for link in page.all("a")] == [f"#{identifier}" for identifier in identifiers]


def test_class_names_are_shown_as_they_are(page: Node, comparison: Comparison) -> None:
    shown = {node.text for node in page.all("bdi")}
    assert shown <= {comparison.class_name(label) for label in range(30)}
    assert shown >= {*NASTY[:4], "class 4"}


@given(st.text(), st.text())
def test_any_text_comes_back_from_markup(content: str, attribute: str) -> None:
    (node,) = parsed(element("p", content, title=attribute)).children
    assert isinstance(node, Node)
    for found, put_in in ((node.text, content), (node.attributes["title"] or "", attribute)):
        assert len(found) == len(put_in)
        assert all(a in (b, "\ufffd") for a, b in zip(found, put_in, strict=True))


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
    """Some images have the same score for all classes, and some the two best of them."""

    def scores(self, skill: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        scores, labels = super().scores(skill, seed)
        scores[:20] = 0
        best = scores[20:60].topk(2)
        scores[20:60] = scores[20:60].scatter(1, best.indices, best.values[:, :1].expand(-1, 2))
        return scores, labels


def test_accuracy_against_k_meets_the_table_where_scores_tie(world: World, tmp_path: Path) -> None:
    tied = _Undecided(world.names, world.train_images)
    (comparison,) = gather([make_run(tmp_path, tied, "focal")])
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
    finals = [_finals(runs, loss) for loss in ("cross_entropy", "ldam", "noised_topk_hinge")]
    for average, figure in zip(("micro", "macro"), _part(page, "Accuracy against K").all("figure"), strict=True):
        numbers = _numbers(figure)
        assert list(numbers) == [f"K = {k}" for k in range(1, 11)]
        for k in KS:
            of_runs = [[final["test"][f"{average}_top{k}"] for final in of_loss] for of_loss in finals]
            assert numbers[f"K = {k}"] == [_spread(values) for values in of_runs]


def test_accuracy_against_class_size_is_that_of_the_classes(page: Node, runs: list[RunFolder]) -> None:
    with (runs[5].path / "test_per_class.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    small, large = _part(page, "Accuracy against class size").all("figure")
    for k, figure in ((1, small), (5, large)):
        for place, cells in _numbers(figure).items():
            low, high, classes = re.findall(r"\d+", place)
            inside = [float(line[f"top{k}"]) for line in lines if int(low) <= int(line["train_images"]) <= int(high)]
            assert len(inside) == int(classes)
            assert cells[2] == _spread([statistics.fmean(inside)])


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=50))
@example([0, *(2**power for power in range(20))])
def test_every_class_is_in_one_bin(sizes: list[int]) -> None:
    bins = size_bins(sizes)
    assert len(bins) <= 12
    assert sum(each.classes for each in bins) == len(sizes)
    assert all(sum(size in each.sizes for each in bins) == 1 for size in sizes)
    assert [each.octave for each in bins] == sorted({each.octave for each in bins})
    ticks = [at for at, _ in size_axis("", bins).ticks]
    assert bins[0].octave <= min(ticks)
    assert max(ticks) <= bins[-1].octave + bins[-1].octaves


def test_a_bin_whose_classes_do_not_occur_has_no_value(comparison: Comparison) -> None:
    accuracy = comparison.runs[0].class_accuracy
    assert accuracy is not None
    unseen = replace(accuracy, by_k={1: torch.full_like(accuracy.by_k[1], torch.nan)})
    assert macro_in_bin(unseen, 1, size_bins(comparison.train_images)[0]) is None


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


def test_learning_curves_show_every_epoch(page: Node, runs: list[RunFolder]) -> None:
    loss, metric = _part(page, "Learning curves").all("figure")
    lines = runs[5].metrics()
    relative = [f"{line['train_loss'] / lines[0]['train_loss']:.3g}" for line in lines]
    assert [cells[2] for cells in _numbers(loss).values()] == relative
    assert [cells[2] for cells in _numbers(metric).values()] == [_spread([line["val_macro_top5"]]) for line in lines]
    (ring,) = metric.all("circle", "ring")  # of the one loss with a single seed
    (told,) = [
        point.all("title")[0].text
        for point in metric.all("g")
        for circle in point.all("circle", "target")[:1]
        if len(point.all("title")) == 1 and _place(circle) == _place(ring)
    ]
    assert f"epoch {runs[5].read_json('final.json')['best_epoch'] + 1}:" in told


def test_losses_with_the_same_settings_are_drawn_in_their_own_units(world: World, tmp_path: Path) -> None:
    slow = TrainConfig(epochs=6, batch_size=32)
    made = [make_run(tmp_path / "a", world, "ldam"), make_run(tmp_path / "b", world, "ldam", train=slow)]
    page = parsed(write_report(made, tmp_path / "page.html").read_text())
    assert page.all("h1")[0].text == "Two set-ups on glyphs"
    assert set(_rows(page)) == {"LDAM (train.batch_size = 64)", "LDAM (train.batch_size = 32)"}
    first = _numbers(_part(page, "Learning curves").all("figure")[0])["epoch 1"]
    assert first == [f"{made[0].metrics()[0]['train_loss']:.3g}"] * 2


def test_the_first_pair_is_the_most_confused(page: Node, comparison: Comparison) -> None:
    total: Counter[tuple[int, int]] = Counter()
    for setup in comparison.finished:
        for run in setup.finished:
            assert run.predictions is not None
            firsts = run.predictions.suggestions[:, 0].tolist()
            for pair in zip(run.predictions.labels.tolist(), firsts, strict=True):
                total[pair] += 60 // len(setup.finished)  # 60: a whole number for one, two and three seeds
    worst = max(
        (pair for pair in total if pair[0] != pair[1]), key=lambda pair: (total[pair], [-each for each in pair])
    )
    assert most_confused(comparison)[0] == worst
    in_order = [total[pair] for pair in most_confused(comparison)]
    assert in_order == sorted(in_order, reverse=True)
    assert len(in_order) == sum(true != first for true, first in total)
    card = _part(page, "Most confused classes").all("article")[0]
    assert [name.text for name in card.all("bdi")] == [comparison.class_name(label) for label in worst]
    mistaken = {
        (run.folder.path / "pictures" / f"{index}.png")
        for run in comparison.runs
        if run.predictions
        for index, (label, first) in enumerate(
            zip(run.predictions.labels, run.predictions.suggestions[:, 0], strict=True)
        )
        if (label, first) == worst
    }
    shown = [base64.b64decode((image.attributes["src"] or "").partition(",")[2]) for image in card.all("img")]
    assert len(shown) == 2
    assert shown[0] in [path.read_bytes() for path in mistaken if path.exists()]


def test_shares_of_a_confused_pair_are_those_of_the_predictions(page: Node, comparison: Comparison) -> None:
    true, mistaken_for = most_confused(comparison)[0]
    card = _part(page, "Most confused classes").all("article")[0]
    for setup, row in zip(comparison.finished, card.all("tbody")[0].all("tr"), strict=True):
        lists = [
            suggested
            for run in setup.finished
            if run.predictions
            for label, suggested in zip(
                run.predictions.labels.tolist(), run.predictions.suggestions.tolist(), strict=True
            )
            if label == true
        ]
        mistaken = [suggested for suggested in lists if suggested[0] == mistaken_for]
        listed = [suggested for suggested in mistaken if true in suggested[:5]]
        expected = [f"{100 * len(mistaken) / len(lists):.0f}\u202f%"]
        expected.append(f"{100 * len(listed) / len(mistaken):.0f}\u202f%" if mistaken else "\N{EN DASH}")
        assert [cell.text for cell in row.all("td")] == expected


def test_examples_mark_the_right_suggestion(page: Node, comparison: Comparison) -> None:
    first = comparison.runs[0].predictions
    assert first is not None
    cards = _part(page, "Examples").all("article")
    for card, index in zip(cards, example_images(first.labels), strict=True):
        truth = comparison.class_name(int(first.labels[index]))
        assert card.all("img")[0].attributes["alt"] == truth
        for setup, suggested in zip(comparison.finished, card.all("ol"), strict=True):
            predictions = setup.finished[0].predictions
            assert predictions is not None
            names = [comparison.class_name(label) for label in predictions.suggestions[index, :5].tolist()]
            assert [item.all("bdi")[0].text for item in suggested.all("li")] == names
            assert [item.all("bdi")[0].text for item in suggested.all("li", "right")] == [truth] * (truth in names)
        assert len(card.all("p", "missed")) == len(card.all("ol")) - len(card.all("li", "right"))


def test_every_setting_is_told(page: Node, runs: list[RunFolder]) -> None:
    told = {row.all("th")[0].text: row for row in _part(page, "Configuration").all("tbody")[0].all("tr")}
    settings = runs[0].read_json("config.json")
    nested = {f"{part}.{name}" for part, values in settings.items() if isinstance(values, dict) for name in values}
    assert set(told) == nested | {"recipe"}
    assert [cell.text for cell in told["loss.epsilon"].all("td")] == ["0.2", "0.2", "0.3", "0.2"]
    assert {name for name, row in told.items() if row.attributes.get("class")} == {"loss.name", "loss.epsilon"}
    folders = _part(page, "Configuration").all("tbody")[1]
    assert {row.all("th")[0].text for row in folders.all("tr")} == {str(run.path) for run in runs}


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


def _place(circle: Node) -> tuple[str | None, str | None]:
    return circle.attributes["cx"], circle.attributes["cy"]


def test_many_set_ups_look_different() -> None:
    keys = [parsed(key("", style)) for style in range(28)]
    colours = [each.all("g")[0].attributes["class"] for each in keys]
    dashes = [each.all("path")[0].attributes.get("stroke-dasharray") for each in keys]
    markers = [each.all("path")[1].attributes["d"] for each in keys]
    assert len(set(zip(colours, dashes, markers, strict=True))) == 28
    for few in (colours[:4], dashes[:4], markers[:4]):  # a few differ in every way
        assert len(set(few)) == 4


def test_labels_tell_set_ups_apart() -> None:
    configs = [
        RunConfig(loss=NoisedTopKHingeConfig(name=name, epsilon=epsilon), optim=OptimConfig(lr=lr), recipe=recipe)
        for name in ("cross_entropy", "noised_topk_hinge")
        for epsilon in (0.1, 0.2)
        for lr in (0.1, 1.0)
        for recipe in ("one", "two")
    ]
    assert len(set(short_labels(configs))) == len(configs)
    assert short_labels([configs[0], configs[8]]) == ["Cross-entropy", "Noised top-K hinge"]
    assert short_labels([configs[8], configs[10]])[1] == "Noised top-K hinge (optim.lr = 1)"
    assert short_labels([configs[8], configs[15]])[1] == "Noised top-K hinge (ε = 0.2)"  # which is enough


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


def test_runs_on_different_data_are_kept_apart(world: World, runs: list[RunFolder], tmp_path: Path) -> None:
    embedded = replace(world, picture=None, data=DataConfig(name="embeddings", root="/data/birds.npz"))
    noisy = replace(world, data=DataConfig(label_noise=0.1))
    made = [
        make_run(tmp_path / "embedded", embedded, "focal"),
        make_run(tmp_path / "noisy", noisy, "cross_entropy"),
        make_run(tmp_path / "elsewhere", replace(world, data=DataConfig(root="/mnt", workers=9)), "focal"),
    ]
    page = parsed(write_report([runs[0], *made], tmp_path / "page.html").read_text())
    assert page.all("h1")[0].text == "Runs on glyphs and birds.npz"
    assert [heading.text for heading in page.all("h2")] == [
        "glyphs: two losses",
        "birds.npz: Focal",
        "glyphs: Cross-entropy",
    ]
    sections = page.all("main")[0].children
    assert all(isinstance(section, Node) for section in sections)
    assert [len(section.all("img")) > 0 for section in sections if isinstance(section, Node)] == [True, False, True]
    titles = [[head.text for head in section.all("h3")] for section in sections if isinstance(section, Node)]
    assert "Examples" in titles[0]
    assert "Examples" not in titles[1]
    assert "Most confused classes" in titles[1]


def test_data_of_one_kind_and_size_with_other_test_images_is_other_data(world: World, tmp_path: Path) -> None:
    made: list[RunFolder] = []
    day = {"test_digest": "one"}
    # Of an early version, or somebody has deleted or edited its notes.
    unknown: list[Any] = [{"train_digest": "one"}, {}, ["odd"]]
    for name, facts in (
        ("day", day),
        ("as small", day),
        ("night", {"test_digest": "other"}),
        *(("day", u) for u in unknown),
    ):
        there = replace(world, data=DataConfig(name="folder", root=f"/photos/{name}"))
        made.append(make_run(tmp_path / str(len(made)), there, "focal", len(made) // 2))
        made[-1].write_json("facts.json", facts)
    days, nights = gather(made)
    assert data_name(nights.data) == "night"
    assert [run.folder for run in nights.runs] == [made[2]]
    # The same files by their names may be other pictures: nobody knows, so they are told apart.
    assert [(setup.label, len(setup.finished)) for setup in days.setups] == [
        ("Focal (data.root = /photos/day)", 3),
        ("Focal (data.root = /photos/as small)", 1),
    ]


def test_embeddings_of_several_kinds_are_compared(world: World, tmp_path: Path) -> None:
    made = []
    for name in ("dino.npz", "clip.npz"):
        there = replace(world, picture=None, data=DataConfig(name="embeddings", root=name))
        made.append(make_run(tmp_path / name, there, "focal"))
        made[-1].write_json("facts.json", {"train_digest": name})
    (comparison,) = gather(made)
    assert [setup.label for setup in comparison.setups] == [
        "Focal (data.root = dino.npz)",
        "Focal (data.root = clip.npz)",
    ]


def test_notes_that_are_missing_or_odd_do_not_keep_a_run_from_being_shown(world: World, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", world, "focal")
    notes: list[Any] = [{"started": "2026"}, {"commit": "a" * 40, "resumed": [{"epoch": 3}]}, ["odd"]]
    for content in notes:
        run.write_json("environment.json", content)
        assert "Focal" in write_report([run], tmp_path / "page.html").read_text()


def test_where_and_how_data_is_read_makes_no_other_set_up(world: World, tmp_path: Path) -> None:
    elsewhere = replace(world, data=DataConfig(root="/mnt", workers=9, on_bad_image="skip"))
    train = TrainConfig(epochs=6, device="cuda", eval_batch_size=7)
    made = [make_run(tmp_path / "0", world, "focal"), make_run(tmp_path / "1", elsewhere, "focal", 1, train=train)]
    (comparison,) = gather([*made, make_run(tmp_path / "2", elsewhere, "focal", 2, epochs=7)])
    assert [(setup.label, len(setup.finished)) for setup in comparison.setups] == [
        ("Focal (train.epochs = 6)", 2),
        ("Focal (train.epochs = 7)", 1),
    ]


def test_a_run_killed_before_its_first_file_is_listed_with_the_others(
    world: World, runs: list[RunFolder], tmp_path: Path
) -> None:
    killed = make_run(tmp_path / "killed", world, "focal", finished=False)
    (killed.path / "classes.json").unlink()
    (killed.path / "environment.json").unlink()
    for order in ([killed, runs[0]], [runs[0], killed]):
        (comparison,) = gather(order)
        assert len(comparison.finished) == len(comparison.setups) - 1 == 1
    assert "unfinished" in write_report([killed], tmp_path / "page.html").read_text()


def test_a_copy_of_a_run_is_no_second_seed(world: World, runs: list[RunFolder], tmp_path: Path) -> None:
    copies = [RunFolder(shutil.copytree(runs[0].path, tmp_path / name)) for name in ("copy", "stopped")]
    (copies[1].path / "final.json").unlink()
    page = parsed(write_report([copies[1], runs[0], copies[0]], tmp_path / "page.html").read_text())
    row = _rows(page)["Cross-entropy"]
    assert row.text.count("±") == 0
    assert row.all("th")[0].text.endswith("1 seed")
    assert "1 finished run; 2 runs left out: same settings and seed as another." in page.text
    states = {line.all("th")[0].text: line.all("td")[1].text for line in page.all("tbody")[-1].all("tr")}
    assert states == {
        str(runs[0].path): "finished",
        str(copies[0].path): "finished, left out",
        str(copies[1].path): "unfinished, left out",
    }
    other_seed = make_run(tmp_path / "other", world, "cross_entropy", seed=1)
    page = parsed(write_report([runs[0], copies[0], other_seed], tmp_path / "page.html").read_text())
    assert _rows(page)["Cross-entropy"].all("th")[0].text.endswith("2 seeds")


@pytest.mark.parametrize(
    ("lost", "missing"),
    [
        ("test_predictions.safetensors", {"Accuracy against K", "Most confused classes", "Examples"}),
        ("test_per_class.csv", {"Accuracy against class size"}),
        ("metrics.jsonl", {"Learning curves"}),
        ("pictures", {"Examples"}),
    ],
)
def test_what_a_run_has_lost_is_left_out(
    page: Node, runs: list[RunFolder], tmp_path: Path, lost: str, missing: set[str]
) -> None:
    shutil.copytree(runs[0].path, tmp_path / "run")
    found = tmp_path / "run" / lost
    shutil.rmtree(found) if found.is_dir() else found.unlink()
    rest = parsed(write_report([RunFolder(tmp_path / "run")], tmp_path / "page.html").read_text())
    assert {head.text for head in page.all("h2")} - {head.text for head in rest.all("h2")} == missing


def test_classes_of_one_size_have_no_chart_against_size(tmp_path: Path) -> None:
    world = World(tuple("abcdefghijkl"), (30,) * 12)
    page = parsed(write_report([make_run(tmp_path / "run", world, "focal")], tmp_path / "page.html").read_text())
    assert "Accuracy against class size" not in page.text
    assert "12 classes with 30 training images each, 360 in all" in page.text
    assert "few" not in page.all("thead")[0].text  # no class has few images


def test_only_k_in_common_are_compared(world: World, runs: list[RunFolder], tmp_path: Path) -> None:
    other = make_run(tmp_path / "a", world, FocalConfig(k=3), train=TrainConfig(epochs=2, ks=(2, 3)))
    page = parsed(write_report([runs[0], other], tmp_path / "page.html").read_text())
    assert [head.text for head in page.all("thead")[0].all("th") if head.text.startswith("top-")] == ["top-3", "top-3"]
    nothing = make_run(tmp_path / "b", world, FocalConfig(k=2), train=TrainConfig(epochs=2, ks=(2,)))
    page = parsed(write_report([runs[0], nothing], tmp_path / "page.html").read_text())
    assert [head.text for head in page.all("thead")[0].all("th")] == ["loss", "training", "seconds", "best epoch"]


def test_a_picture_that_somebody_else_put_there_is_left_alone(runs: list[RunFolder], tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(runs[0].path, tmp_path / "run"))
    for name in ("._3.png", "3 copy.png", "²3.png"):
        (run.path / "pictures" / name).write_bytes(b"no picture of ours")
    before, after = (write_report([each], tmp_path / "page.html").read_text() for each in (runs[0], run))
    assert after.count("<img") == before.count("<img") > 0


def test_the_most_accurate_are_shown_side_by_side(world: World, tmp_path: Path) -> None:
    made = [
        make_run(tmp_path / str(number), world, FocalConfig(gamma=number), skill=1 + number, epochs=2)
        for number in range(6)
    ]
    page = parsed(write_report(made, tmp_path / "page.html").read_text())
    columns = [head.text for head in _part(page, "Examples").all("article")[0].all("h4")]
    assert columns == [f"Focal (\N{GREEK SMALL LETTER GAMMA} = {number})" for number in (2, 3, 4, 5)]
    assert "Only the set-ups with the highest macro accuracy" in _part(page, "Examples").text


def test_the_same_runs_give_the_same_page(page_path: Path, runs: list[RunFolder], tmp_path: Path) -> None:
    again = write_report(runs, tmp_path)
    assert again == tmp_path / "report.html"
    assert again.read_bytes() == page_path.read_bytes()


def test_nothing_to_report_and_damaged_files_are_told(runs: list[RunFolder], tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match="there is no run"):
        write_report([], tmp_path)
    for name in ("test_predictions.safetensors", "test_per_class.csv", "final.json", "classes.json"):
        shutil.copytree(runs[0].path, tmp_path / name)
        (tmp_path / name / name).write_bytes(b"\x08\0\0\0\0\0\0\0{")
        with pytest.raises(ShortlistError, match=f"{name} is damaged"):
            write_report([RunFolder(tmp_path / name)], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ShortlistError, match="cannot write"):
        write_report(runs, tmp_path / "file" / "page.html")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("classes.json", b'["a", "b"]', "it must hold named entries"),
        ("classes.json", b'{"names": ["a", "b"]}', "it has no entry train_images"),
        ("classes.json", b'{"names": "ab", "train_images": [1, 2]}', "names must be a list of strings"),
        ("classes.json", b'{"names": ["a", 2], "train_images": [1, 2]}', "names must be a list of strings"),
        ("classes.json", b'{"names": ["a", "b"], "train_images": [1, null]}', "a list of 2 whole numbers >= 0"),
        ("classes.json", b'{"names": ["a", "b"], "train_images": [1, true]}', "a list of 2 whole numbers >= 0"),
        ("classes.json", b'{"names": ["a", "b"], "train_images": [1, -1]}', "a list of 2 whole numbers >= 0"),
        ("classes.json", b'{"names": ["a", "b"], "train_images": [1]}', "a list of 2 whole numbers >= 0"),
        ("test_per_class.csv", "class,name,train_images,top1\n0,Fürth,3,1\n".encode("latin-1"), "not text in UTF-8"),
    ],
)
def test_a_file_edited_by_hand_is_named(
    runs: list[RunFolder], tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    edited = shutil.copytree(runs[0].path, tmp_path / "run")
    (edited / name).write_bytes(content)
    with pytest.raises(ShortlistError, match=f"{name} is damaged: .*{message}"):
        write_report([RunFolder(edited)], tmp_path / "page.html")


def test_without_their_names_classes_have_numbers(runs: list[RunFolder], tmp_path: Path) -> None:
    edited = shutil.copytree(runs[0].path, tmp_path / "run")
    (edited / "classes.json").unlink()
    page = parsed(write_report([RunFolder(edited)], tmp_path / "page.html").read_text())
    assert {node.text for node in page.all("bdi")} <= {f"class {label}" for label in range(30)}


CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH to open the page in")


def _in_browser(page: Path, profile: Path) -> Node:
    """The document as Chromium has it after loading."""
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += f" --disable-component-update --disable-sync --user-data-dir={profile} --virtual-time-budget=10000"
    command = [str(CHROMIUM), *flags.split(), "--window-size=1280,900", "--dump-dom", page.as_uri()]
    return parsed(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


@needs_chromium
def test_a_browser_shows_the_page(page: Node, page_path: Path, tmp_path: Path) -> None:
    shown = _in_browser(page_path, tmp_path / "profile")
    for tag in ("h1", "h2", "figure", "svg", "img", "td", "bdi", "details"):
        assert [node.text for node in shown.all(tag)] == [node.text for node in page.all(tag)]


# What the page tells of itself, with all that is folded laid open: how wide it is, which boxes stick out of
# the window other than those meant to scroll, and whether pictures and charts have a size.
_PROBE = """<script>
for (const each of document.querySelectorAll("details")) each.open = true;
const out = [...document.querySelectorAll("body *")].filter(each =>
  !each.closest(".scroll > *") && !each.closest("svg > *") && each.getBoundingClientRect().right > innerWidth + 1);
parent.postMessage(JSON.stringify({
  inner: innerWidth,
  scroll: document.documentElement.scrollWidth,
  out: out.map(each => each.outerHTML.slice(0, 200)),
  pictures: [...document.images].every(each => each.naturalWidth > 0 && each.clientWidth > 0),
  charts: [...document.querySelectorAll("svg.chart")].map(each => each.getBoundingClientRect().width),
}), "*");
</script>"""


@needs_chromium
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(page_path: Path, tmp_path: Path, width: int) -> None:
    # A frame, because Chromium has no window as narrow as a phone; without the policy, which allows no script.
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page_path.read_text(encoding="utf-8"))
    (tmp_path / "probed.html").write_text(text.replace("</body>", f"{_PROBE}</body>"), encoding="utf-8")
    (tmp_path / "screen.html").write_text(
        "<!DOCTYPE html><html><body><pre></pre>"
        "<script>addEventListener('message', said => document.querySelector('pre').textContent = said.data)</script>"
        f'<iframe src="probed.html" style="width: {width}px; height: 800px; border: 0"></iframe></body></html>'
    )
    told = json.loads(_in_browser(tmp_path / "screen.html", tmp_path / "profile").all("pre")[0].text)
    assert told["inner"] == width
    assert told["scroll"] <= width
    assert told["out"] == []
    assert told["pictures"]
    assert len(told["charts"]) == 6
    assert all(250 < chart < width for chart in told["charts"])
