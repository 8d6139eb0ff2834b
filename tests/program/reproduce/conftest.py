"""Places to train in."""

from pathlib import Path

import pytest

from tests.support.reproducing import Place, TrainedPlaces


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedPlaces:
    return TrainedPlaces(tmp_path_factory.mktemp("trained"))
