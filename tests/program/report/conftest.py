"""Runs to report on and their page, made once for all tests."""

import shutil
from pathlib import Path

import pytest

from shortlist.program.losses import NoisedTopKHingeConfig
from shortlist.program.report.gather import Comparison, gather
from shortlist.program.report.page import write_report
from shortlist.program.runs.folder import RunFolder
from tests.support.report_pages import ODD_NAMES, Node, parsed
from tests.support.run_folders import World, make_run, small_world


@pytest.fixture(scope="session")
def world() -> World:
    return small_world(*ODD_NAMES)


@pytest.fixture(scope="session")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Three seeds of one loss, two of another, one of a third, and an unfinished run."""
    root = tmp_path_factory.mktemp("runs")
    made = [make_run(root / f"ce-{seed}", world, "cross_entropy", seed, skill=3.0) for seed in (0, 1, 2)]
    made += [make_run(root / f"ldam-{seed}", world, "ldam", seed, skill=2.0) for seed in (0, 1)]
    made.append(make_run(root / "noised", world, NoisedTopKHingeConfig(epsilon=0.3), skill=4.0))
    made.append(make_run(root / "focal", world, "focal", finished=False))
    return made


@pytest.fixture
def run(runs: list[RunFolder], tmp_path: Path) -> RunFolder:
    """A copy of the first run, to be changed."""
    return RunFolder(shutil.copytree(runs[0].path, tmp_path / "run"))


@pytest.fixture(scope="session")
def comparison(runs: list[RunFolder]) -> Comparison:
    (only,) = gather(runs)
    return only


@pytest.fixture(scope="session")
def page_path(runs: list[RunFolder], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(runs, tmp_path_factory.mktemp("page") / "compared.html")


@pytest.fixture(scope="session")
def page(page_path: Path) -> Node:
    return parsed(page_path.read_text(encoding="utf-8"))
