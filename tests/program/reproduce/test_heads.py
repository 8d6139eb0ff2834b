"""Every last layer on every network."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shortlist as sl
from shortlist.program.cli import research
from shortlist.program.config import RunConfig
from shortlist.program.documents import END, begin_mark
from shortlist.program.losses import BalancedSoftmaxConfig, CrossEntropyConfig, NoisedTopKHingeConfig
from shortlist.program.reproduce.comparison_results import Found, Loss
from shortlist.program.reproduce.heads import LOSSES, mean_of, read_heads, train_heads
from shortlist.program.reproduce.rare_classes import write_rare_classes
from shortlist.program.runs.folder import RunFolder, default_folder
from shortlist.program.training.loop import train
from tests.support.pictures import put_classes
from tests.support.reproducing import ROOT
from tests.support.small_runs import photos_config


def found_for(configs: dict[str, RunConfig]) -> Found:
    return Found((), tuple(Loss(name, name, "complete", config, (), 0, ()) for name, config in configs.items()))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    """A working folder with a network of every loss, and a last layer of every loss on each."""
    folder = tmp_path_factory.mktemp("heads")
    put_classes(folder / "photos", {"ash": 9, "elm": 6, "oak": 4})
    base = photos_config(folder / "photos", epochs=1, val_fraction=0.2)
    losses = (
        CrossEntropyConfig(k=1),
        BalancedSoftmaxConfig(k=1),
        NoisedTopKHingeConfig(k=1),
        NoisedTopKHingeConfig(k=2),
    )
    found = found_for({name: replace(base, loss=loss) for name, loss in zip(LOSSES, losses, strict=True)})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SHORTLIST_DATA", str(folder / "cache"))
        for loss in found.losses:
            assert loss.config is not None
            train(loss.config, folder=default_folder(loss.config), quiet=True)
        train_heads(found, seeds=(0,), results=folder / "results")
    return folder, found


def test_every_pair_is_trained_on_the_features_of_its_network(place: tuple[Path, Found]) -> None:
    folder, _ = place
    runs = read_heads(folder / "results/rare-heads.json")
    assert [(run.backbone, run.head) for run in runs] == [(backbone, head) for backbone in LOSSES for head in LOSSES]
    assert all(mean_of(runs, run.backbone, run.head, "macro_top1") is not None for run in runs)
    frozen = [RunFolder(path) for path in (folder / "runs/custom").iterdir() if RunFolder(path).config.model.frozen]
    assert len(frozen) == 16
    for run in frozen:
        network = RunFolder(folder / run.config.model.weights).load_best()
        layers = [name for name in network if name.startswith("backbone.")]
        ours = run.load_best()
        assert layers
        assert all(torch.equal(ours[name], network[name]) for name in layers)


def test_a_second_call_trains_nothing_and_writes_the_same(
    place: tuple[Path, Found], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = place
    monkeypatch.chdir(folder)
    before = sorted(path.stat().st_mtime_ns for path in folder.rglob("final.json"))
    path = train_heads(found, seeds=(0,), results=tmp_path)
    assert path.read_text() == (folder / "results/rare-heads.json").read_text()
    assert sorted(path.stat().st_mtime_ns for path in folder.rglob("final.json")) == before


def test_the_page_shows_the_table(place: tuple[Path, Found], tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(place[0] / "results", results)
    shutil.copy(ROOT / "results/rare-feathers-frozen.json", results)
    begin = begin_mark("shortlist reproduce --document")
    (tmp_path / "rare-classes.md").write_text(f"# Mine\n\n{begin}\n{END}\n")
    page = write_rare_classes(results, tmp_path).read_text()
    part = page.partition("## Every last layer on every network")[2]
    mean = mean_of(read_heads(results / "rare-heads.json"), "cross_entropy", "noised_k1", "macro_top1")
    assert mean is not None
    assert f"{100 * mean.mean:.1f}" in part
    assert "16 runs" in part


def test_what_is_missing_is_named(place: tuple[Path, Found], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, found = place
    monkeypatch.chdir(folder)
    with pytest.raises(sl.ShortlistError, match="cross_entropy, seed 7"):
        train_heads(found, seeds=(7,), results=tmp_path)
    with pytest.raises(sl.ShortlistError, match="noised_k5"):
        train_heads(Found((), found.losses[:-1]), seeds=(0,), results=tmp_path)
    with pytest.raises(sl.ShortlistError, match="no tiny version"):
        research.reproduce(["rare-heads", "--scale", "smoke"])
    (tmp_path / "rare-heads.json").write_text("[{}]")
    with pytest.raises(sl.ShortlistError, match=r"rare-heads\.json"):
        read_heads(tmp_path / "rare-heads.json")
