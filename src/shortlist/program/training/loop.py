"""Training, told as in a paper's appendix: data, network, loss, optimiser, schedule, steps, evaluation, result.

Nothing random hangs on the past: the order of the images, their augmentation and the noise of a step are functions of
the seed, the epoch and the step. So a run that was killed and resumed ends with the numbers it would have had: on a CPU
to the last bit, on a GPU as far as its kernels, which cuDNN may choose anew, repeat themselves.
"""

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning_fabric
import safetensors.torch
import torch
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.tensorboard import SummaryWriter

from shortlist.errors import ShortlistError
from shortlist.ops.class_counts import size_groups
from shortlist.program.config import OptimConfig, RunConfig
from shortlist.program.data.base import Problem, evaluation_plan, fewest_images, training_plan
from shortlist.program.data.catalogue import load_problem
from shortlist.program.data.in_memory import TensorSplit
from shortlist.program.models.build import build_model, load_weights
from shortlist.program.runs.checks import is_metrics_line
from shortlist.program.runs.environment import environment
from shortlist.program.runs.folder import RunFolder, as_safetensors, default_folder, file_digest
from shortlist.program.runs.records import refuse_other_data, refuse_other_training_images, write_facts
from shortlist.program.seeds import mix_seed
from shortlist.program.text import some_of
from shortlist.program.training.cuda_graph import CapturedStep
from shortlist.program.training.evaluate import Evaluation, evaluate
from shortlist.program.training.loss_factory import build_loss, refuse_cosines_without_scale, refuse_large_ks
from shortlist.program.training.progress import TrainingProgress
from shortlist.program.training.schedule import learning_rate
from shortlist.program.training.signals import StopRequests, stop_requests
from shortlist.program.training.thumbnails import save_pictures

# What the seeds are for, so that no two uses share one.
_INIT, _ORDER, _AUGMENT, _NOISE = range(4)
# Steps between looks at the loss: each makes a GPU wait.
_LOOK_EVERY = 50


class Interrupted(KeyboardInterrupt):
    """Training was stopped from outside; the checkpoint is written."""


class DivergedError(ShortlistError):
    """The loss is not finite any more, or scores tell nothing apart."""


@dataclass
class Position:
    """How far a run has come: all that resuming needs beside weights and optimiser."""

    epoch: int = 0
    step: int = 0
    """Steps done in this epoch."""
    loss_sum: float = 0.0
    """Sum over this rank's images of this epoch so far; in a checkpoint, over those of all ranks."""
    images: float = 0
    """Their number."""
    seconds: float = 0.0
    """Spent on training steps since the run began."""
    best_epoch: int = -1
    best_value: float = -1.0
    best_at_smaller_ks: list[float] = field(default_factory=list)
    """What decides between epochs of the same value: the largest of these K first."""
    best_digest: str = ""
    """Checksum of the file of the best weights."""
    skipped: list[str] = field(default_factory=list)
    """Images that could not be read, on any rank, when the checkpoint was written."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Those of ``metrics.jsonl``. The result is taken from here, where a checksum guards it; the file has none."""


def train(config: RunConfig, *, folder: Path | None = None, resume: bool = False, quiet: bool = False) -> RunFolder:
    """Train, evaluate on the test images, and leave a run folder.

    Args:
        config: The run, e.g. from ``shortlist.program.recipes``.
        folder: Where it goes; by default ``runs/<recipe>/<key>-s<seed>``.
        resume: Go on with a run that was interrupted; one that has not begun starts afresh.
        quiet: Show nothing.

    Raises:
        ShortlistError: Bad data or settings, a folder that is taken, a loss that is not finite, a full disk.
        Interrupted: SIGINT or SIGTERM came; a checkpoint was written, or no step was left and the run has finished.
    """
    run = RunFolder(folder or default_folder(config))
    return run_to_the_end(Trainer(config, make_fabric(config), run, quiet=quiet), resume=resume)


def run_to_the_end(
    trainer: "Trainer", *, resume: bool, while_fitting: AbstractContextManager[object] | None = None
) -> RunFolder:
    """Have the trainer's run done from its claim to its result: ``train`` with a trainer of one's own making."""
    run = trainer.folder  # made only now: bad data leaves none
    with run.claim(trainer.config, resume=resume) if trainer.writes else nullcontext():
        trainer.fabric.barrier()
        trainer.read_test_images()
        with while_fitting or nullcontext():
            trainer.fit()
        trainer.test()
    if trainer.stop_asked:
        raise Interrupted(f"stopped; {run.path} has finished")
    return run


class Trainer:
    """One run in this process: one rank of it, where there are several."""

    def __init__(
        self,
        config: RunConfig,
        fabric: lightning_fabric.Fabric,
        run: RunFolder,
        *,
        quiet: bool,
        after_epoch: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.fabric, self.folder = config, fabric, run
        self.after_epoch = after_epoch
        """Called when an epoch is on disk; what it raises ends the training."""
        self.stop_asked = False
        """Whether a stop was asked for when no step was left in which to obey."""
        self.writes = fabric.is_global_zero
        refuse_cosines_without_scale(config)
        self.problem: Problem = load_problem(config.data)
        self.problem.refuse_run_folder(run.path)
        refuse_large_ks(config, len(self.problem.classes))
        torch.manual_seed(mix_seed(config.seed, _INIT))
        model: nn.Module = build_model(config.model, self.problem.input_shape, len(self.problem.classes))
        group = size_groups(self.problem.class_counts).get(config.select_metric.partition("_")[0])
        if group is not None and not group[self.problem.val.labels].any():
            raise self._without_value()  # now, and not after an epoch
        # Label noise may empty a class. As nothing is labelled so, what the loss makes of its count is never asked for.
        self.criterion = build_loss(config.loss, self.problem.class_counts.clamp(min=1)).to(fabric.device)
        if config.train.sync_batchnorm and fabric.world_size > 1:
            if fabric.device.type != "cuda":
                raise ShortlistError("train.sync_batchnorm needs GPUs: torch has no such layer for CPUs")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        if config.train.channels_last:
            model = model.to(memory_format=torch.channels_last)
        self.plain_model = model
        if config.train.compile:
            model = torch.compile(model)  # type: ignore[assignment]
        fused = fabric.device.type == "cuda" and not self._scales_gradients
        self.model, self.optimizer = fabric.setup(model, _optimizer(config.optim, model, fused=fused))
        precise = torch.float32 if fabric.device.type == "mps" else torch.float64
        self.loss_sum = torch.zeros((), dtype=precise, device=fabric.device)
        """Of this rank's images of the epoch so far; on the device, where adding to it waits for nobody."""
        self.update: Callable[[Tensor, Tensor], None] = self._update
        """One step with a whole batch, on a GPU as one launch if it can be."""
        if self._can_capture:
            state = [*self.plain_model.parameters(), *self.plain_model.buffers(), self.loss_sum]
            self.update = CapturedStep(self._update, self.optimizer, state)
        self.steps = len(self._plan(0))
        if self.steps == 0:
            raise ShortlistError(
                f"train.batch_size must leave at least one step: {len(self.problem.train)} training images, "
                f"{fabric.world_size} ranks of {config.train.accumulate} parts"
            )
        self.at = Position()
        self.warned = False
        """Whether it was said that the network makes no difference between images."""
        self.progress = TrainingProgress(config.train.epochs, self.steps, enabled=self.writes and not quiet)
        self.events: SummaryWriter | None = None

    @property
    def _scales_gradients(self) -> bool:
        return self.config.train.precision == "16-mixed"

    @property
    def _can_capture(self) -> bool:
        """Whether whole batches are all alike, and a step never asks the GPU what to do next."""
        train = self.config.train
        alike = train.accumulate == 1 and isinstance(self.problem.train, TensorSplit)
        alone = self.fabric.device.type == "cuda" and self.fabric.world_size == 1
        return train.cuda_graph and alike and alone and not self._scales_gradients

    def read_test_images(self) -> None:
        """Once, before training: one that cannot be read would end the run after all of it."""
        test, size = self.problem.test, self.config.train.eval_batch_size
        if self.config.data.on_bad_image == "fail" and not isinstance(test, TensorSplit):
            plan = evaluation_plan(len(test), size, self.fabric.global_rank, self.fabric.world_size)
            for _ in test.batches(plan, torch.device("cpu")):
                pass

    def fit(self) -> None:
        """Train to the last epoch, from the first or from where the folder's checkpoint was left."""
        self._begin_or_resume()
        try:
            with self.progress, stop_requests() as stop:
                while self.at.epoch < self.config.train.epochs:
                    stopped = self._train_epoch(stop)
                    self._end_epoch()
                    self.after_epoch()
                    if stopped and self.at.epoch < self.config.train.epochs:
                        raise Interrupted(f"stopped after epoch {self.at.epoch}; add --resume to go on")
                self.stop_asked = stop.asked
        finally:
            if self.events is not None:
                with self.folder.writing_events():
                    self.events.close()

    def test(self) -> None:
        """Judge the best weights on the test images, and write the result."""
        self.progress.say(f"testing the weights of epoch {self.at.best_epoch + 1}")
        self.fabric.barrier()  # nobody reads these weights before they are there
        self._write_result()
        self.fabric.barrier()  # nobody reads the result before it is there

    def _begin_or_resume(self) -> None:
        if self.folder.has_checkpoints:
            refuse_other_data(self.problem, self.folder)
            refuse_other_training_images(self.problem, self.folder)
        if self.folder.load_checkpoint(self.progress.say, self._restore) is not None:
            self.at.lines = _lines(self.folder, self.at)
            self.at.loss_sum /= self.fabric.world_size  # an equal share each: what counts is their sum
            self.at.images /= self.fabric.world_size
            done = self.at.epoch == self.config.train.epochs
            where = "after its last epoch" if done else f"at epoch {self.at.epoch + 1}, step {self.at.step}"
            self.progress.say(f"resuming {self.folder.path} {where}")
        self.progress.say(_found(self.problem))
        if not self.writes:
            return
        if self.at.best_digest and not self.folder.restore_best(self.at.best_digest):
            if self.at.step > 0 or self.at.best_epoch < self.at.epoch - 1:
                raise ShortlistError(
                    f"the best weights so far, of epoch {self.at.best_epoch + 1}, are lost from {self.folder.path}: "
                    "delete the folder and give the command again"
                )
            self.folder.save_best(as_safetensors(self.plain_model.state_dict()))  # killed before it could be
        name = torch.cuda.get_device_name(self.fabric.device) if self.fabric.device.type == "cuda" else "cpu"
        self.folder.note_environment({"epoch": self.at.epoch, **environment(name, self.fabric.world_size)})
        classes = {"names": self.problem.classes, "train_images": self.problem.class_counts.tolist()}
        self.folder.write_json("classes.json", classes | {"superclasses": self.problem.superclasses})
        write_facts(self.folder, self.problem)
        if self.problem.preprocess is not None:
            self.folder.write_json("preprocess.json", asdict(self.problem.preprocess))
        self.folder.write_metrics(self.at.lines)
        # Events of epochs that will be run again are hidden from what was written before.
        with self.folder.writing_events() as path:
            self.events = SummaryWriter(str(path), purge_step=self.at.epoch)

    def _restore(self, state: dict[str, Any]) -> None:
        """Take over a training state, or raise a ``ShortlistError`` that says what is wrong with it."""
        if missing := {"model", "optimizer", "precision", "position"} - state.keys():
            raise ShortlistError(f"it has no {min(missing)}")
        at = read_position(state, self.config)
        if at.step > self.steps:
            raise ShortlistError(f"its position is step {at.step} of an epoch of {self.steps}")
        load_weights(self.plain_model, state["model"], "its weights do not fit the network")
        try:
            self.optimizer.load_state_dict(_optimizer_state(state["optimizer"], self.optimizer))
            self.fabric.strategy.precision.load_state_dict(state["precision"])
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            raise ShortlistError("what its optimizer has gathered does not fit the network") from None
        self.at = at

    def _plan(self, epoch: int) -> list[list[Tensor]]:
        train = self.config.train
        return training_plan(
            len(self.problem.train),
            train.batch_size,
            train.accumulate,
            mix_seed(self.config.seed, _ORDER),
            epoch,
            self.fabric.global_rank,
            self.fabric.world_size,
        )

    def _train_epoch(self, stop: StopRequests) -> bool:
        """Train to the end of the epoch, or raise ``Interrupted``; whether a stop was asked for at the very end."""
        config, epoch = self.config, self.at.epoch
        todo = self._plan(epoch)[self.at.step :]
        batches = self.problem.train.batches(
            [part for parts in todo for part in parts],
            self.fabric.device,
            None if config.data.augment == "none" else mix_seed(config.seed, _AUGMENT, epoch),
        )
        self.model.train()
        self.loss_sum.fill_(self.at.loss_sum)
        began, done_before = time.monotonic(), self.at.seconds
        images_before, asked = self.at.images, False
        for step in range(self.at.step, self.steps):
            self.at.images += self._step(batches, epoch, step)
            self.at.step = step + 1
            if self.at.step % _LOOK_EVERY == 0 or self.at.step == self.steps or self.progress.due():
                self.at.loss_sum = self._finite_loss_sum()
                self.at.seconds = done_before + time.monotonic() - began
                rate = (self.at.images - images_before) * self.fabric.world_size / (time.monotonic() - began)
                self.progress.step(epoch, self.at.step, self.at.loss_sum / max(1, self.at.images), rate)
            asked = stop.requested(self.fabric, last=self.at.step == self.steps)
            if asked and self.at.step < self.steps:
                self.at.loss_sum = self._sum_over_ranks(self._finite_loss_sum())
                self.at.images = self._sum_over_ranks(self.at.images)
                self.at.seconds = done_before + time.monotonic() - began
                self._checkpoint()
                raise Interrupted(f"stopped in epoch {epoch + 1}; add --resume to go on")
        return asked

    def _step(self, batches: Iterator[tuple[Tensor, Tensor, Tensor]], epoch: int, step: int) -> int:
        """One update; returns the number of this rank's images in it."""
        config, fabric = self.config, self.fabric
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, epoch, step, self.steps, config.train.epochs)
        _seed(fabric.device, mix_seed(config.seed, _NOISE, epoch, step))
        size, parts, images = config.train.batch_size, config.train.accumulate, 0
        fewest = fewest_images(size, parts * fabric.world_size)
        count = min(size, len(self.problem.train) - step * size)  # over all ranks
        with nullcontext() if count == size else self._uncompiled():
            for part in range(parts):
                inputs, target, _ = next(batches)
                if len(target) == size:  # the whole batch in one part, on one rank
                    self.update(inputs, target)
                    return size
                if len(target) < fewest and fabric.world_size == 1:  # the others could not be read
                    continue
                if len(target) == 0:  # the other ranks would wait for this one's gradient for ever
                    skipped = self.problem.train.skipped[-1]
                    raise ShortlistError(f"no image of a rank's part could be read: {skipped}, ...")
                read = len(target)
                if read < fewest:  # the others could not be read, and a single image has no batch statistics
                    inputs, target = torch.cat((inputs, inputs)), torch.cat((target, target))
                with fabric.no_backward_sync(self.model, enabled=part < parts - 1):
                    # Ranks and parts may differ in size by an image; DDP takes the plain mean over ranks.
                    self._add_gradient(inputs, target, share=read * fabric.world_size / count, images=read)
                images += read
            self._descend()
        return images

    def _update(self, inputs: Tensor, target: Tensor) -> None:
        """One step with a whole batch."""
        self._add_gradient(inputs, target, share=1, images=len(target))
        self._descend()

    def _add_gradient(self, inputs: Tensor, target: Tensor, *, share: float, images: int) -> None:
        """That of the mean loss times ``share``; the loss counts for so many images."""
        loss = self.criterion(self.model(inputs), target)
        self.fabric.backward(loss if share == 1 else loss * share)
        self.loss_sum.add_(loss.detach(), alpha=images)

    def _descend(self) -> None:
        if self.config.optim.clip_norm:
            # A norm that is not finite makes the next loss NaN, which is noticed; looking at it here would be a wait.
            self.fabric.clip_gradients(
                self.model, self.optimizer, max_norm=self.config.optim.clip_norm, error_if_nonfinite=False
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _uncompiled(self) -> AbstractContextManager[object]:
        """For inputs of sizes that are rare: compiling for each would take longer than it saves."""
        return torch.compiler.set_stance("force_eager") if self.config.train.compile else nullcontext()

    def _finite_loss_sum(self) -> float:
        value = self.loss_sum.item()
        if not math.isfinite(value):
            raise DivergedError(
                f"the loss became {value} in epoch {self.at.epoch + 1}, at or before step {self.at.step}: "
                "try a lower optim.lr, optim.warmup_epochs or optim.clip_norm"
            )
        return value

    def _end_epoch(self) -> None:
        validation = self._evaluate("val")
        read = validation.labels >= 0
        if torch.equal(validation.scores[read, 0], validation.scores[read, -1]):  # and ties count as right
            raise DivergedError(
                f"after epoch {self.at.epoch + 1} all suggestions have the same score, for every validation image: "
                "try a lower optim.lr or optim.warmup_epochs, and look at the data"
            )
        self._warn_if_all_alike(validation.suggestions[read])
        metrics = validation.metrics
        value = metrics[self.config.select_metric]
        if value is None:
            raise self._without_value()
        images = self._sum_over_ranks(self.at.images)
        if images == 0:
            raise ShortlistError(f"no training image could be read: {self.problem.train.skipped[-1]} and all others")
        train_loss = self._sum_over_ranks(self.at.loss_sum) / images
        rate = len(self.problem.train) * (self.at.epoch + 1) / self.at.seconds
        best = self._note_if_best(value, metrics)
        line = {"epoch": self.at.epoch, "train_loss": train_loss, "lr": self.optimizer.param_groups[0]["lr"]}
        line |= {"train_seconds": self.at.seconds} | {f"val_{name}": each for name, each in metrics.items()}
        self.at.lines.append(line)
        if self.writes:
            self.folder.append_metrics(line)
            self._write_events(line)
            self.progress.epoch(self.at.epoch, train_loss, self.config.select_metric, value, rate, best)
        self.at.epoch, self.at.step, self.at.loss_sum, self.at.images = self.at.epoch + 1, 0, 0.0, 0
        self._checkpoint(best=best)

    def _note_if_best(self, value: float, metrics: dict[str, float | None]) -> bool:
        average, _, k = self.config.select_metric.rpartition("_top")
        smaller_ks = [each for each in reversed(self.config.all_ks) if each < int(k)]
        at_smaller_ks = [metrics[f"{average}_top{each}"] or 0.0 for each in smaller_ks]
        # Of equals the later: where few images decide, accuracy is at its best long before the network is.
        if [value, *at_smaller_ks] < [self.at.best_value, *self.at.best_at_smaller_ks]:
            return False
        self.at.best_epoch, self.at.best_value, self.at.best_at_smaller_ks = self.at.epoch, value, at_smaller_ks
        return True

    def _without_value(self) -> ShortlistError:
        return ShortlistError(
            f"train.select = {self.config.select_metric} is undefined: no such class among the validation images"
        )

    def _warn_if_all_alike(self, suggestions: Tensor) -> None:
        """Say once, if it is so, that the network makes no difference between images."""
        if not self.warned and len(suggestions) > 1 and (suggestions == suggestions[0]).all():
            self.warned = True
            self.progress.say(f"after epoch {self.at.epoch + 1} all validation images have the same suggestions")

    def _evaluate(self, split: str) -> Evaluation:
        if self.fabric.world_size > 1:  # batch statistics were gathered on each rank apart
            for buffer in self.plain_model.buffers():
                dist.broadcast(buffer, 0)
        with self._uncompiled():
            return evaluate(
                self.model,
                self.problem,
                self.problem.split(split),
                self.config.all_ks,
                device=self.fabric.device,
                batch_size=self.config.train.eval_batch_size,
                rank=self.fabric.global_rank,
                world_size=self.fabric.world_size,
            )

    def _sum_over_ranks(self, value: float) -> float:
        if self.fabric.world_size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.fabric.device)
        dist.all_reduce(total)
        return total.item()

    def _skipped(self) -> list[str]:
        """Images that could not be read, of any split, on any rank and since the run began."""
        splits = (self.problem.train, self.problem.val, self.problem.test)
        of_ranks = [{*self.at.skipped, *(file for split in splits for file in split.skipped)}] * self.fabric.world_size
        if self.fabric.world_size > 1:
            dist.all_gather_object(of_ranks, of_ranks[0])
        return sorted(set().union(*of_ranks))

    def _checkpoint(self, *, best: bool = False) -> None:
        """Write the training state, then the weights if they are the best: no rank goes on before they are there.

        Not the other way round: weights of an epoch that no checkpoint knows could not be told from those of the best
        before it.
        """
        self.at.skipped = self._skipped()
        if self.writes:
            weights = as_safetensors(self.plain_model.state_dict()) if best else b""
            if best:
                self.at.best_digest = hashlib.sha256(weights).hexdigest()
            state = {
                "model": self.plain_model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "precision": self.fabric.strategy.precision.state_dict(),
                "position": asdict(self.at),
            }
            self.folder.save_checkpoint(state, self.at.epoch * self.steps + self.at.step)
            if best:
                self.folder.save_best(weights)
        self.fabric.barrier()

    def _write_events(self, line: dict[str, Any]) -> None:
        assert self.events is not None
        with self.folder.writing_events():
            for name, value in line.items():
                if name != "epoch" and value is not None:
                    self.events.add_scalar(name, value, line["epoch"])
            self.events.flush()

    def _write_result(self) -> None:
        misfit = f"{self.folder.path}/best.safetensors does not fit the network of the run: it is damaged"
        load_weights(self.plain_model, self.folder.load_best(), misfit)
        test = self._evaluate("test")
        skipped = self._skipped()
        if test.ties:
            self.progress.say(test.ties)
        if skipped:
            self.progress.say(f"left out, as they could not be read: {len(skipped)}: {some_of(skipped)}")
        if not self.writes:
            return
        best_line = next(line for line in self.at.lines if line["epoch"] == self.at.best_epoch)
        self.folder.write_file("test_predictions.safetensors", safetensors.torch.save(test.predictions))
        save_pictures(self.folder, self.problem.test, test.labels, test.suggestions)
        self.folder.write_file("test_per_class.csv", test.per_class_csv(self.problem).encode())
        self.folder.write_json(
            "final.json",
            {
                "best_epoch": self.at.best_epoch,
                "select": self.config.select_metric,
                "val": {name[4:]: value for name, value in best_line.items() if name.startswith("val_")},
                "test": test.metrics,
                "train_seconds": self.at.seconds,
                "skipped_images": len(skipped),
                "skipped_files": skipped,
                "best_sha256": file_digest(self.folder.path / "best.safetensors"),
            },
        )


def read_position(state: dict[str, Any], config: RunConfig) -> Position:
    """The position in a training state; a ``ShortlistError`` if no run with this configuration can be there."""
    try:
        at = Position(**state["position"])
        missing = {"epoch", "step", "best_epoch", "best_digest"} - state["position"].keys()
        whole, numbers = (at.epoch, at.step, at.best_epoch), (at.loss_sum, at.images, at.seconds, at.best_value)
        possible = (
            not missing
            and all(type(number) is int for number in whole)
            and all(math.isfinite(number) for number in (*numbers, *at.best_at_smaller_ks))
            and 0 <= at.epoch <= config.train.epochs
            and -1 <= at.best_epoch < max(1, at.epoch)
            and min(at.step, at.images, at.seconds) >= 0
            and isinstance(at.best_digest, str)
            and all(isinstance(file, str) for file in at.skipped)
            and all(is_metrics_line(line) for line in at.lines)
            and [line["epoch"] for line in at.lines] in ([], list(range(at.epoch)))  # none in older checkpoints
        )
    except (KeyError, TypeError):
        possible = False
    if not possible:
        raise ShortlistError(f"its position is none of a run of {config.train.epochs} epochs")
    return at


def epochs_done(run: RunFolder, config: RunConfig, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """The metrics of the epochs that a run has done: of its checkpoint, or without one of its file."""
    state = run.load_checkpoint(warn, lambda state: read_position(state, config))
    return run.metrics() if state is None else _lines(run, read_position(state, config))


def _lines(run: RunFolder, at: Position) -> list[dict[str, Any]]:
    """The metrics of the epochs done; for a checkpoint of an older version they are in the file alone."""
    if at.lines or at.epoch == 0:
        return at.lines
    lines = [line for line in run.metrics() if line["epoch"] < at.epoch]
    if at.best_epoch not in {line["epoch"] for line in lines}:
        raise run.damaged_metrics()
    return lines


def _optimizer_state(saved: Any, optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer has gathered, with the settings of here and now; it does not check shapes by itself."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {"step", "exp_avg", "exp_avg_sq"} if isinstance(optimizer, AdamW) else {"momentum_buffer"}
    for index, gathered in saved["state"].items():
        for name in names if gathered else ():
            value, shape = gathered[name], torch.Size() if name == "step" else parameters[index].shape
            if value is not None and value.shape != shape:
                raise ValueError(name)
    return {"state": saved["state"], "param_groups": optimizer.state_dict()["param_groups"]}


def _found(problem: Problem) -> str:
    """What was found of the data, for a person to compare with what should be there."""
    train, val, test = (f"{len(split):,}" for split in (problem.train, problem.val, problem.test))
    found = f"{len(problem.classes):,} classes, {train} training, {val} validation and {test} test images"
    ignored = problem.facts.ignored_files
    return f"{found}; not used: {ignored}" if ignored else found


def _seed(device: torch.device, seed: int) -> None:
    """Seed the generator that the device's noise comes from, and no other: torch.manual_seed visits every device."""
    if device.type == "mps":
        torch.mps.manual_seed(seed)
        return
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    generator.manual_seed(seed)


def _optimizer(config: OptimConfig, model: nn.Module, *, fused: bool) -> Optimizer:
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": fused or None}
    if config.name == "adamw":
        return AdamW(model.parameters(), betas=(config.momentum, 0.999), **options)
    return SGD(model.parameters(), momentum=config.momentum, nesterov=config.momentum > 0, **options)


def make_fabric(config: RunConfig) -> lightning_fabric.Fabric:
    """One device, or those that torchrun's variables speak of."""
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it speaks to programmers, and quiet is quiet
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        fabric = lightning_fabric.Fabric(
            accelerator=config.train.device,
            devices=local_size,
            num_nodes=world_size // local_size,
            # A rank without a validation image makes no pass that would share the buffers: ``_evaluate`` does that.
            strategy=DDPStrategy(broadcast_buffers=False) if world_size > 1 else "auto",
            precision=config.train.precision,
        )
    except (RuntimeError, ValueError) as wrong:
        raise ShortlistError(f"train.device = {config.train.device} cannot be used here: {wrong}") from wrong
    fabric.launch()
    return fabric
