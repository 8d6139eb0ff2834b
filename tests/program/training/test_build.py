"""Runs that are refused before anything is trained or written, and what is freed between runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shortlist import ShortlistError
from shortlist.program import recipes
from shortlist.program.config import ModelConfig, TrainConfig
from shortlist.program.losses import CrossEntropyConfig, LDAMConfig
from shortlist.program.training.build import free_earlier_runs
from shortlist.program.training.loop import train
from tests.support.pictures import put_classes
from tests.support.small_runs import photos_config, small_config, write_embeddings


def test_a_metric_of_no_class_is_refused_before_training(tmp_path: Path) -> None:
    settings = TrainConfig(epochs=2, batch_size=16, ks=(1, 3), device="cpu", select="many_top3")
    data = write_embeddings(tmp_path / "few.npz", images=120)
    with pytest.raises(ShortlistError, match=r"train\.select = many_top3 is undefined"):
        train(small_config(data, train=settings), folder=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_cosines_are_scaled_once(tmp_path: Path) -> None:
    data = write_embeddings(tmp_path / "points.npz", images=20)
    config = small_config(data, model=ModelConfig(name="none", head="cosine"), loss=CrossEntropyConfig())
    with pytest.raises(ShortlistError, match=r"model\.head must be linear or scaled_cosine for cross_entropy"):
        train(config, folder=tmp_path / "run", quiet=True)
    config = small_config(data, model=ModelConfig(name="none", head="scaled_cosine"), loss=LDAMConfig(k=2))
    with pytest.raises(ShortlistError, match=r"model\.head must be cosine for ldam"):
        train(config, folder=tmp_path / "run", quiet=True)


def test_a_run_is_no_class(tmp_path: Path) -> None:
    put_classes(tmp_path / "photos", {"elm": 12, "owl": 12})
    with pytest.raises(ShortlistError, match="the folder of the run, must not be in"):
        train(photos_config(tmp_path / "photos"), folder=tmp_path / "photos" / "runs" / "first", quiet=True)
    for part in ("train", "val"):
        put_classes(tmp_path / "split" / part, {"elm": 12, "owl": 12})
    assert train(photos_config(tmp_path / "split"), folder=tmp_path / "split" / "runs", quiet=True).finished


def test_what_was_compiled_serves_until_another_network_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[str] = []
    config = recipes.build("cifar100_table4_noised_p00")
    config = replace(config, train=replace(config.train, compile=True))
    for network in ("first", "first", "second", "first"):
        monkeypatch.setattr(torch.compiler, "reset", lambda network=network: resets.append(network))
        free_earlier_runs(replace(config, model=replace(config.model, name=network)))
    assert resets == ["first", "second", "first"]
