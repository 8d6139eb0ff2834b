"""The command that gives a run more classes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shortlist.program.cli.output import say, show
from shortlist.program.cli.parsing import parse


@dataclass(frozen=True)
class AddClassArguments:
    run: Annotated[Path, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional]
    """Folder of the run. It is not changed."""
    folder: Annotated[Path, tyro.conf.arg(metavar="FOLDER"), tyro.conf.Positional]
    """Photos of one class, whose name is the folder's, or a folder for each class; for embeddings, files of vectors."""
    out: Path | None = None
    """Folder of the new run (default: beside the other, with the name of the class)."""
    root: str = ""
    """Where the data of the run is now, if it has moved."""


def add_class(arguments: list[str]) -> None:
    """Add classes from a few photos, without training again: shortlist add-class RUN FOLDER"""
    examples = (
        "shortlist add-class runs/birds photos/owl            the class owl; a new run runs/birds+owl",
        "shortlist add-class runs/birds new_species --out runs/more_birds",
    )
    parsed = parse(AddClassArguments, arguments, "add-class", examples)

    from shortlist.program.runs.folder import RunFolder

    run = RunFolder.existing(parsed.run)

    from shortlist.program.predicting.add_class import add_classes
    from shortlist.program.runs.records import read_classes
    from shortlist.program.text import counted

    child = add_classes(run, parsed.folder, parsed.out, root=parsed.root, say=say)
    photos = read_classes(child).train_images[len(read_classes(run).names) :]
    show(f"{child.path}  {counted(len(photos), 'class', 'classes')} added from {counted(sum(photos), 'photo')}")
