"""Suggestions for images and vectors, from run folders that were made without training."""

import json
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import shortlist as sl
from shortlist import ShortlistError
from shortlist.program.cli import main as cli
from shortlist.program.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from shortlist.program.losses import CrossEntropyConfig
from shortlist.program.models.build import build_model
from shortlist.program.predicting.inputs import image_files, read_vectors
from shortlist.program.predicting.predictor import Predictor
from shortlist.program.runs.folder import RunFolder, as_safetensors
from tests.support.pictures import colour_of, put_image
from tests.support.run_folders import untrained_run

CLASSES = ["ash", "elm", "fir", "oak"]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return untrained_run(tmp_path / "run", CLASSES)


def embedding_run(folder: Path, head: Literal["linear", "cosine", "scaled_cosine"] = "linear") -> RunFolder:
    """Of vectors of seven numbers in four classes."""
    config = RunConfig(
        data=DataConfig(name="embeddings", root="vectors.npz"),
        model=ModelConfig(name="none", head=head),
        loss=CrossEntropyConfig(k=2),
        train=TrainConfig(ks=(1, 4), device="cpu"),
    )
    run = RunFolder(folder)
    with run.claim(config, resume=False):
        run.write_json("classes.json", {"names": CLASSES, "train_images": [1, 1, 1, 1]})
        run.save_best(as_safetensors(build_model(config.model, (7,), 4).state_dict()))
    return run


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(paths):
        put_image(path, colour_of(number))
    return paths


def test_suggestions_do_not_depend_on_the_images_beside(run: RunFolder, photos: list[Path]) -> None:
    predictor = Predictor(run, device="cpu")
    together = dict(zip(photos, predictor.suggest(photos, 4), strict=True))
    for photo in photos:
        alone = predictor.suggest(photo, 4)
        for suggestion, other in zip(alone, together[photo], strict=True):
            assert suggestion.name == other.name
            assert suggestion.score == pytest.approx(other.score, abs=1e-4)


def test_there_are_as_many_suggestions_as_the_loss_was_made_for(
    run: RunFolder, photos: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shortlist", "predict", str(run.path), str(photos[0]), "--json"])
    cli.main()
    assert len(json.loads(capsys.readouterr().out)["suggestions"]) == 2


def test_an_image_is_the_same_however_it_is_given(run: RunFolder, photos: list[Path]) -> None:
    predictor = sl.load(run.path, device="cpu")
    image = Image.open(photos[1])
    array = np.asarray(image)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    wanted = predictor.scores(photos[1])
    assert wanted.shape == (4,)
    for given in (str(photos[1]), image, array, tensor, image.convert("RGBA")):
        assert torch.equal(predictor.scores(given), wanted)
    for several in ([image, array], (tensor, photos[1]), np.stack([array, array]), torch.stack([tensor, tensor])):
        torch.testing.assert_close(predictor.scores(several), wanted.expand(2, 4), rtol=1e-4, atol=1e-4)


def test_one_image_gives_one_list_and_several_a_list_of_lists(run: RunFolder, photos: list[Path]) -> None:
    predictor = sl.load(str(run.path), device="cpu")
    assert predictor.classes == tuple(CLASSES)
    one, several = predictor.suggest(photos[0], k=3), predictor.suggest([photos[0]], k=3)
    assert several == [one]
    assert [suggestion.name for suggestion in one] == [CLASSES[suggestion.index] for suggestion in one]
    scores = predictor.scores(photos[0])
    top = scores.topk(3)
    assert [suggestion.index for suggestion in one] == top.indices.tolist()
    assert [suggestion.score for suggestion in one] == pytest.approx(top.values.tolist())
    assert len(predictor.suggest(photos[0])) == 2, "the K that the run was trained for"


def test_many_images_are_computed_in_batches(run: RunFolder, photos: list[Path]) -> None:
    predictor = sl.load(run.path, device="cpu")
    many = predictor.embed([photos[number % 3] for number in range(130)])
    assert many.shape == (130, 64)
    torch.testing.assert_close(many[129], predictor.embed(photos[129 % 3]), rtol=1e-4, atol=1e-4)


def test_features_are_what_the_last_layer_sees(run: RunFolder, photos: list[Path]) -> None:
    predictor = sl.load(run.path, device="cpu", correct=False)
    weights = run.load_best()
    scores = predictor.embed(photos) @ weights["head.weight"].T + weights["head.bias"]
    torch.testing.assert_close(predictor.scores(photos), scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head", ["linear", "cosine", "scaled_cosine"])
def test_a_run_on_embeddings_takes_vectors(tmp_path: Path, head: Any) -> None:
    run = embedding_run(tmp_path / "run", head)
    predictor = sl.load(run.path, device="cpu")
    vectors = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    scores = predictor.scores(vectors)
    assert scores.shape == (5, 4)
    for given in (vectors.numpy(), vectors.double(), list(vectors), [row.numpy() for row in vectors]):
        torch.testing.assert_close(predictor.scores(given), scores)
    torch.testing.assert_close(predictor.scores(vectors[2]), scores[2])
    assert torch.equal(predictor.embed(vectors), vectors)
    assert [best[0].index for best in predictor.suggest(vectors, k=1)] == scores.argmax(1).tolist()


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_the_command_takes_files_of_vectors(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = embedding_run(tmp_path / "run")
    vectors = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    path = tmp_path / f"vectors{suffix}"
    save = {
        ".npy": lambda: np.save(path, vectors.numpy()),
        ".npz": lambda: np.savez(path, x=vectors.numpy(), other=np.zeros(2)),
        ".safetensors": lambda: safetensors.torch.save_file({"vectors": vectors}, path),
    }
    save[suffix]()
    monkeypatch.setattr(sys, "argv", ["shortlist", "predict", str(run.path), str(path), "-k", "3", "--json"])
    cli.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["file"], line["row"]) for line in lines] == [(str(path), row) for row in range(3)]
    wanted = sl.load(run.path, device="cpu").suggest(vectors, k=3)
    assert [[guess["index"] for guess in line["suggestions"]] for line in lines] == [
        [suggestion.index for suggestion in best] for best in wanted
    ]


def test_what_cannot_be_used_is_named(run: RunFolder, photos: list[Path], tmp_path: Path) -> None:
    predictor = sl.load(run.path, device="cpu")
    given: Any
    for given, message in (
        (np.zeros((4, 4, 3)), r"uint8 .*float64"),
        (np.zeros((4, 4, 2), dtype=np.uint8), r"\(4, 4, 2\)"),
        (torch.zeros(3, 4, 4), r"uint8 .*float32"),
        (torch.zeros(4, 4, 3, dtype=torch.uint8), r"\(C, H, W\)"),
        (7, "int"),
        (tmp_path / "missing.png", r"missing\.png"),
        ([], "none"),
    ):
        with pytest.raises(ShortlistError, match=message):
            predictor.suggest(given, k=1)
    for k in (0, 5, True, 1.5):
        with pytest.raises(ShortlistError, match=r"k must be in \[1, 4\]"):
            predictor.suggest(photos[0], k=k)  # type: ignore[arg-type]
    with pytest.raises(ShortlistError, match="no folder"):
        sl.load(tmp_path / "nowhere")
    vectors = sl.load(embedding_run(tmp_path / "vectors").path, device="cpu")
    for given, message in (
        (photos[0], "embeddings"),
        (torch.zeros(3, 6), r"\(3, 6\)"),
        (torch.zeros(3, 7, dtype=torch.int64), "int64"),
        ([torch.zeros(7), torch.zeros(6)], r"\(6,\)"),
    ):
        with pytest.raises(ShortlistError, match=message):
            vectors.suggest(given, k=1)
    (tmp_path / "broken.npz").write_bytes(b"nothing")
    for path, message in (("broken.npz", "cannot be read"), ("gone.npy", "no file"), ("0.png", "must end in")):
        with pytest.raises(ShortlistError, match=message):
            read_vectors(tmp_path / path)
    np.savez(tmp_path / "two.npz", a=np.zeros(3), b=np.zeros(3))
    with pytest.raises(ShortlistError, match="a, b"):
        read_vectors(tmp_path / "two.npz")


def test_a_folder_without_images_is_named_whatever_else_there_is(photos: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert image_files(photos) == (photos, [])
    with pytest.raises(ShortlistError, match=r"no image in .*empty"):
        image_files([*photos, tmp_path / "empty"])
