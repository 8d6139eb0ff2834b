"""The parts of a training, built once: device, data, network, loss, optimiser, step."""

import functools
import gc
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning_fabric
import torch
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from shortlist.errors import ShortlistError
from shortlist.ops.class_counts import size_groups
from shortlist.program.config import ModelConfig, OptimConfig, RunConfig
from shortlist.program.data.base import Problem, training_plan
from shortlist.program.data.canvas import with_canvases
from shortlist.program.data.catalogue import load_problem
from shortlist.program.models.build import Classifier, build_model
from shortlist.program.models.weights import load_backbone
from shortlist.program.runs.folder import BEST, RunFolder
from shortlist.program.runs.model import load_best
from shortlist.program.runs.start import normalised_as_recorded, normalised_for_start, read_start
from shortlist.program.seeds import mix_seed
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.features import weights_digest, with_features
from shortlist.program.training.mixing import Mixing
from shortlist.program.training.standardise import StandardisedInputs, mean_and_deviation
from shortlist.program.training.step import AUGMENT, INIT, ORDER, Step, scales_gradients


@dataclass(frozen=True)
class Start:
    """The weights of ``model.weights`` that the network holds now."""

    sha256: str
    """Of their file."""
    told: str
    """What the user should know about them."""


@dataclass(frozen=True)
class Parts:
    """All that a training works with."""

    config: RunConfig
    fabric: lightning_fabric.Fabric
    """Device, ranks and precision."""
    problem: Problem
    network: nn.Module
    """As built: its state dict is what weight files hold."""
    trained: nn.Module
    """The part that training changes, and checkpoints hold: the network, or of a frozen one its last layer alone."""
    model: nn.Module
    """The trained part as compiled and wrapped by fabric: the one to call."""
    loss: nn.Module
    optimizer: Optimizer
    step: Step
    steps: int
    """Steps in an epoch."""
    start: Start | None = None
    """None if the network starts from random numbers, from weights of timm, or from a checkpoint of the run."""
    frozen_digest: str = ""
    """Of the weights that stay as they are; empty if the whole network is trained."""

    def batches(self, epoch: int, done: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """This rank's training batches of an epoch, without those of the first ``done`` steps."""
        plan = _plan(self.config, self.fabric, self.problem, epoch)[done:]
        augment_seed = mix_seed(self.config.seed, AUGMENT, epoch)
        return self.problem.train.batches([part for parts in plan for part in parts], self.fabric.device, augment_seed)


def build(
    config: RunConfig,
    folder: Path,
    fabric: lightning_fabric.Fabric | None = None,
    callbacks: Sequence[Callback] = (),
) -> Parts:
    """Build the parts of a run that will be written to ``folder``; nothing is written there yet.

    Args:
        config: The run.
        folder: Where it will go.
        fabric: As ``open_fabric`` gives it, for callers that need it earlier.
        callbacks: Told of the features of a frozen network while they are computed.

    Raises:
        ShortlistError: Data, settings or device that cannot be used.
    """
    fabric = fabric or open_fabric(config)
    _refuse_other_layer(config)
    if config.model.frozen:
        _refuse_what_cannot_be_frozen(config)
    if config.optim.standardise and not config.has_fixed_features:
        raise ShortlistError(
            "optim.standardise needs features that stay the same, and here the whole network is trained: add "
            "--model.frozen or --optim.no-standardise"
        )
    problem, run, model_config = load_problem(config.data, config.seed), RunFolder(folder), config.model
    # Checkpoints of a frozen network hold its last layer alone; the rest is in its best weights, once it has some.
    holds_all_weights = run.continues and (run.has(BEST) or not config.model.frozen)
    if holds_all_weights:  # they replace any others
        model_config = replace(model_config, pretrained=False, weights="")
    problem = normalised_as_recorded(problem, config, run) if run.continues else normalised_for_start(problem, config)
    problem.refuse_run_folder(folder)
    _refuse_large_ks(config, len(problem.classes))
    torch.manual_seed(mix_seed(config.seed, INIT))
    network, start = _network(model_config, problem)
    if config.model.frozen and holds_all_weights:
        load_best(network, run, problem.input_shape)
    group = size_groups(problem.class_counts).get(config.select_metric.partition("_")[0])
    if group is not None and not group[problem.val.labels].any():
        raise undefined_metric(config)  # now, not after an epoch
    # Label noise may empty a class. No image has its label, so the loss never uses its count.
    loss = config.loss.build(problem.class_counts.clamp(min=1)).to(fabric.device)
    if config.train.sync_batchnorm and fabric.world_size > 1:
        if fabric.device.type != "cuda":
            raise ShortlistError("train.sync_batchnorm needs GPUs: torch has no such layer for CPUs")
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
    if config.train.channels_last:
        network = network.to(memory_format=torch.channels_last)
    trained, frozen_digest = network, ""
    if config.model.frozen:
        trained, frozen_digest = network.on_features(), weights_digest(network.backbone)
        problem = with_features(problem, network.backbone, frozen_digest, config, fabric.device, callbacks)
    elif config.data.canvas:

        def say(message: str) -> None:
            for callback in callbacks:
                callback.on_message(message)

        problem = with_canvases(problem, config.data, say)
    model: Any = torch.compile(trained) if config.train.compile else trained
    fused = fabric.device.type == "cuda" and not scales_gradients(config)
    own_optimizer = build_optimizer(config.optim, trained, fused=fused)
    model, optimizer = fabric.setup(model, own_optimizer)
    steps = len(_plan(config, fabric, problem, 0))
    if steps == 0:
        raise ShortlistError(
            f"train.batch_size must leave at least one step: {len(problem.train)} training images, "
            f"{fabric.world_size} ranks of {config.train.accumulate} parts"
        )
    if config.optim.standardise and isinstance(network.head, nn.Linear):  # cosines have no use for it
        mean, deviation = mean_and_deviation(problem.train)
        StandardisedInputs(network.head, mean.to(fabric.device), deviation).attach(own_optimizer)
    mixing = Mixing(config.data, len(problem.classes)) if config.data.mixup or config.data.cutmix else None
    step = Step(config, fabric, trained, model, loss, optimizer, problem.train, steps, mixing)
    return Parts(config, fabric, problem, network, trained, model, loss, optimizer, step, steps, start, frozen_digest)


def _network(config: ModelConfig, problem: Problem) -> tuple[Classifier, Start | None]:
    """The network as training begins, with the weights that the settings name."""
    weights = read_start(config)  # first: a missing file is told before timm builds or downloads anything
    network = build_model(config, problem.input_shape, len(problem.classes))
    if weights is None:
        return network, None
    told = load_backbone(network.backbone, weights.tensors, weights.source, config.name)
    return network, Start(weights.sha256, told)


def _refuse_other_layer(config: RunConfig) -> None:
    """Raise an error if the loss does not fit the last layer.

    Cross-entropy of scores between -1 and 1 stays large however well the classes are separated, and a loss that scales
    cosines itself would scale them twice.
    """
    head, loss = config.model.head, config.loss
    if head == "cosine" and not loss.takes_cosines:
        raise ShortlistError(
            f"model.head must be linear or scaled_cosine for {loss.name}, which has no scale for cosines, got cosine"
        )
    if head == "scaled_cosine" and loss.takes_cosines:
        raise ShortlistError(f"model.head must be cosine for {loss.name}, which has a scale of its own, got {head}")


def _refuse_what_cannot_be_frozen(config: RunConfig) -> None:
    if config.model.name == "none":
        raise ShortlistError("model.frozen is for networks, and embeddings are features already: leave it out")
    if not config.model.starts_trained:
        raise ShortlistError(
            f"model.frozen needs pre-trained weights, got {config.model.name} with random ones, whose features say "
            "nothing about images: add --model.pretrained, or --model.weights FILE"
        )
    for name in ("randaugment", "mixup", "cutmix", "canvas"):
        if value := getattr(config.data, name):
            raise ShortlistError(f"data.{name} must be 0 with model.frozen, which takes no augmentation, got {value}")


def _refuse_large_ks(config: RunConfig, classes: int) -> None:
    """Raise an error that names every K that is too large for this number of classes."""
    if classes < 2:
        raise ShortlistError(f"the data must have at least 2 classes, got {classes}")
    k, ks = config.loss.k, config.train.ks
    if config.loss.largest_k >= classes or max(ks) > classes:
        of_loss, measured = (sorted({min(k, classes - 1) for k in some}) for some in (config.loss.ks, ks))
        raise ShortlistError(
            f"loss.k must be below the number of classes, {classes}, and no train.ks above it, got {k} and {ks}: "
            f"try --loss.k {' '.join(map(str, of_loss))} --train.ks {' '.join(map(str, measured))}"
        )


def undefined_metric(config: RunConfig) -> ShortlistError:
    return ShortlistError(
        f"train.select = {config.select_metric} is undefined: no such class among the validation images"
    )


def build_optimizer(config: OptimConfig, network: nn.Module, *, fused: bool) -> Optimizer:
    """The optimiser. Each group of parameters has an ``lr_factor``, by which the step multiplies the learning rate."""
    groups = _parameter_groups(network, config.head_lr_factor)
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": fused or None}
    if config.name == "adamw":
        return AdamW(groups, betas=(config.momentum, 0.999), **options)
    return SGD(groups, momentum=config.momentum, nesterov=config.momentum > 0, **options)


def _parameter_groups(network: nn.Module, head_lr_factor: float) -> list[dict[str, Any]]:
    """One group, or two if the head has a learning rate of its own; the parameters are in the same order.

    Embeddings have no backbone, and therefore no first group.
    """
    if head_lr_factor == 1:
        return [{"params": list(network.parameters()), "lr_factor": 1.0}]
    backbone, head = (list(network.get_submodule(part).parameters()) for part in ("backbone", "head"))
    groups = [{"params": backbone, "lr_factor": 1.0}, {"params": head, "lr_factor": head_lr_factor}]
    return [group for group in groups if group["params"]]


def open_fabric(config: RunConfig) -> lightning_fabric.Fabric:
    """One device, or those that torchrun's variables describe."""
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # its remarks are for programmers
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        fabric = lightning_fabric.Fabric(
            accelerator=config.train.device,
            devices=local_size,
            num_nodes=world_size // local_size,
            # Buffers are shared before each evaluation: a rank without a validation image makes no forward pass.
            strategy=DDPStrategy(broadcast_buffers=False) if world_size > 1 else "auto",
            precision=config.train.precision,
        )
    except (RuntimeError, ValueError) as error:
        raise ShortlistError(f"train.device = {config.train.device} cannot be used here: {error}") from error
    fabric.launch()
    return fabric


def _plan(config: RunConfig, fabric: lightning_fabric.Fabric, problem: Problem, epoch: int) -> list[list[Tensor]]:
    return training_plan(
        len(problem.train),
        config.train.batch_size,
        config.train.accumulate,
        mix_seed(config.seed, ORDER),
        epoch,
        fabric.global_rank,
        fabric.world_size,
    )


def free_earlier_runs(config: RunConfig) -> None:
    """Free the GPU memory of earlier networks, and the compiled variants of other ones: the compiler has a limit."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    if config.train.compile:
        _reset_compiler(config.model.name)


@functools.lru_cache(maxsize=1)
def _reset_compiler(network: str) -> None:
    """Reset the compiler, unless the last call was for the same network: its compiled code can be reused.

    Different last layers are two variants, and the compiler keeps both.
    """
    torch.compiler.reset()
