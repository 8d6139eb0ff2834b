"""The command that writes a run as files for other programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.table import Table

from shortlist.errors import ShortlistError
from shortlist.program.cli.output import print_table, say, show
from shortlist.program.cli.parsing import parse

if TYPE_CHECKING:
    from shortlist.program.predicting.export import Export

_SECONDS = 1.0  # that each speed is measured for
_BATCHES = (1, 32)


@dataclass(frozen=True)
class ExportArguments:
    run: Annotated[Path, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional]
    """Folder of the run, or its address on the hub, hf://OWNER/NAME."""
    out: Path | None = None
    """Folder for the files (default: export in the folder of the run, or here); or one file, such as birds.onnx."""
    format: tuple[Literal["onnx", "pt2", "timm"], ...] = ()
    """For onnxruntime, for torch.export.load, or weights for timm.create_model (default: onnx pt2)."""
    precision: Literal["float32", "float16", "int8"] = "float32"
    """Of the network; its last layer stays in float32. int8 is for onnx."""
    k: Annotated[int | None, tyro.conf.arg(aliases=["-k"])] = None
    """Number of suggestions (default: the K that the run was trained for)."""
    coverage: float | None = None
    """Sets of a calibrated run contain the right class with this probability (default: 0.9)."""
    of: Literal["classes", "photos"] = "classes"
    """What the coverage is of: classes on average, each counting the same, or photos."""
    average_k: float | None = None
    """Sets of this mean size, instead of a coverage."""
    root: str = ""
    """Where the data of the run is now, if it has moved."""


def export(arguments: list[str]) -> None:
    """Write a run as files for other programs: shortlist export RUN"""
    examples = (
        "shortlist export runs/birds                      model.onnx and model.pt2 in runs/birds/export",
        "shortlist export runs/birds --out birds.onnx -k 10 --coverage 0.95",
        "shortlist export runs/birds --precision int8     smaller, and less exact; needs the validation images",
        "shortlist export runs/birds --format timm        weights for timm.create_model",
    )
    parsed = parse(ExportArguments, arguments, "export", examples)
    if parsed.coverage is not None and not 0 < parsed.coverage < 1:
        raise ShortlistError(f"--coverage must be between 0 and 1, such as 0.9, got {parsed.coverage}")

    from shortlist.program.predicting.hub_runs import hub_address, open_run

    run = open_run(parsed.run)

    from shortlist.program.predicting.export import FOLDER, export_run

    out = parsed.out
    if out is None and hub_address(parsed.run):
        out = Path(FOLDER)  # nothing is written to the cache of the hub's library

    found = export_run(
        run,
        out,
        formats=parsed.format,
        precision=parsed.precision,
        k=parsed.k,
        coverage=parsed.coverage,
        of=parsed.of,
        average_k=parsed.average_k,
        root=parsed.root,
        say=say,
    )
    print_table(_agreement(found))
    if found.measured_on is not None:
        print()
        print_table(_accuracy(found))
    if any(file.agreement for file in found.files):
        print("\nLargest differences; those of scores in standard deviations of an image's scores.\n")
        print_table(_speed(found))
    print()
    for file in found.files:
        show(file.path)


def _agreement(found: "Export") -> Table:
    """How large the files are, and how they compare with the run."""
    headings = ("MB", "same suggestions, %", "scores differ by", "probabilities by", "equal sets, %")
    table = Table(f"on {found.compared_on.source}", *headings, box=None, pad_edge=False)
    for file in found.files:
        cells = ["-"] * 4
        if file.agreement is not None:
            there = file.agreement
            equal = None if there.equal_sets is None else 100 * there.equal_sets
            cells = [
                f"{100 * there.same:.1f}",
                f"{there.score:.1e}",
                _cell(there.probability, ".1e"),
                _cell(equal, ".1f"),
            ]
        table.add_row(file.path.name, f"{file.size / 1e6:.1f}", *cells)
    return table


def _accuracy(found: "Export") -> Table:
    """What a lower precision costs."""
    assert found.measured_on is not None
    headings = (f"{name}, %" for name in found.run_accuracy)
    table = Table(f"on {found.measured_on.source}", *headings, box=None, pad_edge=False)
    rows = [("the run, float32", found.run_accuracy), *((file.path.name, file.accuracy) for file in found.files)]
    for name, accuracy in rows:
        table.add_row(name, *(f"{100 * value:.2f}" for value in accuracy.values()))
    return table


def _speed(found: "Export") -> Table:
    """Images a second, beside the same network in torch."""
    import torch

    from shortlist.program.predicting.agreement import images_a_second
    from shortlist.program.predicting.check_inputs import as_batch
    from shortlist.program.predicting.exported_files import opened

    image, _ = next(iter(found.compared_on))
    size = " x ".join(map(str, as_batch(image).shape[1:]))
    headings = (f"in batches of {batch}" for batch in _BATCHES)
    table = Table(f"inputs a second on this CPU, each {size}", *headings, box=None, pad_edge=False)
    programs = {file.path.name: opened(file.path.read_bytes(), file.format) for file in found.files if file.agreement}
    with torch.inference_mode():
        timed = {"torch, float32": lambda inputs: found.model(torch.from_numpy(inputs))} | programs
        for name, program in timed.items():
            speeds = (images_a_second(program, image, batch, _SECONDS) for batch in _BATCHES)
            table.add_row(name, *(f"{speed:,.0f}" for speed in speeds))
    return table


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
