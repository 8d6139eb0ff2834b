"""What a run is: frozen, validated dataclasses. Standard library only, so that any machine can read a configuration.

The attribute docstrings are the help of the command line.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shortlist.errors import ShortlistError

LossName = Literal[
    "cross_entropy",
    "focal",
    "ldam",
    "logit_adjusted",
    "balanced_softmax",
    "topk_hinge",
    "convex_topk_hinge",
    "calibrated_topk_hinge",
    "smooth_topk_hinge",
    "noised_topk_hinge",
    "imbalanced_noised_topk_hinge",
]
_NOISE = ("k", "epsilon", "n_samples")
_MARGIN = ("max_margin", "scale")
SETTINGS_OF: dict[LossName, tuple[str, ...]] = {
    "cross_entropy": (),
    "focal": ("gamma",),
    "ldam": _MARGIN,
    "logit_adjusted": ("tau",),
    "balanced_softmax": (),
    "topk_hinge": ("k",),
    "convex_topk_hinge": ("k",),
    "calibrated_topk_hinge": ("k",),
    "smooth_topk_hinge": ("k", "tau"),
    "noised_topk_hinge": _NOISE,
    "imbalanced_noised_topk_hinge": _NOISE + _MARGIN,
}
"""What each loss makes use of, as fields of ``LossConfig`` and arguments of its Module."""
DataName = Literal["glyphs", "cifar100", "plantnet300k", "imagenet", "imagenet_lt", "folder", "embeddings"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    name: DataName = "glyphs"
    """Which data; `shortlist datasets` tells what each needs."""
    root: str = ""
    """Where the data is: a folder, or the file of embeddings. Empty: $SHORTLIST_DATA, or else a cache folder."""
    imbalance: float = 1.0
    """Ratio of the largest class to the smallest after subsampling of the training images; 1 leaves them alone."""
    imbalance_kind: Literal["exponential", "step"] = "exponential"
    """Class sizes fall exponentially, or in one step between a large and a small half."""
    label_noise: float = 0.0
    """Probability p that a training label is drawn anew within its group; the true one may come up again."""
    noise_groups: Literal["superclass", "consecutive"] = "superclass"
    """Groups of label noise: true superclasses, or blocks of five consecutive labels as in the paper's own code."""
    val_fraction: float = 0.1
    """Share of the training images held out for validation, in each class, where the data has no validation split."""
    augment: Literal["auto", "none"] = "auto"
    """Random crops, flips and distortions as usual for the data, or none."""
    image_size: int = 0
    """Side of the images after resizing and cropping, for data read from files; 0 takes the data's usual size."""
    on_bad_image: Literal["fail", "skip"] = "fail"
    """What an unreadable image does: end the run, or be left out and counted."""
    workers: int = 2
    """Processes that read image files."""
    seed: int = 0
    """Seed of the split, the subsampling and the label noise; kept apart from the run's own seed."""

    def __post_init__(self) -> None:
        _within(self, "imbalance", 1, math.inf)
        _within(self, "label_noise", 0, 1)
        _within(self, "val_fraction", 0, 0.9)
        _within(self, "image_size", 0, 4096)
        _within(self, "workers", 0, 1024)
        _one_of(self, "name", "imbalance_kind", "noise_groups", "augment", "on_bad_image")

    @property
    def is_named_by_root(self) -> bool:
        """Whether the root says what the data is, and not only where."""
        return self.name in ("folder", "embeddings")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str = "glyphnet"
    """glyphnet (small), densenet40_40 (the paper's), resnet32 (He et al.'s for CIFAR), none (for embeddings), or any
    name that timm knows."""
    head: Literal["linear", "cosine"] = "linear"
    """Last layer: linear scores, or cosines as the margin losses want them."""
    pretrained: bool = False
    """Start from timm's pre-trained weights."""

    def __post_init__(self) -> None:
        _one_of(self, "head")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The defaults are the program's; those of the Modules differ for ldam and the imbalanced loss."""

    name: LossName = "noised_topk_hinge"
    """Which loss to train with."""
    k: int = 5
    """K of the top-K objective."""
    epsilon: float = 0.2
    """Scale of the noise (noised losses)."""
    n_samples: float = 5
    """Draws B of the noise; inf takes the expectation itself (noised losses)."""
    tau: float = 1.0
    """Temperature (smoothed hinge); how much of the class frequencies to take into account (logit adjustment)."""
    gamma: float = 2.0
    """Focus (focal loss)."""
    max_margin: float = 0.2
    """Margin of the rarest class (ldam and noised imbalanced)."""
    scale: float = 50.0
    """Scale (ldam and noised imbalanced)."""

    def __post_init__(self) -> None:
        _one_of(self, "name")
        _within(self, "k", 1, math.inf)
        for name in ("epsilon", "tau", "gamma", "max_margin"):
            _within(self, name, 0, math.inf)
        _within(self, "scale", 1e-12, math.inf)
        if self.n_samples != math.inf and not (self.n_samples >= 1 and self.n_samples == int(self.n_samples)):
            raise ShortlistError(f"loss.n_samples must be a whole number >= 1, or inf, got {self.n_samples}")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    name: Literal["sgd", "adamw"] = "sgd"
    """SGD with Nesterov momentum, or AdamW."""
    lr: float = 0.1
    """Learning rate at the start (after the warm-up)."""
    momentum: float = 0.9
    """Momentum of SGD; the first beta of AdamW."""
    weight_decay: float = 1e-4
    """Weight decay."""
    schedule: Literal["step", "cosine", "constant"] = "step"
    """How the learning rate falls: by `decay` at each milestone, along a cosine to zero, or not."""
    milestones: tuple[int, ...] = ()
    """Epochs (counted from 0) at whose start the step schedule multiplies the learning rate by `decay`."""
    decay: float = 0.1
    """Factor of the step schedule."""
    warmup_epochs: float = 0.0
    """Epochs over which the learning rate rises linearly from zero."""
    clip_norm: float = 0.0
    """Largest norm of the gradient; 0 does not clip."""

    def __post_init__(self) -> None:
        _one_of(self, "name", "schedule")
        _within(self, "lr", 0, math.inf)
        _within(self, "momentum", 0, 0.9999)
        _within(self, "decay", 0, 1)
        _within(self, "weight_decay", 0, math.inf)
        _within(self, "warmup_epochs", 0, math.inf)
        _within(self, "clip_norm", 0, math.inf)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    epochs: int = 10
    """Passes over the training images."""
    batch_size: int = 64
    """Images a step, over all devices together."""
    accumulate: int = 1
    """Parts that a batch is cut into, one after another, to save memory."""
    eval_batch_size: int = 512
    """Images at a time in evaluation, a device."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to train; auto takes a GPU if there is one. For many GPUs start with torchrun."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Arithmetic of the network; losses and metrics stay in float32."""
    channels_last: bool = False
    """Keep images channels-last in memory: faster convolutions on recent GPUs."""
    compile: bool = False
    """Compile the network with torch.compile."""
    cuda_graph: bool = True
    """Launch a step as one CUDA graph where it can be: on one GPU, data in memory, no accumulation, not 16-mixed."""
    sync_batchnorm: bool = False
    """Share batch statistics between GPUs."""
    ks: tuple[int, ...] = (1, 3, 5)
    """The K of the metrics."""
    select: str = "auto"
    """Validation metric that picks the best epoch, such as micro_top1; auto: macro top-K at the loss's K."""

    def __post_init__(self) -> None:
        _one_of(self, "device", "precision")
        for name in ("epochs", "batch_size", "accumulate", "eval_batch_size"):
            _within(self, name, 1, math.inf)
        if not self.ks or len(set(self.ks)) < len(self.ks) or min(self.ks) < 1:
            raise ShortlistError(f"train.ks must be different whole numbers >= 1, got {self.ks}")
        if self.select != "auto" and not re.fullmatch(r"(micro|macro|few|medium|many)_top\d+", self.select):
            raise ShortlistError(f"train.select must be auto or a metric such as macro_top5, got {self.select!r}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    recipe: str = "custom"
    """Name of the recipe it started from."""
    seed: int = 0
    """Seed of the initial weights, the order of the images, the augmentation and the noise."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if self.optim.schedule == "step" and any(not 0 < m < self.train.epochs for m in self.optim.milestones):
            raise ShortlistError(
                f"optim.milestones must lie between 0 and train.epochs = {self.train.epochs}, "
                f"got {self.optim.milestones}: a run of another length needs --optim.milestones of its own"
            )
        if self.train.batch_size % self.train.accumulate:
            raise ShortlistError(
                f"train.accumulate must divide train.batch_size = {self.train.batch_size}, got {self.train.accumulate}"
            )
        if (self.model.name == "none") != (self.data.name == "embeddings"):
            raise ShortlistError(
                "model.name must be none for embeddings and a network for images, "
                f"got {self.model.name} for {self.data.name}"
            )
        if int(self.select_metric.rpartition("_top")[2]) not in self.all_ks:
            raise ShortlistError(f"train.select must use one of train.ks = {self.train.ks}, got {self.train.select!r}")

    @property
    def all_ks(self) -> tuple[int, ...]:
        """The K of the metrics: those asked for, and the loss's own."""
        return tuple(sorted({*self.train.ks, self.loss.k}))

    @property
    def select_metric(self) -> str:
        return f"macro_top{self.loss.k}" if self.train.select == "auto" else self.train.select

    def key(self) -> str:
        """Short hash of everything but the seed: runs that share it differ by chance alone."""
        settings = canonical(self)
        del settings["seed"]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def to_dict(config: RunConfig) -> dict[str, Any]:
    """As plain JSON values."""
    settings = dataclasses.asdict(config)
    if config.loss.n_samples == math.inf:  # JSON has no infinity
        settings["loss"]["n_samples"] = "inf"
    return typing.cast("dict[str, Any]", json.loads(json.dumps(settings, allow_nan=False)))


def from_dict(settings: dict[str, Any]) -> RunConfig:
    """The inverse of ``to_dict``; an unknown field is an error that names it, a missing one has its default."""
    return typing.cast(RunConfig, _build(RunConfig, settings, ""))


def canonical(config: RunConfig) -> dict[str, Any]:
    """As ``to_dict``, and the same text for equal configurations: 5 draws are 5.0, as if somebody had typed them."""
    return to_dict(from_dict(to_dict(config)))


Changes = Mapping[str, Any]
"""Settings by their names on the command line, such as ``{"loss.k": 3}``."""


def changed(config: RunConfig, changes: Changes) -> RunConfig:
    """The configuration with some settings replaced.

    Example:
        >>> changed(RunConfig(), {"loss.k": 3, "train.epochs": 7}).train.epochs
        7
    """
    settings = to_dict(config)
    for name, value in changes.items():
        section, _, setting = name.rpartition(".")
        if section and not isinstance(settings.get(section), dict):
            raise ShortlistError(f"there is no setting {name}")
        (settings[section] if section else settings)[setting] = value
    return from_dict(settings)


_HOW_AND_WHERE = ("data.root", "data.workers", "data.on_bad_image", "train.device", "train.eval_batch_size")


def differences(config: RunConfig, other: RunConfig) -> list[str]:
    """In which settings they are not the same run; where its data lies, and how it is read, makes it no other.

    Example:
        >>> differences(RunConfig(seed=1), changed(RunConfig(), {"train.epochs": 7, "data.root": "elsewhere"}))
        ['seed 1, not 0', 'train.epochs 10, not 7']
    """
    ours, theirs = _flat(to_dict(config)), _flat(to_dict(other))
    return [
        f"{name} {value}, not {theirs[name]}"
        for name, value in ours.items()
        if name not in _HOW_AND_WHERE and theirs[name] != value
    ]


def essential(config: RunConfig) -> RunConfig:
    """With the defaults where configurations make no ``differences``, but for the root where that names the data."""
    usual = _flat(to_dict(RunConfig()))
    root = {"data.root": config.data.root} if config.data.is_named_by_root else {}
    return changed(config, {name: usual[name] for name in _HOW_AND_WHERE} | root)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """By their names on the command line."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _build(kind: type[Any], settings: Any, path: str) -> Any:
    name = path[:-1] or "the configuration"
    if dataclasses.is_dataclass(kind):
        if not isinstance(settings, dict):
            raise ShortlistError(f"{name} must hold named fields, got {settings!r}")
        hints = typing.get_type_hints(kind)
        for field in settings:
            if field not in hints:
                close = difflib.get_close_matches(field, hints, 1)
                hint = f", perhaps {path}{close[0]} was meant" if close else ""
                raise ShortlistError(f"there is no setting {path}{field}{hint}")
        return kind(**{field: _build(hints[field], value, f"{path}{field}.") for field, value in settings.items()})
    if typing.get_origin(kind) is tuple:
        if not isinstance(settings, list | tuple):
            raise ShortlistError(f"{name} must be a list, got {settings!r}")
        return tuple(_build(get_args(kind)[0], each, path) for each in settings)
    if kind in (int, float) and isinstance(settings, bool):  # which Python takes for a number
        raise ShortlistError(f"{name} must be a number, got {settings!r}")
    if kind is float:
        try:
            return float(settings)
        except (OverflowError, TypeError, ValueError):
            raise ShortlistError(f"{name} must be a number, got {settings!r}") from None
    if typing.get_origin(kind) is not Literal and not isinstance(settings, kind):
        raise ShortlistError(f"{name} must be of type {kind.__name__}, got {settings!r}")
    return settings


def _section(config: object) -> str:
    return type(config).__name__.removesuffix("Config").lower()


# Larger whole numbers are no floats any more.
_LARGEST = 2**1023


def _within(config: object, name: str, low: float, high: float) -> None:
    value = getattr(config, name)
    if not (isinstance(value, int | float) and low <= value <= min(high, _LARGEST)):
        limits = f"in [{low}, {high}]" if high < math.inf else f"finite and >= {low}"
        raise ShortlistError(f"{_section(config)}.{name} must be {limits}, got {value!r}")


def _one_of(config: object, *names: str) -> None:
    hints = typing.get_type_hints(type(config))
    for name in names:
        choices, value = get_args(hints[name]), getattr(config, name)
        if value not in choices:
            close = difflib.get_close_matches(str(value), choices, 1)
            hint = f" (perhaps {close[0]}?)" if close else ""
            raise ShortlistError(f"{_section(config)}.{name} must be one of {', '.join(choices)}, got {value!r}{hint}")
