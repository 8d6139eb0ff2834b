"""Calls of the noised hinge's kernels with fixed seeds, and the noise that they see.

Without a GPU the kernels run in Triton's interpreter, on shapes that it can bear.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shortlist.kernels.noised_hinge.autograd import Labels, NoisedHinge, Search, Seed, Settings, counters_for
from shortlist.kernels.noised_hinge.plan import Plan, plan_for
from tests.support import noise_field

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED = 3_456_789_012


def draw(n: int, num_classes: int, spread: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * num_classes)
    scores = spread * torch.randn(n, num_classes, generator=generator)
    return scores, torch.randint(num_classes, (n,), generator=generator)


def lazy_plan(scores: Tensor, rank: int, n_samples: int, **changes: Any) -> Plan:
    """Sample lazily, however short the rows are, with one program a sample."""
    return replace(plan_for(*scores.shape, rank, n_samples), **{"is_lazy": True, "splits": 1, **changes})


def seed_for(plan: Plan, num_rows: int, n_samples: int) -> Seed:
    return Seed(torch.full((counters_for(plan, num_rows, n_samples),), SEED, device=DEVICE), 0)


def kernel_loss(
    scores: Tensor,
    target: Tensor,
    k: int,
    epsilon: float,
    n_samples: int,
    *,
    reduction: str = "none",
    weight: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    plan = plan or plan_for(*scores.shape, k + 1, n_samples)
    labels = Labels.of(target.to(DEVICE), None, weight)
    settings = Settings.of((k,), 1.0, 1.0, epsilon, n_samples, -100, reduction)
    loss: Tensor = NoisedHinge.apply(scores, labels, settings, seed_for(plan, len(scores), n_samples), plan)
    return loss


def cutoffs_of(search: Search | None, plan: Plan) -> Tensor | None:
    """``(R, 2)``: the level and the cold limit of each row, which decide whose noise is whose."""
    if search is None:
        return None
    cold_limit_R = torch.where(search.num_hot_R <= plan.hot_capacity, search.cold_limit_R, math.inf)
    return torch.stack([search.level_R, cold_limit_R], -1).cpu()


def noise_seen(scores: Tensor, cutoffs: Tensor | None, n_samples: int, key: int = 0) -> Tensor:
    """``(R, L, B)``"""
    rows = []
    for number, row in enumerate(scores):
        pair = None if cutoffs is None else (cutoffs[number, 0].item(), cutoffs[number, 1].item())
        rows.append(noise_field.noise(row.detach().double().numpy(), pair, SEED ^ key, number, n_samples))
    return torch.from_numpy(np.stack(rows))
