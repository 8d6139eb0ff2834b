"""The command that uploads a run to the Hugging Face hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shortlist.program.cli.output import say, show
from shortlist.program.cli.parsing import parse


@dataclass(frozen=True)
class PushArguments:
    run: Annotated[Path, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional]
    """Folder of a finished run."""
    repository: Annotated[str, tyro.conf.arg(metavar="OWNER/NAME"), tyro.conf.Positional]
    """Repository on the hub. It is created if need be."""
    public: bool = False
    """Everybody may read it; without, you alone."""
    pictures: bool = False
    """Upload the small copies of test and training images that the run keeps, too."""


def push(arguments: list[str]) -> None:
    """Upload a run to the Hugging Face hub: shortlist push RUN OWNER/NAME"""
    examples = (
        "shortlist push runs/birds me/birds              for yourself; then shortlist predict hf://me/birds photo.jpg",
        "shortlist push runs/birds me/birds --public     for everybody",
    )
    parsed = parse(PushArguments, arguments, "push", examples)

    from shortlist.program.runs.folder import RunFolder

    run = RunFolder.existing(parsed.run)

    from shortlist.program.predicting.push import push_run

    url = push_run(run, parsed.repository, public=parsed.public, pictures=parsed.pictures)
    say(f'load it with sl.load("hf://{parsed.repository}")')
    show(url)
