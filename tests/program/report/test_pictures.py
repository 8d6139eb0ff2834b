"""Confused classes, examples, and their pictures: a page embeds no other file of the machine."""

import base64
import os
from collections import Counter
from pathlib import Path

from shortlist.program.losses import FocalConfig
from shortlist.program.report.gather import Comparison
from shortlist.program.report.page import write_report
from shortlist.program.report.pictures import most_confused
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.thumbnails import example_images
from tests.support.report_pages import Node, page_of, part_of
from tests.support.run_folders import World, make_run

PNG = b"\x89PNG\r\n\x1a\n"


def embedded(page: Path) -> list[bytes]:
    parts = page.read_text().split("data:image/png;base64,")[1:]
    return [base64.b64decode(part.partition('"')[0]) for part in parts]


def test_the_first_pair_is_the_most_confused(page: Node, comparison: Comparison) -> None:
    total: Counter[tuple[int, int]] = Counter()
    for setup in comparison.finished:
        for run in setup.finished:
            assert run.predictions is not None
            firsts = run.predictions.suggestions[:, 0].tolist()
            for pair in zip(run.predictions.labels.tolist(), firsts, strict=True):
                total[pair] += 60 // len(setup.finished)  # 60: a whole number for one, two and three seeds
    confused = [pair for pair in total if pair[0] != pair[1]]
    worst = min(confused, key=lambda pair: (-total[pair], pair))
    assert most_confused(comparison)[0] == worst
    in_order = [total[pair] for pair in most_confused(comparison)]
    assert in_order == sorted(in_order, reverse=True)
    assert len(in_order) == len(confused)
    card = part_of(page, "Most confused classes").all("article")[0]
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
    card = part_of(page, "Most confused classes").all("article")[0]
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
    cards = part_of(page, "Examples").all("article")
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


def test_the_most_accurate_are_shown_side_by_side(world: World, tmp_path: Path) -> None:
    made = [
        make_run(tmp_path / str(number), world, FocalConfig(gamma=number), skill=1 + number, epochs=2)
        for number in range(6)
    ]
    page = page_of(made, tmp_path)
    columns = [head.text for head in part_of(page, "Examples").all("article")[0].all("h4")]
    assert columns == [f"Focal (\N{GREEK SMALL LETTER GAMMA} = {number})" for number in (2, 3, 4, 5)]
    assert "Only the set-ups with the highest macro accuracy" in part_of(page, "Examples").text


def test_a_picture_that_somebody_else_put_there_is_left_alone(run: RunFolder, tmp_path: Path) -> None:
    before = embedded(write_report([run], tmp_path / "page.html"))
    assert before
    for name in ("._3.png", "3 copy.png", "²3.png"):
        (run.path / "pictures" / name).write_bytes(b"no picture of ours")
    assert embedded(write_report([run], tmp_path / "page.html")) == before


def test_a_page_embeds_no_file_through_a_link(run: RunFolder, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(PNG + b"hunter2")
    before = embedded(write_report([run], tmp_path / "before.html"))
    assert before
    assert all(content.startswith(PNG) for content in before)
    for picture in (run.path / "pictures").iterdir():
        picture.unlink()
        picture.symlink_to(secret)
    assert embedded(write_report([run], tmp_path / "page.html")) == []


def test_a_page_embeds_no_file_of_a_linked_folder(run: RunFolder, tmp_path: Path) -> None:
    (run.path / "pictures").rename(tmp_path / "elsewhere")
    (run.path / "pictures").symlink_to(tmp_path / "elsewhere")
    assert embedded(write_report([run], tmp_path / "page.html")) == []


def test_a_page_embeds_only_what_begins_as_a_picture(run: RunFolder, tmp_path: Path) -> None:
    first, second, *others = sorted((run.path / "pictures").iterdir())
    for picture in others:
        picture.write_bytes(b"hunter2")
    second.unlink()
    os.mkfifo(second)
    assert set(embedded(write_report([run], tmp_path / "page.html"))) <= {first.read_bytes()}
