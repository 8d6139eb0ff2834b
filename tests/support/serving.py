"""Photos, forms and applications for the tests of the server."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from starlette.testclient import TestClient

import shortlist as sl
from shortlist.program.predicting.calibration import calibrate
from shortlist.program.predicting.predictor import Predictor
from shortlist.program.runs.folder import RunFolder
from shortlist.program.serving.app import Service, build_app
from shortlist.program.serving.limits import Limits
from shortlist.program.serving.models import ServedRun
from tests.support.scored_runs import drawn, made_run

HOST = "http://127.0.0.1:8000"
NO_RATE = Limits(requests_per_second=0)


def calibrated_run(folder: Path) -> RunFolder:
    """Eight classes, random weights."""
    run = made_run(folder, drawn(600, 1), drawn(600, 2))
    calibrate(run)
    return run


def photo(number: int = 0, kind: str = "PNG", size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    """An image file with two colours that depend on a number."""
    image = Image.new("RGB", size, (37 * number % 256, 90, 200 - 23 * number % 200))
    image.paste((250, 11 * number % 256, 30), (0, 0, size[0] // 2, 1 + (number * 7) % size[1]))
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


def form(*photos: bytes) -> Any:
    """The files of a request."""
    return [("photos", (f"{number}.jpg", content, "image/jpeg")) for number, content in enumerate(photos)]


def service_of(run: RunFolder, **settings: Any) -> Service:
    model = ServedRun(Predictor(run, "cpu"), run.path.name, run.path, 8)
    usual = Service(model, k=3, coverage=0.9 if sl.load(run.path, "cpu").is_calibrated else None, limits=NO_RATE)
    return replace(usual, **settings)


@contextmanager
def client_of(service: Service, base_url: str = HOST) -> Iterator[TestClient]:
    with TestClient(build_app(service), base_url) as client:
        yield client


def indices(suggestions: Sequence[dict[str, Any]]) -> list[int]:
    return [item["index"] for item in suggestions]
