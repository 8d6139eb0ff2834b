"""The command that serves a run as a page and an API."""

import contextlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from shortlist.errors import ShortlistError
from shortlist.program.cli.output import say, say_unpromised
from shortlist.program.cli.parsing import parse
from shortlist.program.text import counted, some_of

if TYPE_CHECKING:
    from shortlist.program.serving.models import ServedModel

_PACKAGES = ("fastapi", "uvicorn", "python_multipart")
_MOST_K = 100  # as the API has it
_MOST_MEGAPIXELS = 170  # Pillow refuses larger ones itself


@dataclass(frozen=True)
class ServeArguments:
    run: Annotated[Path, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional]
    """Folder of the run, its address on the hub, hf://OWNER/NAME, or a file that it was exported to (.onnx)."""
    host: str = "127.0.0.1"
    """Address to serve at. The default can be reached from this machine alone; 0.0.0.0 from everywhere."""
    port: int = 8000
    """Port to serve at; 0 for any free one."""
    allow_host: tuple[str, ...] = ()
    """Other names by which people reach the server, such as plants.example.org."""
    k: Annotated[int | None, tyro.conf.arg(aliases=["-k"])] = None
    """Number of suggestions (default: the K that the run was trained for)."""
    coverage: float | None = None
    """The coverage that the page begins with (default: 0.9, for a calibrated run)."""
    of: Literal["classes", "photos"] = "classes"
    """What the coverage is of: classes on average, each counting the same, or photos."""
    prior: Path | None = None
    """CSV file: class names, then a column of weights for each place or month. One is chosen on the page."""
    examples: bool = False
    """Show training images of the suggested classes. Small copies are kept in the run."""
    root: str = ""
    """Where the data is now, if it has moved; for --examples."""
    record: Path | None = None
    """File for photos of which somebody says "none of these". Without it, nothing is kept."""
    rate: float = 10.0
    """Requests a second that one client may make; 0 for no limit."""
    max_megabytes: int = 20
    """Of one request."""
    max_megapixels: int = 50
    """Of one photo."""
    device: str = "auto"
    """Device to compute on: auto, cpu, cuda or mps."""


def serve(arguments: list[str]) -> None:
    """Serve a page and an API for photos: shortlist serve RUN"""
    examples = (
        "shortlist serve runs/birds                                   then open http://127.0.0.1:8000",
        "shortlist serve runs/birds --examples --coverage 0.95        after shortlist calibrate runs/birds",
        "shortlist serve runs/birds --prior months.csv --record unknown.jsonl",
        "shortlist serve runs/birds --host 0.0.0.0 --allow-host birds.example.org",
    )
    parsed = parse(ServeArguments, arguments, "serve", examples)
    _check(parsed)

    from shortlist.program.predicting.hub_runs import hub_address, open_run

    address = hub_address(parsed.run)
    is_file = address is None and parsed.run.suffix == ".onnx"
    if is_file and parsed.examples:
        raise ShortlistError("--examples are kept in the folder of a run: serve that instead of an exported file")
    if address is not None and parsed.examples:
        raise ShortlistError(
            "--examples are made from training images and kept in a run folder: leave it out for hf://"
        )

    from shortlist.program.runs.folder import RunFolder

    run = RunFolder(parsed.run) if is_file else None if address else open_run(parsed.run)
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise ShortlistError(f"serving needs the packages {', '.join(missing)}: pip install 'shortlist[serve]'")
    run = run or open_run(parsed.run)

    from shortlist.program.predicting.predictor import Predictor
    from shortlist.program.serving.app import Service, build_app
    from shortlist.program.serving.examples import examples_of
    from shortlist.program.serving.exported import open_file
    from shortlist.program.serving.limits import Limits
    from shortlist.program.serving.models import ServedModel, ServedRun
    from shortlist.program.serving.priors import read_prior
    from shortlist.program.serving.records import Record
    from shortlist.program.serving.server import address_of, listen, run_server

    limits = Limits(
        bytes_of_request=parsed.max_megabytes * 2**20,
        pixels_of_photo=parsed.max_megapixels * 10**6,
        requests_per_second=parsed.rate,
    )
    listening = listen(parsed.host, parsed.port)  # before the model is loaded: a port in use is told at once
    with listening:
        model: ServedModel
        if is_file:
            model = open_file(parsed.run)
        else:
            name = address.repository if address else run.path.resolve().name
            predictor = Predictor(run, parsed.device)
            model = ServedRun(predictor, name, run.path, limits.photos, parsed.of)
            if predictor.unpromised:
                say_unpromised(predictor.unpromised)
        _check_with_model(parsed, model)
        prior, unknown = read_prior(parsed.prior, model.classes) if parsed.prior else ({}, [])
        if unknown:
            which = counted(len(unknown), "name that is no class", "names that are no classes")
            say(f"{parsed.prior} has {which} of the run: {some_of(unknown)}; correct misspelt ones, others do no harm")
        service = Service(
            model=model,
            k=min(model.suggested, _MOST_K) if parsed.k is None else parsed.k,
            coverage=_first_coverage(parsed.coverage, model.coverages),
            prior=prior,
            examples=examples_of(run, parsed.root, say) if parsed.examples else {},
            record=Record(parsed.record) if parsed.record else None,
            limits=limits,
            allowed_hosts=(parsed.host, *parsed.allow_host),
        )
        app = build_app(service)
        if calibrate := _calibrate(parsed, model):
            say(f"suggestions have no probabilities until you run `{calibrate}`")
        say("Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):  # the usual end of a server
            run_server(app, listening, lambda: print(address_of(listening, parsed.host), flush=True))
    say("stopped")


def _check_with_model(parsed: ServeArguments, model: "ServedModel") -> None:
    most = min(model.most_suggested, _MOST_K)
    if parsed.k is not None and parsed.k > most:
        raise ShortlistError(f"-k must be at most {most}, got {parsed.k}: {parsed.run} has no more to suggest")
    calibrate = _calibrate(parsed, model)
    for option, value in (("--coverage", parsed.coverage), ("--prior", parsed.prior)):
        if value is not None and calibrate:
            raise ShortlistError(
                f"{option} needs probabilities, and {parsed.run} is not calibrated: run `{calibrate}` first"
            )
    if parsed.prior is not None and not model.takes_prior:
        raise ShortlistError(
            f"--prior needs all classes, and {parsed.run} tells the best alone: serve the run's folder"
        )


def _calibrate(parsed: ServeArguments, model: "ServedModel") -> str:
    """The command that the owner should run, with the path of the run; empty if there is no need."""
    return model.why_no_probabilities.replace(f" {model.name}", f" {parsed.run}")


def _first_coverage(asked: float | None, known: Sequence[float]) -> float | None:
    """The one that the page begins with; None if there are no sets."""
    from shortlist.program.serving.models import known_coverage

    if asked is not None:
        return known_coverage(asked, known)
    return min(known, key=lambda coverage: abs(coverage - 0.9), default=None)


def _check(parsed: ServeArguments) -> None:
    if parsed.coverage is not None and not 0 < parsed.coverage < 1:
        raise ShortlistError(f"--coverage must be between 0 and 1, such as 0.9, got {parsed.coverage}")
    if parsed.k is not None and not 1 <= parsed.k <= _MOST_K:
        raise ShortlistError(f"-k must be from 1 to {_MOST_K}, got {parsed.k}")
    if not 0 <= parsed.port < 2**16:
        raise ShortlistError(f"--port must be from 0 to 65535, got {parsed.port}")
    if not 0 <= parsed.rate < float("inf"):
        raise ShortlistError(f"--rate must be a number of requests a second, or 0 for no limit, got {parsed.rate}")
    if parsed.max_megabytes < 1 or not 1 <= parsed.max_megapixels <= _MOST_MEGAPIXELS:
        raise ShortlistError(
            f"--max-megabytes must be at least 1, and --max-megapixels from 1 to {_MOST_MEGAPIXELS}, got "
            f"{parsed.max_megabytes} and {parsed.max_megapixels}"
        )
    if parsed.root and not parsed.examples:
        raise ShortlistError("--root says where the images for --examples are: add --examples, or leave it out")
