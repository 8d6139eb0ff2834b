"""A small share of ``make torture``: the same cases, through the same functions."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.torture.__main__ import QUICK
from tests.torture.bad_calls import BadCalls
from tests.torture.calls import Calls
from tests.torture.cases import Part, Tally, as_markdown


def test_runs_survive_kills_and_damage() -> None:
    """In a process of its own: children may be forked only where torch has started no threads."""
    command = [sys.executable, "-m", "tests.torture", "--quick", "--only", "kills", "folders"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", [Calls, BadCalls], ids=lambda kind: kind.name)
def test_calls_give_the_right_number_or_a_shortlist_error(kind: type[Part], tmp_path: Path) -> None:
    part = kind(0, tmp_path)
    tally = Tally(part.name, part.promise, seed=0)
    with torch.random.fork_rng(devices=[]):
        tally.add(map(part.run, part.share(QUICK[part.name])))
    assert not tally.failed, as_markdown([tally])
