"""The page in a real browser: by mouse, keyboard and clipboard, on a phone, and when things go wrong."""

import base64
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from shortlist.program.predicting.predictor import Predictor
from shortlist.program.runs.folder import RunFolder
from shortlist.program.serving.app import Service, build_app
from shortlist.program.serving.records import Record
from shortlist.program.serving.server import listen
from tests.support.scored_runs import CLASSES
from tests.support.serving import NO_RATE, opened, photo, service_of

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH to open the page in")

HOSTILE = [
    "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>",
    "\u202eright to left\u202e שלום",
    "x" * 300,
    "many words " * 27,
    "&lt;b&gt; &amp;",
    "",
    "'; alert(1); '",
    "${1 + 1} {{ 1 + 1 }}",
]


@contextmanager
def served(service: Service) -> Iterator[str]:
    """The address of a server in a thread."""
    with listen("127.0.0.1", 0) as listening:
        config = uvicorn.Config(build_app(service), access_log=False, log_level="warning", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(run: RunFolder) -> Iterator[str]:
    prior = {"Spring": [1.0] * CLASSES, "<i>Autumn": [0.0] * (CLASSES - 1) + [1.0]}
    examples = {label: [photo(label, "WEBP")] for label in range(CLASSES)}
    with served(service_of(run, prior=prior, examples=examples)) as address:
        yield address


@contextmanager
def page_at(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    """A page that is ready, makes no request to the outside and no mistake."""
    context = browser.new_context(**options)
    page = context.new_page()
    mistakes: list[str] = []
    page.on("pageerror", lambda error: mistakes.append(str(error)))
    page.on("console", lambda said: mistakes.append(said.text) if "Content Security Policy" in said.text else None)
    page.on("request", lambda asked: None if asked.url.startswith((address, "blob:")) else mistakes.append(asked.url))
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    yield page
    assert mistakes == []
    context.close()


def file(content: bytes, name: str = "IMG_2024.jpg", kind: str = "image/jpeg") -> Any:
    return {"name": name, "mimeType": kind, "buffer": content}


def names(page: Page) -> list[str]:
    return page.locator("#suggestions .name").all_text_contents()


def wanted(predictor: Predictor, content: bytes) -> list[str]:
    return [item.name for item in predictor.suggest(opened(content), k=3)]


def test_a_chosen_photo_gets_the_suggestions_of_the_predictor(
    browser: Browser, address: str, predictor: Predictor
) -> None:
    with page_at(browser, address) as page:
        assert page.title() == "shortlist: birds"
        expect(page.locator("#answer")).to_be_hidden()
        page.set_input_files("#choose", file(photo(2)))
        expect(page.locator("#answer")).to_be_visible()
        assert names(page) == wanted(predictor, photo(2))
        best = predictor.suggest(opened(photo(2)), k=1)[0]
        expect(page.locator("#suggestions .certainty").first).to_contain_text("%")
        width = page.locator("#suggestions .bar span").first.evaluate("bar => parseFloat(bar.style.width)")
        assert width == pytest.approx(100 * (best.probability or 0), abs=0.1)
        expect(page.locator("#status")).to_contain_text(best.name)  # for screen readers
        pictures = page.locator(".pictures img")
        expect(pictures).to_have_count(3)
        pictures.first.evaluate("picture => picture.decode()")
        page.get_by_role("button", name="Start over").click()
        expect(page.locator("#answer")).to_be_hidden()
        expect(page.locator("#choose")).to_be_focused()


_DROP = """([kind, base64]) => {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], "photo.png", { type: "image/png" }));
  const target = document.querySelector("#drop");
  if (kind === "paste") return dispatchEvent(new ClipboardEvent("paste", { clipboardData: data }));
  target.dispatchEvent(new DragEvent("dragenter", { dataTransfer: data, bubbles: true }));
  const lit = document.body.classList.contains("dragging");
  target.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
  return lit && !document.body.classList.contains("dragging");
}"""


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_a_photo_can_be_dropped_and_pasted(browser: Browser, address: str, predictor: Predictor, way: str) -> None:
    with page_at(browser, address) as page:
        assert page.evaluate(_DROP, [way, base64.b64encode(photo(4)).decode()])
        expect(page.locator("#answer")).to_be_visible()
        assert names(page) == wanted(predictor, photo(4))


def test_photos_of_one_thing_are_added_and_removed(browser: Browser, address: str) -> None:
    with page_at(browser, address) as page:
        page.set_input_files("#choose", file(photo(1)))
        page.set_input_files("#add", [file(photo(2)), file(photo(3))])
        expect(page.locator("#status")).to_contain_text("3 photos")
        expect(page.locator("#promise-note")).to_be_visible()
        page.get_by_role("button", name="Remove photo 2").click()
        expect(page.locator("#status")).to_contain_text("2 photos")
        page.set_input_files("#add", [file(photo(number)) for number in range(9)])
        expect(page.locator("#strip li")).to_have_count(8)
        expect(page.locator("#left-out")).to_contain_text("8 photos")
        expect(page.locator("#add")).to_be_disabled()


def test_a_season_and_a_coverage_are_chosen_by_keyboard(browser: Browser, address: str) -> None:
    with page_at(browser, address) as page:
        page.set_input_files("#choose", file(photo(1)))
        expect(page.locator("#set")).to_be_visible()
        sizes = []
        page.locator("#coverage").press("Home")
        for _ in range(7):
            sizes.append(page.locator("#set-names li").count() or CLASSES * ("All" in page.inner_text("#set-text")))
            page.locator("#coverage").press("ArrowRight")
        assert sizes == sorted(sizes)
        assert page.inner_text("#coverage-value") == "99\u202f%"
        page.select_option("#prior", "<i>Autumn")
        expect(page.locator("#status")).to_contain_text("for <i>Autumn")
        assert names(page) == [f"bird {CLASSES - 1}"], "the only class that is possible"


def test_everything_can_be_reached_by_keyboard_in_order(browser: Browser, address: str) -> None:
    with page_at(browser, address) as page:
        page.set_input_files("#choose", file(photo(1)))
        expect(page.locator("#set")).to_be_visible()
        page.evaluate("document.activeElement.blur()")
        reached = []
        for _ in range(7):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert reached == ["BUTTON", "add", "again", "prior", "coverage", "A", reached[-1]]
        for control in page.locator("input:visible, select:visible, button:visible").all():
            label = control.evaluate("it => it.labels?.[0]?.innerText || it.ariaLabel || it.innerText")
            assert label, control


def test_a_file_that_is_no_photo_is_explained_and_can_be_replaced(
    browser: Browser, address: str, predictor: Predictor
) -> None:
    with page_at(browser, address) as page:
        page.set_input_files("#choose", file(b"nothing"))
        expect(page.get_by_role("alert")).to_contain_text("cannot be read")
        expect(page.locator("#retry")).to_be_hidden()
        page.set_input_files("#choose", file(b"text", "a.txt", "text/plain"))
        expect(page.get_by_role("alert")).to_contain_text("not a photo")
        page.set_input_files("#choose", file(photo(5)))
        expect(page.locator("#answer")).to_be_visible()
        expect(page.get_by_role("alert")).to_be_hidden()
        assert names(page) == wanted(predictor, photo(5))


def test_a_slow_network_is_told_and_can_be_cancelled(browser: Browser, address: str) -> None:
    with page_at(browser, address) as page:
        waiting: list[Route] = []
        page.clock.install()
        page.route("**/api/suggest*", lambda route: waiting.append(route))
        page.set_input_files("#choose", file(photo(1)))
        expect(page.locator("#output")).to_have_attribute("aria-busy", "true")
        expect(page.locator("#status")).to_contain_text("Looking")
        expect(page.locator("#cancel")).to_be_hidden()
        page.clock.fast_forward(5000)
        expect(page.locator("#status")).to_contain_text("Still waiting")
        page.click("#cancel")
        expect(page.locator("#status")).to_contain_text("Cancelled")
        expect(page.locator("#output")).to_have_attribute("aria-busy", "false")
        page.unroute("**/api/suggest*")
        page.route("**/api/suggest*", lambda route: route.abort())
        page.set_input_files("#choose", file(photo(1)))
        expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
        page.unroute("**/api/suggest*")
        page.click("#retry")
        expect(page.locator("#answer")).to_be_visible()


def test_an_answer_that_comes_too_late_is_not_shown(browser: Browser, address: str, predictor: Predictor) -> None:
    with page_at(browser, address) as page:
        first: list[Route] = []
        page.route("**/api/suggest*", lambda route: first.append(route) if not first else route.continue_())
        page.set_input_files("#choose", file(photo(1)))
        page.set_input_files("#choose", file(photo(6)))
        expect(page.locator("#answer")).to_be_visible()
        assert names(page) == wanted(predictor, photo(6))


_NOTE_FILE_NAMES = """() => {
  const send = fetch;
  window.fetch = (address, options) => {
    window.sent = [...options.body.values()].map((file) => file.name);
    return send(address, options);
  };
}"""


def test_the_name_of_the_file_is_not_sent(browser: Browser, address: str) -> None:
    with page_at(browser, address) as page:
        page.evaluate(_NOTE_FILE_NAMES)
        page.set_input_files("#choose", file(photo(1), "Home, 1 July 2024.jpg"))
        expect(page.locator("#answer")).to_be_visible()
        assert page.evaluate("window.sent") == ["photo-1"]


@pytest.mark.parametrize(("width", "touch"), [(360, True), (1400, False)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hostile_names_are_text_and_fit_any_screen(
    browser: Browser, run: RunFolder, tmp_path: Path, width: int, touch: bool, scheme: Any
) -> None:
    service = service_of(run, k=CLASSES, examples={0: [photo(kind="WEBP")]}, record=Record(tmp_path / "record.jsonl"))
    service.model.classes = HOSTILE
    screen = {"viewport": {"width": width, "height": 740}, "color_scheme": scheme, "has_touch": touch}
    with served(service) as address, page_at(browser, address, **screen) as page:
        assert page.locator("#camera + label").is_visible() == touch
        page.set_input_files("#camera", file(photo(1)))
        expect(page.locator("#answer")).to_be_visible()
        assert sorted(names(page)) == sorted(HOSTILE)
        assert page.title() == "shortlist: birds"
        assert page.locator("#suggestions :is(script, b, i), #suggestions img[onerror]").count() == 0
        page.locator("#coverage").press("End")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        outside = "it => it.getBoundingClientRect().right > innerWidth + 1 && !it.matches('.said, .file')"
        assert [found.inner_text() for found in page.locator("body *").all() if found.evaluate(outside)] == []
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (scheme == "light")
        assert page.screenshot(full_page=True)


def test_none_of_these_is_recorded_once(browser: Browser, run: RunFolder, tmp_path: Path, address: str) -> None:
    record = tmp_path / "record.jsonl"
    with served(service_of(run, record=Record(record))) as recording, page_at(browser, recording) as page:
        assert "only if you press" in page.inner_text("#privacy")
        page.set_input_files("#choose", file(photo(1)))
        page.click("#none")
        expect(page.locator("#none")).to_have_text("Recorded")
        expect(page.locator("#none")).to_be_disabled()
        assert record.read_text().count("\n") == 1
    with page_at(browser, address) as page:
        page.set_input_files("#choose", file(photo(1)))
        expect(page.locator("#answer")).to_be_visible()
        expect(page.locator("#none")).to_be_hidden()
        assert "keeps none" in page.inner_text("#privacy")


def test_limits_are_told_on_the_page(browser: Browser, run: RunFolder) -> None:
    with (
        served(service_of(run, limits=replace(NO_RATE, bytes_of_request=300_000))) as address,
        page_at(browser, address) as page,
    ):
        page.set_input_files("#choose", file(bytes(250_000)))
        expect(page.get_by_role("alert")).to_contain_text("too large")


# The contrast of text and controls, by the formula of the Web Content Accessibility Guidelines.
_CONTRAST = """it => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let behind = it;
  const clear = (colour) => numbers(colour)[3] === 0;
  while (clear(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
  const [one, other] = [getComputedStyle(it).color, getComputedStyle(behind).backgroundColor].map(light);
  return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(browser: Browser, address: str, scheme: Any) -> None:
    with page_at(browser, address, color_scheme=scheme) as page:
        for step in ("empty", "answer", "error"):
            if step != "empty":
                page.set_input_files("#choose", file(photo(1) if step == "answer" else b"nothing"))
                expect(page.locator(f"#{step}")).to_be_visible()
            texts = "p:visible, h1, h2:visible, label:visible, .name:visible, .certainty:visible, a, .button:visible"
            for found in page.locator(texts).all():
                assert found.evaluate(_CONTRAST) >= 4.5, found.inner_text()
