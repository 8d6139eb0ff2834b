"""Who may ask, how much and how often; and that browsers may do nothing else."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

import httpx
import pytest
import torch
from starlette.testclient import TestClient
from torch import Tensor

from shortlist.program.runs.folder import RunFolder
from shortlist.program.serving.app import build_app
from shortlist.program.serving.batching import Batcher
from shortlist.program.serving.limits import Limits, MemoryBudget, RateLimit, RefusedError
from tests.support.serving import HOST, NO_RATE, client_of, form, photo, service_of


def refused(client: TestClient, *photos: bytes, status: int) -> str:
    response = client.post("/api/suggest", files=form(*photos))
    assert response.status_code == status, response.text
    sentence: str = response.json()["error"]
    return sentence


# Bytes, pixels, photos


@pytest.fixture(scope="module")
def limited(run: RunFolder) -> Iterator[TestClient]:
    limits = replace(NO_RATE, bytes_of_request=100_000, pixels_of_photo=10_000, photos=2)
    with client_of(service_of(run, limits=limits)) as client:
        yield client


def test_too_many_bytes_are_refused(limited: TestClient) -> None:
    assert "0.095 MB" in refused(limited, photo(size=(300, 200), kind="BMP"), status=413)

    def body() -> Iterator[bytes]:  # of no announced length
        yield b'--boundary\r\ncontent-disposition: form-data; name="photos"; filename="a"\r\n\r\n'
        for _ in range(200):
            yield bytes(1000)

    kind = {"content-type": "multipart/form-data; boundary=boundary"}
    response = limited.post("/api/suggest", content=body(), headers=kind)
    assert response.status_code == 413
    assert limited.post("/api/suggest", files=form(photo())).status_code == 200


def test_too_many_pixels_are_refused_before_they_are_decoded(limited: TestClient) -> None:
    sentence = refused(limited, photo(), photo(size=(400, 300), kind="PNG"), status=413)
    assert "Photo 2" in sentence
    assert "0.01 million" in sentence


def test_too_many_photos_are_refused(limited: TestClient) -> None:
    assert "2 photos" in refused(limited, photo(), photo(), photo(), status=413)
    assert limited.post("/api/suggest", files=form(photo(), photo())).status_code == 200


def test_a_body_that_does_not_arrive_is_given_up(run: RunFolder) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"--x\r\n"
        await asyncio.sleep(60)

    async def ask() -> httpx.Response:
        app = build_app(service_of(run, limits=replace(NO_RATE, seconds_to_send=0.05)))
        kind = {"content-type": "multipart/form-data; boundary=x"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HOST) as client:
            return await client.post("/api/suggest", content=body(), headers=kind)

    assert asyncio.run(ask()).status_code == 408


def test_requests_share_a_budget_of_memory() -> None:
    budget = MemoryBudget(100)
    with budget.reserve(500), pytest.raises(RefusedError) as refusal, budget.reserve(1):
        pass  # the first is let in whatever its size
    assert refusal.value.status == 503
    with budget.reserve(60), budget.reserve(40):
        pass
    with pytest.raises(KeyError), budget.reserve(100):
        raise KeyError
    with budget.reserve(100):
        pass


# How often


def test_a_client_may_ask_at_a_rate_and_twice_as_often_at_once() -> None:
    now = [0.0]
    rate = RateLimit(5, clock=lambda: now[0])
    for _ in range(10):
        rate.take("a")
    with pytest.raises(RefusedError) as refusal:
        rate.take("a")
    assert (refusal.value.status, refusal.value.retry_after) == (429, 1)
    rate.take("b")
    now[0] = 0.21
    rate.take("a")
    with pytest.raises(RefusedError):
        rate.take("a")
    now[0] = 1000.0
    for _ in range(10):
        rate.take("a")
    with pytest.raises(RefusedError):
        rate.take("a")


def test_only_so_many_clients_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shortlist.program.serving.limits._CLIENTS_REMEMBERED", 3)
    rate = RateLimit(1, clock=lambda: 0.0)
    for number in range(100):
        rate.take(str(number))
    assert len(rate._buckets) == 3


def test_the_api_has_a_rate_and_the_page_has_none(run: RunFolder) -> None:
    with client_of(service_of(run, limits=Limits(requests_per_second=2))) as client:
        answers = [client.get("/api/health") for _ in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 4 + [429] * 2
        assert int(answers[-1].headers["retry-after"]) >= 1
        assert "2 a second" in answers[-1].json()["error"]
        assert client.get("/").status_code == 200


# The queue


def test_a_full_queue_refuses_and_the_rest_is_answered() -> None:
    entered, gate = queue.Queue[int](), threading.Event()

    def compute(photos: Sequence[Tensor]) -> Sequence[Tensor]:
        entered.put(len(photos))
        gate.wait()
        return photos

    batcher = Batcher(compute, most_waiting=3, at_once=2, seconds=0.0)
    squares = [torch.full((1, 1, 1), number, dtype=torch.uint8) for number in range(9)]
    first = batcher.submit(squares[:1])
    entered.get(timeout=10)  # the thread is busy, and the queue empty
    waiting = batcher.submit(squares[1:3])
    with pytest.raises(RefusedError) as refusal:
        batcher.submit(squares[3:6])
    assert refusal.value.status == 503
    gate.set()
    assert [row.result(10).item() for row in (*first, *waiting)] == [0, 1, 2]
    batcher.close()
    assert not batcher._thread.is_alive()
    assert max(entered.queue, default=0) <= 2


def test_what_waits_is_answered_before_the_end() -> None:
    batcher = Batcher(lambda photos: photos, most_waiting=50, seconds=0.5)
    rows = batcher.submit([torch.full((1, 1, 1), number, dtype=torch.uint8) for number in range(10)])
    batcher.close()
    assert [row.result(0).item() for row in rows] == list(range(10))


def test_batches_have_few_sizes() -> None:
    sizes: list[int] = []

    def compute(photos: Sequence[Tensor]) -> Sequence[Tensor]:
        sizes.append(len(photos))
        return photos

    batcher = Batcher(compute, most_waiting=50, seconds=0.5)
    rows = batcher.submit([torch.full((1, 1, 1), number, dtype=torch.uint8) for number in range(13)])
    batcher.close()
    assert sizes == [8, 4, 1]
    assert [row.result(0).item() for row in rows] == list(range(13))


def test_a_client_that_left_is_not_computed() -> None:
    seen: list[float] = []

    def compute(photos: Sequence[Tensor]) -> Sequence[Tensor]:
        seen.extend(photo.item() for photo in photos)
        return photos

    batcher = Batcher(compute, most_waiting=50, seconds=0.2)
    rows = batcher.submit([torch.full((1, 1, 1), number, dtype=torch.uint8) for number in range(4)])
    assert rows[2].cancel()
    batcher.close()
    assert seen == [0, 1, 3]


def test_a_full_queue_is_told_in_json(run: RunFolder) -> None:
    with client_of(service_of(run, limits=replace(NO_RATE, photos_waiting=1))) as client:
        response = client.post("/api/suggest", files=form(*[photo(number) for number in range(8)]))
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert client.post("/api/suggest", files=form(photo())).status_code == 200


# Which host and page


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:9", "localhost:8000", "LOCALHOST", "[::1]:8000", "birds.example"]
)
def test_known_hosts_are_served(run: RunFolder, host: str) -> None:
    with client_of(service_of(run, allowed_hosts=["Birds.example"])) as client:
        assert client.get("/api/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil.example:8000", "[::1", "10.0.0.1", "a@b:c"]
)
def test_other_hosts_are_refused_with_the_remedy(client: TestClient, host: str) -> None:
    for path in ("/", "/api/health", "/app.js"):
        response = client.get(path, headers={"host": host})
        assert response.status_code == 400
        assert "--allow-host" in response.json()["error"]


def test_an_address_is_served_where_the_connection_came_in(run: RunFolder) -> None:
    # As with --host 0.0.0.0: the test client takes the address of its URL for that of the server.
    with client_of(service_of(run), "http://192.168.1.5:8000") as client:
        assert client.get("/api/health").status_code == 200
        assert client.get("/api/health", headers={"host": "192.168.1.6:8000"}).status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_pages_may_send_nothing(client: TestClient, headers: dict[str, str]) -> None:
    response = client.post("/api/suggest", files=form(photo()), headers=headers)
    assert response.status_code == 403


def test_the_own_page_may_send(client: TestClient) -> None:
    own = {"origin": HOST, "sec-fetch-site": "same-origin"}
    assert client.post("/api/suggest", files=form(photo()), headers=own).status_code == 200


def test_every_answer_has_the_headers_and_allows_no_other_origin(client: TestClient) -> None:
    answers = [
        client.get("/"),
        client.get("/app.js"),
        client.get("/api/about", headers={"origin": "https://evil.example"}),
        client.get("/nowhere"),
        client.get("/", headers={"host": "evil.example"}),
        client.post("/api/suggest", files=form(b"nothing")),
        client.options("/api/suggest", headers={"access-control-request-method": "POST"}),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 404, 400, 422, 405]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy, "nothing from outside"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert not any(name.startswith("access-control-allow") for name in answer.headers)
    for answer in answers[2:]:
        assert answer.headers["cache-control"] == "no-store"
        assert answer.json()


def test_the_page_holds_no_inline_script_and_nothing_from_outside(client: TestClient) -> None:
    page, script, style = (client.get(path).text for path in ("/", "/app.js", "/style.css"))
    assert "<script>" not in page
    assert " style=" not in page
    assert " onclick" not in page
    for text in (page, script, style):
        assert "//" not in text.replace("// ", "").replace("http://www.w3.org/2000/svg", "")
    for way_in in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way_in not in script
