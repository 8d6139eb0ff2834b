"""What set-ups are called, so that a reader can tell them apart at a glance."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from shortlist.program.config import SETTINGS_OF, LossConfig, LossName, RunConfig, to_dict

LOSS_NAMES: dict[LossName, str] = {
    "cross_entropy": "Cross-entropy",
    "focal": "Focal",
    "ldam": "LDAM",
    "logit_adjusted": "Logit adjustment",
    "balanced_softmax": "Balanced softmax",
    "topk_hinge": "Top-K hinge",
    "convex_topk_hinge": "Convex top-K hinge",
    "calibrated_topk_hinge": "Calibrated top-K hinge",
    "smooth_topk_hinge": "Smoothed top-K hinge",
    "noised_topk_hinge": "Noised top-K hinge",
    "imbalanced_noised_topk_hinge": "Imbalanced noised top-K hinge",
}
_SYMBOLS = {
    "k": "K",
    "epsilon": "ε",
    "n_samples": "B",
    "tau": "τ",
    "gamma": "\N{GREEK SMALL LETTER GAMMA}",
    "max_margin": "margin",
    "scale": "scale",
}


def loss_settings(loss: LossConfig) -> str:
    """The settings that this loss makes use of.

    Example:
        >>> loss_settings(LossConfig(name="noised_topk_hinge", k=5, epsilon=0.2, n_samples=10))
        'K = 5, ε = 0.2, B = 10'
    """
    return ", ".join(f"{_SYMBOLS[name]} = {getattr(loss, name):g}" for name in SETTINGS_OF[loss.name])


def settings(config: RunConfig) -> dict[str, Any]:
    """All settings but the seed by their names on the command line, those of the loss first."""
    nested = to_dict(config)
    flat: dict[str, Any] = {}
    for section in ("loss", "model", "optim", "train", "data"):
        flat |= {f"{section}.{name}": value for name, value in nested[section].items()}
    return flat | {"recipe": nested["recipe"]}


def shown(value: Any) -> str:
    """A setting as one would type it."""
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def varied_settings(configs: Sequence[RunConfig]) -> list[str]:
    """Names of the settings in which the configurations differ."""
    flat = [settings(config) for config in configs]
    return [name for name in flat[0] if any(each[name] != flat[0][name] for each in flat)]


def short_labels(configs: Sequence[RunConfig]) -> list[str]:
    """The loss's name and, where set-ups share a loss, as many settings as are needed to tell them apart."""
    members: dict[LossName, list[int]] = defaultdict(list)
    for position, config in enumerate(configs):
        members[config.loss.name].append(position)
    labels = [""] * len(configs)
    for loss, positions in members.items():
        needed = _telling_settings([configs[position] for position in positions])
        for position in positions:
            values = settings(configs[position])
            details = ", ".join(f"{_plain_name(name)} = {shown(values[name])}" for name in needed)
            labels[position] = f"{LOSS_NAMES[loss]} ({details})" if details else LOSS_NAMES[loss]
    return labels


def _telling_settings(configs: Sequence[RunConfig]) -> list[str]:
    flat = [settings(config) for config in configs]
    needed: list[str] = []
    distinct = 1
    for name in varied_settings(configs):
        told_apart = len({str([values[each] for each in [*needed, name]]) for values in flat})
        if told_apart > distinct:
            needed.append(name)
            distinct = told_apart
    return needed


def _plain_name(setting: str) -> str:
    section, _, name = setting.rpartition(".")
    return _SYMBOLS[name] if section == "loss" and name in _SYMBOLS else setting
