"""An exported file says what its run says: what is in it, and not more."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shortlist.errors import ShortlistError
from shortlist.program.data.base import Preprocess
from shortlist.program.data.image_io import before_crop, evaluation_transform
from shortlist.program.predicting.export import export_run
from shortlist.program.predicting.predictor import Predictor
from shortlist.program.runs.folder import RunFolder
from shortlist.program.serving.app import Service
from shortlist.program.serving.exported import ServedFile, open_file
from tests.support.scored_runs import CLASSES
from tests.support.serving import NO_RATE, client_of, form, indices, opened, photo

K = 3


def metadata(run: RunFolder, **changed: Any) -> dict[str, Any]:
    """As ``shortlist export`` writes it."""
    usual = {
        "classes": [f"bird {number}" for number in range(CLASSES)],
        "k": K,
        "preprocess": run.read_json("preprocess.json"),
        "sets": {"coverage": 0.8, "of": "classes"},
        "calibration": {"temperature": 1.0, "prior": 0.0},
    }
    return usual | changed


def computed(predictor: Predictor, pixels: np.ndarray[Any, Any]) -> Mapping[str, np.ndarray[Any, Any]]:
    """What a file of the run gives: it resizes and crops as the run does."""
    tensors = [torch.from_numpy(image) for image in pixels]
    best = predictor.suggest(tensors, k=K)
    in_set = np.zeros((len(tensors), CLASSES), dtype=bool)
    for row, inside in zip(in_set, predictor.sets(tensors, 0.8), strict=True):
        row[[item.index for item in inside]] = True
    return {
        "indices": np.array([[item.index for item in row] for row in best]),
        "scores": np.array([[item.score for item in row] for row in best], dtype=np.float32),
        "probabilities": np.array([[item.probability for item in row] for row in best], dtype=np.float32),
        "in_set": in_set,
    }


@pytest.fixture
def file(run: RunFolder, predictor: Predictor) -> ServedFile:
    return ServedFile(Path("birds.onnx"), lambda pixels: computed(predictor, pixels), metadata(run))


@pytest.mark.parametrize("fit", ["crop", "pad"])
@pytest.mark.parametrize("size", [(40, 30), (31, 77), (300, 301), (16, 16), (5, 700)])
def test_a_photo_can_be_made_small_before_the_file_sees_it(fit: Any, size: tuple[int, int]) -> None:
    preprocess = Preprocess(3, 18, 16, (0.5,) * 3, (0.5,) * 3, fit)
    image = Image.effect_noise(size, 80).convert("RGB")
    small = Image.fromarray(before_crop(preprocess)(image).permute(1, 2, 0).numpy())
    whole, again = (evaluation_transform(preprocess)(picture) for picture in (image, small))
    assert torch.equal(whole, again)


def test_a_file_gives_the_answers_of_its_run(file: ServedFile, predictor: Predictor) -> None:
    service = Service(file, k=2, coverage=0.8, limits=NO_RATE)
    with client_of(service) as client:
        for number, size in enumerate([(40, 30), (30, 40), (64, 64)]):
            content = photo(number, size=size)
            found = client.post("/api/suggest?coverage=0.8&k=3", files=form(content)).json()
            wanted = predictor.suggest(opened(content), k=3)
            assert indices(found["suggestions"]) == [item.index for item in wanted]
            assert [item["score"] for item in found["suggestions"]] == pytest.approx(
                [item.score for item in wanted], rel=1e-4, abs=1e-4
            )
            inside = predictor.sets(opened(content), 0.8)
            assert {*indices(found["sets"][0]["suggestions"])} == {item.index for item in inside}
        about = client.get("/api/about").json()
        assert (about["run"], about["most_photos"], about["coverages"]) == ("birds", 1, [0.8])
        assert client.post("/api/suggest?k=4", files=form(photo())).status_code == 422
        assert client.post("/api/suggest?coverage=0.9", files=form(photo())).status_code == 422
        assert client.post("/api/suggest", files=form(photo(), photo())).status_code == 413


def test_photos_of_different_shapes_keep_their_places(file: ServedFile) -> None:
    photos = [file.prepared(opened(photo(number, size=(30 + 7 * (number % 3), 40)))) for number in range(7)]
    together = file.rows(photos)
    for prepared, row in zip(photos, together, strict=True):
        torch.testing.assert_close(file.rows([prepared])[0], row, rtol=1e-4, atol=1e-4)


def test_a_file_with_sets_of_a_mean_size_has_no_coverage(run: RunFolder, predictor: Predictor) -> None:
    told = metadata(run, sets={"average_k": 3.0})
    file = ServedFile(Path("birds.onnx"), lambda pixels: computed(predictor, pixels), told)
    with client_of(Service(file, k=2, limits=NO_RATE)) as client:
        assert client.get("/api/about").json()["coverages"] == []
        response = client.post("/api/suggest?coverage=0.8", files=form(photo()))
        assert response.status_code == 422
        assert "0.8" in response.json()["error"]


def test_an_uncalibrated_file_has_no_probabilities(run: RunFolder, predictor: Predictor) -> None:
    def plain(pixels: np.ndarray[Any, Any]) -> Mapping[str, np.ndarray[Any, Any]]:
        found = computed(predictor, pixels)
        return {name: found[name] for name in ("indices", "scores")}

    file = ServedFile(Path("birds.onnx"), plain, metadata(run, sets=None, calibration=None))
    assert "shortlist calibrate" in file.why_no_probabilities
    answer = file.answer(file.rows([file.prepared(opened(photo()))]), 2)
    assert [item.probability for item in answer.suggestions] == [None, None]


@pytest.mark.parametrize(
    "change", [{"classes": None}, {"k": None}, {"preprocess": {"channels": 3}}, {"sets": {"coverage": "x"}}]
)
def test_another_file_is_refused(run: RunFolder, change: dict[str, Any]) -> None:
    with pytest.raises(ShortlistError, match="shortlist export"):
        ServedFile(Path("birds.onnx"), lambda pixels: {}, metadata(run, **change))


def test_a_file_of_vectors_is_refused(run: RunFolder) -> None:
    with pytest.raises(ShortlistError, match="embeddings"):
        ServedFile(Path("birds.onnx"), lambda pixels: {}, metadata(run, preprocess=None))


def test_a_real_file_is_served(run: RunFolder, predictor: Predictor, tmp_path: Path) -> None:
    export_run(run, tmp_path / "birds.onnx", k=K, coverage=0.8)
    with client_of(Service(open_file(tmp_path / "birds.onnx"), k=K, limits=NO_RATE)) as client:
        for number in range(3):
            content = photo(number, size=(50 + number, 90))
            found = client.post("/api/suggest?coverage=0.8", files=form(content)).json()
            assert indices(found["suggestions"]) == [item.index for item in predictor.suggest(opened(content), k=K)]
            inside = {item.index for item in predictor.sets(opened(content), 0.8)}
            assert {*indices(found["sets"][0]["suggestions"])} == inside
    (tmp_path / "other.onnx").write_bytes(b"nothing")
    with pytest.raises(ShortlistError, match=r"other\.onnx cannot be opened"):
        open_file(tmp_path / "other.onnx")
