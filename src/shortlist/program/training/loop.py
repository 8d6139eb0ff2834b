"""The training loop: resume, epochs, steps, validation, checkpoints, test, result.

Nothing random depends on the past: the order of the images, their augmentation and the noise of a step are functions of
seed, epoch and step. So a run that was killed and resumed ends with the numbers of an undisturbed one: on a CPU to the
last bit, on a GPU as far as its kernels, which cuDNN may choose differently, are reproducible.
"""

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning_fabric
import safetensors.torch
import torch
from torch import Tensor
from torch import distributed as dist

from shortlist.errors import ShortlistError
from shortlist.ops.class_counts import size_groups
from shortlist.prior_correction import PriorCorrection
from shortlist.program.config import RunConfig
from shortlist.program.data.base import Problem, Split, evaluation_plan
from shortlist.program.data.in_memory import TensorSplit
from shortlist.program.runs.card import write_card
from shortlist.program.runs.environment import environment
from shortlist.program.runs.folder import BEST, RunFolder, as_safetensors, default_folder, file_digest
from shortlist.program.runs.model import load_best
from shortlist.program.runs.records import (
    corrected_name,
    refuse_other_data,
    refuse_other_training_images,
    write_correction,
    write_facts,
)
from shortlist.program.runs.scores import MOST_WRITTEN, Scores, write_scores
from shortlist.program.runs.start import refuse_other_start
from shortlist.program.text import counted, some_of
from shortlist.program.training.build import Parts, build, open_fabric, undefined_metric
from shortlist.program.training.callbacks import Callback, ProgressDisplay
from shortlist.program.training.checkpoint import Position, lines_of, restore, training_state
from shortlist.program.training.class_weights import set_class_weights
from shortlist.program.training.correction import fit_correction
from shortlist.program.training.evaluate import Evaluation, KeptScores, evaluate, split_scores, standard_error
from shortlist.program.training.loggers import build_loggers, refuse_missing_loggers
from shortlist.program.training.signals import StopRequests, stop_requests
from shortlist.program.training.step import uncompiled
from shortlist.program.training.thumbnails import save_pictures

MOST_TO_SELECT = 2**26  # validation scores that each epoch is corrected by; more would take minutes on a CPU
_LOOK_EVERY = 50  # steps between reading the loss, which makes a GPU wait


class Interrupted(KeyboardInterrupt):
    """Training was stopped from outside; the checkpoint is written."""


class DivergedError(ShortlistError):
    """The loss is no longer finite, or all scores are the same."""


def train(
    config: RunConfig,
    *,
    folder: Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
) -> RunFolder:
    """Train, evaluate on the test images, and leave a run folder.

    Args:
        config: The run, e.g. from ``shortlist.program.recipes``.
        folder: Where it goes; by default ``runs/<recipe>/<key>-s<seed>``.
        resume: Continue a run that was interrupted; one that has not begun starts afresh.
        quiet: Show nothing.
        callbacks: Called at the moments of the training that they override.

    Raises:
        ShortlistError: Bad data or settings, a folder that is taken, a loss that is not finite, a full disk.
        Interrupted: SIGINT or SIGTERM came; a checkpoint was written, or no step was left and the run has finished.
    """
    refuse_missing_loggers(config.train.logger)
    run = RunFolder(folder or default_folder(config))
    fabric = open_fabric(config)
    shown = [ProgressDisplay()] if fabric.is_global_zero and not quiet else []
    callbacks = [*shown, *callbacks]
    try:
        parts = build(config, run.path, fabric, callbacks)
    except BaseException:
        for callback in callbacks:
            callback.close()
        raise
    trainer = Trainer(parts, run, callbacks=callbacks)
    with run.claim(config, resume=resume) if trainer.writes else nullcontext():  # only now: bad data leaves no folder
        trainer.fabric.barrier()
        trainer.read_test_images()
        trainer.fit()
        trainer.test()
    if trainer.stop_asked:
        raise Interrupted(f"stopped; {run.path} has finished")
    return run


class Trainer:
    """One run in this process, which is one of several ranks under torchrun. The caller has claimed the folder."""

    def __init__(self, parts: Parts, run: RunFolder, *, callbacks: Sequence[Callback] = ()) -> None:
        self.parts, self.run = parts, run
        self.config, self.fabric, self.problem = parts.config, parts.fabric, parts.problem
        self.epochs = parts.config.train.epochs
        self.position = Position()
        self.writes = parts.fabric.is_global_zero
        self.stop_asked = False
        """True if a stop was asked for after the last step."""
        self.callbacks: list[Callback] = [
            *(build_loggers(run, self.config.train.logger) if self.writes else []),
            *callbacks,
        ]
        self._has_warned = False
        self._selects_corrected = self.config.train.select_corrected and self.config.corrected_metric is not None
        scores = len(self.problem.val) * len(self.problem.classes)
        if self._selects_corrected and scores > MOST_TO_SELECT:
            self._selects_corrected = False
            self.say(
                f"the best epoch is chosen before the correction for class sizes: {scores:,} validation scores are too "
                "many to correct in each epoch"
            )
        self._began, self._seconds_before, self._images_before = 0.0, 0.0, 0.0  # of the part of an epoch trained here

    def read_test_images(self) -> None:
        """Read them once before training: one that cannot be read would end the run after all of it."""
        test, size = self.problem.test, self.config.train.eval_batch_size
        if self.config.data.on_bad_image == "fail" and not isinstance(test, TensorSplit):
            plan = evaluation_plan(len(test), size, self.fabric.global_rank, self.fabric.world_size)
            for _ in test.batches(plan, torch.device("cpu")):
                pass

    def fit(self) -> None:
        """Train to the last epoch, from the start or from the checkpoint in the folder."""
        self._resume()
        if self.writes:
            self._write_records()
        with ExitStack() as closing:
            for callback in self.callbacks:
                closing.callback(callback.close)
            for callback in self.callbacks:
                callback.on_fit_start(self)
            with stop_requests() as stop:
                while self.position.epoch < self.epochs:
                    stopped = self._train_epoch(stop)
                    self._end_epoch()
                    if stopped and self.position.epoch < self.epochs:
                        raise Interrupted(f"stopped after epoch {self.position.epoch}; add --resume to go on")
                self.stop_asked = stop.asked
            for callback in self.callbacks:
                callback.on_fit_end(self)

    def test(self) -> None:
        """Evaluate the best weights on the test images, and write the result."""
        self.say(f"testing the weights of epoch {self.position.best_epoch + 1}")
        self.fabric.barrier()  # no rank reads the weights before they are written
        load_best(self.parts.network, self.run, self.problem.input_shape)
        val = self._validation_scores()
        correction = self._fit_correction(val)
        kept = KeptScores(self.problem.test, len(self.problem.classes), self.fabric.device, MOST_WRITTEN)
        result = self._evaluate("test", correction, kept)
        test = kept.result(self.fabric.world_size)
        skipped = self._skipped()
        if result.ties:
            self.say(result.ties)
        if skipped:
            self.say(f"left out, as they could not be read: {len(skipped)}: {some_of(skipped)}")
        if self.writes:
            write_scores(self.run, val=val, test=test)
            self._write_result(result, skipped)
        self.fabric.barrier()  # no rank reads the result before it is written

    def _validation_scores(self) -> Scores:
        with self._ready_to_evaluate():
            return split_scores(
                self.parts.model,
                self.problem.val,
                len(self.problem.classes),
                device=self.fabric.device,
                batch_size=self.config.train.eval_batch_size,
                rank=self.fabric.global_rank,
                world_size=self.fabric.world_size,
            )

    def _fit_correction(self, val: Scores) -> PriorCorrection | None:
        """Choose the correction for the prior on the validation images, and record it; None without one."""
        found = fit_correction(
            val,
            self.problem,
            self.config,
            best_sha256=file_digest(self.run.path / BEST),
            world_size=self.fabric.world_size,
            say=self.say,
        )
        if found is None:
            return None
        correction, chosen = found
        self.say(f"scores are corrected for class sizes: {chosen}")
        if self.writes:
            write_correction(self.run, chosen)
        return correction

    def say(self, message: str) -> None:
        for callback in self.callbacks:
            callback.on_message(message)

    def read_loss(self) -> float:
        """Mean loss of this rank's images of the epoch so far, which must be finite. Makes a GPU wait."""
        value = self.parts.step.loss_sum.item()
        if not math.isfinite(value):
            raise DivergedError(
                f"the loss became {value} in epoch {self.position.epoch + 1}, at or before step {self.position.step}: "
                "try a lower optim.lr, optim.warmup_epochs or optim.clip_norm"
            )
        self.position.loss_sum = value
        self.position.seconds = self._seconds_before + time.monotonic() - self._began
        return value / max(1, self.position.images)

    @property
    def images_per_second(self) -> float:
        """Training speed over all ranks, in this epoch."""
        images = (self.position.images - self._images_before) * self.fabric.world_size
        return images / (time.monotonic() - self._began)

    def _resume(self) -> None:
        """Load the newest checkpoint, if there is one, and see that data and best weights are still the run's."""
        if self.run.has_checkpoints:
            refuse_other_data(self.problem, self.run)
            refuse_other_training_images(self.problem, self.run)
            refuse_other_start(self.config.model, self.run)
        if self.run.load_checkpoint(self.say, self._restore) is not None:
            position = self.position
            position.lines = lines_of(self.run, position)
            position.loss_sum /= self.fabric.world_size  # an equal share each: only their sum counts
            position.images /= self.fabric.world_size
            done = position.epoch == self.epochs
            where = "after its last epoch" if done else f"at epoch {position.epoch + 1}, step {position.step}"
            self.say(f"resuming {self.run.path} {where}")
        elif self.parts.start:
            self.say(self.parts.start.told)
        self.say(_found(self.problem))

    def _restore(self, state: dict[str, Any]) -> None:
        self.position = restore(self.parts, state)

    def _write_records(self) -> None:
        """Write what describes the run, and have its best weights in place."""
        position, run = self.position, self.run
        if position.best_digest and not run.restore_best(position.best_digest):
            if position.step > 0 or position.best_epoch < position.epoch - 1:
                raise ShortlistError(
                    f"the best weights so far, of epoch {position.best_epoch + 1}, are lost from {run.path}: "
                    "delete the folder and give the command again"
                )
            # Killed between the checkpoint and its weights, which are the checkpoint's own.
            run.save_best(as_safetensors(self.parts.network.state_dict()))
        device = self.fabric.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        start = {"start_sha256": self.parts.start.sha256} if self.parts.start else {}
        run.note_environment({"epoch": position.epoch, **environment(name, self.fabric.world_size), **start})
        classes = {"names": self.problem.classes, "train_images": self.problem.class_counts.tolist()}
        run.write_json("classes.json", classes | {"superclasses": self.problem.superclasses})
        write_facts(run, self.problem)
        if self.problem.preprocess is not None:
            run.write_json("preprocess.json", asdict(self.problem.preprocess))
        run.write_metrics(position.lines)

    def _train_epoch(self, stop: StopRequests) -> bool:
        """Train to the end of the epoch, or raise ``Interrupted``; True if a stop was asked for at its last step."""
        position, parts = self.position, self.parts
        batches = parts.batches(position.epoch, position.step)
        set_class_weights(parts.loss, self.config, self.problem.class_counts, position.epoch)
        parts.model.train()
        parts.step.loss_sum.fill_(position.loss_sum)
        self._began, self._seconds_before, self._images_before = time.monotonic(), position.seconds, position.images
        asked = False
        for number in range(position.step, parts.steps):
            position.images += parts.step(batches, position.epoch, number)
            position.step = number + 1
            is_last = position.step == parts.steps
            if position.step % _LOOK_EVERY == 0 or is_last:
                self.read_loss()
            for callback in self.callbacks:
                callback.on_step(self)
            asked = stop.requested(self.fabric, last=is_last)
            if asked and not is_last:
                self.read_loss()
                position.loss_sum = _sum_over_ranks(self.fabric, position.loss_sum)
                position.images = _sum_over_ranks(self.fabric, position.images)
                self._checkpoint()
                raise Interrupted(f"stopped in epoch {position.epoch + 1}; add --resume to go on")
        return asked

    def _end_epoch(self) -> None:
        """Validate, and write metrics, training state and weights."""
        position = self.position
        kept = self._kept_for_correction()
        validation = self._evaluate("val", kept=kept)
        for callback in self.callbacks:
            callback.on_validation(self, validation)
        self._check_scores(validation)
        metrics = validation.metrics
        if metrics[self.config.select_metric] is None:
            raise undefined_metric(self.config)
        images = _sum_over_ranks(self.fabric, position.images)
        if images == 0:
            raise ShortlistError(f"no training image could be read: {self.problem.train.skipped[-1]} and all others")
        corrected = self._corrected(kept)
        is_best = self._note_if_best(corrected or metrics, validation.seen)
        line: dict[str, Any] = {
            "epoch": position.epoch,
            "train_loss": _sum_over_ranks(self.fabric, position.loss_sum) / images,
            "lr": self.parts.optimizer.param_groups[0]["lr"],
            "train_seconds": position.seconds,
        } | {f"val_{name}": value for name, value in metrics.items()}
        if corrected:
            line[corrected_name(self.config.select_metric)] = corrected[self.config.select_metric]
        position.lines.append(line)
        if self.writes:
            self.run.append_metrics(line)
        for callback in self.callbacks:
            callback.on_epoch_end(self, line)
        position.epoch, position.step, position.loss_sum, position.images = position.epoch + 1, 0, 0.0, 0
        self._checkpoint(is_best=is_best)

    def _check_scores(self, validation: Evaluation) -> None:
        """Raise an error if all scores are the same; warn once if the network does not tell images apart."""
        read = validation.labels >= 0
        if torch.equal(validation.scores[read, 0], validation.scores[read, -1]):  # ties would count as correct
            raise DivergedError(
                f"after epoch {self.position.epoch + 1} all suggestions have the same score, for every validation "
                "image: try a lower optim.lr or optim.warmup_epochs, and look at the data"
            )
        suggestions = validation.suggestions[read]
        if not self._has_warned and len(suggestions) > 1 and (suggestions == suggestions[0]).all():
            self._has_warned = True
            self.say(f"after epoch {self.position.epoch + 1} all validation images have the same suggestions")

    def _kept_for_correction(self) -> KeptScores | None:
        """What keeps validation scores, if the epoch is chosen by its corrected accuracy."""
        if not self._selects_corrected:
            return None
        return KeptScores(self.problem.val, len(self.problem.classes), self.fabric.device)

    def _corrected(self, kept: KeptScores | None) -> dict[str, float | None]:
        """Metrics of the scores after the correction that the run would get now; empty without one."""
        if kept is None:
            return {}
        world_size = self.fabric.world_size
        scores = kept.result(world_size)
        found = fit_correction(scores, self.problem, self.config, best_sha256="", world_size=world_size)
        return found[1].val if found else {}

    def _note_if_best(self, metrics: dict[str, float | None], seen: Tensor) -> bool:
        """Compare the epoch with the best so far, by the selected metric and then by the same at smaller K.

        With ``select_latest`` it also replaces a better one that it cannot be told from.

        Args:
            metrics: Of the epoch, on the validation images.
            seen: How many of these are of each class.
        """
        position = self.position
        average, _, selected_k = self.config.select_metric.rpartition("_top")
        smaller_ks = [k for k in reversed(self.config.all_ks) if k < int(selected_k)]
        value, *at_smaller_ks = (metrics[f"{average}_top{k}"] or 0.0 for k in (int(selected_k), *smaller_ks))
        if self.config.train.select_latest:
            highest = max(value, position.best_value)
            is_best = value >= highest - standard_error(highest, self._averaged(seen, average))
        else:
            # Of equal epochs the later: with few images accuracy peaks long before the network is at its best.
            is_best = [value, *at_smaller_ks] >= [position.best_value, *position.best_at_smaller_ks]
        if is_best:
            position.best_epoch, position.best_at_smaller_ks = position.epoch, at_smaller_ks
        position.best_value = max(value, position.best_value)
        return is_best

    def _averaged(self, seen: Tensor, average: str) -> Tensor:
        """How many images each class has that an average is over; for an average over images, how many there are."""
        if average == "micro":
            return seen.sum(0, keepdim=True)
        group = size_groups(self.problem.class_counts).get(average)
        return seen if group is None else seen[group.to(seen.device)]

    @contextmanager
    def _ready_to_evaluate(self) -> Iterator[None]:
        if self.fabric.world_size > 1:  # each rank has batch statistics of its own
            for buffer in self.parts.trained.buffers():
                dist.broadcast(buffer, 0)
        with uncompiled(self.config):
            yield

    def _evaluate(
        self, split: str, correction: PriorCorrection | None = None, kept: KeptScores | None = None
    ) -> Evaluation:
        with self._ready_to_evaluate():
            return evaluate(
                self.parts.model,
                self.problem,
                self.problem.split(split),
                self.config.all_ks,
                device=self.fabric.device,
                batch_size=self.config.train.eval_batch_size,
                rank=self.fabric.global_rank,
                world_size=self.fabric.world_size,
                correction=correction,
                kept=kept,
            )

    def _checkpoint(self, *, is_best: bool = False) -> None:
        """Write the training state, then the weights if they are the best; all ranks wait until they are written.

        In this order: weights of an epoch that no checkpoint knows could not be told from those of the best before it.
        """
        self.position.skipped = self._skipped()
        if self.writes:
            weights = as_safetensors(self.parts.network.state_dict()) if is_best else b""
            if is_best:
                self.position.best_digest = hashlib.sha256(weights).hexdigest()
            steps_done = self.position.epoch * self.parts.steps + self.position.step
            self.run.save_checkpoint(training_state(self.parts, self.position), steps_done)
            if is_best:
                self.run.save_best(weights)
        self.fabric.barrier()
        for callback in self.callbacks:
            callback.on_checkpoint(self)

    def _skipped(self) -> list[str]:
        """Images that could not be read, of any split, on any rank and since the run began."""
        splits = (self.problem.train, self.problem.val, self.problem.test)
        here = {*self.position.skipped, *(file for split in splits for file in split.skipped)}
        of_ranks = [here] * self.fabric.world_size
        if self.fabric.world_size > 1:
            dist.all_gather_object(of_ranks, here)
        return sorted(set().union(*of_ranks))

    def _write_result(self, result: Evaluation, skipped: list[str]) -> None:
        best_line = next(line for line in self.position.lines if line["epoch"] == self.position.best_epoch)
        self.run.write_file("test_predictions.safetensors", safetensors.torch.save(result.predictions))
        save_pictures(self.run, self.problem.test, result.labels, result.suggestions)
        self.run.write_file("test_per_class.csv", result.per_class_csv(self.problem).encode())
        final = {
            "best_epoch": self.position.best_epoch,
            "select": self.config.select_metric,
            "val": {name[4:]: value for name, value in best_line.items() if name.startswith("val_")},
            "test": result.metrics,
            **({"test_corrected": result.corrected.metrics} if result.corrected else {}),
            "train_seconds": self.position.seconds,
            "skipped_images": len(skipped),
            "skipped_files": skipped,
            "best_sha256": file_digest(self.run.path / BEST),
        }
        write_card(self.run, final)
        self.run.write_json("final.json", final)


def _sum_over_ranks(fabric: lightning_fabric.Fabric, value: float) -> float:
    if fabric.world_size == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=fabric.device)
    dist.all_reduce(total)
    return total.item()


def _classes_without(problem: Problem, split: Split) -> list[str]:
    """Names of classes that are trained on, and have no image in another split."""
    is_missing = torch.bincount(split.labels, minlength=len(problem.classes)) == 0
    return [problem.classes[label] for label in (is_missing & (problem.class_counts > 0)).nonzero().flatten().tolist()]


def _found(problem: Problem) -> str:
    """What the data holds, for the user to compare with what it should hold."""
    train, val, test = (f"{len(split):,}" for split in (problem.train, problem.val, problem.test))
    found = [f"{len(problem.classes):,} classes, {train} training, {val} validation and {test} test images"]
    without = {"validation": _classes_without(problem, problem.val), "test": _classes_without(problem, problem.test)}
    if without["validation"] == without["test"]:
        without = {"validation and test": without["test"]}
    found += [
        f"{counted(len(classes), 'class', 'classes')} without {split} images: {some_of(classes)}"
        for split, classes in without.items()
        if classes
    ]
    if problem.facts.ignored_files:
        found.append(f"not used: {problem.facts.ignored_files}")
    return "; ".join(found)
