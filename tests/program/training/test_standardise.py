"""A linear layer is trained as if its features had mean 0 and deviation 1, and kept as a layer for them as they are."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import ModelConfig, OptimConfig, RunConfig
from shortlist.program.data.base import Held
from shortlist.program.data.in_memory import HeldSplit, TensorSplit
from shortlist.program.losses import LDAMConfig
from shortlist.program.predicting.predictor import load
from shortlist.program.training.loop import train
from shortlist.program.training.standardise import mean_and_deviation
from tests.support.early_ends import train_until_step
from tests.support.small_runs import outcome, small_config, write_embeddings

OPTIMISERS = [
    OptimConfig(name="adamw", lr=0.01, weight_decay=1.0, schedule="cosine"),
    OptimConfig(lr=0.05, weight_decay=0.01, schedule="cosine"),
]
FEATURES = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embeddings(tmp_path_factory.mktemp("data") / "vectors.npz")


def changed_features(data: Path, path: Path, change: Callable[[Any], Any]) -> Path:
    """The same data with other features."""
    arrays = dict(np.load(data))
    for name in arrays:
        if name.endswith("_x"):
            arrays[name] = change(arrays[name].astype(np.float64)).astype(np.float32)
    np.savez(path, **arrays)
    return path


def shifted(x: Any) -> Any:
    """Small numbers that are all positive, as of a network that ends in a ReLU."""
    return 0.03 * x + np.linspace(0.2, 0.7, FEATURES)


def standardised(data: Path) -> Callable[[Any], Any]:
    x = np.load(data)["train_x"].astype(np.float64)
    mean = x.mean(0)
    return lambda rows: (rows - mean) / np.sqrt(np.square(x - mean).mean())


def with_optim(optim: OptimConfig, data: Path, **settings: Any) -> RunConfig:
    return small_config(data, optim=optim, **settings)


def scores_after(config: RunConfig, folder: Path) -> Tensor:
    """Of the test vectors, by the trained run."""
    run = train(config, folder=folder, quiet=True)
    return load(run.path).scores(np.load(config.data.root)["test_x"])


@pytest.mark.parametrize("optim", OPTIMISERS, ids=["adamw", "sgd"])
def test_it_is_training_on_standardised_features(data: Path, tmp_path: Path, optim: OptimConfig) -> None:
    raw = changed_features(data, tmp_path / "raw.npz", shifted)
    usual = changed_features(raw, tmp_path / "usual.npz", standardised(raw))
    wanted = scores_after(with_optim(optim, usual), tmp_path / "usual")
    found = scores_after(with_optim(replace(optim, standardise=True), raw), tmp_path / "standardise")
    otherwise = scores_after(with_optim(optim, raw), tmp_path / "raw")
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3)
    assert (otherwise - wanted).abs().max() > 0.5  # without it, the same settings train another layer


def test_stopped_and_resumed_it_ends_as_if_undisturbed(data: Path, tmp_path: Path) -> None:
    config = with_optim(replace(OPTIMISERS[0], standardise=True), data)
    undisturbed = train(config, folder=tmp_path / "undisturbed", quiet=True).path
    train_until_step(config, tmp_path / "stopped", 50)
    train(config, folder=tmp_path / "stopped", resume=True, quiet=True)
    assert outcome(tmp_path / "stopped") == outcome(undisturbed)


def test_a_cosine_layer_is_trained_as_before(data: Path, tmp_path: Path) -> None:
    """It divides by the length of the features, and would mean something else with others."""
    weights = []
    for standardise in (False, True):
        optim = replace(OPTIMISERS[0], standardise=standardise)
        config = with_optim(optim, data, model=ModelConfig(name="none", head="cosine"), loss=LDAMConfig(k=3))
        run = train(config, folder=tmp_path / str(standardise), quiet=True)
        weights.append(load_file(run.path / "best.safetensors"))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def test_features_that_are_all_the_same_do_no_harm(data: Path, tmp_path: Path) -> None:
    same = changed_features(data, tmp_path / "same.npz", lambda x: np.full_like(x, 0.5))
    assert scores_after(with_optim(replace(OPTIMISERS[0], standardise=True), same), tmp_path / "run").isfinite().all()


def test_it_is_refused_where_the_features_change(tmp_path: Path) -> None:
    config = RunConfig(optim=replace(OPTIMISERS[0], standardise=True))
    with pytest.raises(ShortlistError, match=r"optim\.standardise .* add --model\.frozen or --optim\.no-standardise"):
        train(config, folder=tmp_path / "run", quiet=True)


def test_an_image_that_cannot_be_read_does_not_count() -> None:
    """Its row of features is zero."""
    rows = 3 + torch.rand(10, 4, generator=torch.Generator().manual_seed(0))
    labels, is_read = torch.zeros(10, dtype=torch.int64), torch.arange(10) != 7
    held = HeldSplit(TensorSplit(rows, labels), Held(rows * is_read.unsqueeze(1), is_read))
    mean, deviation = mean_and_deviation(held)
    torch.testing.assert_close(mean, rows[is_read].mean(0))
    assert deviation == pytest.approx((rows[is_read] - mean).square().mean().sqrt().item())
