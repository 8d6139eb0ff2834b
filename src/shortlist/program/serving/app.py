"""The JSON API, and the page that uses it."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from math import isfinite
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp
from torch import Tensor

from shortlist import __version__
from shortlist.errors import ShortlistError
from shortlist.program.predicting.predictor import Suggestion
from shortlist.program.serving.batching import Batcher
from shortlist.program.serving.examples import Examples
from shortlist.program.serving.guard import Guard, error_content, retry_header
from shortlist.program.serving.limits import Limits, MemoryBudget, RateLimit, RefusedError
from shortlist.program.serving.models import Answer, ServedModel, known_coverage, log_weights_by_name
from shortlist.program.serving.records import Record
from shortlist.program.serving.uploads import FIELD, decoded_photos, received_photos
from shortlist.program.text import did_you_mean, some_of

MOST_SHOWN = 100  # suggestions of one answer or set
_MOST_COVERAGES = 10
_PAGE = {
    "/": ("index.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    "/app.js": ("app.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_DECODERS = max(1, min(4, os.cpu_count() or 1))  # threads; each may hold a decoded photo
_Result = TypeVar("_Result")


class SuggestedClass(BaseModel):
    """A class that the photos may show."""

    name: str
    index: int = Field(description="The place of the class among all classes, from 0.")
    score: float | None = Field(description="Higher is better; no probability. Null if it is not a finite number.")
    probability: float | None = Field(description="That the photos show this class. Null if the run is not calibrated.")
    examples: list[str] = Field(description="Addresses of example pictures; empty unless the owner shows them.")


class SuggestedSet(BaseModel):
    """As many classes as it takes to contain the right one with a chosen probability."""

    coverage: float
    of: str = Field(description="What the coverage is of: classes, each counting the same, or photos.")
    is_promised: bool = Field(
        description="False with several photos or a prior: the coverage was measured for single photos without one."
    )
    size: int = Field(description="How many classes the set has. It may be empty, or have all classes.")
    suggestions: list[SuggestedClass] = Field(description=f"The best of them, at most {MOST_SHOWN}.")


class SuggestAnswer(BaseModel):
    """What all photos of a request say together."""

    run: str
    version: str = Field(description="Of shortlist.")
    photos: int
    prior: str | None
    suggestions: list[SuggestedClass]
    sets: list[SuggestedSet]


class ClassEntry(BaseModel):
    name: str
    index: int
    examples: list[str]


class ClassList(BaseModel):
    run: str
    classes: list[ClassEntry]


class Health(BaseModel):
    status: str
    run: str
    version: str


class About(BaseModel):
    """What the page needs to know before the first photo."""

    run: str
    version: str
    classes: int
    suggested: int = Field(description="How many suggestions there are unless k says otherwise.")
    is_calibrated: bool
    calibrate: str = Field(description="The command that calibrates the run; empty if it is calibrated.")
    coverages: list[float] = Field(description="What coverage may be.")
    coverage: float | None = Field(description="The one that the page begins with.")
    priors: list[str] = Field(description="What prior may be.")
    has_examples: bool
    is_recording: bool
    most_photos: int
    most_bytes: int


class Recorded(BaseModel):
    photos: int


class ErrorAnswer(BaseModel):
    error: str = Field(description="The problem and the remedy, in a sentence.")


@dataclass(frozen=True)
class Service:
    """What is served, and how."""

    model: ServedModel
    k: int
    coverage: float | None = None
    """The one that the page begins with."""
    prior: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Weights of all classes, for each place or month."""
    examples: Examples = field(default_factory=dict)
    record: Record | None = None
    limits: Limits = field(default_factory=Limits)
    allowed_hosts: Collection[str] = ()


_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": description}
    for status, description in {
        400: "The form is malformed or holds no photo, or the server is not known by this name.",
        403: "A page of another site sent it.",
        408: "The photos took too long to arrive.",
        413: "Too many bytes, pixels or photos.",
        415: "Not multipart/form-data.",
        422: "A photo cannot be read, or a parameter is invalid.",
        429: "Too many requests of one client.",
        503: "Too many requests at the same time.",
    }.items()
}
_PHOTO_FILES = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}


def _form(**others: Any) -> dict[str, Any]:
    """The body of a request in the schema. It is read here, not by FastAPI, which would write files to the disk."""
    schema = {"type": "object", "required": [FIELD], "properties": {FIELD: _PHOTO_FILES, **others}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def build_app(service: Service) -> ASGIApp:
    """The application, for any ASGI server."""
    model, limits = service.model, service.limits
    # Folder names may not be valid UTF-8: Python holds such bytes as lone surrogates, which JSON cannot.
    names = [name.encode(errors="backslashreplace").decode() for name in model.classes]
    log_weights = log_weights_by_name(service.prior)
    budget = MemoryBudget(limits.bytes_at_once)
    batcher = Batcher(model.rows, limits.photos_waiting)
    threads = ThreadPoolExecutor(_DECODERS, "photos")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        batcher.close()
        threads.shutdown()

    app = FastAPI(
        title=f"shortlist: {model.name}",
        version=__version__,
        description="Suggestions for photos. All photos of a request are of one thing and get one answer.",
        openapi_url="/api/schema",
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        # Newer versions of FastAPI can report requests to a collector that the environment names. Older ones ignore it.
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        },
        lifespan=lifespan,
    )
    _explain_errors(app)

    async def in_thread(work: Callable[..., _Result], *arguments: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

    def prepared(contents: Sequence[bytes]) -> list[Tensor]:
        return [model.prepared(photo) for photo in decoded_photos(contents, model.channels, limits)]

    def suggested(item: Suggestion) -> SuggestedClass:
        return SuggestedClass(
            name=names[item.index],
            index=item.index,
            score=_finite(item.score),
            probability=_finite(item.probability),
            examples=_addresses(service.examples, item.index),
        )

    @app.post("/api/suggest", responses=_REFUSALS, openapi_extra=_form(), summary="Suggest classes for photos")
    async def suggest(
        request: Request,
        k: Annotated[int | None, Query(description="How many suggestions.")] = None,
        coverage: Annotated[list[float] | None, Query(description="Coverages of sets, in hundredths.")] = None,
        prior: Annotated[str | None, Query(description="A column of the prior.")] = None,
    ) -> SuggestAnswer:
        k = _checked_k(service.k if k is None else k, model.most_suggested)
        coverages = _checked_coverages(coverage or [], model)
        weights = _chosen(prior, log_weights)
        async with received_photos(request, limits, budget) as (contents, _):
            if len(contents) > model.most_photos:
                raise RefusedError(413, f"Too many photos: this model takes {model.most_photos} of one thing.")
            photos = await in_thread(prepared, contents)
        rows = await asyncio.gather(*map(asyncio.wrap_future, batcher.submit(photos)))
        answer: Answer = await in_thread(model.answer, rows, k, coverages, weights)
        return SuggestAnswer(
            run=model.name,
            version=__version__,
            photos=len(rows),
            prior=prior,
            suggestions=[*map(suggested, answer.suggestions)],
            sets=[
                SuggestedSet(
                    coverage=found.coverage,
                    of=model.of,
                    is_promised=found.is_promised,
                    size=len(found.suggestions),
                    suggestions=[*map(suggested, found.suggestions[:MOST_SHOWN])],
                )
                for found in answer.sets
            ],
        )

    if service.record is not None:
        record = service.record
        indices = {"type": "string", "description": "Indices of the classes that were suggested, with commas."}

        @app.post("/api/none-of-these", responses=_REFUSALS, openapi_extra=_form(suggested=indices))
        async def none_of_these(request: Request) -> Recorded:
            """Add the photos to the owner's record, without place and time."""
            async with received_photos(request, limits, budget) as (contents, fields):
                wrong = [names[index] for index in _indices(fields.get("suggested", ""), len(names))]

                def keep() -> None:
                    record.add(model.name, wrong, decoded_photos(contents, 3, limits))

                await in_thread(keep)
            return Recorded(photos=len(contents))

    @app.get("/api/classes")
    async def classes() -> ClassList:
        """All classes, in the order of their indices."""
        entries = [
            ClassEntry(name=name, index=index, examples=_addresses(service.examples, index))
            for index, name in enumerate(names)
        ]
        return ClassList(run=model.name, classes=entries)

    @app.get("/api/health")
    async def health() -> Health:
        """Answers while the server is up."""
        return Health(status="ok", run=model.name, version=__version__)

    @app.get("/api/about")
    async def about() -> About:
        """What can be asked for."""
        return About(
            run=model.name,
            version=__version__,
            classes=len(names),
            suggested=service.k,
            is_calibrated=not model.why_no_probabilities,
            calibrate=model.why_no_probabilities,
            coverages=[*model.coverages],
            coverage=service.coverage,
            priors=[*service.prior],
            has_examples=bool(service.examples),
            is_recording=service.record is not None,
            most_photos=min(limits.photos, model.most_photos),
            most_bytes=limits.bytes_of_request,
        )

    @app.get("/examples/{index}/{number}", include_in_schema=False)
    async def example(index: int, number: int) -> Response:
        pictures = service.examples.get(index, [])
        if not 0 <= number < len(pictures):
            raise HTTPException(404)
        return Response(pictures[number], media_type="image/webp", headers={"Cache-Control": "private, max-age=3600"})

    for path, (file, kind) in _PAGE.items():
        content = resources.files(__package__).joinpath("page", file).read_bytes()
        app.add_api_route(path, _static(content, kind), include_in_schema=False)
    # Around all of it, and so around the answers of FastAPI to errors too.
    return Guard(app, service.allowed_hosts, RateLimit(limits.requests_per_second))


def _static(content: bytes, kind: str) -> Callable[[], Any]:
    async def page() -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return page


def _explain_errors(app: FastAPI) -> None:
    """Every error is a sentence in JSON."""

    @app.exception_handler(ShortlistError)
    async def refused(request: Request, error: ShortlistError) -> Response:
        if not isinstance(error, RefusedError):
            raise error
        # What was not read of the request would be taken for the next one.
        headers = {**retry_header(error), "connection": "close"}
        return JSONResponse(error_content(str(error)), error.status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        found = error.errors()[0]
        return JSONResponse(error_content(f"{found['loc'][-1]}: {found['msg']}."), 422, {"connection": "close"})

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        sentences = {404: "There is nothing at this address.", 405: "This address does not take such requests."}
        return JSONResponse(error_content(sentences.get(error.status_code, str(error.detail))), error.status_code)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse(error_content("The server made a mistake. Its terminal says which."), 500)


def _checked_k(k: int, most_suggested: int) -> int:
    most = min(most_suggested, MOST_SHOWN)
    if not 1 <= k <= most:
        raise RefusedError(422, f"k must be from 1 to {most}, got {k}.")
    return k


def _checked_coverages(coverages: Sequence[float], model: ServedModel) -> list[float]:
    if coverages and model.why_no_probabilities:
        raise RefusedError(422, f"There are no sets yet: run `{model.why_no_probabilities}` first.")
    if len(coverages) > _MOST_COVERAGES:
        raise RefusedError(422, f"At most {_MOST_COVERAGES} coverages in one request, got {len(coverages)}.")
    try:
        return [known_coverage(coverage, model.coverages) for coverage in coverages]
    except ShortlistError as error:
        raise RefusedError(422, f"{error}.") from None


def _chosen(prior: str | None, log_weights: Mapping[str, Tensor]) -> Tensor | None:
    if prior is None:
        return None
    if prior not in log_weights:
        hint = did_you_mean(prior, log_weights) or (
            f": choose one of {some_of([*log_weights])}" if log_weights else ": the server was started without --prior"
        )
        raise RefusedError(422, f"There is no prior of this name{hint}")
    return log_weights[prior]


def _indices(text: str, num_classes: int) -> list[int]:
    words = [word for word in text.split(",") if word]
    if len(words) > MOST_SHOWN or not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise RefusedError(422, "suggested must be indices of classes, with commas between them.")
    indices = [int(word) for word in words]
    if any(index >= num_classes for index in indices):
        raise RefusedError(422, f"suggested must be indices below {num_classes}.")
    return indices


def _addresses(examples: Examples, index: int) -> list[str]:
    return [f"/examples/{index}/{number}" for number in range(len(examples.get(index, [])))]


def _finite(value: float | None) -> float | None:
    """JSON has no NaN, and not every version of FastAPI writes null for it."""
    return value if value is not None and isfinite(value) else None
