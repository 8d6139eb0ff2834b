"""``shortlist compare``: what may be compared, and mistakes told before any work."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from shortlist import ShortlistError
from shortlist.program.cli import main as cli
from shortlist.program.compare import running
from shortlist.program.compare.candidates import CANDIDATES
from tests.support.comparing import DATA

MISTAKES = [
    ("compare photoz", "'photoz'"),
    ("compare smoek", "did you mean smoke"),
    ("compare points.npz --losses cross_entropy ldamm", "'ldamm'.* did you mean ldam"),
    ("compare points.npz --losses ldam", "--losses .*two"),
    ("compare points.npz --loss.name ldam", "loss.name .*--losses"),
    ("compare points.npz --loss.epsilon 3", "loss.epsilon .*--losses"),
    ("compare points.npz --model.head linear", "model.head"),
    ("compare points.npz --seed 3", "seed .*--seeds"),
    ("compare points.npz --seeds 0 0", "--seeds .*0 0"),
    ("compare points.npz --trials -1", "--trials .*-1"),
    ("compare points.npz --search-epochs 0", "--search-epochs .*0"),
    ("compare points.npz --losses ldam cross_entropy --search loss.gamma=1,2", "loss.gamma"),
    ("compare points.npz --search optim.lr=1,x", "optim.lr=1,x"),
    ("compare points.npz --search optim.lr=1,2 --search optim.momentum=0,1", "--search .*once"),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path(DATA).touch()
    return tmp_path


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_a_mistake_is_told_before_any_work(
    line: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shortlist", *line.split()])
    with pytest.raises(SystemExit):
        cli.main()
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in Path().iterdir()] == [DATA]


@pytest.fixture
def asked(place: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command line, and returns what it asks for instead of doing it."""

    def ask(line: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def record(base: Any, candidates: Any, budget: Any, **options: Any) -> None:
            found.update(base=base, candidates=candidates, budget=budget, **options)
            raise ShortlistError("recorded")

        monkeypatch.setattr(running, "compare", record)
        monkeypatch.setattr(sys, "argv", ["shortlist", *line.split()])
        with pytest.raises(SystemExit):
            cli.main()
        return found

    return ask


def test_data_is_a_folder_of_images_a_file_of_embeddings_or_a_recipe(asked: Any) -> None:
    Path("photos").mkdir()
    for data, recipe, root in (("photos", "folder", "photos"), (DATA, "embeddings", DATA), ("smoke", "smoke", "")):
        base = asked(f"compare {data}")["base"]
        assert (base.recipe, base.data.root) == (recipe, root)


def test_every_option_reaches_the_comparison(asked: Any) -> None:
    usual = asked(f"compare {DATA}")
    assert [candidate.name for candidate in usual["candidates"]] == [*CANDIDATES]
    assert (usual["seeds"], usual["budget"].epochs) == ((0, 1, 2), usual["base"].train.epochs)
    assert usual["out"].parent == Path("runs", "compare")
    options = "--losses focal mixture --seeds 4 5 --trials 3 --search-epochs 2 --search optim.lr=1,2 --storage s.db"
    found = asked(f"compare {DATA} {options} --lost-after 2.5 --out there --train.epochs 7 --loss.k 3")
    budget = found["budget"]
    assert [candidate.name for candidate in found["candidates"]] == ["focal", "mixture"]
    assert (found["seeds"], found["out"]) == ((4, 5), Path("there"))
    assert (budget.trials, budget.epochs, budget.search) == (3, 2, ("optim.lr=1,2",))
    assert (budget.storage, budget.lost_after) == ("s.db", 2.5)
    assert {"train.epochs", "loss.k"} <= {*budget.fixed}
    assert (found["base"].train.epochs, found["base"].loss.k) == (7, 3)
