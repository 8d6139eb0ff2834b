"""Configurations: validated, frozen, and the same after a trip through JSON."""

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from shortlist import ShortlistError
from shortlist.program import recipes
from shortlist.program.config import (
    SETTINGS_OF,
    DataConfig,
    LossConfig,
    LossName,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    changed,
    differences,
    from_dict,
    to_dict,
)
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.loss_factory import build_loss
from shortlist.program.training.schedule import learning_rate


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_survives_json(name: str) -> None:
    config = recipes.build(name)
    assert config.recipe == name
    assert recipes.HELP[name].endswith(".")
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_infinitely_many_samples_survive_json() -> None:
    config = RunConfig(loss=LossConfig(n_samples=math.inf))
    assert from_dict(json.loads(json.dumps(to_dict(config), allow_nan=False))) == config


def test_configurations_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 1  # type: ignore[misc]


def other_settings(config: RunConfig) -> dict[str, Any]:
    """For each setting but the seed and the recipe's name, by its name on the command line, another value."""
    others: dict[str, Any] = {
        "data.name": "folder",
        "data.imbalance": 10.0,
        "data.imbalance_kind": "step",
        "data.noise_groups": "consecutive",
        "data.augment": "none",
        "data.on_bad_image": "skip",
        "model.head": "cosine",
        "loss.name": "focal",
        "optim.name": "adamw",
        "optim.momentum": 0.5,
        "optim.schedule": "cosine",
        "train.accumulate": 2,
        "train.device": "cpu",
        "train.precision": "bf16-mixed",
        "train.select": "micro_top1",
    }
    return {
        f"{section}.{name}": others.get(f"{section}.{name}", _another(value))
        for section, settings in to_dict(config).items()
        if isinstance(settings, dict)
        for name, value in settings.items()
    }


def test_the_key_ignores_the_seed_and_nothing_else() -> None:
    config = RunConfig()
    assert config.key() == replace(config, seed=7).key()
    for setting, other in other_settings(config).items():
        assert changed(config, {setting: other}).key() != config.key(), setting


HOW_AND_WHERE = {"data.root", "data.workers", "data.on_bad_image", "train.device", "train.eval_batch_size"}


def test_all_settings_but_how_and_where_the_data_is_read_make_another_run() -> None:
    config = RunConfig()
    for setting, other in other_settings(config).items():
        found = differences(changed(config, {setting: other}), config)
        assert [each.split()[0] for each in found] == ([] if setting in HOW_AND_WHERE else [setting])


def test_metrics_are_measured_at_every_k_once_in_ascending_order() -> None:
    config = RunConfig(loss=LossConfig(k=3), train=TrainConfig(ks=(5, 1, 10)))
    assert config.all_ks == (1, 3, 5, 10)
    assert replace(config, loss=LossConfig(k=5)).all_ks == (1, 5, 10)


def _another(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return 2 * value + 1
        case float():
            return value / 2 + 0.01
    return [*value, 7] if isinstance(value, list) else f"{value}2"


def test_changes_name_what_there_is() -> None:
    assert changed(RunConfig(), {"seed": 3}).seed == 3
    for name in ("los.k", "loss.kk", "seed.k", "sede"):
        with pytest.raises(ShortlistError, match=f"there is no setting {name}"):
            changed(RunConfig(), {name: 3})


def test_equal_configurations_have_equal_keys() -> None:
    whole, broken = (replace(recipes.build("smoke"), loss=LossConfig(scale=scale)) for scale in (50, 50.0))
    assert whole == broken
    assert whole.key() == broken.key()


WRONG: list[tuple[type[Any], dict[str, Any], str]] = [
    (DataConfig, {"name": "cifar"}, r"data\.name must be one of .*'cifar' \(perhaps cifar100\?\)"),
    (DataConfig, {"label_noise": 1.5}, r"data\.label_noise must be in \[0, 1\], got 1\.5"),
    (DataConfig, {"imbalance": 0.5}, r"data\.imbalance must be .* >= 1, got 0\.5"),
    (DataConfig, {"imbalance": math.inf}, r"data\.imbalance must be finite"),
    (ModelConfig, {"head": "mlp"}, r"model\.head must be one of linear, cosine, got 'mlp'"),
    (LossConfig, {"name": "noised_topk_hing"}, r"perhaps noised_topk_hinge\?"),
    (LossConfig, {"k": 0}, r"loss\.k must be .* >= 1, got 0"),
    (LossConfig, {"epsilon": -1.0}, r"loss\.epsilon must be .*, got -1\.0"),
    (LossConfig, {"n_samples": 2.5}, r"loss\.n_samples must be a whole number >= 1, or inf, got 2\.5"),
    (LossConfig, {"scale": 0.0}, r"loss\.scale must be"),
    (OptimConfig, {"lr": math.nan}, r"optim\.lr must be"),
    (OptimConfig, {"momentum": 1.5}, r"optim\.momentum must be in \[0, 0\.9999\], got 1\.5"),
    (TrainConfig, {"ks": (5, 5)}, r"train\.ks must be different whole numbers >= 1, got \(5, 5\)"),
    (TrainConfig, {"select": "top5"}, r"train\.select must be auto or a metric such as macro_top5, got 'top5'"),
    (TrainConfig, {"epochs": 0}, r"train\.epochs must be .* >= 1, got 0"),
    (
        RunConfig,
        {"optim": OptimConfig(milestones=(10,))},
        r"optim\.milestones must lie between 0 and train\.epochs = 10",
    ),
    (RunConfig, {"train": TrainConfig(accumulate=3)}, r"train\.accumulate must divide train\.batch_size = 64, got 3"),
    (RunConfig, {"train": TrainConfig(select="micro_top7")}, r"train\.select must use one of train\.ks"),
    (RunConfig, {"data": DataConfig(name="embeddings")}, r"model\.name must be none for embeddings"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_setting_is_named(kind: type[Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ShortlistError, match=message):
        kind(**settings)


def test_unknown_settings_in_a_file_are_named() -> None:
    settings = to_dict(RunConfig())
    settings["loss"]["epsilom"] = 1
    with pytest.raises(ShortlistError, match=r"no setting loss\.epsilom, perhaps loss\.epsilon was meant"):
        from_dict(settings)


@pytest.mark.parametrize(
    ("section", "setting", "value", "message"),
    [
        ("loss", "k", "five", r"loss\.k must be of type int, got 'five'"),
        ("loss", "epsilon", "much", r"loss\.epsilon must be a number, got 'much'"),
        ("optim", "lr", None, r"optim\.lr must be a number, got None"),
        ("model", "name", None, r"model\.name must be of type str, got None"),
        ("train", "ks", 5, r"train\.ks must be a list, got 5"),
        ("train", "ks", ["five"], r"train\.ks must be of type int, got 'five'"),
    ],
)
def test_a_value_of_the_wrong_type_in_a_file_is_named(section: str, setting: str, value: Any, message: str) -> None:
    settings = to_dict(RunConfig())
    settings[section][setting] = value
    with pytest.raises(ShortlistError, match=f"^{message}$"):
        from_dict(settings)


@pytest.mark.parametrize("settings", [[], {"loss": "x"}, {"seed": None}])
def test_the_file_of_a_wrong_configuration_is_named(tmp_path: Path, settings: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ShortlistError, match=f"{tmp_path}/config.json: (the configuration|loss|seed) must"):
        _ = RunFolder(str(tmp_path)).config


@pytest.mark.parametrize("name", get_args(LossName))
def test_every_setting_of_a_loss_reaches_it(name: LossName) -> None:
    config = LossConfig(name=name, k=3, epsilon=0.7, n_samples=4, tau=0.3, gamma=1.5, max_margin=0.6, scale=7.0)
    loss = build_loss(config, torch.ones(6))
    used = {field.name for field in dataclasses.fields(config) if hasattr(loss, field.name)}
    assert used == {*SETTINGS_OF[name], *(["tau"] if name == "balanced_softmax" else [])}
    assert all(getattr(loss, setting) == getattr(config, setting) for setting in SETTINGS_OF[name])


def test_an_unknown_recipe_is_answered_with_those_close_to_it() -> None:
    with pytest.raises(
        ShortlistError, match="no recipe 'cifar100_table4_noise_p40': perhaps cifar100_table4_noised_p40"
    ):
        recipes.build("cifar100_table4_noise_p40")


def rates(config: OptimConfig, epochs: int, steps: int) -> list[float]:
    return [learning_rate(config, epoch, step, steps, epochs) for epoch in range(epochs) for step in range(steps)]


def test_the_step_schedule_drops_at_the_start_of_its_milestones() -> None:
    config = OptimConfig(lr=1.0, schedule="step", milestones=(2, 3), decay=0.5)
    assert rates(config, 4, 2) == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25]


def test_the_cosine_schedule_falls_from_the_rate_to_almost_nothing() -> None:
    values = rates(OptimConfig(lr=1.0, schedule="cosine"), 10, 10)
    assert values[0] == 1
    assert values[50] == pytest.approx(0.5)
    assert values == sorted(values, reverse=True)
    assert 0 < values[-1] < 1e-3


@pytest.mark.parametrize("schedule", ["step", "cosine", "constant"])
def test_the_warm_up_rises_to_the_rate(schedule: Any) -> None:
    values = rates(OptimConfig(lr=1.0, schedule=schedule, warmup_epochs=2), 4, 5)
    assert values[:10] == sorted(values[:10])
    assert 0 < values[0] < 0.2
    assert values[10] == pytest.approx(1.0)
