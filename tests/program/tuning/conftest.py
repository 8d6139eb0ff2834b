"""A small run to search settings for, in a working folder of its own."""

from dataclasses import replace
from pathlib import Path

import pytest

from shortlist.program.config import RunConfig
from shortlist.program.losses import SmoothTopKHingeConfig
from tests.support.small_runs import small_config, write_embeddings
from tests.support.studies import EPOCHS


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embeddings(tmp_path_factory.mktemp("data") / "points.npz", images=200)


@pytest.fixture
def config(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A small run. The paper's grid for its loss has two points."""
    monkeypatch.chdir(tmp_path)
    small = small_config(data, recipe="embeddings", loss=SmoothTopKHingeConfig(k=3))
    return replace(small, train=replace(small.train, epochs=EPOCHS, batch_size=64))
