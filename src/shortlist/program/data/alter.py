"""What a configuration does to any data set: hold out missing splits, thin classes, make training labels wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig
from shortlist.program.data.base import SPLITS, LabelNoise, Problem, Thinning
from shortlist.program.seeds import mix_seed
from shortlist.program.text import some_of

PAPER_GROUP_SIZE = 5


class Samples(Protocol):
    """Labelled samples: a list of files, or rows of a tensor."""

    @property
    def labels(self) -> Tensor: ...

    def subset(self, indices: Tensor) -> Self: ...


SomeSamples = TypeVar("SomeSamples", bound=Samples)


def generator_for(config: DataConfig, purpose: str) -> torch.Generator:
    """Random numbers for one purpose: asking for one alteration must not change what another one draws."""
    return torch.Generator().manual_seed(mix_seed(config.seed, *purpose.encode()))


def hold_out_missing(
    given: Mapping[str, SomeSamples], classes: Sequence[str], config: DataConfig
) -> tuple[dict[str, SomeSamples], dict[str, Tensor]]:
    """All three splits. Those that the data lacks are taken from training, ``config.val_fraction`` of each class.

    Returns:
        The splits, and for each one made here the indices of its samples among the training samples given.
    """
    missing = [split for split in SPLITS if split not in given]
    if not missing:
        return dict(given), {}
    train = given["train"]
    rest, *held_out = hold_out(
        train.labels, classes, config.val_fraction, len(missing), generator_for(config, "validation")
    )
    indices = dict(zip(missing, held_out, strict=True))
    made = {split: train.subset(rows) for split, rows in {"train": rest, **indices}.items()}
    return {**given, **made}, indices


def hold_out(
    labels: Tensor, classes: Sequence[str], fraction: float, parts: int, generator: torch.Generator
) -> list[Tensor]:
    """Sorted indices of what stays for training, then of each of the ``parts`` held out, drawn at random.

    Each part takes ``fraction`` of every class, at least one image, and leaves one for training. A class that is too
    small for that gives none: it is better learned than measured.

    Example:
        >>> labels = torch.tensor([0] * 10 + [1] * 4 + [2])
        >>> rest, val = hold_out(labels, ["cat", "dog", "yeti"], 0.2, 1, torch.Generator().manual_seed(0))
        >>> [torch.bincount(labels[part], minlength=3).tolist() for part in (rest, val)]
        [[8, 3, 1], [2, 1, 0]]
    """
    if not 0 < fraction < 1 / parts:
        raise ShortlistError(
            f"data.val_fraction must be above 0 and below {1 / parts:g} for data without a "
            f"{'validation and a test' if parts == 2 else 'validation'} split, got {fraction:g}"
        )
    available = torch.bincount(labels, minlength=len(classes))
    most = (available - 1).clamp(min=0) // parts
    taken = (available * fraction).round().long().clamp(min=1).minimum(most)
    if not taken.any():
        raise ShortlistError(
            f"no class has the {parts + 1} images that it takes to hold some out for "
            f"{'validation and test' if parts == 2 else 'validation'}: "
            + some_of([f"{name} ({count})" for name, count in zip(classes, available.tolist(), strict=True)])
        )
    grouped, place_in_class = shuffled_within_classes(labels, generator)
    # 0 stays for training; the first images of each shuffled class are parts 1, 2, ...
    given = taken[labels[grouped]]
    part = place_in_class.div(given.clamp(min=1), rounding_mode="floor") + 1
    part[(part > parts) | (given == 0)] = 0
    return [grouped[part == number].sort().values for number in range(parts + 1)]


def shuffled_within_classes(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of all images, class by class and shuffled within each; and the place of each in its class, from 0."""
    shuffled = torch.randperm(len(labels), generator=generator)
    grouped = shuffled[labels[shuffled].argsort(stable=True)]
    sizes = torch.bincount(labels)
    return grouped, torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels[grouped]]


def thin_classes(train: SomeSamples, num_classes: int, config: DataConfig) -> tuple[SomeSamples, Thinning | None]:
    """The training samples that ``config.imbalance`` keeps."""
    if config.imbalance == 1:
        return train, None
    kept = _thinned(train, num_classes, config, "imbalance")
    return kept, Thinning(kept=len(kept.labels), of=len(train.labels))


def thin_validation(val: SomeSamples, num_classes: int, config: DataConfig) -> SomeSamples:
    """The validation samples: all, or with ``config.thin_validation`` a subset as long-tailed as the training samples.

    Every class that has one keeps one.
    """
    if config.imbalance == 1 or not config.thin_validation:
        return val
    return _thinned(val, num_classes, config, "thin validation")


def _thinned(samples: SomeSamples, num_classes: int, config: DataConfig, purpose: str) -> SomeSamples:
    kept = long_tailed_subset(
        samples.labels,
        num_classes,
        imbalance=config.imbalance,
        kind=config.imbalance_kind,
        generator=generator_for(config, purpose),
    )
    return samples.subset(kept)


def size_profile(num_classes: int, imbalance: float, kind: str) -> Tensor:
    """Size of each class as a share of the largest, from 1 down to ``1 / imbalance``, float64.

    ``exponential``: ``imbalance ** (-c / (L - 1))`` for class c of L. ``step``: 1 in the first half, ``1 / imbalance``
    in the second. Both as in the CIFAR-LT benchmarks (Cao et al. 2019).

    Example:
        >>> size_profile(3, 100, "exponential").tolist()
        [1.0, 0.1, 0.01]
        >>> size_profile(4, 10, "step").tolist()
        [1.0, 1.0, 0.1, 0.1]
    """
    rank = torch.arange(num_classes, dtype=torch.float64)
    exponent = (rank >= num_classes // 2).double() if kind == "step" else rank / max(num_classes - 1, 1)
    return torch.as_tensor(imbalance, dtype=torch.float64) ** -exponent


def sizes_from_profile(profile: Tensor, largest: float) -> Tensor:
    """Whole sizes, rounded down as the benchmarks do, and at least 1."""
    # Rounding errors: 500 * 100 ** -1 may come out just below 5.
    return (profile * largest + 1e-9).long().clamp(min=1)


def long_tailed_subset(
    labels: Tensor, num_classes: int, *, imbalance: float, kind: str, generator: torch.Generator
) -> Tensor:
    """Sorted indices of a random subset whose class sizes follow the profile, in the order of the labels.

    The head keeps as many images as the largest class has; a class with fewer than its share keeps them all.

    Example:
        >>> labels = torch.arange(3).repeat_interleave(100)
        >>> kept = long_tailed_subset(labels, 3, imbalance=100, kind="exponential", generator=torch.Generator())
        >>> torch.bincount(labels[kept]).tolist()
        [100, 10, 1]
    """
    available = torch.bincount(labels, minlength=num_classes)
    if not len(labels):
        raise ShortlistError("data.imbalance needs images, got none")
    wanted = sizes_from_profile(size_profile(num_classes, imbalance, kind), float(available.max()))
    grouped, place_in_class = shuffled_within_classes(labels, generator)
    kept: Tensor = grouped[place_in_class < wanted[labels[grouped]]].sort().values
    return kept


def with_label_noise(problem: Problem, config: DataConfig, run_seed: int) -> Problem:
    """The problem with the wrong training labels that ``config`` asks for.

    ``run_seed`` is the seed of the run, which decides which labels are redrawn if ``config.redraw_noise`` says so.
    """
    if config.label_noise == 0:
        return problem
    labels = problem.train.labels
    seed = config.seed + run_seed if config.redraw_noise else config.seed
    noisy = add_label_noise(labels, len(problem.classes), replace(config, seed=seed), problem.superclasses)
    noise = LabelNoise(changed=int((noisy != labels).sum()), of=len(labels))
    return replace(problem, train=problem.train.with_labels(noisy), facts=replace(problem.facts, label_noise=noise))


def add_label_noise(labels: Tensor, num_classes: int, config: DataConfig, superclasses: Sequence[str] = ()) -> Tensor:
    """Labels with the noise that ``config.label_noise`` asks for.

    ``superclasses`` names the superclass of each class, where the data has any.
    """
    if config.noise_groups == "consecutive":
        groups = consecutive_groups(num_classes)
    elif superclasses:
        names = sorted(set(superclasses))
        groups = torch.tensor([names.index(name) for name in superclasses])
    else:
        raise ShortlistError(
            f"data.noise_groups must be consecutive for {config.name}, which has no superclasses, "
            f"got {config.noise_groups}"
        )
    return redraw_within_groups(labels, groups, config.label_noise, generator_for(config, "label noise"))


def consecutive_groups(num_classes: int) -> Tensor:
    """Blocks of five consecutive labels: the groups of the paper's released code.

    The last block is smaller if five does not divide the number of classes.

    Example:
        >>> consecutive_groups(7).tolist()
        [0, 0, 0, 0, 0, 1, 1]
    """
    return torch.arange(num_classes) // PAPER_GROUP_SIZE


def redraw_within_groups(labels: Tensor, group_of_class: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Each label is, with probability ``p``, drawn again from the classes of its group.

    All classes of the group are equally likely, including the true one: with groups of five, ``p = 0.5`` makes
    0.4 of the labels wrong.

    Example:
        >>> labels = torch.tensor([0, 1, 2, 3])
        >>> noisy = redraw_within_groups(labels, torch.tensor([0, 1, 0, 1]), 1.0, torch.Generator().manual_seed(0))
        >>> (noisy % 2).tolist()
        [0, 1, 0, 1]
    """
    members = group_of_class.argsort(stable=True)
    size = torch.bincount(group_of_class)
    first = size.cumsum(0) - size
    redrawn, which = torch.rand((2, len(labels)), generator=generator, dtype=torch.float64)
    group = group_of_class[labels]
    replacement = members[first[group] + (which * size[group]).long()]
    return torch.where(redrawn < p, replacement, labels)
