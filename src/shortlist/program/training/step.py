"""One training step: forward, loss, backward, clipping, optimiser; on a GPU launched as one CUDA graph if possible."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import lightning_fabric
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shortlist.errors import ShortlistError
from shortlist.program.config import RunConfig
from shortlist.program.data.base import Split, fewest_images
from shortlist.program.data.in_memory import TensorSplit
from shortlist.program.seeds import mix_seed
from shortlist.program.training.cuda_graph import CapturedStep
from shortlist.program.training.mixing import Mixing
from shortlist.program.training.schedule import learning_rate

# What seeds are for, so that no two purposes share one.
INIT, ORDER, AUGMENT, NOISE, MIX = range(5)


class Step:
    """Updates the network by one batch: ``step(batches, epoch, number)``.

    Args:
        config: The run's.
        fabric: Device, ranks and precision.
        trained: As built; its parameters and buffers are what the step changes.
        model: The same as compiled and wrapped by fabric.
        loss: Called with scores and labels, or with scores and probabilities if images are mixed.
        optimizer: As wrapped by fabric.
        train: The training images.
        steps: Steps in an epoch.
        mixing: Mixes the images and labels of a batch. With it, a step is not captured as a CUDA graph: losses of
            probabilities run without their kernels, and nobody has checked that no such loss waits for the GPU.
    """

    def __init__(
        self,
        config: RunConfig,
        fabric: lightning_fabric.Fabric,
        trained: nn.Module,
        model: nn.Module,
        loss: nn.Module,
        optimizer: Optimizer,
        train: Split,
        steps: int,
        mixing: Mixing | None = None,
    ) -> None:
        self._config, self._fabric, self._model, self._loss = config, fabric, model, loss
        self._optimizer, self._train, self._steps, self._mixing = optimizer, train, steps, mixing
        precise = torch.float32 if fabric.device.type == "mps" else torch.float64
        self.loss_sum = torch.zeros((), dtype=precise, device=fabric.device)
        """Over this rank's images of the epoch so far. It stays on the device, so that adding to it never waits."""
        self.update: Callable[[Tensor, Tensor], None] = self._update
        """One update with a whole batch."""
        if mixing is None and _can_capture(config, fabric, train):
            state = [*trained.parameters(), *trained.buffers(), self.loss_sum]
            self.update = CapturedStep(self._update, optimizer, state)

    def __call__(self, batches: Iterator[tuple[Tensor, Tensor, Tensor]], epoch: int, number: int) -> int:
        """Take the next batch and update the weights; returns the number of this rank's images in it."""
        config, fabric = self._config, self._fabric
        rate = learning_rate(config.optim, epoch, number, self._steps, config.train.epochs)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]
        _seed(fabric.device, mix_seed(config.seed, NOISE, epoch, number))
        size, parts, images = config.train.batch_size, config.train.accumulate, 0
        fewest = fewest_images(size, parts * fabric.world_size)
        count = min(size, len(self._train) - number * size)  # over all ranks
        with nullcontext() if count == size else uncompiled(config):
            for part in range(parts):
                inputs, target, _ = next(batches)
                read = len(target)
                seed = mix_seed(config.seed, MIX, epoch, number, fabric.global_rank * parts + part)
                if read == size:  # the whole batch in one part, on one rank
                    self.update(*self._mixed(inputs, target, seed))
                    return size
                if read < fewest and fabric.world_size == 1:  # the rest of the part could not be read
                    continue
                if read == 0:  # the other ranks would wait for this rank's gradient for ever
                    raise ShortlistError(f"no image of a rank's part could be read: {self._train.skipped[-1]}, ...")
                if read < fewest:  # a single image has no batch statistics
                    inputs, target = torch.cat((inputs, inputs)), torch.cat((target, target))
                inputs, target = self._mixed(inputs, target, seed)
                with fabric.no_backward_sync(self._model, enabled=part < parts - 1):  # type: ignore[arg-type]
                    # Ranks and parts may differ in size by an image; DDP takes the plain mean over ranks.
                    self._add_gradient(inputs, target, share=read * fabric.world_size / count, images=read)
                images += read
            self._descend()
        return images

    def _mixed(self, inputs: Tensor, target: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        return (inputs, target) if self._mixing is None else self._mixing(inputs, target, seed)

    def _update(self, inputs: Tensor, target: Tensor) -> None:
        self._add_gradient(inputs, target, share=1, images=len(target))
        self._descend()

    def _add_gradient(self, inputs: Tensor, target: Tensor, *, share: float, images: int) -> None:
        """Add the gradient of ``share`` times the mean loss, and the loss of so many images to the sum."""
        loss = self._loss(self._model(inputs), target)
        self._fabric.backward(loss if share == 1 else loss * share)
        self.loss_sum.add_(loss.detach(), alpha=images)

    def _descend(self) -> None:
        if self._config.optim.clip_norm:
            # A norm that is not finite makes the next loss NaN, which is noticed; checking it here would be a wait.
            self._fabric.clip_gradients(
                self._model, self._optimizer, max_norm=self._config.optim.clip_norm, error_if_nonfinite=False
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def uncompiled(config: RunConfig) -> AbstractContextManager[object]:
    """For inputs of rare sizes: compiling for each size would take longer than it saves."""
    return torch.compiler.set_stance("force_eager") if config.train.compile else nullcontext()


def scales_gradients(config: RunConfig) -> bool:
    return config.train.precision == "16-mixed"


def _can_capture(config: RunConfig, fabric: lightning_fabric.Fabric, train: Split) -> bool:
    """True if all whole batches have one shape, and a step never reads a result from the GPU."""
    same_shape = config.train.accumulate == 1 and isinstance(train, TensorSplit)
    one_gpu = fabric.device.type == "cuda" and fabric.world_size == 1
    return config.train.cuda_graph and same_shape and one_gpu and not scales_gradients(config)


def _seed(device: torch.device, seed: int) -> None:
    """Seed only the generator of the device's noise: ``torch.manual_seed`` would visit every device."""
    if device.type == "mps":
        torch.mps.manual_seed(seed)
        return
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    generator.manual_seed(seed)
