"""Each loss for one row and one label, written as literally as its formula: slow, and hard to get wrong."""

import itertools
import math

import torch
from torch import Tensor


def kth_largest(values: Tensor, k: int) -> Tensor:
    return values.sort(descending=True).values[k - 1]


def topk_error(row: Tensor, label: int, k: int) -> Tensor:
    return (kth_largest(row, k) > row[label]).to(row.dtype)


def topk_hinge(row: Tensor, label: int, k: int) -> Tensor:
    others = torch.cat([row[:label], row[label + 1 :]])
    return (1 + kth_largest(others, k) - row[label]).relu()


def convex_topk_hinge(row: Tensor, label: int, k: int) -> Tensor:
    raised = row + 1 - torch.eye(len(row), dtype=row.dtype)[label]
    return (sum(kth_largest(raised, j) for j in range(1, k + 1)) / k - row[label]).relu()


def calibrated_topk_hinge(row: Tensor, label: int, k: int) -> Tensor:
    return (1 + kth_largest(row, k + 1) - row[label]).relu()


def smooth_topk_hinge(row: Tensor, label: int, k: int, tau: float) -> Tensor:
    every, with_label = [], []
    for subset in itertools.combinations(range(len(row)), k):
        mean_over_tau = row[list(subset)].sum() / (k * tau)
        every.append(mean_over_tau + (label not in subset) / tau)
        if label in subset:
            with_label.append(mean_over_tau)
    return tau * (torch.stack(every).logsumexp(0) - torch.stack(with_label).logsumexp(0))


def topk_cross_entropy(row: Tensor, label: int, ks: tuple[int, ...]) -> Tensor:
    """Classes are drawn without replacement, with odds ``exp(row)``: over all orders of those before the label."""
    rates = (row - row.max()).exp()
    others = [j for j in range(len(row)) if j != label]
    hit = torch.zeros_like(row[0])
    for place in range(max(ks)):
        share = sum(k > place for k in ks) / len(ks)
        for before in itertools.permutations(others, place):
            first, left = torch.ones_like(hit), list(range(len(row)))
            for drawn in (*before, label):
                first = first * rates[drawn] / rates[left].sum()
                left.remove(drawn)
            hit = hit + share * first
    return -hit.log()


def focal(row: Tensor, label: int, gamma: float) -> Tensor:
    probability = row.softmax(0)[label]
    return (1 - probability) ** gamma * -probability.log()


def margin(class_counts: Tensor, label: int, max_margin: float) -> Tensor:
    margins = 1 / class_counts.double() ** 0.25
    return max_margin * margins[label] / margins.max()


def ldam(row: Tensor, label: int, class_counts: Tensor, max_margin: float, scale: float) -> Tensor:
    lowered = row - margin(class_counts, label, max_margin) * torch.eye(len(row), dtype=row.dtype)[label]
    return -(scale * lowered).log_softmax(0)[label]


def logit_adjusted(row: Tensor, label: int, class_counts: Tensor, tau: float) -> Tensor:
    prior = class_counts.to(row.dtype) / class_counts.sum()
    return -(row + tau * prior.log()).log_softmax(0)[label]


def balanced_softmax(row: Tensor, label: int, class_counts: Tensor) -> Tensor:
    weighted = class_counts * row.exp()
    return -(weighted[label] / weighted.sum()).log()


def noised_topk_hinge(row: Tensor, label: int, k: int, epsilon: float, noise: Tensor, margin: float = 1.0) -> Tensor:
    rivals = [kth_largest(row + epsilon * draw, k + 1) for draw in noise.T]
    return (margin + sum(rivals) / len(rivals) - row[label]).relu()


def spread(row: Tensor, k: int) -> float:
    best = sorted(row.tolist(), reverse=True)[: 2 * k + 2]
    mean = sum(best) / len(best)
    return math.sqrt(sum((score - mean) ** 2 for score in best) / len(best))


def imbalanced_noised_topk_hinge(
    row: Tensor,
    label: int,
    k: int,
    epsilon: float,
    noise: Tensor,
    class_counts: Tensor,
    max_margin: float,
    scale: float,
) -> Tensor:
    rivals = [kth_largest(row + epsilon * draw, k + 1) for draw in noise.T]
    return (scale * (margin(class_counts, label, max_margin) + sum(rivals) / len(rivals) - row[label])).relu()


def log_prior(class_counts: Tensor) -> Tensor:
    return (class_counts / class_counts.sum(dtype=torch.float64)).log()
