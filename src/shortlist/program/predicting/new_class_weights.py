"""Weights of new classes for a trained last layer. The other weights stay as they are.

1. **Start.** The weights of a new class are its mean features m less the mean of all training features, divided by the
   covariance C of these and its mean variance: ``w = (C + tr(C)/d I)^-1 (m - mean)``. For a cosine layer, all features
   have unit length.
2. **Learn.** A few hundred steps lower the loss of the run in the new weights alone, on the new photos and on the
   training images that the new classes come closest to. Old weights cannot move, so the old scores of these images are
   computed once, and the steps take seconds.
3. **Place.** How high the new scores lie is chosen on validation images of the old classes: a new class must be among
   their first K as often as old classes are for images that are not theirs. A linear layer has a bias for that. A
   cosine layer has none: there the weights are turned towards or away from the mean of all features. The weights of a
   linear layer are also made shorter until the new class is first no more often than old classes wrongly are: learnt
   from few photos, they are too sure.

Without the last step, a class of few photos is hardly ever suggested; without the second, one of many photos is told
apart from its look-alikes less well than a training does.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shortlist.heads.cosine import CosineLinear, unit_rows

_SHRINKAGE = 1.0  # share of the mean variance that is added to every variance
_STEPS, _BATCH = 200, 256
_STEP_SIZE = 0.1  # of the root mean square of a weight, for Adam
_TRUSTED = 10  # a class of so many photos goes half as far
_NEAREST, _FEWEST_NEAREST = 4000, 200  # training images of old classes: of all new classes together, of one at least
_ANGLES = 721  # tried for a cosine layer
_LENGTHS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # tried for the weights of a linear layer
_ROWS_AT_ONCE = 4096  # that all classes are scored for

Correct = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Known:
    """Features of images of the old classes."""

    train: Tensor
    """``(N, d)``, of training images."""
    labels: Tensor
    """``(N,)`` their labels."""
    val: Tensor
    """``(N, d)``, of images that the height of the new scores is chosen on."""
    val_labels: Tensor
    """``(N,)`` their labels."""


def extended_head(
    head: nn.Module,
    photos: Sequence[Tensor],
    known: Known,
    loss: nn.Module,
    k: int,
    correct: Correct = lambda scores: scores,
) -> nn.Module:
    """The last layer with more classes.

    Args:
        head: A linear or cosine layer.
        photos: ``(N, d)`` features of the photos of each new class.
        known: Of the old classes.
        loss: For all classes, the new ones last.
        k: A new class must be among the first ``k`` as often as old ones are for images of other classes. Of few
            classes, all but one: every class is among the first of all.
        correct: What is done to ``(N, L + M)`` scores before they are compared: a number is added to those of a class.
    """
    k = max(min(k, len(_rows(head)[0]) - 1), 1)
    place = _Placement(head, known, k, correct, len(photos))
    new = place(_start(head, photos, known))
    new = place(_learnt(new, head, photos, known, loss, k), _LENGTHS)
    return _with_rows(head, *(torch.cat((old, more)) for old, more in zip(_rows(head), _rows(new), strict=True)))


@torch.no_grad()
def _start(head: nn.Module, photos: Sequence[Tensor], known: Known) -> nn.Module:
    """A layer of the new classes alone."""
    train = _inputs(head, known.train)
    centre = train.mean(0)
    spread = ((train - centre).T @ (train - centre) / len(train)).double()
    ridge = (_SHRINKAGE * spread.diagonal().mean()).clamp(min=1e-12) * torch.eye(len(spread), dtype=spread.dtype)
    means = torch.stack([_inputs(head, rows).mean(0) for rows in photos])
    weight = torch.linalg.solve(spread + ridge, (means - centre).double().T).T.to(train.dtype)
    if _is_cosine(head):
        return _with_rows(head, unit_rows(weight))
    new = (known.val - centre) @ weight.T
    usual = head(known.val).std(0, correction=0).median()
    weight = weight * (usual / new.std(0, correction=0).clamp(min=1e-12)).unsqueeze(1)
    return _with_rows(head, weight, torch.zeros(len(weight)))


def _learnt(
    start: nn.Module, head: nn.Module, photos: Sequence[Tensor], known: Known, loss: nn.Module, k: int
) -> nn.Module:
    """The layer of the new classes with a lower loss."""
    with torch.no_grad():
        nearest = _nearest(start, head, known, k)
        features = torch.cat((known.train[nearest], *photos)).clone()  # tensors of inference mode have no gradients
        old_scores = head(features)
        first = old_scores.shape[1]
        new_labels = [torch.full((len(rows),), first + number) for number, rows in enumerate(photos)]
        labels = torch.cat((known.labels[nearest], *new_labels))
    begin, *bias = _rows(start)
    change = torch.zeros_like(begin, requires_grad=True)
    sizes = torch.tensor([len(rows) for rows in photos], dtype=begin.dtype)
    # Few photos say little: their weights stay closer to the start.
    reach = (begin.square().mean().sqrt() * sizes / (sizes + _TRUSTED)).unsqueeze(1)
    optimizer = torch.optim.Adam([change], lr=_STEP_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)  # the same photos give the same weights
        epochs = math.ceil(_STEPS * _BATCH / len(features))
        order = torch.cat([torch.randperm(len(features)) for _ in range(epochs)])
        for batch in torch.split(order, min(_BATCH, len(features)))[:_STEPS]:
            new_scores = functional_call(start, {"weight": begin + reach * change}, features[batch])
            scores = torch.cat((old_scores[batch], new_scores), 1)
            optimizer.zero_grad()
            loss(scores, labels[batch]).backward()
            optimizer.step()
            schedule.step()
    return _with_rows(start, begin + reach * change.detach(), *bias)


def _nearest(new: nn.Module, head: nn.Module, known: Known, k: int) -> Tensor:
    """The training images for which a new class is, or comes closest to being, among the first k."""
    gaps = [new(rows) - head(rows).topk(k).values[:, -1:] for rows in torch.split(known.train, _ROWS_AT_ONCE)]
    gap = torch.cat(gaps)
    count = max(_NEAREST // gap.shape[1], _FEWEST_NEAREST)
    is_near = torch.zeros(len(gap), dtype=torch.bool)
    is_near[gap.topk(min(count, len(gap)), dim=0).indices] = True
    return is_near.nonzero().flatten()


class _Placement:
    """Makes new classes as frequent among the first k of validation images as old ones are for images of others."""

    @torch.no_grad()
    def __init__(self, head: nn.Module, known: Known, k: int, correct: Correct, count_new: int) -> None:
        old: Tensor = head(known.val)
        count = old.shape[1]
        scores = correct(torch.cat((old, old.new_zeros(len(old), count_new)), 1))
        best = scores[:, :count].topk(k).values
        is_right = (scores.gather(1, known.val_labels.unsqueeze(1)) >= best).double().mean(0)
        others = max(count - 1, 1)
        self._share_first = (1 - is_right[0].item()) / others
        self._share = (k - is_right[-1].item()) / others
        # What the plain score of a new class must exceed: a correction adds a number to the scores of a class.
        self._limit_first, self._limit = (best[:, place, None] - scores[:, count:] for place in (0, -1))
        self._val, self._centre = known.val, _inputs(head, known.train).mean(0)

    @torch.no_grad()
    def __call__(self, new: nn.Module, lengths: Sequence[float] = (1.0,)) -> nn.Module:
        """The same layer at the right height. Of a linear layer, with the greatest length of weights that will do."""
        if _is_cosine(new):
            return self._turned(new)
        weight, bias = _rows(new)
        scores = new(self._val) - bias
        best_length, best_height, error = (torch.full_like(bias, value) for value in (1.0, 0.0, math.inf))
        for length in lengths:
            missing = (self._limit - length * scores).T
            # One class after another: torch takes no quantiles of more than 16 million numbers at once.
            height = torch.stack([torch.quantile(row, self._share) for row in missing])
            is_first = length * scores + height > self._limit_first
            too_often = (is_first.float().mean(0) - self._share_first).clamp(min=0)
            is_better = too_often < error
            best_length = torch.where(is_better, length, best_length)
            best_height = torch.where(is_better, height, best_height)
            error = torch.minimum(too_often, error)
        return _with_rows(new, best_length.unsqueeze(1) * weight, best_height)

    def _turned(self, new: nn.Module) -> nn.Module:
        alike = unit_rows(self._centre)
        (weight,) = _rows(new)
        apart = unit_rows(weight - (weight @ alike).unsqueeze(1) * alike)
        along, across = (_with_rows(new, rows)(self._val) for rows in (alike.unsqueeze(0), apart))
        best, error = torch.zeros(len(apart)), torch.full((len(apart),), math.inf)
        # From straight apart outwards: of angles that do as well, the first keeps most of what tells the class apart.
        for angle in sorted(torch.linspace(-math.pi / 2, math.pi / 2, _ANGLES).tolist(), key=abs):
            is_among = math.cos(angle) * across + math.sin(angle) * along > self._limit
            missed = (is_among.float().mean(0) - self._share).abs()
            best, error = torch.where(missed < error, angle, best), torch.minimum(missed, error)
        return _with_rows(new, best.cos().unsqueeze(1) * apart + best.sin().unsqueeze(1) * alike)


def _is_cosine(head: nn.Module) -> bool:
    return isinstance(head, CosineLinear)


def _inputs(head: nn.Module, features: Tensor) -> Tensor:
    """What the weights are multiplied with."""
    return unit_rows(features) if _is_cosine(head) else features


def _rows(head: nn.Module) -> tuple[Tensor, ...]:
    """The weights of the classes, and of a linear layer their biases."""
    names = ("weight",) if _is_cosine(head) else ("weight", "bias")
    return tuple(head.get_parameter(name).detach() for name in names)


def _with_rows(head: nn.Module, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    """A layer of the same kind with other classes."""
    found = copy.deepcopy(head)
    found.register_parameter("weight", nn.Parameter(weight.clone()))
    found.out_features = len(weight)  # type: ignore[assignment]
    if bias is not None:
        found.register_parameter("bias", nn.Parameter(bias.clone()))
    return found
