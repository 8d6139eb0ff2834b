"""What a trial is worth: what its run would record if it were finished."""

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

from shortlist.program.compare.candidates import find_candidates
from shortlist.program.compare.running import compare
from shortlist.program.compare.search import Budget
from shortlist.program.config import ModelConfig, changed
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import read_correction
from shortlist.program.training.loop import train
from tests.support.early_ends import KillBeforeTest, Killed
from tests.support.pictures import put_classes
from tests.support.small_runs import photos_config


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_trial_is_worth_what_its_run_records_on_the_validation_images(
    frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHORTLIST_DATA", str(tmp_path / "cache"))
    put_classes(Path("photos"), {"ash": 24, "elm": 16, "owl": 12, "yew": 10})
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=0)
    safetensors.torch.save_file(network.state_dict(), "weights.safetensors")
    base = replace(
        photos_config(Path("photos"), epochs=2, image_size=32, val_fraction=0.3),
        model=ModelConfig(name="test_resnet", weights="weights.safetensors", frozen=frozen),
    )
    base, budget = changed(base, {"optim.lr": 0.01}), Budget(trials=1, epochs=2)
    losses = find_candidates(["cross_entropy", "balanced_softmax"])
    with pytest.raises(Killed):  # the second loss is searched after the kill, which leaves a trial without its value
        compare(base, losses, budget, seeds=(0,), quiet=True, callbacks=[KillBeforeTest()])
    found = compare(base, losses, budget, seeds=(0,), quiet=True)
    for entry in found.entries:
        (trial,) = entry.chosen.trials
        run = train(RunFolder(trial.folder).config, folder=trial.folder, resume=True, quiet=True)
        recorded = read_correction(run)
        assert recorded is not None
        assert trial.value == pytest.approx(recorded.val[base.select_metric], abs=1e-6)
