"""The entry point: help, mistakes, pipes and signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import shortlist
from shortlist.program.cli import main as cli
from shortlist.program.training.signals import stop_requests

CONSOLE = [sys.executable, "-m", "shortlist"]


def run_shortlist(*arguments: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return run_command([*CONSOLE, *map(str, arguments)], **environment)


def run_command(command: list[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command as a terminal would: with interrupts, which a background process may have been told to ignore."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


# Help and mistakes

WITHOUT_TORCH = [
    "",
    "--help",
    "--version",
    "help",
    "help train",
    "trian",
    "train",
    "train smokee",
    "train smoke --help",
    "train smoke --loss.kk 3",
    "train smoke --loss.k -1",
    "tune --help",
    "evaluate --help",
    "evaluate",
    "predict --help",
    "report --help",
    "reproduce",
    "reproduce tabel",
    "reproduce --help",
    "datasets",
    "datasets cifar",
    "bench --help",
    "bench --sweet",
    "demo --help",
    "evaluate /nowhere",
    "predict /nowhere photo.jpg",
    "report /nowhere",
]


def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    code = f"""
import contextlib, io, json, sys
from shortlist.program.cli import main as cli
loaded = []
for line in {WITHOUT_TORCH!r}:
    sys.argv = ["shortlist", *line.split()]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        cli.main()
    assert said.getvalue(), line
    if "torch" in sys.modules:
        loaded.append(line)
        break
print(json.dumps(loaded))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_the_version_is_printed() -> None:
    done = run_shortlist("--version")
    assert (done.returncode, done.stdout) == (0, f"shortlist {shortlist.__version__}\n")


def test_help_for_a_command_is_that_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["shortlist", *arguments])
        code: object = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
        return code, *capfd.readouterr()

    assert said("help", "evaluate")[1] == said("evaluate", "--help")[1] != ""
    assert all(name in said("help")[1] for name in cli.COMMANDS)
    code, _, error = said("help", "evalute")
    assert code == 2
    assert "evaluate" in error


def test_data_of_a_single_class_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.npz"
    np.savez(data, x=np.ones((20, 4), np.float32), y=np.zeros(20, np.int64))
    arguments = ["train", "embeddings", "--data.root", str(data), "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["shortlist", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    said = capfd.readouterr().err
    assert "at least 2 classes" in said
    assert "--loss.k 0" not in said


# Pipes


@pytest.mark.parametrize("arguments", [["-h"], ["train", "smoke", "-h"], ["reproduce"]], ids=" ".join)
def test_a_reader_that_stops_reading_help_sees_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*CONSOLE, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.stderr == ""


# Signals


def test_an_interrupt_that_an_import_would_swallow_ends_the_program(tmp_path: Path) -> None:
    """The import of NumPy did: when interrupted, it failed with a RecursionError."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    raise RecursionError\n"
    )
    done = run_shortlist("train", "smoke", "--out", tmp_path / "run", PYTHONPATH=f"{tmp_path}:{':'.join(sys.path)}")
    assert (done.returncode, done.stderr) == (130, "")


def test_an_interrupt_while_stopping_kills_without_a_traceback() -> None:
    code = """
import atexit, signal, sys
from shortlist.program.cli import main as cli
cli.COMMANDS["demo"] = lambda arguments: signal.raise_signal(signal.SIGINT)
atexit.register(signal.raise_signal, signal.SIGINT)  # while Python shuts down
sys.argv = ["shortlist", "demo"]
cli.main()
"""
    done = run_command([sys.executable, "-c", code])
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "shortlist demo: stopped\n")


def test_the_first_request_waits_the_second_raises_and_the_third_kills() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_requests() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


def test_a_killed_loader_process_is_told_in_a_sentence(tmp_path: Path) -> None:
    write_images(tmp_path / "photos", classes=3, images=40)
    settings = "--model.name glyphnet --model.no-pretrained --model.head linear --data.image-size 32 --data.workers 1"
    settings += " --loss.name cross_entropy --loss.k 1 --train.ks 1 --train.epochs 1000 --optim.milestones"
    arguments = ["train", "folder", *settings.split(), "--data.root", tmp_path / "photos", "--out", tmp_path / "run"]
    with subprocess.Popen([*CONSOLE, *map(str, arguments)], stderr=subprocess.PIPE, text=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while process.poll() is None:  # a worker may just have finished; then the next one is killed
            for worker in children.read_text().split():
                if (tmp_path / "run" / "checkpoints").exists():
                    os.kill(int(worker), signal.SIGKILL)
            time.sleep(0.01)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 1
    assert "Traceback" not in said
    assert "--data.workers" in said
    assert "--resume" in said


def write_images(root: Path, *, classes: int, images: int) -> None:
    random = np.random.default_rng(0)
    for label in range(classes):
        (root / f"class {label}").mkdir(parents=True)
        for number in range(images):
            pixels = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / f"class {label}" / f"{number}.png")
