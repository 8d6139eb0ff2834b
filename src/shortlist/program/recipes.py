"""Recipes: complete configurations for your own data, for the demo, and for every row of the paper's tables.

``shortlist train NAME`` trains one, and any setting can be changed. A name says where the paper prints the number.
"""

import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from shortlist.errors import ShortlistError
from shortlist.program.config import (
    DataConfig,
    DataName,
    Fit,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    changed,
    to_dict,
)
from shortlist.program.losses import (
    BalancedSoftmaxConfig,
    CrossEntropyConfig,
    FocalConfig,
    ImbalancedNoisedTopKHingeConfig,
    LDAMConfig,
    LogitAdjustedConfig,
    LossConfig,
    NoisedTopKHingeConfig,
    SmoothTopKHingeConfig,
)
from shortlist.program.text import did_you_mean

RECIPES: dict[str, Callable[[], RunConfig]] = {}
HELP: dict[str, str] = {}
"""What each recipe is, in a line."""
FOR_YOUR_DATA = ("folder", "folder_lite", "folder_frozen", "embeddings")
_TO_TRY_IT_OUT = ("smoke", "demo_")
_PAPER = {
    "cifar100_table": "The paper: CIFAR-100",
    "cifar100_lt": "Beyond the paper: CIFAR-100-LT",
    "plantnet_": "The paper: Pl@ntNet-300K",
    "imagenet_lt": "The paper: ImageNet-LT",
    "imagenet_table": "The paper: ImageNet",
    "feathers_": "Beyond the paper: feathers of birds",
}


def build(name: str) -> RunConfig:
    """The configuration of a recipe.

    Example:
        >>> build("cifar100_table4_noised_p40").data.label_noise
        0.4
    """
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or ": `shortlist train --help` lists them"
        raise ShortlistError(f"there is no recipe {name!r}{hint}")
    return replace(RECIPES[name](), recipe=name)


def with_loss(recipe: RunConfig, loss: str) -> RunConfig:
    """The recipe with another loss: at its own defaults, for the same K, with the last layer that it needs.

    Example:
        >>> with_loss(build("folder"), "cross_entropy").model.head
        'linear'
    """
    if loss == recipe.loss.name:
        return recipe
    config = changed(recipe, {"loss.name": loss})
    return replace(config, model=replace(config.model, head=_head(config.loss)))


def command_line(config: RunConfig) -> str:
    """The command that trains a configuration: its recipe and all that differs from it.

    Example:
        >>> command_line(changed(build("smoke"), {"loss.max_margin": 0.3}))
        'shortlist train smoke --loss.max-margin 0.3'
    """
    words = ["shortlist", "train", config.recipe]
    recipe = build(config.recipe)
    if config.loss.name != recipe.loss.name:
        words += ["--loss.name", config.loss.name]
        recipe = with_loss(recipe, config.loss.name)
    settings, original = to_dict(config), to_dict(recipe)
    if settings["seed"] != original["seed"]:
        words += ["--seed", str(settings["seed"])]
    for section in ("data", "model", "loss", "optim", "train"):
        for name, value in settings[section].items():
            if value == original[section][name]:
                continue
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{section}.{flag}" if value else f"--{section}.no-{flag}")
            else:
                words += [f"--{section}.{flag}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def overview() -> dict[str, list[tuple[str, str]]]:
    """Recipes and what they are, under headings. Rows of a table that differ in a number share a line.

    Example:
        >>> overview()["The paper: ImageNet"][0]
        ('imagenet_table9_cross_entropy_k{1,5}', 'Table 9, cross-entropy')
    """
    own = [(name, HELP[name]) for name in FOR_YOUR_DATA]
    first = [(name, text) for name, text in HELP.items() if name.startswith(_TO_TRY_IT_OUT)]
    listed = {"Your own data": own, "To try it out": first}
    for prefix, heading in _PAPER.items():
        families: dict[str, list[str]] = {}
        for name in HELP:
            if name.startswith(prefix):
                families.setdefault(name.rstrip("0123456789."), []).append(name)
        listed[heading] = [_family(stem, names) for stem, names in families.items()]
    return listed


def _family(stem: str, names: list[str]) -> tuple[str, str]:
    text = HELP[names[0]].rstrip(".")
    if len(names) == 1:
        return names[0], text
    return f"{stem}{{{','.join(name.removeprefix(stem) for name in names)}}}", text.rpartition(", ")[0]


def _add(name: str, text: str, recipe: Callable[[], RunConfig]) -> None:
    RECIPES[name] = recipe
    HELP[name] = text


def glyphs(loss: LossConfig, *, epochs: int, lr: float) -> RunConfig:
    """The built-in look-alike characters, long-tailed, with a network for two cores."""
    return RunConfig(
        data=DataConfig(name="glyphs", imbalance=50),
        model=ModelConfig(name="glyphnet", head=_head(loss)),
        loss=loss,
        optim=OptimConfig(lr=lr, schedule="cosine", warmup_epochs=0.5, weight_decay=1e-4),
        train=TrainConfig(epochs=epochs, batch_size=64, ks=(1, 3, 5)),
    )


def smoke() -> RunConfig:
    """Two epochs of large batches on the built-in characters: seconds, and it learns little."""
    loss = ImbalancedNoisedTopKHingeConfig(k=5, epsilon=0.05, max_margin=0.1, scale=50)
    config = glyphs(loss, epochs=2, lr=0.1)
    return replace(config, train=replace(config.train, batch_size=256))


def folder() -> RunConfig:
    """Your own images in one folder a class: the paper's network for fine-grained images, with a cosine schedule."""
    config = _pretrained_resnet50("folder", _fine_tuning_loss())
    # The warm-up spares the pre-trained weights the first gradients, which come from a random last layer. That layer
    # has everything to learn, and with few images has few steps for it.
    return replace(
        config,
        optim=replace(config.optim, schedule="cosine", milestones=(), warmup_epochs=1, head_lr_factor=10),
        train=replace(config.train, select_corrected=True, select_latest=True),
    )


def folder_lite() -> RunConfig:
    """The same with EfficientNet-Lite0, whose weights come with a package: a package index is all that it needs."""
    config = folder()
    return replace(
        config, model=replace(config.model, name="tf_efficientnet_lite0", pretrained=False, weights="package")
    )


def folder_frozen() -> RunConfig:
    """The last layer alone, on features of EfficientNet-Lite0 that are computed once: minutes on two cores."""
    return _frozen_lite("folder", "crop")


def embeddings() -> RunConfig:
    """A file of embeddings with labels: trains a linear layer on top."""
    return RunConfig(
        data=DataConfig(name="embeddings"),
        model=ModelConfig(name="none"),
        loss=_fixed_features_loss(),
        optim=_for_fixed_features(),
        train=TrainConfig(epochs=30, batch_size=256, select_corrected=True, select_latest=True),
    )


def cifar100(loss: LossConfig, *, label_noise: float = 0.0) -> RunConfig:
    """The paper's protocol on CIFAR-100 (section 4.4), after Berrada et al. (2018)."""
    return RunConfig(
        data=DataConfig(
            name="cifar100", label_noise=label_noise, noise_groups="consecutive", redraw_noise=label_noise > 0
        ),
        model=ModelConfig(name="densenet40_40"),
        loss=loss,
        optim=OptimConfig(lr=0.1, milestones=(0.5, 0.75), weight_decay=1e-4),
        train=TrainConfig(epochs=300, batch_size=64, ks=(1, 5), select="micro_top5"),
    )


def cifar100_lt(loss: LossConfig) -> RunConfig:
    """CIFAR-100 thinned to a long tail: network, batches and schedule of Cao et al. (2019), as is usual."""
    return RunConfig(
        data=DataConfig(name="cifar100", imbalance=100),
        model=ModelConfig(name="resnet32", head=_head(loss)),
        loss=loss,
        optim=OptimConfig(lr=0.1, milestones=(0.8, 0.9), decay=0.01, warmup_epochs=5, weight_decay=2e-4),
        train=TrainConfig(epochs=200, batch_size=128),
    )


def plantnet(loss: LossConfig) -> RunConfig:
    """The paper's protocol on Pl@ntNet-300K (section 4.5.1)."""
    return _pretrained_resnet50("plantnet300k", loss)


def imagenet_lt(loss: LossConfig) -> RunConfig:
    """The paper's protocol on ImageNet-LT (section 4.5.2)."""
    return RunConfig(
        data=DataConfig(name="imagenet_lt", workers=8),
        model=ModelConfig(name="resnet34", head=_head(loss)),
        loss=loss,
        optim=OptimConfig(lr=1e-2, milestones=(0.6, 0.8), weight_decay=2e-3),
        train=TrainConfig(epochs=100, batch_size=128),
    )


def imagenet(loss: LossConfig, *, lr: float, weight_decay: float) -> RunConfig:
    """The paper's protocol on ImageNet (appendix D), after Berrada et al. (2018)."""
    return RunConfig(
        data=DataConfig(name="imagenet", val_fraction=0.039, workers=8),  # 50,000 images
        model=ModelConfig(name="resnet18"),
        loss=loss,
        optim=OptimConfig(lr=lr, milestones=(0.25, 0.5, 0.75), weight_decay=weight_decay),
        train=TrainConfig(epochs=120, batch_size=256, ks=(1, 5), select=f"micro_top{loss.largest_k}"),
    )


def feathers_lite() -> RunConfig:
    """Fine-tuning on FeathersV1: narrow images are padded, and the last layer learns ten times as fast as the rest."""
    loss = _fine_tuning_loss()
    return RunConfig(
        data=DataConfig(name="feathers", fit="pad", image_size=128),
        model=ModelConfig(name="tf_efficientnet_lite0", weights="package", head=_head(loss)),
        loss=loss,
        optim=OptimConfig(lr=0.02, head_lr_factor=10, schedule="cosine", warmup_epochs=1, weight_decay=1e-4),
        train=TrainConfig(epochs=12, batch_size=64, select_corrected=True, select_latest=True),
    )


def feathers_frozen() -> RunConfig:
    """The last layer alone on FeathersV1."""
    return _frozen_lite("feathers", "pad")


def _fine_tuning_loss() -> LossConfig:
    """For a pre-trained network as a whole.

    LDAM led on photographs, and its cosine layer learns quickly from few of them. In networks that start from random
    weights it lags behind balanced softmax (docs/rare-classes.md).
    """
    return LDAMConfig(k=5, max_margin=0.2)


def _fixed_features_loss() -> LossConfig:
    """For a last layer alone; the correction afterwards sees to the class sizes.

    Balanced softmax asks the weights to overcome the class sizes in training. Those of a class with one or two images
    learn these by heart, and it was up to nine points behind (docs/rare-classes.md).
    """
    return CrossEntropyConfig(k=5)


def _frozen_lite(data: DataName, fit: Fit) -> RunConfig:
    return RunConfig(
        data=DataConfig(name=data, fit=fit, image_size=128),
        model=ModelConfig(name="tf_efficientnet_lite0", weights="package", frozen=True),
        loss=_fixed_features_loss(),
        optim=_for_fixed_features(),
        train=TrainConfig(epochs=30, batch_size=256, select_corrected=True, select_latest=True),
    )


def _for_fixed_features() -> OptimConfig:
    """One choice for the features of any network; docs/log.md says on which it was made, and how."""
    return OptimConfig(name="adamw", lr=1e-2, schedule="cosine", warmup_epochs=0.5, weight_decay=1.0, standardise=True)


def _pretrained_resnet50(data: DataName, loss: LossConfig) -> RunConfig:
    return RunConfig(
        data=DataConfig(name=data, workers=8),
        model=ModelConfig(name="resnet50.tv_in1k", pretrained=True, head=_head(loss)),
        loss=loss,
        optim=OptimConfig(lr=2e-3, milestones=(2 / 3, 5 / 6), weight_decay=1e-4),
        train=TrainConfig(epochs=30, batch_size=32),
    )


def _head(loss: LossConfig) -> Literal["linear", "cosine"]:
    """As in the paper, the losses with margins have a cosine layer, and only they."""
    return "cosine" if loss.takes_cosines else "linear"


def _register_for_everybody() -> None:
    _add("smoke", "The smallest run: a few seconds, to see that everything works.", smoke)
    _add("folder", "Your own images in one folder a class; pass --data.root.", folder)
    _add(
        "folder_lite",
        "The same with EfficientNet-Lite0 from a package (pip install 'shortlist[lite]'): no model hub needed.",
        folder_lite,
    )
    _add(
        "folder_frozen",
        "The same, the last layer alone, on features that are computed once: minutes on two cores.",
        folder_frozen,
    )
    _add("embeddings", "A file of embeddings with labels (.npz or .safetensors); pass --data.root.", embeddings)
    for name, loss, lr in (
        ("cross_entropy", CrossEntropyConfig(k=5), 0.1),
        ("smooth", SmoothTopKHingeConfig(k=5, tau=1.0), 0.5),
        ("imbalanced", ImbalancedNoisedTopKHingeConfig(k=5, epsilon=0.05, max_margin=0.1, scale=50), 0.05),
        ("balanced_softmax", BalancedSoftmaxConfig(k=5), 0.1),
    ):
        text = f"The demo's {name.replace('_', '-')} row: look-alike characters, long-tailed."
        _add(f"demo_{name}", text, partial(glyphs, loss, epochs=8, lr=lr))


def _register_cifar100() -> None:
    for epsilon in (0.0, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0):
        noised = NoisedTopKHingeConfig(k=5, epsilon=epsilon, n_samples=10)
        _add(f"cifar100_table2_epsilon_{epsilon:g}", f"Table 2, epsilon = {epsilon:g}.", partial(cifar100, noised))
    for draws in (1, 2, 3, 5, 50, 100):  # with 10 it is table 4's, without label noise
        noised = NoisedTopKHingeConfig(k=5, epsilon=0.2, n_samples=draws)
        _add(f"cifar100_table3_samples_{draws}", f"Table 3, B = {draws}.", partial(cifar100, noised))
    losses: dict[str, LossConfig] = {
        "cross_entropy": CrossEntropyConfig(k=5),
        "smooth": SmoothTopKHingeConfig(k=5, tau=1.0),
        "noised": NoisedTopKHingeConfig(k=5, epsilon=0.2, n_samples=10),
    }
    for name, loss in losses.items():
        for p in (0.0, 0.1, 0.2, 0.3, 0.4):
            text = f"Table 4 (top-5) and table 7 (top-1), {name.replace('_', '-')}, label noise p = {p}."
            _add(f"cifar100_table4_{name}_p{round(100 * p):02d}", text, partial(cifar100, loss, label_noise=p))


def _register_cifar100_lt() -> None:
    for k in (1, 3, 5):
        for name, loss in {
            "cross_entropy": CrossEntropyConfig(k=k),
            "smooth": SmoothTopKHingeConfig(k=k, tau=1.0),
            "noised": NoisedTopKHingeConfig(k=k, epsilon=1.0, n_samples=5),
            "focal": FocalConfig(k=k, gamma=0.5),
            "ldam": LDAMConfig(k=k, max_margin=0.2, scale=30),
            "imbalanced": ImbalancedNoisedTopKHingeConfig(k=k, epsilon=0.05, max_margin=0.2, scale=30),
            "cosine_cross_entropy": _cosine_cross_entropy(k=k, scale=30),
            "logit_adjusted": LogitAdjustedConfig(k=k, tau=1.0),
            "balanced_softmax": BalancedSoftmaxConfig(k=k),
        }.items():
            text = f"CIFAR-100-LT, imbalance 100, {name.replace('_', '-')}, K = {k}."
            _add(f"cifar100_lt_{name}_k{k}", text, partial(cifar100_lt, loss))


def _register_plantnet() -> None:
    for k in (1, 3, 5, 10):
        table, where = ("table8", "Table 8 (micro)") if k == 10 else ("table5", "Table 5 (macro) and table 8 (micro)")
        for name, loss in {
            "cross_entropy": CrossEntropyConfig(k=k),
            "smooth": SmoothTopKHingeConfig(k=k, tau=0.1),
            "noised": NoisedTopKHingeConfig(k=k, epsilon=1.0, n_samples=5),
            "focal": FocalConfig(k=k, gamma=2.0),
            "ldam": LDAMConfig(k=k, max_margin=0.2, scale=40),
            "imbalanced": ImbalancedNoisedTopKHingeConfig(k=k, epsilon=0.01, max_margin=0.2, scale=60),
        }.items():
            _add(
                f"plantnet_{table}_{name}_k{k}", f"{where}, {name.replace('_', '-')}, K = {k}.", partial(plantnet, loss)
            )
    text = "Ablation: table 5's cross-entropy, K = 5, with the cosine layer and scale that the margin losses have."
    _add("plantnet_cosine_cross_entropy_k5", text, partial(plantnet, _cosine_cross_entropy(k=5, scale=40)))
    for k in (1, 3, 5):
        for name, what, loss in (
            ("logit_adjusted", "logit adjustment (tau is to be tuned)", LogitAdjustedConfig(k=k)),
            ("balanced_softmax", "balanced softmax", BalancedSoftmaxConfig(k=k)),
        ):
            _add(f"plantnet_{name}_k{k}", f"Beyond table 5: {what}, K = {k}.", partial(plantnet, loss))


def _register_imagenet() -> None:
    for k in (1, 3, 5):
        for name, loss in {
            "cross_entropy": CrossEntropyConfig(k=k),
            "smooth": SmoothTopKHingeConfig(k=k, tau=0.1),
            "focal": FocalConfig(k=k, gamma=1.0),
            "ldam": LDAMConfig(k=k, max_margin=0.4, scale=30),
            "imbalanced": ImbalancedNoisedTopKHingeConfig(k=k, epsilon=0.1, max_margin=0.4, scale=50),
        }.items():
            text = f"Table 6, {name.replace('_', '-')}, K = {k}."
            _add(f"imagenet_lt_table6_{name}_k{k}", text, partial(imagenet_lt, loss))
    for k in (1, 5):
        for name, loss, lr, weight_decay in (
            ("cross_entropy", CrossEntropyConfig(k=k), 0.1, 1e-4),
            ("smooth", SmoothTopKHingeConfig(k=k, tau=0.1), 1.0, 2.5e-5),
            ("noised", NoisedTopKHingeConfig(k=k, epsilon=0.5, n_samples=10), 0.1, 1.5e-4),
        ):
            text = f"Table 9, {name.replace('_', '-')}, K = {k}."
            _add(f"imagenet_table9_{name}_k{k}", text, partial(imagenet, loss, lr=lr, weight_decay=weight_decay))


def _register_feathers() -> None:
    _add(
        "feathers_lite", "FeathersV1, fine-tuning of EfficientNet-Lite0 (pip install 'shortlist[lite]').", feathers_lite
    )
    _add("feathers_frozen", "FeathersV1, the last layer alone on features that are computed once.", feathers_frozen)


def _cosine_cross_entropy(k: int, scale: float) -> LossConfig:
    """LDAM without margins: cross-entropy with the layer and the scale that the margin losses have."""
    return LDAMConfig(k=k, max_margin=0.0, scale=scale)


_register_for_everybody()
_register_cifar100()
_register_cifar100_lt()
_register_plantnet()
_register_imagenet()
_register_feathers()
