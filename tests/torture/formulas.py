"""Every loss and operator as its formula stands in the papers, in NumPy, for one row of scores and one label.

Written without looking at the library or at ``tests/obvious.py``: only then is agreement evidence. The numbers are
NumPy's longest floats, so that the error of the formulas stays below that of what they judge.
"""

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Row = NDArray[np.longdouble]


def descending(row: Row) -> Row:
    return np.sort(row)[::-1]


def kth(row: Row, k: int) -> Any:
    return descending(row)[k - 1]


def top_sum(row: Row, k: int) -> Any:
    return descending(row)[:k].sum()


def positive(x: Any) -> Any:
    return max(x, np.longdouble(0))


def log_sum_exp(values: Row) -> Any:
    top = values.max()
    return top + np.log(np.exp(values - top).sum())


def topk_error(row: Row, label: int, k: int) -> Any:
    return np.longdouble(kth(row, k) > row[label])


def topk_hinge(row: Row, label: int, k: int) -> Any:
    return positive(1 + kth(np.delete(row, label), k) - row[label])


def convex_topk_hinge(row: Row, label: int, k: int) -> Any:
    raised = row + 1
    raised[label] -= 1
    return positive(top_sum(raised, k) / k - row[label])


def calibrated_topk_hinge(row: Row, label: int, k: int) -> Any:
    return positive(1 + kth(row, k + 1) - row[label])


def smooth_topk_hinge(row: Row, label: int, k: int, tau: float) -> Any:
    if tau == 0:
        return positive(1 + (kth(np.delete(row, label), k) - row[label]) / k)
    temperature = np.longdouble(tau)
    subsets = list(itertools.combinations(range(len(row)), k))
    sums: Row = np.array([row[list(subset)].sum() for subset in subsets], np.longdouble) / (k * temperature)
    has_label = np.array([label in subset for subset in subsets], bool)
    raised: Row = sums + (1 - has_label.astype(np.longdouble)) / temperature
    return temperature * (log_sum_exp(raised) - log_sum_exp(sums[has_label]))


def topk_cross_entropy(row: Row, label: int, k: int | tuple[int, ...]) -> Any:
    """The chance that the label is drawn in ``k`` draws without replacement, with odds ``exp(row)``."""
    ks = (k,) if isinstance(k, int) else k
    others = [place for place in range(len(row)) if place != label]
    # Logarithms of the chances that the first draws are exactly this set of other classes.
    drawn: dict[frozenset[int], Any] = {frozenset(): np.longdouble(0)}
    hit, miss = [], []
    for draw in range(max(ks)):
        following: dict[frozenset[int], Any] = {}
        for before, log_chance in drawn.items():
            left = log_sum_exp(np.delete(row, list(before)))
            hit.append(log_chance + row[label] - left + np.log(np.longdouble(sum(draw < one for one in ks)) / len(ks)))
            for place in set(others) - before:
                after = before | {place}
                chance = log_chance + row[place] - left
                following[after] = np.logaddexp(following.get(after, -np.inf), chance)
        drawn = following
        share = np.longdouble(ks.count(draw + 1)) / len(ks)
        if share:
            miss.append(np.log(share) + log_sum_exp(np.array(list(drawn.values()), np.longdouble)))
    log_hit, log_miss = (log_sum_exp(np.array(part, np.longdouble)) for part in (hit, miss))
    return -log_hit if log_miss > -1 else -np.log1p(-np.exp(log_miss))


def cross_entropy(row: Row, label: int) -> Any:
    others = np.delete(row, label)
    # log(1 + odds against the label), which keeps its digits where the label is almost certain.
    return np.logaddexp(np.longdouble(0), log_sum_exp(others) - row[label])


def focal(row: Row, label: int, gamma: float) -> Any:
    against = log_sum_exp(np.delete(row, label)) - row[label]
    with np.errstate(over="ignore"):
        wrong = 1 / (1 + np.exp(-against))
    return wrong ** np.longdouble(gamma) * np.logaddexp(np.longdouble(0), against)


def margins(counts: Row, max_margin: float) -> Row:
    inverse_roots = counts ** -np.longdouble(0.25)
    result: Row = np.longdouble(max_margin) * inverse_roots / inverse_roots.max()
    return result


def ldam(row: Row, label: int, class_counts: Row, max_margin: float, scale: float) -> Any:
    lowered = row.copy()
    lowered[label] -= margins(class_counts, max_margin)[label]
    return cross_entropy(np.longdouble(scale) * lowered, label)


def logit_adjusted(row: Row, label: int, class_counts: Row, tau: float) -> Any:
    return cross_entropy(row + np.longdouble(tau) * np.log(class_counts / class_counts.sum()), label)


def smooth_kth(row: Row, k: int, epsilon: float, noise: Row) -> Any:
    """Mean over the columns of ``noise`` (L, B)."""
    return np.mean([kth(row + np.longdouble(epsilon) * draw, k) for draw in noise.T])


def smooth_top_sum(row: Row, k: int, epsilon: float, noise: Row) -> Any:
    return np.mean([top_sum(row + np.longdouble(epsilon) * draw, k) for draw in noise.T])


def expected_kth(row: Row, k: int, epsilon: float) -> Any:
    """``E[k-th largest of row + epsilon Z]`` as an integral over t of P(at least k of them are above t)."""
    hard = kth(row, k)
    if epsilon == 0:
        return hard
    u = ((row - hard) / np.longdouble(epsilon)).astype(np.float64)
    # No order statistic moves by more than the largest |Z|, and none of a few hundred normals is beyond 12.
    t = np.linspace(-12, 12, 6001)
    exactly = np.zeros((k, len(t)))  # P(j of the classes so far are above t), j < k
    exactly[0] = 1
    for mean in u:
        above = ndtr(mean - t)
        below = ndtr(t - mean)
        exactly[1:] = exactly[1:] * below + exactly[:-1] * above
        exactly[0] *= below
    at_least_k = 1 - exactly.sum(0)
    integral = (at_least_k.sum() - (at_least_k[0] + at_least_k[-1]) / 2) * (t[1] - t[0])
    return hard + np.longdouble(epsilon) * (t[0] + integral)


def noised_topk_hinge(
    row: Row,
    label: int,
    k: int | tuple[int, ...],
    epsilon: float,
    noise: Row | None,
    margin: float = 1.0,
    relative: bool = False,
) -> Any:
    rivals = _rivals(row, k, epsilon, noise, relative)
    return np.mean([positive(np.longdouble(margin) + rival - row[label]) for rival in rivals])


def imbalanced_noised_topk_hinge(
    row: Row,
    label: int,
    class_counts: Row,
    k: int | tuple[int, ...],
    epsilon: float,
    noise: Row | None,
    max_margin: float,
    scale: float,
    relative: bool = False,
) -> Any:
    margin = margins(class_counts, max_margin)[label]
    rivals = _rivals(row, k, epsilon, noise, relative)
    return np.longdouble(scale) * np.mean([positive(margin + rival - row[label]) for rival in rivals])


def several(k: int | tuple[int, ...]) -> tuple[int, ...]:
    return k if isinstance(k, tuple) else (k,)


def spread(row: Row, k: int | tuple[int, ...]) -> Any:
    return np.std(descending(row)[: 2 * max(several(k)) + 2])


def _rivals(row: Row, k: int | tuple[int, ...], epsilon: float, noise: Row | None, relative: bool) -> list[Any]:
    scale = epsilon * spread(row, k) if relative else epsilon
    return [_rival(row, one, scale, noise) for one in several(k)]


def _rival(row: Row, k: int, epsilon: float, noise: Row | None) -> Any:
    """The (K+1)-th largest: averaged over draws, or its expectation where there are none."""
    if noise is None:
        return expected_kth(row, k + 1, epsilon)
    return smooth_kth(row, k + 1, epsilon, noise) if epsilon else kth(row, k + 1)


def cosines(features: Row, directions: Row) -> Any:
    return (features @ directions.T) / (
        np.sqrt((features**2).sum(-1, keepdims=True)) * np.sqrt((directions**2).sum(-1))
    )


def accuracies(scores: Row, labels: NDArray[np.int64], ks: tuple[int, ...]) -> dict[str, float]:
    """Micro and macro top-K accuracy; an image is right at K if fewer than K scores are above its label's."""
    above = (scores > scores[np.arange(len(labels)), labels][:, None]).sum(1)
    result = {}
    for k in ks:
        right = above < k
        result[f"micro_top{k}"] = float(right.mean()) if len(labels) else math.nan
        by_class = [right[labels == label].mean() for label in np.unique(labels)]
        result[f"macro_top{k}"] = float(np.mean(by_class)) if by_class else math.nan
    return result
