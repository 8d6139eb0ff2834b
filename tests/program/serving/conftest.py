"""A run to serve, made once for all tests of a file."""

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from shortlist.program.predicting.predictor import Predictor
from shortlist.program.runs.folder import RunFolder
from tests.support.serving import calibrated_run, client_of, service_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return calibrated_run(tmp_path_factory.mktemp("runs") / "birds")


@pytest.fixture(scope="module")
def predictor(run: RunFolder) -> Predictor:
    return Predictor(run, "cpu")


@pytest.fixture(scope="module")
def client(run: RunFolder) -> Iterator[TestClient]:
    with client_of(service_of(run)) as client:
        yield client
