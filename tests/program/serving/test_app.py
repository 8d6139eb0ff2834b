"""The API says what the Predictor says, however many ask at once, and keeps nothing."""

import asyncio
import base64
import json
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient
from torch import Tensor

import shortlist as sl
from shortlist.program.predicting.predictor import Predictor
from shortlist.program.runs.folder import BEST, RunFolder, file_digest
from shortlist.program.runs.records import Correction, write_correction
from shortlist.program.serving import records
from shortlist.program.serving.app import build_app
from shortlist.program.serving.limits import RefusedError
from shortlist.program.serving.records import Record
from tests.support.run_folders import untrained_run
from tests.support.scored_runs import CLASSES
from tests.support.serving import HOST, calibrated_run, client_of, form, indices, opened, photo, service_of


def suggest(client: TestClient, *photos: bytes, **query: Any) -> dict[str, Any]:
    response = client.post("/api/suggest", files=form(*photos), params=query)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def probabilities(predictor: Predictor, content: bytes) -> Tensor:
    """Of all classes, in their order."""
    found = sorted(predictor.suggest(opened(content), k=CLASSES), key=lambda item: item.index)
    return torch.tensor([item.probability for item in found], dtype=torch.float64)


def in_order(suggestions: list[dict[str, Any]]) -> Tensor:
    found = sorted(suggestions, key=lambda item: item["index"])
    return torch.tensor([item["probability"] for item in found], dtype=torch.float64)


# Answers


@pytest.mark.parametrize("number", range(3))
def test_an_answer_is_that_of_the_predictor(client: TestClient, predictor: Predictor, number: int) -> None:
    content = photo(number)
    found = suggest(client, content, k=5, coverage=[0.6, 0.9])
    wanted = predictor.suggest(opened(content), k=5)
    assert [(item["name"], item["index"]) for item in found["suggestions"]] == [(w.name, w.index) for w in wanted]
    for item, expected in zip(found["suggestions"], wanted, strict=True):
        assert item["score"] == pytest.approx(expected.score, rel=1e-4, abs=1e-4)
        assert item["probability"] == pytest.approx(expected.probability, rel=1e-4, abs=1e-4)
    for of_coverage in found["sets"]:
        inside = predictor.sets(opened(content), coverage=of_coverage["coverage"])
        assert indices(of_coverage["suggestions"]) == [item.index for item in inside]
        assert of_coverage["size"] == len(inside)
        assert of_coverage["is_promised"]
    assert [item["coverage"] for item in found["sets"]] == [0.6, 0.9]
    assert (found["run"], found["version"], found["photos"], found["prior"]) == ("birds", sl.__version__, 1, None)


def test_there_are_as_many_suggestions_as_the_owner_chose_and_no_set_unasked(client: TestClient) -> None:
    found = suggest(client, photo())
    assert len(found["suggestions"]) == 3
    assert found["sets"] == []


def test_many_requests_at_once_are_computed_in_batches_and_answered_as_alone(
    run: RunFolder, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = service_of(run)
    sizes: list[int] = []
    compute = service.model.rows

    def counted_rows(photos: Sequence[Tensor]) -> Sequence[Tensor]:
        sizes.append(len(photos))
        return compute(photos)

    monkeypatch.setattr(service.model, "rows", counted_rows)

    async def ask_all() -> list[httpx.Response]:
        app = build_app(service)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HOST) as client:
            requests = (client.post("/api/suggest?k=8", files=form(photo(number))) for number in range(40))
            return await asyncio.gather(*requests)

    answers = asyncio.run(ask_all())
    assert sum(sizes) == 40
    assert len(sizes) < 40, "some photos shared a batch"
    for number, response in enumerate(answers):
        wanted = predictor.scores(opened(photo(number)))
        for item in response.json()["suggestions"]:
            assert item["score"] == pytest.approx(wanted[item["index"]].item(), rel=1e-4, abs=1e-4)


def test_photos_of_one_thing_are_fused_by_the_mean_of_their_log_probabilities(
    client: TestClient, predictor: Predictor
) -> None:
    photos = [photo(number) for number in (1, 4, 6)]
    mean = torch.stack([probabilities(predictor, content).log() for content in photos]).mean(0)
    found = suggest(client, *photos, k=CLASSES, coverage=0.9)
    torch.testing.assert_close(in_order(found["suggestions"]), mean.softmax(0), rtol=1e-3, atol=1e-5)
    assert found["photos"] == 3
    assert not found["sets"][0]["is_promised"]
    again = suggest(client, *reversed(photos), k=CLASSES)
    assert indices(again["suggestions"]) == indices(found["suggestions"]), "in any order"
    same = suggest(client, photos[0], photos[0], k=CLASSES)
    torch.testing.assert_close(in_order(same["suggestions"]), probabilities(predictor, photos[0]), rtol=1e-3, atol=1e-5)


def test_scores_of_an_uncalibrated_run_are_fused_by_their_mean(tmp_path: Path) -> None:
    run = untrained_run(tmp_path / "run", ["ash", "elm", "fir"])
    photos = [photo(1), photo(5)]
    with client_of(service_of(run)) as client:
        found = suggest(client, *photos)
        refused = client.post("/api/suggest?coverage=0.9", files=form(photo()))
        about = client.get("/api/about").json()
    mean = sl.load(run.path, "cpu").scores([opened(content) for content in photos]).mean(0)
    for item in found["suggestions"]:
        assert item["score"] == pytest.approx(mean[item["index"]].item(), rel=1e-4, abs=1e-4)
        assert item["probability"] is None
    assert refused.status_code == 422
    assert "shortlist calibrate run" in refused.json()["error"]
    assert str(tmp_path) not in refused.text + json.dumps(about), "users are not told where the run is"
    assert not about["is_calibrated"]
    assert about["calibrate"] == "shortlist calibrate run"


def test_a_prior_multiplies_the_probabilities_and_orders_by_them(run: RunFolder, predictor: Predictor) -> None:
    weights = [0.0, 1.0, 2.0, 8.0, 1.0, 0.5, 3.0, 1.0]
    content = photo(2)
    with client_of(service_of(run, prior={"July": weights, "June": [1.0] * CLASSES})) as client:
        july = suggest(client, content, k=CLASSES, prior="July", coverage=0.99)
        june = suggest(client, content, k=CLASSES, prior="June")
        unknown = client.post("/api/suggest?prior=Jul", files=form(content))
    plain = probabilities(predictor, content)
    expected = plain * torch.tensor(weights, dtype=torch.float64)
    found = july["suggestions"]
    assert sorted(indices(found)) == list(range(1, CLASSES)), "a class of weight zero is not suggested"
    torch.testing.assert_close(in_order(found), (expected / expected.sum())[1:], rtol=1e-3, atol=1e-5)
    shares = [item["probability"] for item in found]
    assert shares == sorted(shares, reverse=True)
    assert 0 not in indices(july["sets"][0]["suggestions"])
    assert not july["sets"][0]["is_promised"]
    assert july["prior"] == "July"
    torch.testing.assert_close(in_order(june["suggestions"]), plain, rtol=1e-3, atol=1e-5)
    assert unknown.status_code == 422
    assert "July" in unknown.json()["error"]


def test_with_a_prior_the_correction_for_class_sizes_does_not_order(tmp_path: Path) -> None:
    run = calibrated_run(tmp_path / "run")
    numbers: Any = {"images": 1, "classes": 1, "num_classes": CLASSES, "val": {}}
    write_correction(run, Correction(5.0, "macro_top1", (1,), best_sha256=file_digest(run.path / BEST), **numbers))
    with client_of(service_of(run, prior={"anywhere": [1.0] * CLASSES})) as client:
        plain = suggest(client, photo(), k=CLASSES, coverage=0.99)
        found = suggest(client, photo(), k=CLASSES, coverage=0.99, prior="anywhere")
    for with_prior, without in ((found, plain), (found["sets"][0], plain["sets"][0])):
        shares = [item["probability"] for item in with_prior["suggestions"]]
        assert shares == sorted(shares, reverse=True)
        scores = [item["score"] for item in without["suggestions"]]
        assert scores == sorted(scores, reverse=True)
    assert indices(plain["suggestions"]) != indices(found["suggestions"])


@pytest.mark.parametrize(
    ("query", "fact"),
    [
        ("k=0", "1 to 8"),
        ("k=9", "1 to 8"),
        ("k=many", "k"),
        ("coverage=0.905", "0.905"),
        ("coverage=1", "0.99"),
        ("coverage=nan", "nan"),
        ("coverage=" + "&coverage=".join(["0.9"] * 11), "10"),
        ("prior=July", "--prior"),
    ],
)
def test_bad_parameters_are_named(client: TestClient, query: str, fact: str) -> None:
    response = client.post(f"/api/suggest?{query}", files=form(photo()))
    assert response.status_code == 422
    assert fact in response.json()["error"]


def test_a_score_that_is_not_finite_is_null(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(run)
    monkeypatch.setattr(service.model, "rows", lambda photos: [torch.full((CLASSES,), torch.nan)] * len(photos))
    with client_of(service) as client:
        assert {item["score"] for item in suggest(client, photo())["suggestions"]} == {None}


def test_a_mistake_of_the_server_is_told_and_survived(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(run)
    compute, failures = service.model.rows, [RuntimeError("out of memory")]

    def fail_once(photos: Sequence[Tensor]) -> Sequence[Tensor]:
        if failures:
            raise failures.pop()
        return compute(photos)

    monkeypatch.setattr(service.model, "rows", fail_once)
    with TestClient(build_app(service), HOST, raise_server_exceptions=False) as client:
        response = client.post("/api/suggest", files=form(photo()))
        assert response.status_code == 500
        assert "out of memory" not in response.text
        assert response.json()["error"]
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert len(suggest(client, photo())["suggestions"]) == 3


# The other addresses


def test_classes_health_and_schema(client: TestClient, predictor: Predictor) -> None:
    classes = client.get("/api/classes").json()["classes"]
    assert [item["name"] for item in classes] == list(predictor.classes)
    assert [item["index"] for item in classes] == list(range(CLASSES))
    assert client.get("/api/health").json() == {"status": "ok", "run": "birds", "version": sl.__version__}
    schema = client.get("/api/schema").json()
    assert {"/api/suggest", "/api/classes", "/api/health", "/api/about"} <= schema["paths"].keys()
    assert "photos" in json.dumps(schema["paths"]["/api/suggest"]["post"]["requestBody"])
    assert client.get("/docs").status_code == 404


def test_names_that_are_no_text_are_served(run: RunFolder) -> None:
    service = service_of(run)
    odd = ["bad \udcff", "<b>", "\u202eabc", "x" * 300, "", "a\x00b", "é", "7"]
    model = service.model
    model.classes = odd
    with client_of(service) as client:
        names = [item["name"] for item in client.get("/api/classes").json()["classes"]]
        found = suggest(client, photo(), k=8)["suggestions"]
    assert names == ["bad \\udcff", *odd[1:]]
    assert {item["name"] for item in found} == {*names}


def test_example_pictures_are_shown_only_if_there_are_any(run: RunFolder, client: TestClient) -> None:
    assert suggest(client, photo(), k=8)["suggestions"][0]["examples"] == []
    assert client.get("/examples/0/0").status_code == 404
    picture = photo(kind="WEBP")
    with client_of(service_of(run, examples={3: [picture]})) as with_examples:
        found = {item["index"]: item["examples"] for item in suggest(with_examples, photo(), k=8)["suggestions"]}
        assert found.pop(3) == ["/examples/3/0"]
        assert not any(found.values())
        response = with_examples.get("/examples/3/0")
        assert response.content == picture
        assert response.headers["content-type"] == "image/webp"
        for missing in ("/examples/3/1", "/examples/3/-1", "/examples/99/0", "/examples/..%2f..%2fconfig.json/0"):
            assert with_examples.get(missing).status_code in (404, 422)


# Nothing is kept


def files_below(*folders: Path) -> dict[Path, tuple[int, int]]:
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def test_nothing_is_written(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def no_file(*given: object, **options: object) -> None:
        raise AssertionError("a temporary file was opened")

    monkeypatch.setattr(tempfile, "TemporaryFile", no_file)
    large = photo(size=(1000, 900), kind="BMP")  # 2.7 MB: frameworks put such files on the disk
    before = files_below(run.path, tmp_path)
    with client_of(service_of(run)) as client:
        suggest(client, large, photo(), coverage=0.9)
        assert client.post("/api/suggest", files=form(b"nothing")).status_code == 422
        assert client.post("/api/none-of-these", files=form(photo())).status_code in (404, 405)
    assert files_below(run.path, tmp_path) == before


def with_place_and_time() -> bytes:
    exif = Image.Exif()
    exif[0x0132] = "2024:07:01 12:00:00"
    exif.get_ifd(0x8825)[2] = (51.0, 28.0, 38.0)
    return photo(3, "JPEG", exif=exif, comment=b"at home", size=(1500, 1200))


def test_none_of_these_keeps_pixels_and_suggestions_alone(run: RunFolder, tmp_path: Path) -> None:
    path, content = tmp_path / "record.jsonl", with_place_and_time()
    assert b"2024:07:01" in content
    prior = {"Secret Valley": [1.0] * CLASSES}
    with client_of(service_of(run, record=Record(path), prior=prior)) as client:
        suggest(client, content, prior="Secret Valley")
        assert path.read_bytes() == b"", "only if the user asks for it"
        for _ in range(2):
            response = client.post("/api/none-of-these", files=form(content, photo()), data={"suggested": "2,0"})
            assert response.json() == {"photos": 2}
        bad = client.post("/api/none-of-these", files=form(content), data={"suggested": "99"})
        assert bad.status_code == 422
        assert client.get("/api/about").json()["is_recording"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2
    assert lines[0].keys() == {"run", "suggested", "photos"}
    assert lines[0]["suggested"] == ["bird 2", "bird 0"]
    kept = base64.b64decode(lines[0]["photos"][0])
    for trace in (b"2024", b"Exif", b"at home", b"Secret"):
        assert trace not in kept
        assert trace not in path.read_bytes()
    image = opened(kept)
    assert image.size == (1024, 819)
    assert not image.getexif()
    assert "comment" not in image.info
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_record_strips_whatever_image_it_is_given(tmp_path: Path) -> None:
    Record(tmp_path / "record.jsonl").add("birds", [], [opened(with_place_and_time())])
    (kept,) = json.loads((tmp_path / "record.jsonl").read_text())["photos"]
    image = opened(base64.b64decode(kept))
    assert not image.getexif()
    assert "comment" not in image.info


def test_a_full_record_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(tmp_path / "record.jsonl")
    monkeypatch.setattr(records, "LARGEST", 100)
    with pytest.raises(RefusedError, match="full"):
        record.add("birds", [], [opened(photo())])
    assert (tmp_path / "record.jsonl").read_bytes() == b""


@pytest.mark.parametrize("name", ["nowhere/record.jsonl", "folder"])
def test_a_record_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(sl.ShortlistError, match="--record"):
        Record(tmp_path / name)


def test_a_model_that_fuses_nothing_takes_one_photo(run: RunFolder) -> None:
    service = service_of(run)
    service.model.most_photos = 1
    with client_of(replace(service, k=2)) as client:
        assert client.post("/api/suggest", files=form(photo(), photo(1))).status_code == 413
        assert client.get("/api/about").json()["most_photos"] == 1
