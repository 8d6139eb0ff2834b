"""Whatever is in the files of a run, a command answers with a sentence that names the file."""

import resource
from pathlib import Path

import pytest

from shortlist import ShortlistError
from shortlist.program.report.page import write_report
from shortlist.program.runs.folder import RunFolder
from tests.support.damaged_runs import few_damages, make_runs, unexplained
from tests.support.run_folders import make_run, small_world


def test_no_damaged_record_ends_in_a_traceback(tmp_path: Path) -> None:
    runs = make_runs(tmp_path)
    damages = list(few_damages(runs))
    assert unexplained(runs, damages, tmp_path, ("evaluate", "predict", "report")) == []
    of_whole_files = [damage for damage in damages if damage.what in ("null", "epoch = null")]
    assert unexplained(runs, of_whole_files, tmp_path, ("train --resume",)) == []


@pytest.mark.parametrize(
    "line",
    [
        "null",
        '{"epoch": 1, "val_macro_top5": -1}',
        '{"epoch": null}',
        '{"epoch": 0, "train_loss": "x"}',
        '{"epoch": true}',
    ],
)
def test_a_page_leaves_out_what_is_no_line_of_metrics(tmp_path: Path, line: str) -> None:
    run = make_run(tmp_path / "run", small_world(), "cross_entropy")
    good = write_report([run], tmp_path / "good.html").read_bytes()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    assert write_report([run], tmp_path / "page.html").read_bytes() == good


def test_a_page_that_does_not_fit_on_the_disk_gives_no_advice_about_training(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", small_world(), "cross_entropy")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ShortlistError, match=r"page\.html.*File too large; make room") as told:
            write_report([RunFolder(run.path)], tmp_path / "page.html")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "train" not in str(told.value)
