"""Sets of suggestions of varying size: as many classes as it takes to keep a promise.

Shape suffixes: N images, L classes, G groups of classes.
"""

import math
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.ops.batch import checked_rows, row_chunks
from shortlist.ops.checks import ClassCounts, can_read, check_at_least_one, check_floating, check_k, check_positive
from shortlist.ops.class_counts import log_prior
from shortlist.ops.dtypes import widened

__all__ = ["PredictionSets"]

Method = Literal["marginal", "pas", "interp_q", "classwise", "clustered", "macro"]
_METHODS = get_args(Method)
_BY_PRIOR = ("pas", "macro")

_CLOSE = 1e-9  # a rank or a sum of weights that rounding has moved by less than this share is whole
_AT_ONCE = 2**24  # scores in working memory
_IN_CACHE = 2**20  # scores in the cache of a CPU
_ROUNDING = 8 * torch.finfo(torch.float64).eps
_EMBEDDED_AT = (0.5, 0.6, 0.7, 0.8, 0.9)  # quantiles that describe a class to the clustering
_LLOYD_STEPS = 50


class PredictionSets(nn.Module):
    """Sets that contain the label with a chosen probability: every class whose confidence reaches its threshold.

    The network's scores are logits, and p is their softmax. ``calibrate`` chooses the thresholds on images that were
    used neither for training nor for any choice. New images must come from the same source as these: the promises hold
    on average over calibration images and new images, drawn alike.

    ========== ================== ===========================================================================
    method     confidence         what is promised
    ========== ================== ===========================================================================
    marginal   p                  ``coverage`` of all images
    pas        p / prior          the same; among such sets, small ones that are fair to rare classes
    classwise  p                  ``coverage`` of every class, with sets that can be huge
    interp_q   p                  nothing; thresholds between those of classwise and marginal
    clustered  p                  ``coverage`` of every cluster of classes with similar thresholds
    macro      p / prior          ``coverage`` averaged over classes, each counting the same
    ========== ================== ===========================================================================

    For macro, the classes are those with calibration images: nothing is promised for the others. A class with a single
    such image moves the threshold as much as all images of a frequent class do, and the promise allows for that: with
    few classes or few images the sets contain everything. For classwise, a class with less than ``coverage / (1 -
    coverage)`` calibration images is in every set.

    With ``average_k`` the sets have that many classes on average over the calibration images, and nothing is promised
    about labels, which are not used. The confidence is that of the method: marginal, pas or macro.

    Args:
        coverage: Between 0 and 1. Ignored with ``average_k``.
        method: One of the above.
        average_k: Mean size of the sets, instead of a coverage.
        interpolation: For interp_q, the weight of a class's own threshold beside the common one.
        clusters: For clustered, the number of clusters; by default a rule of the method's authors.

    Attributes:
        thresholds: ``(L,)`` smallest log-confidence that puts a class into a set; minus infinity: always in it.
        images: How many calibration images they rest on; 0 before ``calibrate``.
        class_images: ``(L,)`` how many of these are of each class.

    Example:
        >>> sets = PredictionSets(coverage=0.5, method="marginal")
        >>> scores = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1], [0.4, 0.1, 0.5]]).log()
        >>> sets.calibrate(scores, torch.tensor([0, 1, 0])).thresholds.exp()
        tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)
        >>> sets(torch.tensor([[0.6, 0.3, 0.1], [0.4, 0.3, 0.3]]).log())
        tensor([[ True, False, False],
                [False, False, False]])

    Reference:
        Sadinle, Lei & Wasserman, JASA 2019 (marginal, classwise); Ding et al., NeurIPS 2023 (clustered); Ding,
        Fermanian & Salmon, arXiv 2507.06867 (pas, interp_q); arXiv 2606.28598 (macro); Lorieul, Joly & Shasha, arXiv
        2112.08851 (average_k).
    """

    thresholds: Tensor
    log_prior: Tensor
    class_images: Tensor
    images: Tensor

    def __init__(
        self,
        coverage: float = 0.9,
        method: Method = "macro",
        *,
        average_k: float | None = None,
        interpolation: float = 0.999,
        clusters: int | None = None,
    ) -> None:
        super().__init__()
        _check_share("coverage", coverage)
        if not isinstance(method, str) or method not in _METHODS:
            raise ShortlistError(f"method must be one of {_METHODS}, got {method!r}")
        if average_k is not None:
            check_positive("average_k", average_k)
            if method not in ("marginal", *_BY_PRIOR):
                raise ShortlistError(f"method must be marginal, pas or macro with average_k, got {method!r}")
        if not isinstance(interpolation, float | int) or not 0 <= interpolation <= 1:
            raise ShortlistError(f"interpolation must be in [0, 1], got {interpolation!r}")
        if clusters is not None:
            check_at_least_one("clusters", clusters)
        self.coverage, self.method, self.average_k = coverage, method, average_k
        self.interpolation, self.clusters = interpolation, clusters
        self.register_buffer("thresholds", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("log_prior", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("class_images", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("images", torch.zeros((), dtype=torch.int64))

    def calibrate(self, scores: Tensor, target: Tensor, class_counts: ClassCounts | None = None) -> Self:
        """Choose the thresholds.

        Args:
            scores: ``(N, L)`` scores of images that were used neither for training nor for any choice.
            target: ``(N,)`` their labels.
            class_counts: ``(L,)`` training images of each class, which give the prior. For pas, macro and ``average_k``
                with them; the other methods do without. A class without a training image must be left out of the
                network's classes first.

        Returns:
            Itself.
        """
        check_floating("scores", scores)
        scores_NL, target_N = checked_rows(scores, target)
        if len(target_N) == 0:
            raise ShortlistError("scores must be those of at least one calibration image, got none")
        num_classes, device = scores_NL.shape[1], scores_NL.device
        self.log_prior = self._prior(class_counts, num_classes).to(device)
        self.class_images = target_N.bincount(minlength=num_classes)
        self.images = self.class_images.sum()
        if self.average_k is not None:
            if self.average_k > num_classes:
                raise ShortlistError(f"average_k must be at most {num_classes}, the classes, got {self.average_k}")
            threshold = self._mean_size_threshold(scores_NL, self.average_k)
            self.thresholds = torch.full((num_classes,), threshold, dtype=torch.float64, device=device)
            return self
        own_N = (
            torch.cat(
                [
                    widened(scores_NL[rows]).log_softmax(1).gather(1, target_N[rows].unsqueeze(1)).squeeze(1)
                    for rows in row_chunks(scores_NL, _AT_ONCE)
                ]
            ).double()
            - self.log_prior[target_N]
        )
        if not bool(own_N.isfinite().all()):
            raise ShortlistError("scores must be finite: the label of some image has a probability of 0 or NaN")
        self.thresholds = self._class_thresholds(own_N, target_N, num_classes)
        return self

    def forward(self, scores: Tensor, max_k: int | None = None) -> Tensor:
        """``(..., L)`` True for the classes in the set of each image. A set may be empty, or hold every class.

        Args:
            scores: ``(..., L)`` logits.
            max_k: Keep only so many classes of a larger set, those with the highest confidence. No coverage is promised
                then.
        """
        num_classes = len(self.thresholds)
        if num_classes == 0:
            raise ShortlistError("the sets have no thresholds yet: call calibrate first")
        check_floating("scores", scores)
        if scores.dim() == 0 or scores.shape[-1] != num_classes:
            raise ShortlistError(
                f"scores must have shape (..., {num_classes}), with the classes last, got {tuple(scores.shape)}"
            )
        inside = self._inside(scores)
        if max_k is None:
            return inside
        check_k(max_k, num_classes, num_classes)
        best = self._confidence(scores).masked_fill(~inside, -math.inf).topk(max_k).indices
        return inside & torch.zeros_like(inside).scatter_(-1, best, True)

    def _inside(self, scores: Tensor) -> Tensor:
        """Compares log p with threshold + log prior: the prior costs no pass over the scores.

        The sum is rounded to the dtype of log p, so that the label which gave the threshold is inside.
        """
        limits_L = self.thresholds + self.log_prior
        if widened(scores[:0]).dtype == torch.float64:
            limits_L = limits_L - _ROUNDING * limits_L.abs()  # nothing is left to round
        if not can_read(scores):
            log_p = widened(scores).log_softmax(-1)
            return log_p >= limits_L.to(log_p.dtype)
        # On a CPU a few rows at a time, which stay in its cache: half the time of a pass over all of them.
        rows_NL = scores.detach().reshape(-1, scores.shape[-1])
        inside_NL = torch.empty(rows_NL.shape, dtype=torch.bool)
        most = max((rows.stop - rows.start for rows in row_chunks(rows_NL, _IN_CACHE)), default=0)
        memory_RL = torch.empty(most, rows_NL.shape[1], dtype=widened(rows_NL[:0]).dtype)  # new memory takes longer
        limits_L = limits_L.to(memory_RL.dtype)
        for rows in row_chunks(rows_NL, _IN_CACHE):
            wide_RL = widened(rows_NL[rows])
            log_p_RL = torch.log_softmax(wide_RL, 1, out=memory_RL[: len(wide_RL)])
            torch.ge(log_p_RL, limits_L, out=inside_NL[rows])
        return inside_NL.view(scores.shape)

    def _confidence(self, scores: Tensor) -> Tensor:
        """Its logarithm, of scores with the classes last."""
        return widened(scores).log_softmax(-1) - self.log_prior.to(widened(scores).dtype)

    def _prior(self, class_counts: ClassCounts | None, num_classes: int) -> Tensor:
        """``(L,)`` what the log-probabilities are reduced by."""
        if self.method not in _BY_PRIOR:
            return torch.zeros(num_classes, dtype=torch.float64)
        if class_counts is None:
            raise ShortlistError(
                f"class_counts must be given for {self.method}, whose confidence is p / prior: the number of training "
                "images of each class"
            )
        counts, logarithms = log_prior(class_counts)
        if len(counts) != num_classes:
            raise ShortlistError(f"class_counts must have {num_classes} entries, one for each score, got {len(counts)}")
        return logarithms.double()

    def _class_thresholds(self, own_N: Tensor, target_N: Tensor, num_classes: int) -> Tensor:
        """``(L,)`` thresholds, from the confidence of the label of each calibration image."""
        one = torch.zeros_like(target_N)
        if self.method in ("marginal", "pas"):
            return group_thresholds(own_N, one, 1, self.coverage).expand(num_classes).clone()
        if self.method == "macro":
            return macro_threshold(own_N, target_N, self.coverage).expand(num_classes).clone()
        if self.method == "classwise":
            return group_thresholds(own_N, target_N, num_classes, self.coverage)
        common = group_thresholds(own_N, one, 1, self.coverage)
        if self.method == "interp_q":
            own_threshold = group_thresholds(own_N, target_N, num_classes, self.coverage)
            return (self.interpolation * own_threshold.exp() + (1 - self.interpolation) * common.exp()).log()
        return clustered_thresholds(own_N, target_N, num_classes, self.coverage, self.clusters, common)

    def _mean_size_threshold(self, scores_NL: Tensor, average_k: float) -> float:
        """The smallest confidence among the N * average_k largest ones of all images and classes."""
        wanted = round(average_k * len(scores_NL))
        best = torch.empty(0, dtype=torch.float64, device=scores_NL.device)
        for rows in row_chunks(scores_NL, _AT_ONCE):
            found = torch.cat([best, self._confidence(scores_NL[rows]).flatten().double()])
            best = found.topk(min(wanted, len(found))).values
        return best[-1].item() if wanted else math.inf

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes thresholds of any number of classes: a new module does not know it yet."""
        for name in ("thresholds", "log_prior", "class_images"):
            if isinstance(found := state_dict.get(prefix + name), Tensor) and found.dim() == 1:
                setattr(self, name, torch.empty_like(found, device=getattr(self, name).device))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Moves to another device but keeps the dtypes: ``half()`` of a network must not round thresholds."""
        super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        goal = f"coverage={self.coverage}" if self.average_k is None else f"average_k={self.average_k}"
        rests_on = f", classes={len(self.thresholds)}, images={self.images}" if self.images else ""
        return f"{goal}, method={self.method!r}{rests_on}"


def group_thresholds(own_N: Tensor, group_N: Tensor, num_groups: int, coverage: float) -> Tensor:
    """``(G,)`` the threshold of each group of images that covers a new image of the group with this probability.

    Of n images it is the r-th largest confidence, r = ceil((n + 1) coverage): the new image is equally likely to fall
    between any two of them. If r is above n, nothing but minus infinity is low enough.

    Example:
        >>> group_thresholds(torch.tensor([0.1, 0.5, 0.9, 0.3]), torch.tensor([0, 0, 0, 1]), 2, coverage=0.6)
        tensor([0.1000,   -inf], dtype=torch.float64)
    """
    count_G = group_N.bincount(minlength=num_groups)
    rank_G = _ceil((count_G + 1).double() * coverage).long()
    order_N = own_N.double().argsort(descending=True)
    order_N = order_N[group_N[order_N].argsort(stable=True)]  # by group, the most confident first
    place_G = count_G.cumsum(0) - count_G + rank_G - 1
    is_enough_G = rank_G <= count_G
    thresholds_G = torch.full((num_groups,), -math.inf, dtype=torch.float64, device=own_N.device)
    thresholds_G[is_enough_G] = own_N.double()[order_N[place_G[is_enough_G]]]
    return thresholds_G


def macro_threshold(own_N: Tensor, target_N: Tensor, coverage: float) -> Tensor:
    """The common threshold that covers new images with this probability, averaged over the classes of ``target_N``.

    Every image weighs 1 / (classes * images of its class). A new image of a class would add at most the largest weight,
    so the weights above the threshold must reach the coverage plus that. Minus infinity if they cannot.

    Example:
        >>> confidence = torch.tensor([0.9, 0.8, 0.7, 0.1])  # three images of class 0, one of class 1
        >>> macro_threshold(confidence, torch.tensor([0, 0, 0, 1]), coverage=0.5)  # 0.5 + 0.5 needs all of them
        tensor(0.1000, dtype=torch.float64)
    """
    count_L = target_N.bincount()
    weight_N = 1 / (count_L[target_N].double() * (count_L > 0).sum())
    order_N = own_N.double().argsort(descending=True)
    reached_N = weight_N[order_N].cumsum(0)
    needed = coverage + weight_N.max()
    enough_N = reached_N >= needed * (1 - _CLOSE)
    if needed > 1 + _CLOSE or not enough_N.any():
        return torch.tensor(-math.inf, dtype=torch.float64, device=own_N.device)
    return own_N.double()[order_N[enough_N.int().argmax()]]


def clustered_thresholds(
    own_N: Tensor, target_N: Tensor, num_classes: int, coverage: float, clusters: int | None, common: Tensor
) -> Tensor:
    """``(L,)`` one threshold for each cluster of classes whose labels have similar confidences.

    A share of the images finds the clusters, and the others give the thresholds, so that the promise holds. Every other
    image of a class, and so on, is taken in the order in which they come: the result does not depend on chance. Classes
    with too few images for a quantile have the common threshold.
    """
    fewest = math.ceil(_ceil(torch.tensor(coverage / (1 - coverage))).item())
    count_L = target_N.bincount(minlength=num_classes)
    smallest = int(count_L[count_L >= fewest].min()) if (count_L >= fewest).any() else 0
    kept = int((count_L >= fewest).sum())
    used = smallest * kept // (75 + kept)  # for clustering, of the smallest class that takes part
    number = clusters or used // 2
    share = used / smallest if smallest else 0.0
    place_N = _place_in_class(target_N, num_classes)
    # Evenly spread over the images of a class: the share of those before it goes up by one.
    finds_N = ((place_N + 1) * share).floor() > (place_N * share).floor()
    found_L = target_N[finds_N].bincount(minlength=num_classes)
    takes_part_L = found_L >= fewest
    if number < 2 or int(takes_part_L.sum()) <= number:
        return common.expand(num_classes).clone()
    embedding_LE = torch.stack(
        [
            own_N[finds_N & (target_N == label)].exp().quantile(own_N.new_tensor(_EMBEDDED_AT))
            for label in takes_part_L.nonzero().flatten().tolist()
        ]
    )
    cluster_L = torch.full((num_classes,), number, device=own_N.device)
    cluster_L[takes_part_L] = _kmeans(embedding_LE, found_L[takes_part_L].double().sqrt(), number)
    gives_N = ~finds_N & takes_part_L[target_N]
    thresholds_G = group_thresholds(own_N[gives_N], cluster_L[target_N[gives_N]], number + 1, coverage)
    thresholds_G[number] = common.squeeze()
    return thresholds_G[cluster_L]


def _kmeans(points_PE: Tensor, weight_P: Tensor, number: int) -> Tensor:
    """``(P,)`` the cluster of each point, by weighted k-means from points spread over the order of their means."""
    order_P = points_PE.mean(1).argsort()
    starts = torch.linspace(0, len(points_PE) - 1, number, device=points_PE.device).round().long()
    centres = points_PE[order_P[starts]]
    cluster_P = torch.zeros(len(points_PE), dtype=torch.int64, device=points_PE.device)
    for step in range(_LLOYD_STEPS):
        nearest_P = torch.cdist(points_PE, centres).argmin(1)
        if step and torch.equal(nearest_P, cluster_P):
            break
        cluster_P = nearest_P
        total = torch.zeros(number, dtype=weight_P.dtype, device=weight_P.device).index_add_(0, cluster_P, weight_P)
        sums = torch.zeros_like(centres).index_add_(0, cluster_P, points_PE * weight_P.unsqueeze(1))
        centres = torch.where(total.unsqueeze(1) > 0, sums / total.clamp(min=1e-300).unsqueeze(1), centres)
    return cluster_P


def _place_in_class(target_N: Tensor, num_classes: int) -> Tensor:
    """``(N,)`` how many images of the same class come before each one."""
    order_N = target_N.argsort(stable=True)
    count_L = target_N.bincount(minlength=num_classes)
    place_N = torch.empty_like(target_N)
    place_N[order_N] = (
        torch.arange(len(target_N), device=target_N.device) - (count_L.cumsum(0) - count_L)[target_N[order_N]]
    )
    return place_N


def _ceil(numbers: Tensor) -> Tensor:
    """Rounds up, unless a number is whole but for rounding: 30 * 0.9 is 27."""
    return (numbers * (1 - _CLOSE)).ceil()


def _check_share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, float | int) or not 0 < value < 1:
        raise ShortlistError(f"{name} must be between 0 and 1, such as 0.9, got {value!r}")
