"""Run folders: whole files, no run overwritten, damage found and named."""

import itertools
import json
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from shortlist import ShortlistError
from shortlist.program.atomic_files import WRITING, written_whole
from shortlist.program.config import RunConfig, to_dict
from shortlist.program.runs.folder import FinishedError, RunFolder, as_safetensors, file_digest, find_runs
from tests.support.file_operations import watched
from tests.support.forked import Ended, run_forked


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "run")
    with folder.claim(RunConfig(), resume=False):
        yield folder


def no_warning(message: str) -> None:
    raise AssertionError(message)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)

    def claim_elsewhere() -> Ended:
        return run_forked(lambda: run.claim(RunConfig(), resume=False).__enter__(), seconds=60)

    with run.claim(RunConfig(), resume=False):
        assert f"{tmp_path} is in use by another process" in claim_elsewhere().err
    assert claim_elsewhere().code == 0


def test_a_run_that_got_nowhere_may_simply_begin_again(tmp_path: Path) -> None:
    for _ in range(2):
        with RunFolder(tmp_path).claim(RunConfig(), resume=False):
            pass


def test_a_run_that_begins_again_was_begun_by_the_process_that_does(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for commit in ("killed at once", "trained it all"):
        with run.claim(RunConfig(), resume=True):
            run.note_environment({"commit": commit, "dirty": False})
    assert run.read_json("environment.json") == {"commit": "trained it all", "dirty": False}


def test_a_run_names_the_programs_of_all_processes_that_trained_it(run: RunFolder) -> None:
    for commit, dirty in (("a" * 40, False), (None, None), ("b" * 40, True), ("a" * 40, False)):
        run.note_environment({"commit": commit, "dirty": dirty})
    assert run.commits() == ["a" * 10, "b" * 10 + "+changes"]


def test_an_interrupted_run_must_be_resumed_on_purpose(tmp_path: Path) -> None:
    with RunFolder(tmp_path).claim(RunConfig(), resume=True):
        RunFolder(tmp_path).save_checkpoint({}, 1)
    with (
        pytest.raises(ShortlistError, match="interrupted; add --resume"),
        RunFolder(tmp_path).claim(RunConfig(), resume=False),
    ):
        pass
    with RunFolder(tmp_path).claim(RunConfig(), resume=True):
        assert RunFolder.existing(tmp_path).config == RunConfig()


def test_another_configuration_is_not_overwritten_unless_nothing_was_trained(tmp_path: Path) -> None:
    with RunFolder(tmp_path).claim(RunConfig(), resume=False):
        pass
    config, other = replace(RunConfig(), seed=2), replace(RunConfig(), seed=1)
    with RunFolder(tmp_path).claim(config, resume=False):
        assert RunFolder(tmp_path).config == config
        RunFolder(tmp_path).save_checkpoint({}, 1)
    found = r"another configuration \(seed 2, not 1\)"
    with pytest.raises(ShortlistError, match=found), RunFolder(tmp_path).claim(other, resume=True):
        pass


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with run.claim(RunConfig(), resume=False):
        run.write_json("final.json", {})
    with pytest.raises(FinishedError, match="already finished"), run.claim(RunConfig(), resume=True):
        pass


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ShortlistError, match="holds no run"), RunFolder(tmp_path).claim(RunConfig(), resume=True):
        pass
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["thesis.tex"]


@pytest.mark.parametrize("content", ['{"architectures": ["BertModel"]}', '{"seed": 1}', "{}", "[]", "not even JSON"])
def test_a_configuration_of_another_program_is_no_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with (
        pytest.raises(ShortlistError, match="is not empty and holds no run"),
        RunFolder(tmp_path).claim(RunConfig(), resume=True),
    ):
        pass
    assert (tmp_path / "config.json").read_text() == content


def test_a_run_of_another_version_that_got_nowhere_may_begin_again(tmp_path: Path) -> None:
    settings = to_dict(RunConfig()) | {"a setting": "that was given up"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with RunFolder(tmp_path).claim(RunConfig(), resume=False):
        assert RunFolder(tmp_path).config == RunConfig()


def test_a_refused_folder_keeps_what_others_are_writing(tmp_path: Path) -> None:
    with written_whole(tmp_path / "runs" / "other" / "best.safetensors") as file:
        file.write(b"weights")
        with pytest.raises(ShortlistError, match="holds no run"):
            RunFolder(tmp_path / "runs").claim(RunConfig(), resume=False).__enter__()
    assert (tmp_path / "runs" / "other" / "best.safetensors").read_bytes() == b"weights"


def test_names_that_are_no_text_come_back(tmp_path: Path) -> None:
    names = [os.fsdecode(b"caf\xe9"), "café", "猫"]
    RunFolder(tmp_path).write_json("classes.json", names)
    assert RunFolder(tmp_path).read_json("classes.json") == names


def test_a_killed_writer_leaves_nothing_after_the_next_claim(tmp_path: Path) -> None:
    with RunFolder(tmp_path).claim(RunConfig(), resume=False):
        pass

    def die_while_writing() -> None:
        with written_whole(tmp_path / "final.json") as file:
            file.write(b"half")
            os.kill(os.getpid(), 9)

    assert run_forked(die_while_writing, seconds=60).killed
    assert list(tmp_path.glob(f"{WRITING}*"))
    with RunFolder(tmp_path).claim(RunConfig(), resume=True):
        assert not list(tmp_path.glob(f"{WRITING}*"))
        assert not RunFolder(tmp_path).finished


def test_a_full_disk_is_explained_and_leaves_the_old_checkpoint(run: RunFolder) -> None:
    run.save_checkpoint({"epoch": 1}, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ShortlistError, match=r"cannot write .*File too large; make room and give the command"):
            run.save_checkpoint({"weights": torch.zeros(1_000_000)}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.load_checkpoint(no_warning) == {"epoch": 1}
    assert not list(run.path.rglob(f"{WRITING}*"))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(run: RunFolder) -> None:
    for step in (1, 2):
        run.save_checkpoint({"step": step, "weights": torch.full((1000,), float(step))}, step)
    newest = max((run.path / "checkpoints").glob("*.pt"))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1  # one bit
    newest.write_bytes(bytes(content))
    warnings: list[str] = []
    state = run.load_checkpoint(warnings.append)
    assert state is not None
    assert state["step"] == 1
    assert str(newest) in warnings[0]
    newest.write_bytes(bytes(content[:100]))
    assert (run.load_checkpoint(warnings.append) or {})["step"] == 1


def test_two_checkpoints_are_kept(run: RunFolder) -> None:
    for step in range(5):
        run.save_checkpoint({"step": step}, step)
    assert len(list((run.path / "checkpoints").glob("*.pt"))) == 2
    assert run.load_checkpoint(no_warning) == {"step": 4}


def test_damaged_checkpoints_of_later_steps_do_not_push_out_new_ones(run: RunFolder) -> None:
    for step in (7, 8):
        run.save_checkpoint({"step": step}, step)
    for path in (run.path / "checkpoints").iterdir():
        path.write_bytes(b"rubbish")
    assert run.load_checkpoint(lambda message: None) is None
    for step in (1, 2, 3):
        run.save_checkpoint({"step": step}, step)
        assert run.load_checkpoint(no_warning) == {"step": step}
    assert len(list((run.path / "checkpoints").iterdir())) == 2


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("echo owned",)


def test_a_checkpoint_cannot_run_code_and_the_one_before_it_is_used(
    run: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    run.save_checkpoint({"payload": _Evil()}, 1)
    warnings: list[str] = []
    with pytest.raises(ShortlistError, match=r"000000001-.*\.pt cannot be used") as refused:
        run.load_checkpoint(warnings.append)
    assert "weights_only" not in str(refused.value)
    run.save_checkpoint({"step": 2}, 2)
    run.save_checkpoint({"payload": _Evil()}, 3)
    assert run.load_checkpoint(warnings.append) == {"step": 2}
    assert "000000003" in warnings[-1]
    assert "owned" not in capfd.readouterr().out


def test_damaged_best_weights_are_refused_by_name(run: RunFolder) -> None:
    run.save_best(as_safetensors({"w": torch.arange(4.0)}))
    assert torch.equal(run.load_best()["w"], torch.arange(4.0))
    best = run.path / "best.safetensors"
    run.write_json("final.json", {"best_sha256": file_digest(best)})
    best.write_bytes(safetensors.torch.save({"w": torch.arange(4.0) + 1}))
    with pytest.raises(ShortlistError, match=r"best\.safetensors is damaged: its checksum"):
        run.load_best()
    best.write_bytes(b"rubbish")
    (run.path / "final.json").unlink()
    with pytest.raises(ShortlistError, match=r"best\.safetensors is damaged"):
        run.load_best()


def test_half_lines_of_metrics_are_dropped(run: RunFolder) -> None:
    for epoch in range(3):
        run.append_metrics({"epoch": epoch})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "val')
    assert [line["epoch"] for line in run.metrics()] == [0, 1, 2]
    run.write_metrics(run.metrics()[:2])
    assert run.metrics() == [{"epoch": 0}, {"epoch": 1}]


def test_wrong_paths_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match="there is no folder"):
        RunFolder.existing(tmp_path / "nowhere")
    with pytest.raises(ShortlistError, match=r"is not a run: it has no config\.json"):
        RunFolder.existing(tmp_path)
    with RunFolder(tmp_path / "a" / "b").claim(RunConfig(), resume=False):
        pass
    with pytest.raises(ShortlistError, match=r"runs are further down, e\.g\. .*a/b"):
        RunFolder.existing(tmp_path)
    assert [found.path for found in find_runs([tmp_path, tmp_path / "a"])] == [tmp_path / "a" / "b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShortlistError, match="there is no run in"):
        find_runs([tmp_path / "empty"])


def test_killed_at_any_moment_of_writing_the_best_weights_a_run_still_has_some(tmp_path: Path) -> None:
    old, new = (as_safetensors({"weight": torch.full((3,), float(number))}) for number in (1, 2))

    def write_until(operation: int) -> Ended:
        def write() -> None:
            with watched(tmp_path, kill_before=operation):
                RunFolder(tmp_path).save_best(new)

        RunFolder(tmp_path).save_best(old)
        return run_forked(write, seconds=60)

    for operation in itertools.count(1):
        ended = write_until(operation)
        assert (tmp_path / "best.safetensors").read_bytes() in (old, new)
        if ended.code == 0:
            break
        assert ended.killed, ended
    assert operation > 6
