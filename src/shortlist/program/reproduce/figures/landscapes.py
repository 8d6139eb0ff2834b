"""The ten losses of the paper's level sets, in its order and with its settings."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from shortlist import functional
from shortlist.program.reproduce.figures.repetitions import NoisedLoss, repeated, with_margin
from shortlist.program.reproduce.figures.triangle import Triangle

Map = Callable[[Triangle, int, int], Tensor]
"""The losses at the points of a triangle, for K and a number of repetitions that noised losses are averaged over."""


@dataclass(frozen=True)
class Landscape:
    """A loss to be seen over the triangle."""

    name: str
    setting: str
    losses: Map

    @property
    def column(self) -> str:
        return f"{self.name}, {self.setting}" if self.setting else self.name


def _plain(loss: Callable[..., Tensor], **settings: float) -> Map:
    def losses(triangle: Triangle, k: int, repetitions: int) -> Tensor:
        return loss(triangle.scores_PL, triangle.target_P, k, reduction="none", **settings)

    return losses


def _cross_entropy(triangle: Triangle, k: int, repetitions: int) -> Tensor:
    return F.cross_entropy(triangle.scores_PL, triangle.target_P, reduction="none")


def _noised(epsilon: float, n_samples: int, loss: NoisedLoss) -> Map:
    def losses(triangle: Triangle, k: int, repetitions: int) -> Tensor:
        every = repeated(loss, triangle, k, epsilon=epsilon, n_samples=n_samples, repetitions=repetitions)
        return every.double().mean(0)

    return losses


BALANCED: NoisedLoss = partial(functional.noised_topk_hinge, reduction="none")

LANDSCAPES = (
    Landscape("top-K error", "", _plain(functional.topk_error)),
    Landscape("cross-entropy", "", _cross_entropy),
    Landscape("hinge", "", _plain(functional.topk_hinge)),
    Landscape("calibrated hinge", "", _plain(functional.calibrated_topk_hinge)),
    Landscape("convexified hinge", "", _plain(functional.convex_topk_hinge)),
    Landscape("smoothed hinge", "τ = 0.1", _plain(functional.smooth_topk_hinge, tau=0.1)),
    Landscape("smoothed hinge", "τ = 1", _plain(functional.smooth_topk_hinge, tau=1.0)),
    Landscape("noised balanced", "ε = 0.3, B = 30", _noised(0.3, 30, BALANCED)),
    Landscape("noised balanced", "ε = 1, B = 30", _noised(1.0, 30, BALANCED)),
    Landscape("noised imbalanced", "ε = 1, B = 30, m = 5", _noised(1.0, 30, with_margin(5.0))),
)
