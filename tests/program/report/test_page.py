"""The numbers on the page are those of the runs, and a browser shows it on any screen."""

import json
import re
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from hypothesis import given
from hypothesis import strategies as st

from shortlist.program.config import flat
from shortlist.program.losses import LOSSES
from shortlist.program.report.gather import Comparison, gather
from shortlist.program.report.markup import element
from shortlist.program.report.page import data_facts, write_report
from shortlist.program.report.summary import ABSENT
from shortlist.program.runs.folder import RunFolder
from tests.support.report_pages import METRICS, ODD_NAMES, Node, finals_of, page_of, parsed, part_of, rows_of
from tests.support.run_folders import World, make_run


@pytest.mark.parametrize("loss", ["cross_entropy", "ldam", "noised_topk_hinge"])
def test_every_number_in_the_table_is_that_of_the_runs(page: Node, runs: list[RunFolder], loss: Any) -> None:
    finals = finals_of(runs, loss)
    expected = [[final["test"][name] for final in finals] for name in METRICS]
    expected += [[final["train_seconds"] for final in finals], [final["best_epoch"] + 1 for final in finals]]
    row = rows_of(page)[LOSSES[loss].label]
    cells = row.all("td")
    assert len(cells) == len(expected)
    for cell, values in zip(cells, expected, strict=True):
        exact = [float(data.attributes["value"] or "") for data in cell.all("data")]
        assert exact[0] == pytest.approx(statistics.mean(values), rel=1e-12)
        assert exact[1:] == ([pytest.approx(statistics.stdev(values), rel=1e-9)] if len(values) > 1 else [])
    shown = [float(cell.all("data")[0].text) for cell in cells[: len(METRICS)]]
    assert shown == [pytest.approx(100 * statistics.mean(values), abs=0.0501) for values in expected[: len(METRICS)]]
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
    rows = [row.all("td") for name, row in rows_of(page).items() if name != "Focal"]
    for place, column in enumerate(zip(*rows, strict=True)):
        values = [float(cell.all("data")[0].text) for cell in column]
        bold = [bool(cell.all("strong")) for cell in column]
        best = min(values) if place == len(METRICS) else max(values)
        assert bold == [place <= len(METRICS) and value == best for value in values]


def test_unfinished_runs_are_named_and_have_no_numbers(page: Node) -> None:
    row = rows_of(page)["Focal"]
    (cell,) = row.all("td")
    assert cell.text == "unfinished: 2 of 6 epochs done"
    assert not row.all("data")
    for title in ("Accuracy against K", "Accuracy against class size", "Learning curves", "Examples"):
        assert "Focal" not in part_of(page, title).text


def test_the_heading_says_what_is_compared_on_which_data(page: Node) -> None:
    assert page.all("h1")[0].text == page.all("title")[0].text == "Four losses on glyphs"
    facts = page.all("p", "facts")[0].text
    assert "30 classes with 3 to 300 training images" in facts
    assert "180 test images" in facts
    assert "6 finished runs, 1 unfinished" in facts
    assert "Highest macro top-5 accuracy: Noised top-K hinge" in page.all("p", "lead")[0].text


def test_test_images_that_could_not_be_read_are_not_counted_but_told(run: RunFolder, runs: list[RunFolder]) -> None:
    file = run.path / "test_predictions.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["labels"][[3, 7]] = -1
    safetensors.torch.save_file(tensors, file)
    alone, beside = gather([run])[0], gather([run, runs[1]])[0]
    assert "in all; 178 test images, 2 more unreadable; 1 finished run." in data_facts(alone)
    assert "; 178 to 180 test images, 0 to 2 more unreadable; " in data_facts(beside)
    assert "; 180 test images; " in data_facts(gather(runs)[0])


def test_equals_lead_together(world: World, tmp_path: Path) -> None:
    made = [make_run(tmp_path / name, world, name, skill=2.0, epochs=2) for name in ("focal", "ldam")]
    made.append(make_run(tmp_path / "worse", world, "cross_entropy", skill=0.5, epochs=2))
    lead = page_of(made, tmp_path).all("p", "lead")[0].text
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
    assert shown >= {*ODD_NAMES[:4], "class 4"}


@given(st.text(), st.text())
def test_any_text_comes_back_from_markup(content: str, attribute: str) -> None:
    (node,) = parsed(element("p", content, title=attribute)).children
    assert isinstance(node, Node)
    for found, put_in in ((node.text, content), (node.attributes["title"] or "", attribute)):
        assert len(found) == len(put_in)
        assert all(a in (b, "\ufffd") for a, b in zip(found, put_in, strict=True))


def test_every_setting_is_told(page: Node, runs: list[RunFolder]) -> None:
    told = {row.all("th")[0].text: row for row in part_of(page, "Configuration").all("tbody")[0].all("tr")}
    settings = {name for run in runs for name in flat(run.read_json("config.json"))}
    assert set(told) == settings - {"format", "seed"}
    losses = [cell.text for cell in told["loss.name"].all("td")]
    epsilons = [cell.text for cell in told["loss.epsilon"].all("td")]
    assert [epsilon for loss, epsilon in zip(losses, epsilons, strict=True) if loss == "noised_topk_hinge"] == ["0.3"]
    assert epsilons[losses.index("cross_entropy")] == ABSENT
    marked = {name for name, row in told.items() if row.attributes.get("class")}
    assert {"loss.name", "loss.epsilon"} <= marked
    assert all(name.startswith("loss.") for name in marked)
    folders = part_of(page, "Configuration").all("tbody")[1]
    assert {row.all("th")[0].text for row in folders.all("tr")} == {str(run.path) for run in runs}


def test_the_same_runs_give_the_same_page(page_path: Path, runs: list[RunFolder], tmp_path: Path) -> None:
    again = write_report(runs, tmp_path)
    assert again == tmp_path / "report.html"
    assert again.read_bytes() == page_path.read_bytes()


CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH to open the page in")


def _in_browser(page: Path, profile: Path) -> Node:
    """The document after loading in Chromium."""
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += f" --disable-component-update --disable-sync --user-data-dir={profile} --virtual-time-budget=10000"
    command = [str(CHROMIUM), *flags.split(), "--window-size=1280,900", "--dump-dom", page.as_uri()]
    return parsed(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


@needs_chromium
def test_a_browser_shows_the_page(page: Node, page_path: Path, tmp_path: Path) -> None:
    shown = _in_browser(page_path, tmp_path / "profile")
    for tag in ("h1", "h2", "figure", "svg", "img", "td", "bdi", "details"):
        assert [node.text for node in shown.all(tag)] == [node.text for node in page.all(tag)]


# With all folded parts open: how wide the page is, which boxes extend beyond the window, except those that scroll,
# and whether pictures and charts have a size.
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
    # In a frame, since Chromium has no window as narrow as a phone; without the policy, which forbids the script.
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
