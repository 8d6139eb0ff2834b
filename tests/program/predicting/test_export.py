"""Exported files say what the run says: with onnxruntime or torch, for images of any size, in batches of any size."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image

import shortlist as sl
from shortlist import ShortlistError
from shortlist.program.cli import main as cli
from shortlist.program.config import ModelConfig, TrainConfig
from shortlist.program.data.image_io import evaluation_transform, file_preprocess
from shortlist.program.losses import CrossEntropyConfig
from shortlist.program.models.build import build_model
from shortlist.program.predicting.calibration import calibrate
from shortlist.program.predicting.check_inputs import as_batch
from shortlist.program.predicting.export import Export, export_run
from shortlist.program.predicting.predictor import Predictor
from shortlist.program.predicting.square_pixels import square_pixels
from shortlist.program.runs.folder import BEST, RunFolder, as_safetensors, file_digest
from shortlist.program.runs.records import Correction, read_preprocess, write_correction
from shortlist.program.training.loop import train
from tests.support.processes import run_code
from tests.support.run_folders import untrained_run
from tests.support.small_runs import photos_config, small_config, write_embeddings

CLASSES = {'"barn" owl\'s': 24, "Éléphant 雀": 16, "elm": 12, "fir": 10, "oak": 10}


def noisy_picture(random: np.random.Generator, colour: float, sides: tuple[int, int] = (8, 80)) -> Image.Image:
    width, height = random.integers(*sides, 2).tolist()
    pixels = random.normal(colour, 60, (height, width, 3)).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number, (name, count) in enumerate(CLASSES.items()):
        (folder / name).mkdir()
        for image in range(count):
            noisy_picture(random, 40 + 40 * number).save(folder / name / f"{image}.png")
    return folder


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Trained, corrected for class sizes and calibrated."""
    config = replace(
        photos_config(photos, epochs=3, val_fraction=0.3),
        loss=CrossEntropyConfig(k=2),
        train=TrainConfig(epochs=3, batch_size=8, ks=(1, 2), device="cpu", correct_prior="on"),
    )
    found = train(config, folder=tmp_path_factory.mktemp("runs") / "run", quiet=True)
    write_correction(found, replace(chosen(found), tau=0.5))
    calibrate(found)
    return found


def chosen(run: RunFolder) -> Correction:
    return Correction(**json.loads((run.path / "correction.json").read_text()))


@pytest.fixture(scope="module")
def exported(run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Export:
    return export_run(run, tmp_path_factory.mktemp("export"), k=3, coverage=0.8, of="photos")


def session_of(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def outputs_of(session: onnxruntime.InferenceSession, inputs: Any) -> dict[str, Any]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {session.get_inputs()[0].name: inputs}), strict=True))


def assert_same(found: dict[str, Any], predictor: Predictor, inputs: list[Any], k: int, **sets: Any) -> None:
    """Rows of outputs beside what the Predictor says; neighbours whose scores tie may change places."""
    scores = predictor.scores(inputs)
    assert found["indices"].shape == found["scores"].shape == (len(inputs), k)
    assert found["indices"].dtype == np.int64
    best = scores.topk(k).values
    torch.testing.assert_close(torch.from_numpy(found["scores"]), best, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores.gather(1, torch.from_numpy(found["indices"])), best, rtol=1e-4, atol=1e-4)
    if not predictor.is_calibrated:
        assert found.keys() == {"indices", "scores"}
        return
    agree = 0
    for row, (every, inside) in enumerate(
        zip(predictor.suggest(inputs, len(predictor.classes)), predictor.sets(inputs, **sets), strict=True)
    ):
        chance = {item.index: item.probability for item in every}
        wanted = [chance[index] for index in found["indices"][row].tolist()]
        assert found["probabilities"][row].tolist() == pytest.approx(wanted, abs=1e-4)
        agree += set(np.flatnonzero(found["in_set"][row]).tolist()) == {item.index for item in inside}
    assert agree >= 0.99 * len(inputs), "sets may differ where a class is exactly at its threshold"


def rows(session: onnxruntime.InferenceSession, inputs: list[Any]) -> dict[str, Any]:
    found = [outputs_of(session, as_batch(given)) for given in inputs]
    return {name: np.concatenate([row[name] for row in found]) for name in found[0]}


def test_a_thousand_images_of_any_size_give_the_same_in_onnxruntime(run: RunFolder, exported: Export) -> None:
    random = np.random.default_rng(1)
    pictures = [noisy_picture(random, random.uniform(0, 255)) for _ in range(980)]
    pictures += [
        noisy_picture(random, 128, sides) for sides in ((1, 2), (1, 4), (150, 400), (1, 200)) for _ in range(5)
    ]
    found = rows(session_of(exported.files[0].path), pictures)
    assert_same(found, Predictor(run, "cpu"), pictures, 3, coverage=0.8, of="photos")
    assert len(np.unique(found["indices"][:, 0])) > 1
    assert 0 < found["in_set"].mean() < 1


@pytest.mark.parametrize("size", [1, 7, 64])
def test_batches_of_any_size_are_taken(run: RunFolder, exported: Export, size: int) -> None:
    pixels = np.random.default_rng(size).integers(0, 256, (size, 3, 31, 40), dtype=np.uint8)
    found = outputs_of(session_of(exported.files[0].path), pixels)
    assert_same(found, Predictor(run, "cpu"), list(torch.from_numpy(pixels)), 3, coverage=0.8, of="photos")


def test_a_pt2_file_needs_torch_alone(run: RunFolder, exported: Export, tmp_path: Path) -> None:
    path = exported.files[1].path
    pixels = [np.random.default_rng(n).integers(0, 256, (n, 3, 9 + 5 * n, 50 // n), dtype=np.uint8) for n in (1, 2, 5)]
    for batch in pixels:
        np.save(tmp_path / "pixels.npy", batch)
        run_code(f"""
import sys, json, numpy, torch
files = {{"metadata.json": ""}}
program = torch.export.load({str(path)!r}, extra_files=files).module()
found = program(torch.from_numpy(numpy.load({str(tmp_path / "pixels.npy")!r})))
assert "shortlist" not in sys.modules
assert len(json.loads(files["metadata.json"])["classes"]) == 5
numpy.savez({str(tmp_path / "found.npz")!r}, **{{name: value.numpy() for name, value in found.items()}})
""")
        with np.load(tmp_path / "found.npz") as found:
            inputs = list(torch.from_numpy(batch))
            assert_same(dict(found), Predictor(run, "cpu"), inputs, 3, coverage=0.8, of="photos")


def test_the_metadata_say_what_is_inside(run: RunFolder, exported: Export) -> None:
    session = session_of(exported.files[0].path)
    known = {name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}
    assert tuple(known["classes"]) == sl.load(run.path, device="cpu").classes
    assert set(known["classes"]) == set(CLASSES)
    assert known["k"] == 3
    assert known["sets"] == {"coverage": 0.8, "of": "photos"}
    assert known["correction"] == {"tau": 0.5}
    assert known["calibration"].keys() == {"temperature", "prior"}
    assert known["preprocess"] == json.loads((run.path / "preprocess.json").read_text())
    assert (known["loss"], known["precision"], known["shortlist"]) == ("cross_entropy", "float32", sl.__version__)
    given = session.get_inputs()[0]
    assert (given.name, given.shape, given.type) == ("pixels", ["batch", 3, "height", "width"], "tensor(uint8)")


def test_files_hold_no_path_of_this_machine(exported: Export) -> None:
    for file in exported.files:
        content = file.path.read_bytes()
        assert str(Path(sl.__file__).parent).encode() not in content
        assert file.size == len(content)


def test_files_are_compared_with_the_run_on_its_test_images(exported: Export) -> None:
    assert "test images of the run" in exported.compared_on.source
    for file in exported.files:
        assert file.agreement is not None
        assert file.agreement.same == 1
        assert file.agreement.score < 1e-3


def test_padded_images_are_padded_inside_the_file(tmp_path: Path) -> None:
    run = untrained_run(tmp_path / "run", list(CLASSES))
    run.write_json("preprocess.json", asdict(file_preprocess(16, "pad")))
    told: list[str] = []
    found = export_run(run, formats=["onnx"], say=told.append)
    assert found.files[0].path == run.path / "export" / "model.onnx"
    assert any("not calibrated" in text and f"shortlist calibrate {run.path}" in text for text in told)
    assert "made for the purpose" in found.compared_on.source
    random = np.random.default_rng(2)
    pictures = [noisy_picture(random, 128) for _ in range(100)]
    assert_same(rows(session_of(found.files[0].path), pictures), Predictor(run, "cpu"), pictures, 2)


def test_a_run_on_embeddings_takes_vectors(tmp_path: Path) -> None:
    data = write_embeddings(tmp_path / "vectors.npz")
    run = train(small_config(data), folder=tmp_path / "run", quiet=True)
    calibrate(run)
    found = export_run(run, tmp_path, average_k=2.5)
    with np.load(data) as arrays:
        vectors = arrays["test_x"]
    for file in found.files:
        assert file.agreement is not None
        assert not file.agreement.problem
    outputs = outputs_of(session_of(tmp_path / "model.onnx"), vectors)
    assert_same(outputs, Predictor(run, "cpu"), list(torch.from_numpy(vectors)), 3, average_k=2.5)
    metadata = session_of(tmp_path / "model.onnx").get_modelmeta().custom_metadata_map
    assert json.loads(metadata["sets"]) == {"average_k": 2.5}
    with pytest.raises(ShortlistError, match=r"embeddings.*float16"):
        export_run(run, precision="float16")


def test_lower_precisions_are_smaller_and_say_what_they_cost(run: RunFolder, exported: Export, tmp_path: Path) -> None:
    for precision, ratio in (("float16", 0.75), ("int8", 0.75)):
        found = export_run(run, tmp_path, formats=["onnx"], k=3, precision=precision)  # type: ignore[arg-type]
        (file,) = found.files
        assert file.path.name == f"model-{precision}.onnx"
        assert file.size < ratio * exported.files[0].size
        assert found.measured_on is not None
        assert (
            file.accuracy.keys()
            == found.run_accuracy.keys()
            == {f"top-{k}, {of}" for k in (1, 3) for of in ("photos", "classes")}
        )
        assert file.agreement is not None
        assert 0 < file.agreement.score < 0.5, "it is rounded, and not another network"
        outputs = outputs_of(session_of(file.path), np.zeros((4, 3, 20, 30), dtype=np.uint8))
        assert outputs["scores"].dtype == np.float32
        assert outputs["in_set"].shape == (4, 5)


def timm_run(folder: Path, head: Any, tau: float) -> RunFolder:
    """With random weights of a network with TensorFlow's padding."""
    run = untrained_run(folder, list(CLASSES))
    settings = json.loads((run.path / "config.json").read_text())
    settings["model"] |= {"name": "tf_efficientnet_lite0", "head": head}
    run.write_json("config.json", settings)
    run.write_json("classes.json", {"names": list(CLASSES), "train_images": [9, 5, 3, 0, 1]})
    run.write_json("preprocess.json", asdict(file_preprocess(32)))
    network = build_model(ModelConfig(name="tf_efficientnet_lite0", head=head), (3, 32, 32), len(CLASSES))
    run.save_best(as_safetensors(network.state_dict()))
    if tau:
        write_correction(run, Correction(tau, "macro_top2", (2,), 5, 4, 5, {}, file_digest(run.path / BEST)))
    return run


def test_timm_opens_the_weights_and_gives_the_scores_of_the_run(tmp_path: Path) -> None:
    for head, tau in (("linear", 0.5), ("scaled_cosine", 0.0)):
        run = timm_run(tmp_path / head, head, tau)
        path = tmp_path / f"{head}.safetensors"
        export_run(run, path)
        network = timm.create_model("tf_efficientnet_lite0", num_classes=5, checkpoint_path=str(path)).eval()
        preprocess, predictor = read_preprocess(run), Predictor(run, "cpu")
        pictures = [noisy_picture(np.random.default_rng(n), 128) for n in range(4)]
        squares = torch.stack([evaluation_transform(preprocess)(picture) for picture in pictures])
        with torch.inference_mode():
            scores = network(preprocess.normalise(squares))
        wanted = predictor.scores(pictures)
        if head == "scaled_cosine":
            wanted = wanted * predictor.embed(pictures).norm(dim=1, keepdim=True)
        torch.testing.assert_close(scores, wanted, rtol=1e-3, atol=1e-3)
        with safetensors.safe_open(path, framework="pt") as file:
            assert json.loads(file.metadata()["classes"]) == list(CLASSES)


def test_what_timm_cannot_hold_is_refused(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match=r"no network glyphnet.*onnx"):
        export_run(run, formats=["timm"])
    with pytest.raises(ShortlistError, match=r"cosine.*--model\.head linear"):
        export_run(timm_run(tmp_path / "run", "cosine", 0.5), formats=["timm"])


def test_a_network_with_tensorflows_padding_is_exported(tmp_path: Path) -> None:
    run = timm_run(tmp_path / "run", "linear", 0.5)
    found = export_run(run, tmp_path / "lite.onnx", k=4)
    assert [file.path for file in found.files] == [tmp_path / "lite.onnx"]
    pictures = [noisy_picture(np.random.default_rng(n), 128) for n in range(5)]
    found_rows = rows(session_of(tmp_path / "lite.onnx"), pictures)
    assert_same(found_rows, Predictor(run, "cpu"), pictures, 4)
    assert 3 not in found_rows["indices"], "a class without a training image"


def test_a_file_that_disagrees_is_not_written(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shortlist.program.predicting.deployed.square_pixels",
        lambda images, preprocess: square_pixels(images, preprocess).flip(3),
    )
    with pytest.raises(ShortlistError, match=r"model\.onnx is not written: on .* test images"):
        export_run(run, tmp_path / "out", formats=["onnx"])
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_is_refused_with_the_remedy(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untrained = untrained_run(tmp_path / "untrained", ["a", "b", "c"])
    given: Any
    for folder, given, message in (
        (run, {"coverage": 0.9, "average_k": 2.0}, "--coverage and --average-k"),
        (run, {"coverage": 1.5}, r"coverage .*1\.5"),
        (run, {"k": 6}, r"k must be in \[1, 5\]"),
        (run, {"out": tmp_path / "a.onnx", "formats": ["pt2"]}, r"a\.onnx.*--format"),
        (run, {"precision": "int8", "formats": ["pt2"]}, "int8 is not for --format pt2, only float32 or float16"),
        (run, {"precision": "float16", "formats": ["timm"]}, "float16 is not for --format timm"),
        (run, {"precision": "int8", "root": str(tmp_path / "gone")}, "int8 needs the validation images"),
        (untrained, {"coverage": 0.9}, rf"not calibrated.*shortlist calibrate {untrained.path}"),
        (untrained, {"average_k": 2.0}, "not calibrated"),
    ):
        with pytest.raises(ShortlistError, match=message):
            export_run(folder, **{"out": tmp_path / "out"} | given)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ShortlistError, match=r"onnxruntime.*pip install 'shortlist\[export\]'.*--format pt2"):
        export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["shortlist", "export", *map(str, words)])
        cli.main()
        return capsys.readouterr().out

    return call


def test_the_command_shows_agreement_accuracy_and_speed(run: RunFolder, tmp_path: Path, command: Any) -> None:
    shown = command(run.path, "--out", tmp_path, "--precision", "float16", "--format", "onnx", "-k", 3)
    assert "same suggestions" in shown
    assert "top-3, classes" in shown
    assert "in batches of 32" in shown
    assert shown.rstrip().endswith(str(tmp_path / "model-float16.onnx"))
