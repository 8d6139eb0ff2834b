"""Names of set-ups and settings for people."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from shortlist.program.config import NEUTRAL, RunConfig, identity, to_dict
from shortlist.program.losses import COMMON, LOSSES, LossConfig

_SYMBOLS = {
    "k": "K",
    "epsilon": "ε",
    "relative": "relative ε",
    "n_samples": "B",
    "tau": "τ",
    "gamma": "\N{GREEK SMALL LETTER GAMMA}",
    "margin": "margin",
    "max_margin": "margin",
    "scale": "scale",
    "cross_entropy_share": "share of cross-entropy",
    "prior": "prior",
    "class_weights": "class weights",
    "weight_from": "weights from",
}


def loss_settings(loss: LossConfig, digits: int = 6) -> str:
    """The settings of the loss itself, without those that change nothing.

    Example:
        >>> from shortlist.program.losses import NoisedTopKHingeConfig
        >>> loss_settings(NoisedTopKHingeConfig(k=5, epsilon=0.2, n_samples=10))
        'K = 5, ε = 0.2, B = 10'
    """
    every = loss.settings() | {name: getattr(loss, name) for name in COMMON}
    told = {name: value for name, value in every.items() if NEUTRAL.get(f"loss.{name}") != value}
    return ", ".join(f"{_SYMBOLS[name]} = {shown(value, digits)}" for name, value in told.items())


def settings(config: RunConfig) -> dict[str, Any]:
    """All settings but the seed, by their names on the command line. Those of the loss come first."""
    nested = to_dict(config)
    flat: dict[str, Any] = {}
    for section in ("loss", "model", "optim", "train", "data"):
        flat |= {f"{section}.{name}": value for name, value in nested[section].items()}
    return flat | {"recipe": nested["recipe"]}


def shown(value: Any, digits: int = 6) -> str:
    """A value as a person would type it."""
    if isinstance(value, list | tuple):
        return ", ".join(shown(item, digits) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def varied_settings(configs: Sequence[RunConfig]) -> list[str]:
    """Names of the settings in which the runs differ, those of the loss first."""
    known = [identity(config) for config in configs]
    names = dict.fromkeys(name for config in configs for name in settings(config))
    return [name for name in names if len({str(values.get(name)) for values in known}) > 1]


def short_labels(configs: Sequence[RunConfig]) -> list[str]:
    """The name of each loss, with as many settings as it takes to distinguish set-ups with the same loss."""
    members: dict[str, list[int]] = defaultdict(list)
    for position, config in enumerate(configs):
        members[config.loss.name].append(position)
    labels = [""] * len(configs)
    for loss, positions in members.items():
        needed = _distinguishing_settings([configs[position] for position in positions])
        for position in positions:
            values = settings(configs[position])
            details = ", ".join(f"{_plain_name(name)} = {shown(values[name])}" for name in needed)
            label = LOSSES[loss].label
            labels[position] = f"{label} ({details})" if details else label
    return labels


def _distinguishing_settings(configs: Sequence[RunConfig]) -> list[str]:
    flat = [settings(config) for config in configs]
    needed: list[str] = []
    distinct = 1
    for name in varied_settings(configs):
        combinations = {str([values.get(setting) for setting in [*needed, name]]) for values in flat}
        if len(combinations) > distinct:
            needed.append(name)
            distinct = len(combinations)
    return needed


def _plain_name(setting: str) -> str:
    section, _, name = setting.rpartition(".")
    return _SYMBOLS[name] if section == "loss" and name in _SYMBOLS else setting
