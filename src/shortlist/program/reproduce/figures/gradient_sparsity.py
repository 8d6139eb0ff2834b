"""How many coordinates of the noised loss's gradient are not zero, on given scores.

The paper counts during the first epoch of training. Here the scores are normal, with spreads from those of an untrained
network to those of a confident one. As long as the loss is active, only the ratio of noise to spread matters.

Shape suffixes: N rows, L classes, E values of epsilon.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from shortlist.functional import noised_topk_hinge
from shortlist.program.reproduce import Scale
from shortlist.program.reproduce.figures.style import QUIET, SERIES, Columns, headline, publish

K = 5
N_SAMPLES = 3
NUM_CLASSES = 100
SPREADS = (0.1, 1.0, 10.0)

_SEED = 2022


@dataclass(frozen=True)
class _Effort:
    rows: int
    values: int
    """How many values of epsilon, from 1e-4 to 100."""


_EFFORTS: dict[Scale, _Effort] = {
    "smoke": _Effort(rows=50, values=7),
    "short": _Effort(rows=300, values=25),
    "paper": _Effort(rows=2000, values=49),
}


def draw(folder: Path, scale: Scale) -> list[Path]:
    """A curve for each spread of the scores."""
    effort = _EFFORTS[scale]
    return publish(folder, "gradient-sparsity-given-scores", numbers(effort.rows, effort.values), _paint)


def numbers(rows: int, values: int) -> Columns:
    """Mean number of non-zero coordinates, for each epsilon and spread."""
    generator = torch.Generator().manual_seed(_SEED)
    epsilon_E = torch.logspace(-4, 2, values, dtype=torch.float64)
    scores_NL = torch.randn(rows, NUM_CLASSES, generator=generator)
    target_N = torch.randint(NUM_CLASSES, (rows,), generator=generator)
    curves = {
        _curve(spread): torch.stack(
            [
                nonzero_coordinates(
                    spread * scores_NL, target_N, K, epsilon=epsilon, n_samples=N_SAMPLES, generator=generator
                )
                for epsilon in epsilon_E.tolist()
            ]
        )
        for spread in SPREADS
    }
    return {"epsilon": epsilon_E} | curves


def nonzero_coordinates(
    scores_NL: Tensor,
    target_N: Tensor,
    k: int,
    *,
    epsilon: float,
    n_samples: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Number of non-zero coordinates of the noised loss's gradient, mean over the rows.

    Example:
        Without noise, two: the rival and the label.

        >>> nonzero_coordinates(torch.tensor([[0.3, 0.2, 0.1]]), torch.tensor([0]), 1, epsilon=0.0, n_samples=3)
        tensor(2.)
    """
    scores_NL = scores_NL.detach().requires_grad_()
    loss = noised_topk_hinge(
        scores_NL, target_N, k, epsilon=epsilon, n_samples=n_samples, generator=generator, reduction="sum"
    )
    (gradient_NL,) = torch.autograd.grad(loss, scores_NL)
    # Entries are multiples of 1/B, up to rounding where all draws find the label and cancel its -1.
    return (gradient_NL.abs() > 0.5 / n_samples).sum(1).float().mean()


def _curve(spread: float) -> str:
    return f"spread={spread:g}"


def _paint(columns: Columns) -> Figure:
    figure = Figure(figsize=(11, 6.2))
    axes = figure.add_axes((0.07, 0.14, 0.77, 0.68))
    epsilon_E = columns["epsilon"]
    for spread, colour in zip(SPREADS, SERIES, strict=True):
        counts_E = columns[_curve(spread)]
        axes.plot(epsilon_E.numpy(), counts_E.numpy(), color=colour, linewidth=3)
        middle = int((counts_E - 3).abs().argmin())
        axes.annotate(
            f"{spread:g}", (epsilon_E[middle].item(), 3.0), (-8, 8), textcoords="offset points", color=colour,
            ha="right", fontweight="bold",
        )  # fmt: skip
    axes.axhline(N_SAMPLES + 1, color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.annotate(
        f"B + 1 = {N_SAMPLES + 1}", (1.01, N_SAMPLES + 1), xycoords=("axes fraction", "data"), color=QUIET,
        va="center", annotation_clip=False,
    )  # fmt: skip
    axes.set(xscale="log", ylim=(0, N_SAMPLES + 1.5), yticks=range(N_SAMPLES + 2), xlabel="ε")
    axes.grid(axis="y")
    axes.tick_params(length=0)
    axes.minorticks_off()
    headline(
        figure,
        f"The gradient touches at most B + 1 of {NUM_CLASSES} classes",
        f"Non-zero coordinates a row, K = {K}, B = {N_SAMPLES}. On normal scores; beside each curve, their spread.",
    )
    return figure
