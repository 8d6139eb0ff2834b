"""Features of a frozen network: computed once for every image, kept in the cache folder, trained on like embeddings.

A file holds the features of one split by one backbone. Its name is a digest of all that they depend on: the images, how
they are preprocessed, the network and its weights, the precision. The loss, the labels and the seed are no part of it,
so that all runs on the same images share the file.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import locked, write_file
from shortlist.program.cache_folder import cache_folder
from shortlist.program.config import RunConfig
from shortlist.program.data.base import SPLITS, Held, Problem, Split, evaluation_plan
from shortlist.program.data.in_memory import HeldSplit, digest_of
from shortlist.program.devices import autocast
from shortlist.program.runs.folder import as_safetensors
from shortlist.program.training.callbacks import Callback

_FORMAT = 1  # of the files; part of their names
_AT_ONCE_ON_CPU = 16  # images: larger batches fall out of the processor's caches, and take twice the time


def weights_digest(network: nn.Module) -> str:
    return hashlib.sha256(as_safetensors(network.state_dict())).hexdigest()


def with_features(
    problem: Problem,
    backbone: nn.Module,
    digest: str,
    config: RunConfig,
    device: torch.device,
    callbacks: Sequence[Callback],
) -> Problem:
    """The problem with features of the backbone in place of images.

    Several processes may call it at once, such as the ranks of a run: one computes, and the others wait for its files.

    Args:
        problem: Of images.
        backbone: On the CPU, where it will be again afterwards.
        digest: Of the weights of the backbone.
        config: The run's: name of the network, precision, what to do with unreadable images.
        device: Where to compute.
        callbacks: Told what is done.
    """

    def say(message: str) -> None:
        for callback in callbacks:
            callback.on_message(message)

    def report(before: int, count: int) -> None:
        for callback in callbacks:
            callback.on_features(before + count, total)

    folder = cache_folder() / "features"
    images = {name: problem.split(name) for name in SPLITS}
    keys = {name: _key(problem, split, digest, config) for name, split in images.items()}
    files = {name: _FeatureFile(folder / f"{key}.safetensors", config, say) for name, key in keys.items()}
    features = {name: kept for name, file in files.items() if (kept := file.read(len(images[name])))}
    missing = [name for name in SPLITS if name not in features]
    done, total, began = 0, sum(len(images[name]) for name in missing), time.monotonic()
    if missing:
        say(f"computing the features of {total:,} images by {config.model.name}")
        backbone.to(device).eval()
    for name in missing:
        compute = partial(_computed, images[name], backbone, config, device, partial(report, done))
        features[name] = files[name].read_or_make(len(images[name]), compute)
        done += len(images[name])
    backbone.to("cpu")
    say(f"features: computed in {time.monotonic() - began:.0f} s" if missing else f"features: found in {folder}")
    train, val, test = (HeldSplit(images[name], features[name]) for name in SPLITS)
    return replace(problem, train=train, val=val, test=test, input_shape=tuple(train.inputs.shape[1:]))


def _key(problem: Problem, split: Split, digest: str, config: RunConfig) -> str:
    """Changes with everything that the features depend on, rounding by another device apart."""
    parts = {
        "format": _FORMAT,
        "images": split.content_digest(),
        "preprocess": asdict(problem.preprocess) if problem.preprocess else None,
        "network": config.model.name,
        "timm": version("timm"),  # the same weights may mean another network in another version
        "weights": digest,
        "precision": config.train.precision,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _computed(
    images: Split, backbone: nn.Module, config: RunConfig, device: torch.device, progress: Callable[[int], None]
) -> Held:
    batch_size = config.train.eval_batch_size
    if device.type == "cpu":
        batch_size = min(batch_size, _AT_ONCE_ON_CPU)
    plan = evaluation_plan(len(images), batch_size, 0, 1)
    is_read = torch.zeros(len(images), dtype=torch.bool)
    rows = torch.zeros(len(images), 0)
    for number, (inputs, _, indices) in enumerate(images.batches(plan, device)):
        if len(indices):
            with torch.inference_mode(), autocast(config.train.precision, device):
                found = backbone(inputs).cpu()
            if not is_read.any():  # only now is their size known
                rows = torch.zeros(len(images), found.shape[1], dtype=found.dtype)
            rows[indices.cpu()] = found
            is_read[indices.cpu()] = True
        progress(min(len(images), (number + 1) * batch_size))
    if not is_read.any():
        raise ShortlistError(f"none of {len(images)} images could be read: {'; '.join(images.skipped[:3])}")
    return Held(rows, is_read, tuple(images.skipped))


class _FeatureFile:
    """Features on disk. A file that is damaged, or cannot be written, costs only the time to compute them again.

    Args:
        path: The file.
        config: The run's. A file that lacks unreadable images is only for runs that skip such images; others are to
            meet the image, and fail.
        say: Called with what the user should know.
    """

    def __init__(self, path: Path, config: RunConfig, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._accepts_skipped = config.data.on_bad_image == "skip"

    def read(self, count: int) -> Held | None:
        """The features of so many images; None if they have to be computed."""
        if not self._path.is_file():
            return None
        try:
            with safetensors.safe_open(self._path, framework="pt") as file:
                checksum, skipped = file.metadata()["sha256"], file.metadata()["skipped"]
                rows, is_read = file.get_tensor("features"), file.get_tensor("is_read")
            if len(rows) != count or checksum != _checksum(rows, is_read, skipped):
                raise ValueError("its checksum does not match")
        except (safetensors.SafetensorError, LookupError, OSError, TypeError, ValueError) as error:
            self._say(f"{self._path} is damaged and computed again: {error}")
            with suppress(OSError):
                self._path.unlink()
            return None
        is_usable = self._accepts_skipped or bool(is_read.all())
        return Held(rows, is_read, tuple(json.loads(skipped))) if is_usable else None

    def read_or_make(self, count: int, compute: Callable[[], Held]) -> Held:
        """The features, computed unless another process is doing so: then its file is waited for."""
        with ExitStack() as lock:
            try:
                lock.enter_context(locked(self._path.with_suffix(".lock")))
            except ShortlistError as error:  # e.g. a cache folder that is read-only
                self._say(f"the features cannot be kept for other runs: {error}")
                return compute()
            features = self.read(count)
            if features is None:
                features = compute()
                self._write(features)
            return features

    def _write(self, features: Held) -> None:
        skipped = json.dumps(features.skipped)
        metadata = {"sha256": _checksum(features.rows, features.is_read, skipped), "skipped": skipped}
        tensors = {"features": features.rows, "is_read": features.is_read}
        try:
            write_file(self._path, safetensors.torch.save(tensors, metadata))
        except ShortlistError as error:
            self._say(f"the features cannot be kept for other runs: {error}")


def _checksum(rows: Tensor, is_read: Tensor, skipped: str) -> str:
    return hashlib.sha256(f"{digest_of(rows, is_read)} {skipped}".encode()).hexdigest()
