"""Configurations: validated, frozen, the same after a trip through JSON, and read from every format so far."""

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shortlist import ShortlistError
from shortlist.program import recipes
from shortlist.program.config import (
    FORMAT,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    changed,
    differences,
    from_dict,
    identity,
    to_dict,
)
from shortlist.program.losses import LOSSES, CrossEntropyConfig, ImbalancedNoisedTopKHingeConfig, NoisedTopKHingeConfig
from shortlist.program.runs.folder import RunFolder


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_survives_json(name: str) -> None:
    config = recipes.build(name)
    assert config.recipe == name
    assert recipes.HELP[name].endswith(".")
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_infinitely_many_samples_survive_json() -> None:
    config = RunConfig(loss=NoisedTopKHingeConfig(n_samples=math.inf))
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
        "data.fit": "pad",
        "data.normalise": "network",
        "data.on_bad_image": "skip",
        "model.head": "cosine",
        "loss.name": "focal",
        "optim.name": "adamw",
        "optim.momentum": 0.5,
        "optim.milestones": [0.5],
        "optim.schedule": "cosine",
        "train.accumulate": 2,
        "train.device": "cpu",
        "train.precision": "bf16-mixed",
        "train.select": "micro_top1",
        "train.correct_prior": "off",
        "train.logger": ["csv"],
        "loss.class_weights": "inverse",
    }
    return {
        f"{section}.{name}": others.get(f"{section}.{name}", _another(value))
        for section, settings in to_dict(config).items()
        if isinstance(settings, dict)
        for name, value in settings.items()
    }


HOW_AND_WHERE = {
    "data.root",
    "data.workers",
    "data.on_bad_image",
    "train.device",
    "train.eval_batch_size",
    "train.logger",
}


def test_all_settings_but_how_and_where_the_data_is_read_make_another_run() -> None:
    config = RunConfig()
    for setting, other in other_settings(config).items():
        another = changed(config, {setting: other})
        found = [difference.split()[0] for difference in differences(another, config)]
        assert (setting in found) == (setting not in HOW_AND_WHERE), setting
        assert (another.key() == config.key()) == (setting in HOW_AND_WHERE), setting


def test_the_key_ignores_the_seed_and_nothing_else() -> None:
    """Nothing else, that is, which makes another run."""
    config = RunConfig()
    assert config.key() == replace(config, seed=7).key()
    assert differences(replace(config, seed=7), config) == ["seed 7, not 0"]


@pytest.mark.parametrize("recipe", ["folder", "embeddings"])
def test_data_of_ones_own_is_known_by_its_place_but_may_move_while_a_run_is_resumed(recipe: str) -> None:
    here, there = (changed(recipes.build(recipe), {"data.root": root}) for root in ("here", "there"))
    assert identity(here) != identity(there)
    assert not differences(here, there)


def test_milestones_that_mean_the_same_epochs_are_the_same_run() -> None:
    short, long = (changed(RunConfig(), {"train.epochs": epochs}) for epochs in (2, 300))
    for config, same in ((short, True), (long, False)):
        one, two = (changed(config, {"optim.milestones": shares}) for shares in ([0.5], [0.5, 0.75]))
        assert (identity(one) == identity(two)) == same


def test_metrics_are_measured_at_every_k_once_in_ascending_order() -> None:
    config = RunConfig(loss=NoisedTopKHingeConfig(k=3), train=TrainConfig(ks=(5, 1, 10)))
    assert config.all_ks == (1, 3, 5, 10)
    assert replace(config, loss=CrossEntropyConfig(k=5)).all_ks == (1, 5, 10)


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
    losses = (ImbalancedNoisedTopKHingeConfig(scale=scale) for scale in (50, 50.0))
    whole, broken = (replace(recipes.build("smoke"), loss=loss) for loss in losses)
    assert whole == broken
    assert whole.key() == broken.key()


WRONG: list[tuple[type[Any], dict[str, Any], str]] = [
    (DataConfig, {"name": "cifar"}, r"data\.name must be one of .*'cifar': did you mean cifar100\?"),
    (DataConfig, {"label_noise": 1.5}, r"data\.label_noise must be in \[0, 1\], got 1\.5"),
    (DataConfig, {"imbalance": 0.5}, r"data\.imbalance must be .* >= 1, got 0\.5"),
    (DataConfig, {"imbalance": math.inf}, r"data\.imbalance must be finite"),
    (DataConfig, {"fit": "stretch"}, r"data\.fit must be one of crop, pad, got 'stretch'"),
    (DataConfig, {"mixup": -0.5}, r"data\.mixup must be .* >= 0, got -0\.5"),
    (DataConfig, {"randaugment": 11}, r"data\.randaugment must be in \[0, 10\], got 11"),
    (DataConfig, {"name": "embeddings", "cutmix": 1.0}, r"data\.cutmix must be 0 for embeddings, .*, got 1\.0"),
    (ModelConfig, {"head": "mlp"}, r"model\.head must be one of linear, cosine, .*got 'mlp'"),
    (NoisedTopKHingeConfig, {"name": "noised_topk_hing"}, r"did you mean noised_topk_hinge\?"),
    (NoisedTopKHingeConfig, {"k": 0}, r"loss\.k must be .* >= 1.* got 0"),
    (NoisedTopKHingeConfig, {"epsilon": -1.0}, r"loss\.epsilon must be .*, got -1\.0"),
    (NoisedTopKHingeConfig, {"n_samples": 2.5}, r"loss\.n_samples must be a whole number >= 1, or inf, got 2\.5"),
    (ImbalancedNoisedTopKHingeConfig, {"scale": 0.0}, r"loss\.scale must be"),
    (OptimConfig, {"lr": math.nan}, r"optim\.lr must be"),
    (OptimConfig, {"head_lr_factor": -1.0}, r"optim\.head_lr_factor must be finite and >= 0, got -1\.0"),
    (OptimConfig, {"momentum": 1.5}, r"optim\.momentum must be in \[0, 0\.9999\], got 1\.5"),
    (TrainConfig, {"ks": (5, 5)}, r"train\.ks must be different whole numbers >= 1, got \(5, 5\)"),
    (TrainConfig, {"select": "top5"}, r"train\.select must be auto or a metric such as macro_top5, got 'top5'"),
    (TrainConfig, {"epochs": 0}, r"train\.epochs must be .* >= 1, got 0"),
    (OptimConfig, {"milestones": (0.5, 1.0)}, r"optim\.milestones must be shares of the run .* got \(0\.5, 1\.0\)"),
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
    with pytest.raises(ShortlistError, match=r"no setting loss\.epsilom: did you mean epsilon\?"):
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


# Formats


def format_1(config: RunConfig, milestones: list[int]) -> dict[str, Any]:
    """The settings as the first format had them: those of all losses for every loss, and milestones as epochs."""
    settings = to_dict(config)
    del settings["format"]
    all_losses = {"k": 5, "epsilon": 0.2, "n_samples": 5, "tau": 1.0, "gamma": 2.0, "max_margin": 0.2, "scale": 50.0}
    settings["loss"] = all_losses | settings["loss"]
    settings["optim"]["milestones"] = milestones
    return settings


@pytest.mark.parametrize("name", LOSSES)
def test_a_configuration_of_the_first_format_is_read(name: str) -> None:
    config = changed(RunConfig(), {"loss.name": name, "train.epochs": 60, "optim.milestones": [0.5, 0.75]})
    assert from_dict(format_1(config, [30, 45])) == config


def test_a_drop_of_the_first_format_stays_at_its_epoch() -> None:
    for epochs in range(2, 40):
        for epoch in range(1, epochs):
            config = from_dict(format_1(changed(RunConfig(), {"train.epochs": epochs}), [epoch]))
            assert config.optim.drop_epochs(epochs) == [epoch]


def test_milestones_of_the_first_format_that_a_schedule_ignored_are_dropped() -> None:
    config = changed(RunConfig(), {"optim.schedule": "cosine", "train.epochs": 10})
    assert from_dict(format_1(config, [20, 25])) == config


@pytest.mark.parametrize("written", [{}, {"format": FORMAT}])
@pytest.mark.parametrize("name", [[], {}, None, 3, "adaboost"])
def test_a_damaged_name_of_a_loss_is_named(name: Any, written: dict[str, int]) -> None:
    with pytest.raises(ShortlistError, match=r"loss\.name must be one of"):
        from_dict({**written, "loss": {"name": name}})


@pytest.mark.parametrize("number", [FORMAT + 1, "2", None])
def test_a_format_of_the_future_is_refused_by_its_number(number: Any) -> None:
    with pytest.raises(ShortlistError, match=f"format {number!r}.* up to {FORMAT}"):
        from_dict(to_dict(RunConfig()) | {"format": number})
