"""On two processes, accelerate repeats images to fill its batches, and the example counts each of them once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate_processes import loader, scores_of
from long_tail import NUM_CLASSES, Samples, embeddings

import shortlist as sl
from tests.support.examples import run_example
from tests.support.processes import run_as_torchrun

IMAGES = 397


def test_the_example_runs_on_one_process() -> None:
    assert f"1 processes, {IMAGES} validation images" in run_example("accelerate_processes", "--epochs", "1")


def numbered_images() -> Samples:
    """Vectors that hold nothing but the number of their image."""
    return Samples(torch.arange(float(IMAGES)).unsqueeze(1), embeddings(held_out_of_class=14).val.labels[:IMAGES])


def work(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    network = torch.nn.Identity()
    batches: Any = accelerator.prepare(loader(numbered_images()))
    numbers, labels = scores_of(accelerator, network, batches)
    local = sl.TopKMetrics(NUM_CLASSES, ks=(1,))
    gathered = 0
    for inputs, labels_of_batch in batches:
        local.update(torch.zeros(len(inputs), NUM_CLASSES), labels_of_batch)
        gathered += len(accelerator.gather(inputs))
    local.compute()
    with local.sync_context():
        local_count = int(local.seen.sum())
    seen = {
        "numbers": numbers.flatten().tolist(),
        "labels": labels.tolist(),
        "gathered": gathered,
        "counted by each process": local_count,
    }
    if accelerator.is_main_process:
        (folder / "seen.json").write_text(json.dumps(seen))
    printed = run_example("accelerate_processes", "--epochs", "1")
    (folder / f"printed-{accelerator.process_index}").write_text(printed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two processes")
    run_as_torchrun(work, 2, path)
    return path


def test_two_processes_see_each_image_once(folder: Path) -> None:
    seen = json.loads((folder / "seen.json").read_text())
    assert sorted(seen["numbers"]) == list(range(IMAGES))
    labels = numbered_images().labels.tolist()
    assert seen["labels"] == [labels[int(number)] for number in seen["numbers"]]


def test_without_gather_for_metrics_some_are_counted_twice(folder: Path) -> None:
    seen = json.loads((folder / "seen.json").read_text())
    assert seen["gathered"] == seen["counted by each process"] == 400


def test_the_example_runs_on_two_processes_and_prints_once(folder: Path) -> None:
    assert f"2 processes, {IMAGES} validation images" in (folder / "printed-0").read_text()
    assert (folder / "printed-1").read_text() == ""
