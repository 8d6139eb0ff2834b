"""Runs small enough for tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortlist.program.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig, to_dict
from shortlist.program.losses import CrossEntropyConfig, NoisedTopKHingeConfig

NUM_CLASSES = 12


def write_embeddings(path: Path, images: int = 600) -> Path:
    """Noisy points around a centre for each class; some classes are rarer than others."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(NUM_CLASSES, 16))
    arrays: dict[str, Any] = {}
    for name, count in (("train", images), ("val", 240), ("test", 240)):
        labels = random.integers(NUM_CLASSES, size=count)
        if name == "train":
            labels = np.concatenate(
                [np.arange(NUM_CLASSES), np.minimum(labels, random.integers(NUM_CLASSES, size=count))]
            )
        arrays[f"{name}_x"] = (centres[labels] + 1.5 * random.normal(size=(len(labels), 16))).astype(np.float32)
        arrays[f"{name}_y"] = labels
    np.savez(path, **arrays)
    return path


def small_config(data: Path, **overrides: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "data": DataConfig(name="embeddings", root=str(data)),
        "model": ModelConfig(name="none"),
        "loss": NoisedTopKHingeConfig(k=3, epsilon=0.3, n_samples=3),
        "optim": OptimConfig(lr=0.05, schedule="cosine"),
        "train": TrainConfig(epochs=8, batch_size=16, ks=(1, 3), device="cpu"),
    }
    return RunConfig(**(settings | overrides))


def photos_config(root: Path, epochs: int = 2, **settings: Any) -> RunConfig:
    """For a folder of small photographs in two classes or more."""
    usual: dict[str, Any] = {"name": "folder", "root": str(root), "image_size": 16, "workers": 0}
    return RunConfig(
        data=DataConfig(**usual | settings),
        model=ModelConfig(name="glyphnet"),
        loss=CrossEntropyConfig(k=1),
        train=TrainConfig(epochs=epochs, batch_size=8, ks=(1,), device="cpu"),
    )


def config_arguments(config: RunConfig) -> list[str]:
    """The command-line options that turn a recipe into this configuration."""
    sections = to_dict(config)
    arguments = []
    for section in ("data", "model", "loss", "optim", "train"):
        for name, value in sections[section].items():
            flag = f"--{section}.{name.replace('_', '-')}"
            if isinstance(value, bool):
                arguments.append(flag if value else flag.replace(f"{section}.", f"{section}.no-"))
            elif isinstance(value, list):
                arguments += [flag, *map(str, value)]
            elif value != "":
                arguments += [flag, str(value)]
    return arguments


def assert_close(one: dict[str, float | None], other: dict[str, float | None], rel: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert other[name] == (None if value is None else pytest.approx(value, rel=rel)), name


def outcome(folder: Path) -> dict[str, Any]:
    """All numbers of a finished run, except times."""
    final = json.loads((folder / "final.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    del final["train_seconds"]
    for line in lines:
        del line["train_seconds"]
    return {"final": final, "metrics": lines}
