"""The command: a real server from its start to Ctrl-C, and a sentence with the remedy for what cannot be served."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shortlist.program.cli import main as cli
from shortlist.program.predicting.calibration import calibrate
from shortlist.program.predicting.predictor import Predictor
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.scores import Scores
from tests.program.predicting.test_predictor import embedding_run
from tests.support.run_folders import untrained_run
from tests.support.scored_runs import drawn, made_run
from tests.support.serving import form, indices, opened, photo


@pytest.fixture
def server(run: RunFolder, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "shortlist", "serve", str(run.path), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--record", str(tmp_path / "record.jsonl")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    yield process
    process.kill()
    process.communicate()


def test_a_server_starts_answers_and_ends_with_ctrl_c(
    server: "subprocess.Popen[str]", run: RunFolder, predictor: Predictor, tmp_path: Path
) -> None:
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:")
    with httpx.Client(base_url=address, timeout=30) as client:
        found = client.post("/api/suggest?k=4&coverage=0.8", files=form(photo(2))).json()
        assert indices(found["suggestions"]) == [item.index for item in predictor.suggest(opened(photo(2)), k=4)]
        assert "text/html" in client.get("/").headers["content-type"]
        assert "server" not in client.get("/").headers
        assert client.get("/api/health", headers={"host": "evil.example"}).status_code == 400
        # A request that is refused before it was read in full, and then another one on a connection of its own.
        assert client.post("/api/suggest", files=form(bytes(21 * 2**20))).status_code == 413
        assert client.post("/api/none-of-these", files=form(photo(1))).json() == {"photos": 1}
        assert (tmp_path / "record.jsonl").read_text().count("\n") == 1
    server.send_signal(signal.SIGINT)
    rest, messages = server.communicate(timeout=30)
    assert server.returncode == 0
    assert rest == ""
    assert messages.splitlines()[-1] == "stopped"
    assert "Traceback" not in messages
    assert "127.0.0.1" not in messages, "requests are not logged"


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["shortlist", "serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_what_cannot_be_served_is_told_with_the_remedy(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = str(untrained_run(tmp_path / "plain", ["ash", "elm", "fir"]).path)
    vectors = str(embedding_run(tmp_path / "vectors").path)
    (tmp_path / "prior.csv").write_text("class,x\nash,1\n")
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        for arguments, facts in (
            ([str(tmp_path / "nowhere")], ["no folder"]),
            ([plain, "--port", port], [f"port {port}", "--port 0"]),
            ([plain, "--port", "0", "--coverage", "0.9"], ["--coverage", f"shortlist calibrate {plain}"]),
            ([plain, "--port", "0", "--prior", str(tmp_path / "prior.csv")], ["--prior", "shortlist calibrate"]),
            ([str(run.path), "--port", "0", "--prior", str(tmp_path / "prior.csv")], ["8 classes", "bird 0"]),
            ([str(run.path), "--port", "0", "--prior", str(tmp_path / "none.csv")], ["none.csv"]),
            ([vectors, "--port", "0"], ["embeddings"]),
            ([plain, "--port", "70000"], ["--port", "70000"]),
            ([plain, "--port", "0", "-k", "4"], ["-k", "3"]),
            ([plain, "-k", "0"], ["-k", "0"]),
            ([plain, "--coverage", "1.5"], ["--coverage", "1.5"]),
            ([str(run.path), "--port", "0", "--coverage", "0.905"], ["coverage", "0.905", "0.99"]),
            ([str(tmp_path / "no.onnx"), "--port", "0"], ["no.onnx"]),
            ([str(tmp_path / "no.onnx"), "--examples"], ["--examples", "folder"]),
            ([plain, "--rate", "-1"], ["--rate"]),
            ([plain, "--max-megapixels", "1000"], ["--max-megapixels", "1000"]),
            ([plain, "--root", "photos"], ["--examples"]),
            ([plain, "--host", "nowhere.invalid"], ["--host", "nowhere.invalid"]),
            ([plain, "--host", "192.0.2.1"], ["--host", "192.0.2.1"]),
            ([plain, "--port", "0", "--record", str(tmp_path / "no/record")], ["--record"]),
        ):
            message = refusal(monkeypatch, capsys, *arguments, "--device", "cpu")
            for fact in facts:
                assert fact in message, arguments


def test_classes_that_a_coverage_promises_nothing_for_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    test = drawn(600, 2)
    others = test.labels != 6
    unseen = Scores(test.scores[others], test.labels[others], test.images[others])
    run = made_run(tmp_path / "run", drawn(600, 1), unseen)
    calibrate(run)
    message = refusal(monkeypatch, capsys, str(run.path), "--port", "0", "--device", "cpu", "-k", "99")  # so it ends
    assert "bird 6" in message
    assert "bird 5" not in message


def test_a_missing_extra_is_named(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else find(name))
    message = refusal(monkeypatch, capsys, str(run.path), "--port", "0")
    assert "uvicorn" in message
    assert "shortlist[serve]" in message
