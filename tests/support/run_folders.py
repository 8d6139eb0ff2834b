"""Run folders as training leaves them, without the training: only the scores are made up."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from shortlist.program.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from shortlist.program.data.base import Problem, Split
from shortlist.program.data.image_io import file_preprocess
from shortlist.program.data.in_memory import digest_of
from shortlist.program.losses import LOSSES, CrossEntropyConfig, LossConfig
from shortlist.program.models.build import build_model
from shortlist.program.runs.environment import environment
from shortlist.program.runs.folder import RunFolder, as_safetensors
from shortlist.program.seeds import mix_seed
from shortlist.program.training.evaluate import Evaluation, evaluate
from shortlist.program.training.thumbnails import save_pictures

_LOOK_ALIKES = 3


def one_colour(label: int) -> Tensor:
    """A picture whose colour identifies its class."""
    return torch.tensor([label * 37 % 256, label * 11 % 256, 128], dtype=torch.uint8).view(3, 1, 1).expand(3, 40, 30)


class ScoredSplit(Split):
    """Test inputs that are their own scores."""

    def __init__(self, scores: Tensor, labels: Tensor, picture: Callable[[int], Tensor] | None = one_colour) -> None:
        self.scores, self.labels, self.picture = scores, labels, picture

    def batches(
        self, plan: Sequence[Tensor], device: torch.device, augment_seed: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for indices in plan:
            yield self.scores[indices], self.labels[indices], indices

    def content_digest(self) -> str:
        return digest_of(self.scores)

    def original(self, index: int) -> Tensor:
        return self.scores[index]

    def thumbnail(self, index: int) -> Tensor | None:
        if self.picture is None:
            return None
        picture = self.picture(int(self.labels[index])).clone()
        picture[0, 0, 0] = index % 256  # so that no two pictures of a class are the same
        return picture


@dataclass(frozen=True)
class World:
    """What the runs are about: classes, most of them rare, that look alike in threes."""

    names: tuple[str, ...]
    train_images: tuple[int, ...]
    images_of_class: int = 6
    picture: Callable[[int], Tensor] | None = one_colour
    data: DataConfig = field(default_factory=DataConfig)

    def scores(self, skill: float, seed: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(len(self.names)).repeat(self.images_of_class)
        noise = torch.randn(len(labels), len(self.names), generator=torch.Generator().manual_seed(seed))
        alike = labels.unsqueeze(1) // _LOOK_ALIKES == torch.arange(len(self.names)) // _LOOK_ALIKES
        known = torch.tensor(self.train_images)[labels].add(1).log2()
        own = nn.functional.one_hot(labels, len(self.names))
        return noise + alike * 2.5 + own * (skill * known / 8).unsqueeze(1), labels


def small_world(*names: str, picture: Callable[[int], Tensor] | None = one_colour) -> World:
    """Thirty classes, the first ones with the given names."""
    sizes = tuple(round(300 * 0.85**place) for place in range(30))
    return World((*names, *(f"class {place}" for place in range(len(names), 30))), sizes, picture=picture)


def make_run(
    path: Path,
    world: World,
    loss: LossConfig | str,
    seed: int = 0,
    *,
    skill: float = 1.0,
    finished: bool = True,
    epochs: int = 6,
    train: TrainConfig | None = None,
) -> RunFolder:
    """Write a run folder file by file, in the order of training; an unfinished one ends after two epochs."""
    config = RunConfig(
        seed=seed,
        data=world.data,
        model=ModelConfig(name="none" if world.data.name == "embeddings" else "glyphnet"),
        loss=loss if isinstance(loss, LossConfig) else LOSSES[loss](),
        train=train or TrainConfig(epochs=epochs),
    )
    run = RunFolder(path)
    with run.claim(config, resume=False):
        run.write_json("environment.json", environment("cpu", 1))
        run.write_json("classes.json", {"names": world.names, "train_images": world.train_images})
        run.write_metrics([])
        for epoch in range(config.train.epochs if finished else 2):
            validation = _evaluated(world, config, skill * (epoch + 1) / config.train.epochs, mix_seed(seed, epoch))
            line = {"epoch": epoch, "train_loss": 7.0 / (epoch + 1 + skill), "train_seconds": 2.0 * (epoch + 1)}
            run.append_metrics(line | {f"val_{name}": value for name, value in validation[0].metrics.items()})
        if finished:
            _finish(run, config, world, skill)
    return run


def _finish(run: RunFolder, config: RunConfig, world: World, skill: float) -> None:
    test, problem = _evaluated(world, config, skill, mix_seed(config.seed))
    save_pictures(run, problem.test, test.labels, test.suggestions)
    run.write_file("test_predictions.safetensors", safetensors.torch.save(test.predictions))
    run.write_file("test_per_class.csv", test.per_class_csv(problem).encode())
    run.write_json(
        "final.json",
        {
            "best_epoch": config.train.epochs - 2,
            "select": config.select_metric,
            "val": test.metrics,
            "test": test.metrics,
            "train_seconds": 10 * skill + config.seed,
            "skipped_images": 0,
            "best_sha256": "",
        },
    )


def _evaluated(world: World, config: RunConfig, skill: float, seed: int) -> tuple[Evaluation, Problem]:
    scores, labels = world.scores(skill, seed)
    test = ScoredSplit(scores, labels, world.picture)
    train = ScoredSplit(scores, torch.arange(len(world.names)).repeat_interleave(torch.tensor(world.train_images)))
    problem = Problem(world.names, train, test, test, (len(world.names),))
    return evaluate(
        nn.Identity(), problem, test, config.all_ks, device=torch.device("cpu"), batch_size=len(labels)
    ), problem


def untrained_run(folder: Path, classes: Sequence[str]) -> RunFolder:
    """A run on images of 16 x 16 with random weights, as if stopped after its first epoch.

    Its network has norms over the batch, and its loss another K than the largest that is measured.
    """
    config = RunConfig(
        data=DataConfig(name="folder", image_size=16),
        model=ModelConfig(name="resnet32"),
        loss=CrossEntropyConfig(k=2),
        train=TrainConfig(ks=(1, 4), device="cpu"),
    )
    run = RunFolder(folder)
    with run.claim(config, resume=False):
        run.write_json("classes.json", {"names": list(classes), "train_images": [1] * len(classes)})
        run.write_json("preprocess.json", asdict(file_preprocess(16)))
        run.save_best(as_safetensors(build_model(config.model, (3, 16, 16), len(classes)).state_dict()))
    return run
