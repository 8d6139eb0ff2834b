"""The settings of a run: frozen, validated dataclasses. Standard library only, so that any machine can read them.

The attribute docstrings are the help of the command line.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast, get_args

from shortlist.errors import ShortlistError
from shortlist.program.losses import LOSSES, LossConfig, NoisedTopKHingeConfig
from shortlist.program.settings import check_choices, check_within, from_plain, to_plain

FORMAT = 2
"""Number of the layout of ``config.json``; ``upgrade`` reads those before it."""

DataName = Literal["glyphs", "cifar100", "plantnet300k", "imagenet", "imagenet_lt", "feathers", "folder", "embeddings"]
Fit = Literal["crop", "pad"]
LoggerName = Literal["tensorboard", "csv", "wandb", "mlflow"]

OWN_NETWORKS = ("glyphnet", "densenet40_40", "resnet32", "none")
"""Networks that are not timm's: nobody offers pre-trained weights of them."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    section: ClassVar[str] = "data"

    name: DataName = "glyphs"
    """Which data set; `shortlist datasets` describes them."""
    root: str = ""
    """Where the data is: a folder, or the file of embeddings (default: $SHORTLIST_DATA, or a cache folder)."""
    imbalance: float = 1.0
    """Subsample the training images until the largest class has this many times the images of the smallest."""
    imbalance_kind: Literal["exponential", "step"] = "exponential"
    """How class sizes fall: exponentially, or in one step between a large and a small half."""
    thin_validation: bool = False
    """Subsample the validation images like the training images: rare classes then have few, as in data from outside."""
    label_noise: float = 0.0
    """Probability that a training label is redrawn from its group, which includes the true label."""
    noise_groups: Literal["superclass", "consecutive"] = "superclass"
    """Groups of the label noise: superclasses, or blocks of five consecutive labels as in the paper's code."""
    redraw_noise: bool = False
    """Draw other label noise for each seed of a run, as the paper's code does; seed 0 has the noise it always has."""
    val_fraction: float = 0.1
    """Share of each class held out for validation, if the data has no validation split."""
    augment: Literal["auto", "none"] = "auto"
    """Random crops and flips as usual for the data set, or none."""
    randaugment: int = 0
    """Strength of timm's RandAugment, from 1 to 10, for data read from files; 0 is off."""
    mixup: float = 0.0
    """Alpha of Mixup, which blends pairs of training images and their labels; 0 is off."""
    cutmix: float = 0.0
    """Alpha of CutMix, which pastes a box of one training image into another; 0 is off. With both, one by lot."""
    fit: Fit = "crop"
    """How images become square, for data read from files: crop the middle, or pad them, so that nothing is cut off."""
    image_size: int = 0
    """Side of the images in pixels; 0 is the usual size of the data set. Smaller images are enlarged."""
    canvas: int = 0
    """Read every image once, training images as squares of this side that are cropped on the device; 0 is off."""
    normalise: Literal["auto", "data", "network"] = "auto"
    """Mean and deviation of images: usual for the data, or the network's own; auto: its own with --model.weights."""
    on_bad_image: Literal["fail", "skip"] = "fail"
    """What to do about an unreadable image: stop, or leave it out and count it."""
    workers: int = 2
    """Number of processes that read image files."""
    seed: int = 0
    """Seed of the validation split, the subsampling and the label noise."""

    def __post_init__(self) -> None:
        check_within(self, "imbalance", 1)
        check_within(self, "label_noise", 0, 1)
        check_within(self, "val_fraction", 0, 0.9)
        check_within(self, "randaugment", 0, 10)
        check_within(self, "mixup", 0)
        check_within(self, "cutmix", 0)
        check_within(self, "image_size", 0, 4096)
        check_within(self, "canvas", 0, 4096)
        check_within(self, "workers", 0, 1024)
        check_choices(self, "name", "imbalance_kind", "noise_groups", "augment", "fit", "normalise", "on_bad_image")
        if self.canvas and self.randaugment:
            raise ShortlistError(
                f"data.canvas must be 0 with RandAugment, which changes images as they are read, got {self.canvas}"
            )
        if self.cutmix and self.name == "embeddings":
            raise ShortlistError(f"data.cutmix must be 0 for embeddings, which have no boxes to cut, got {self.cutmix}")

    @property
    def is_named_by_root(self) -> bool:
        """True if the root says which data it is, and not only where it lies."""
        return self.name in ("folder", "embeddings")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    section: ClassVar[str] = "model"

    name: str = "glyphnet"
    """Any network of timm, or glyphnet, densenet40_40, resnet32 (for CIFAR), or none (for embeddings)."""
    head: Literal["linear", "cosine", "scaled_cosine"] = "linear"
    """Last layer: linear, cosine for the losses with margins, or cosines times a scale for all others."""
    scale: float = 30.0
    """What a scaled_cosine layer multiplies the cosines by."""
    learn_scale: bool = False
    """Train the scale of a scaled_cosine layer too."""
    pretrained: bool = False
    """Start from the pre-trained weights of timm."""
    weights: str = ""
    """Start from the weights in a file, in a run folder, or of the extra [lite]: package."""
    frozen: bool = False
    """Train the last layer alone, on features that are computed once, without augmentation, and kept."""

    def __post_init__(self) -> None:
        check_choices(self, "head")
        check_within(self, "scale", 1e-12)
        if self.weights and self.pretrained:
            raise ShortlistError(
                f"model.weights = {self.weights} and model.pretrained exclude each other: a network starts from one or "
                "the other; add --model.no-pretrained, or leave out --model.weights"
            )
        if self.weights and self.name == "none":
            raise ShortlistError(f"model.weights = {self.weights} needs a network, and model.name is none")

    @property
    def starts_trained(self) -> bool:
        """True if the network does not start from random weights."""
        return self.weights != "" or (self.pretrained and self.name not in OWN_NETWORKS)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    section: ClassVar[str] = "optim"

    name: Literal["sgd", "adamw"] = "sgd"
    """SGD with Nesterov momentum, or AdamW."""
    lr: float = 0.1
    """Learning rate at the start (after the warm-up)."""
    head_lr_factor: float = 1.0
    """Learning rate of the last layer, as a multiple of that of the other layers, such as 10."""
    momentum: float = 0.9
    """Momentum of SGD; the first beta of AdamW."""
    weight_decay: float = 1e-4
    """Weight decay."""
    standardise: bool = False
    """Train a linear last layer on fixed features as if they had mean 0 and deviation 1, whatever they are."""
    schedule: Literal["step", "cosine", "constant"] = "step"
    """How the learning rate falls: by `decay` at each milestone, along a cosine to zero, or not at all."""
    milestones: tuple[float, ...] = ()
    """When the step schedule multiplies the learning rate by `decay`: shares of the run, such as 0.5 0.75."""
    decay: float = 0.1
    """Factor of the step schedule."""
    warmup_epochs: float = 0.0
    """Number of epochs over which the learning rate rises linearly from zero."""
    clip_norm: float = 0.0
    """Clip gradients to this norm; 0 does not clip."""

    def __post_init__(self) -> None:
        check_choices(self, "name", "schedule")
        check_within(self, "lr", 0)
        check_within(self, "head_lr_factor", 0)
        check_within(self, "momentum", 0, 0.9999)
        check_within(self, "decay", 0, 1)
        check_within(self, "weight_decay", 0)
        check_within(self, "warmup_epochs", 0)
        check_within(self, "clip_norm", 0)
        if not all(0 < milestone < 1 for milestone in self.milestones):
            raise ShortlistError(
                f"optim.milestones must be shares of the run between 0 and 1, such as 0.5 0.75, got {self.milestones}"
            )

    def drop_epochs(self, epochs: int) -> list[int]:
        """The epochs, counted from 0, at whose start the step schedule lowers the learning rate.

        Example:
            >>> OptimConfig(milestones=(0.5, 0.75)).drop_epochs(300)
            [150, 225]
        """
        if self.schedule != "step":
            return []
        rounded = {round(milestone * epochs) for milestone in self.milestones}
        return sorted(epoch for epoch in rounded if 0 < epoch < epochs)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    section: ClassVar[str] = "train"

    epochs: int = 10
    """Number of passes over the training images."""
    batch_size: int = 64
    """Images per step, over all devices."""
    accumulate: int = 1
    """Split each batch into this many parts, one after another, to save memory."""
    eval_batch_size: int = 512
    """Images per batch and device in evaluation."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device to train on; auto is a GPU if there is one. For several GPUs, start with torchrun."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Precision of the network; losses and metrics stay in float32."""
    channels_last: bool = False
    """Store images channels-last in memory: faster on recent GPUs. Networks of timm always do."""
    compile: bool = False
    """Compile the network with torch.compile."""
    cuda_graph: bool = True
    """Run a step as one CUDA graph if possible: one GPU, data in memory, no accumulation, no mixing, not 16-mixed."""
    sync_batchnorm: bool = False
    """Share the statistics of batch normalisation between GPUs."""
    ks: tuple[int, ...] = (1, 3, 5)
    """Values of K to measure."""
    select: str = "auto"
    """Validation metric that picks the best epoch, such as micro_top1; auto is macro top-K at the K of the loss."""
    select_corrected: bool = False
    """Pick the epoch by its accuracy after the correction for class sizes, as the finished run gets it."""
    select_latest: bool = False
    """Pick the latest epoch within a standard error of the best, which few validation images choose by chance."""
    correct_prior: Literal["auto", "on", "off"] = "auto"
    """Correct scores for class sizes after training, as suits `select` on validation; auto: unless select is micro."""
    logger: tuple[LoggerName, ...] = ("tensorboard",)
    """Where the metrics of each epoch go beside metrics.jsonl; several are possible, and nothing after it is none."""

    def __post_init__(self) -> None:
        check_choices(self, "device", "precision", "correct_prior")
        for name in ("epochs", "batch_size", "accumulate", "eval_batch_size"):
            check_within(self, name, 1)
        if not self.ks or len(set(self.ks)) < len(self.ks) or min(self.ks) < 1:
            raise ShortlistError(f"train.ks must be different whole numbers >= 1, got {self.ks}")
        if self.select != "auto" and not re.fullmatch(r"(micro|macro|few|medium|many)_top\d+", self.select):
            raise ShortlistError(f"train.select must be auto or a metric such as macro_top5, got {self.select!r}")
        known = get_args(LoggerName)
        if not all(name in known for name in self.logger) or len(set(self.logger)) < len(self.logger):
            raise ShortlistError(f"train.logger must be different ones of {', '.join(known)}, got {self.logger}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    recipe: str = "custom"
    """Name of the recipe that the settings started from."""
    seed: int = 0
    """Seed of the initial weights, the order of the images, the augmentation and the noise."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=NoisedTopKHingeConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
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
    def has_fixed_features(self) -> bool:
        """True if the last layer alone is trained."""
        return self.model.frozen or self.data.name == "embeddings"

    @property
    def all_ks(self) -> tuple[int, ...]:
        """Every K that is measured: those of the metrics and those of the loss."""
        return tuple(sorted({*self.train.ks, *self.loss.ks}))

    @property
    def select_metric(self) -> str:
        return f"macro_top{self.loss.largest_k}" if self.train.select == "auto" else self.train.select

    @property
    def corrected_metric(self) -> str | None:
        """The accuracy that the correction for the prior is chosen by; None without a correction.

        Example:
            >>> RunConfig(train=TrainConfig(select="few_top5")).corrected_metric
            'macro_top5'
        """
        average, _, k = self.select_metric.rpartition("_top")
        wanted = self.train.correct_prior == "on" or (self.train.correct_prior == "auto" and average != "micro")
        # Few, medium and many are macro accuracies of some classes; one tau serves all of them.
        return f"{'micro' if average == 'micro' else 'macro'}_top{k}" if wanted else None

    @property
    def corrected_ks(self) -> tuple[int, ...]:
        """The K that the correction is chosen by together: those that are measured, up to that of the metric.

        Example:
            >>> RunConfig(train=TrainConfig(ks=(1, 3, 5, 10), select="macro_top5")).corrected_ks
            (1, 3, 5)
        """
        largest = int(self.select_metric.rpartition("_top")[2])
        return tuple(k for k in self.all_ks if k <= largest)

    @property
    def normalises_for_network(self) -> bool:
        """True if images get the mean and deviation that the network's weights were trained with, if it has some."""
        return self.data.normalise == "network" or (self.data.normalise == "auto" and self.model.weights != "")

    def key(self) -> str:
        """Short hash of the run's identity, the same for all seeds."""
        return hashlib.sha256(json.dumps(identity(self), sort_keys=True).encode()).hexdigest()[:10]


_HOW_AND_WHERE = (
    "data.root",
    "data.workers",
    "data.on_bad_image",
    "train.device",
    "train.eval_batch_size",
    "train.logger",
)

NEUTRAL: dict[str, Any] = {
    "data.canvas": 0,
    "data.thin_validation": False,
    "data.redraw_noise": False,
    "data.randaugment": 0,
    "data.mixup": 0.0,
    "data.cutmix": 0.0,
    "data.fit": "crop",
    "data.normalise": "auto",
    "model.weights": "",
    "model.frozen": False,
    "model.scale": 30.0,
    "model.learn_scale": False,
    "loss.cross_entropy_share": 0.0,
    "loss.prior": 0.0,
    "loss.class_weights": "none",
    "loss.weight_from": 0.0,
    "optim.head_lr_factor": 1.0,
    "optim.standardise": False,
    "loss.margin": 1.0,
    "loss.relative": False,
    "train.select_corrected": False,
    "train.select_latest": False,
    "train.correct_prior": "auto",  # it changes neither the weights nor the plain results
}
"""Settings that are younger than the first published results, each with the value that changes nothing. At that value a
setting is no part of a run's identity, so earlier runs keep their key. Never change a value, never remove an entry."""


def identity(config: RunConfig) -> dict[str, Any]:
    """What makes it this run, by names on the command line: two runs of the same identity differ by the seed alone.

    Left out are the seed, where the data lies (unless that says which data it is), how it is read, and settings at
    their ``NEUTRAL`` value. The milestones are the epochs at which the learning rate falls, so that shares that mean
    the same epochs are the same.

    Example:
        >>> identity(RunConfig(seed=1)) == identity(changed(RunConfig(), {"data.root": "elsewhere"}))
        True
    """
    settings = flat(to_dict(from_dict(to_dict(config))))  # there and back: 5 and 5.0 are the same
    left_out = {"format", "seed", *_HOW_AND_WHERE} - ({"data.root"} if config.data.is_named_by_root else set())
    settings["optim.milestones"] = config.optim.drop_epochs(config.train.epochs)
    return {
        name: value
        for name, value in settings.items()
        if name not in left_out and not (name in NEUTRAL and value == NEUTRAL[name])
    }


def differences(config: RunConfig, other: RunConfig) -> list[str]:
    """The settings in which they are not the same run. Data that has only moved makes no difference.

    Example:
        >>> differences(RunConfig(seed=1), changed(RunConfig(), {"train.epochs": 7, "data.root": "elsewhere"}))
        ['seed 1, not 0', 'train.epochs 10, not 7']
    """
    ours, theirs = ({"seed": run.seed} | identity(run) for run in (config, other))
    return [
        f"{name} {ours.get(name, 'unset')}, not {theirs.get(name, 'unset')}"
        for name in {**ours, **theirs}
        if name != "data.root" and ours.get(name) != theirs.get(name)
    ]


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as JSON values, with the number of their format."""
    return {"format": FORMAT, **to_plain(config)}


def from_dict(settings: Any) -> RunConfig:
    """The inverse of ``to_dict``, for all formats. A missing field gets its default; an unknown one is an error."""
    settings = upgrade(settings)
    if isinstance(settings, dict):
        settings = {name: value for name, value in settings.items() if name != "format"}
    return cast(RunConfig, from_plain(RunConfig, settings))


_LOSS_SETTINGS_OF_FORMAT_1 = ("epsilon", "n_samples", "tau", "gamma", "max_margin", "scale")


def upgrade(settings: Any) -> Any:
    """Bring settings of any format into the current one.

    Format 1, which had no number, kept the settings of all losses for every loss, and milestones as epochs of the run.
    What does not look like a configuration is returned as it is: ``from_dict`` names what is wrong with it.
    """
    if not isinstance(settings, dict):
        return settings
    written = settings.get("format", 1)
    if not isinstance(written, int) or written > FORMAT:
        raise ShortlistError(
            f"the configuration has the format {written!r}, and this version of shortlist reads formats up to {FORMAT}:"
            " install a newer version"
        )
    if written == FORMAT:
        return settings
    upgraded = {**settings, "format": FORMAT}
    if isinstance(loss := settings.get("loss"), dict):
        kind = LOSSES.get(str(loss.get("name", NoisedTopKHingeConfig.name)))
        known = [field.name for field in dataclasses.fields(kind)] if kind else _LOSS_SETTINGS_OF_FORMAT_1
        unused = set(_LOSS_SETTINGS_OF_FORMAT_1).difference(known)
        upgraded["loss"] = {name: value for name, value in loss.items() if name not in unused}
        upgraded["loss"].setdefault("name", NoisedTopKHingeConfig.name)
    with suppress(KeyError, TypeError):
        epochs, milestones = settings["train"]["epochs"], settings["optim"]["milestones"]
        # A cosine schedule could carry milestones behind the end of its run, without effect.
        shares = [milestone / epochs for milestone in milestones if 0 < milestone < epochs]
        upgraded["optim"] = {**settings["optim"], "milestones": shares}
    return upgraded


Changes = Mapping[str, Any]
"""Settings by their names on the command line, such as ``{"loss.k": 3}``."""


def changed(config: RunConfig, changes: Changes) -> RunConfig:
    """The configuration with some settings replaced. Another loss starts from its own defaults, with the same K.

    Example:
        >>> changed(RunConfig(), {"loss.k": 3, "train.epochs": 7}).train.epochs
        7
    """
    settings = to_dict(config)
    if changes.get("loss.name", config.loss.name) != config.loss.name:
        takes_several = getattr(LOSSES.get(changes["loss.name"]), "takes_several_k", False)
        settings["loss"] = {"k": config.loss.k if takes_several else config.loss.largest_k}
    for name, value in changes.items():
        section, _, setting = name.rpartition(".")
        if section and not isinstance(settings.get(section), dict):
            raise ShortlistError(f"there is no setting {name}")
        (settings[section] if section else settings)[setting] = value
    return from_dict(settings)


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings by their names on the command line.

    Example:
        >>> flat({"seed": 0, "loss": {"k": 5}})
        {'seed': 0, 'loss.k': 5}
    """
    names: dict[str, Any] = {}
    for name, value in settings.items():
        inner = flat(value) if isinstance(value, dict) else {"": value}
        names |= {f"{name}.{rest}".rstrip("."): item for rest, item in inner.items()}
    return names
