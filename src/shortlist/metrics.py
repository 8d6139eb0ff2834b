"""Top-K accuracy and the coverage of sets: micro, macro, and by the number of training images of the classes."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.ops.batch import check_labels_in_range, checked_rows, with_classes_last
from shortlist.ops.checks import ClassCounts, check_at_least_one, check_integer, check_k, checked_class_counts
from shortlist.ops.class_counts import size_groups

try:
    from torchmetrics import Metric
except ImportError as missing:
    raise ImportError("the metrics of shortlist need torchmetrics: pip install 'shortlist[metrics]'") from missing


Ties = Literal["correct", "wrong"]
_TIES = get_args(Ties)


def scores_above(scores_RL: Tensor, index_R: Tensor) -> Tensor:
    """``(R,)`` number of scores above the label's. The label is correct at K if there are fewer than K.

    Example:
        >>> scores_above(torch.tensor([[3.0, 2.0, 2.0], [1.0, float("nan"), 2.0]]), torch.tensor([2, 2]))
        tensor([1, 1])
    """
    own_R1 = scores_RL.gather(-1, index_R.unsqueeze(-1))
    # Counting ``<=`` makes a NaN on either side count as above.
    return scores_RL.shape[-1] - (scores_RL <= own_R1).sum(-1)


def others_not_below(scores_RL: Tensor, index_R: Tensor) -> Tensor:
    """``(R,)`` number of other scores that are not below the label's. With fewer than K, it is correct without a tie.

    Example:
        >>> others_not_below(torch.tensor([[3.0, 2.0, 2.0], [1.0, float("nan"), 2.0]]), torch.tensor([2, 2]))
        tensor([2, 1])
    """
    own_R1 = scores_RL.gather(-1, index_R.unsqueeze(-1))
    not_below_R = scores_RL.shape[-1] - 1 - (scores_RL < own_R1).sum(-1)
    return not_below_R + own_R1.squeeze(-1).isnan()  # so that a NaN label is not correct at K = L


class TopKMetrics(Metric):
    """Micro, macro and few / medium / many top-K accuracy, for several K at once.

    An image is correct at K if fewer than K scores are strictly above its label's, so a tie with the K-th score counts
    as correct. A label whose score is NaN is never correct; NaN scores of other classes count as above it.

    ``tied_top{k}`` is the fraction of images that are correct only because of a tie. Watch it: a network that gives
    every class the same score is always "correct", and bfloat16 scores, which have three digits, tie often. If it is
    not small, compute the last layer in float32, or count ties as wrong.

    The state is an integer count for each class and K, summed over ranks. So the result does not depend on how the
    images are divided into batches and ranks.

    Args:
        num_classes: Number L of classes.
        ks: The values of K.
        class_counts: ``(L,)`` number of training images of each class, zero allowed. Adds the accuracy of classes with
            few (below 20), a medium number of, and many (above 100) images.
        ignore_index: Images with this label are not counted.
        ties: ``"correct"``, or ``"wrong"`` if an image is correct only with fewer than K other scores that are not
            below the label's.
        **kwargs: Passed to ``torchmetrics.Metric``.

    Example:
        >>> metrics = TopKMetrics(3, ks=(1, 2), class_counts=[5, 50, 500])
        >>> scores = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
        >>> metrics.update(scores, torch.tensor([0, 1, 1]))
        >>> result = metrics.compute()
        >>> {name: round(result[name].item(), 3) for name in ("micro_top1", "macro_top1", "macro_top2", "medium_top2")}
        {'micro_top1': 0.333, 'macro_top1': 0.5, 'macro_top2': 1.0, 'medium_top2': 1.0}
        >>> int(result["absent_classes"])
        1
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    seen: Tensor
    ignore_index: Tensor
    class_counts: Tensor | None

    def __init__(
        self,
        num_classes: int,
        ks: Sequence[int] = (1, 3, 5),
        class_counts: ClassCounts | None = None,
        *,
        ignore_index: int = -100,
        ties: Ties = "correct",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_at_least_one("num_classes", num_classes)
        try:
            ks = () if isinstance(ks, str) else tuple(ks)
        except TypeError:
            raise ShortlistError(f"ks must be a sequence of values of K, such as (1, 5), got {ks!r}") from None
        if len(ks) == 0:
            raise ShortlistError("ks must be one or more values of K, such as (1, 5), got none")
        for k in ks:
            check_k(k, num_classes, num_classes)
        if len(set(ks)) < len(ks):
            raise ShortlistError(f"ks must be different values of K, got {ks}")
        check_integer("ignore_index", ignore_index)
        if not isinstance(ties, str) or ties not in _TIES:
            raise ShortlistError(f"ties must be one of {_TIES}, got {ties!r}")
        self.num_classes = num_classes
        self.ties = ties
        self.ks = ks
        counts = None if class_counts is None else checked_class_counts(class_counts, num_classes, allow_zero=True)
        self.register_buffer("class_counts", counts, persistent=False)
        self.add_state("seen", torch.zeros(num_classes, dtype=torch.int64), dist_reduce_fx="sum")
        # A MetricCollection merges metrics whose states are equal. So the names of states contain K, the ignored label
        # is a state, and both counts are kept, whichever way ties count.
        self.add_state("ignore_index", torch.tensor(ignore_index), dist_reduce_fx="max")
        self._ignored_label = ignore_index  # a number, since reading the state may wait for a GPU
        for k in ks:
            for name in (f"hits_top{k}", f"strict_hits_top{k}"):
                self.add_state(name, torch.zeros(num_classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, target: Tensor) -> None:
        """Count a batch: ``(N, L)`` scores and ``(N,)`` labels, or other shapes as for the losses."""
        scores_RL, index_R, _ = with_classes_last(scores, target)
        if index_R is None:
            raise ShortlistError(f"target must be int64 labels, got probabilities ({target.dtype})")
        if scores_RL.shape[-1] != self.num_classes:
            raise ShortlistError(f"scores must have {self.num_classes} classes, got {scores_RL.shape[-1]}")
        check_labels_in_range(index_R, self.num_classes, self._ignored_label)
        kept_R = index_R != self._ignored_label
        index_R = torch.where(kept_R, index_R, 0)
        above_R = scores_above(scores_RL, index_R).flatten()
        not_below_R = others_not_below(scores_RL, index_R).flatten()
        index_R, kept_R = index_R.flatten(), kept_R.flatten()
        # Not in place: a state created in inference mode cannot be changed outside it.
        self.seen = self.seen.index_add(0, index_R, kept_R.long())
        for k in self.ks:
            for name, rank_R in ((f"hits_top{k}", above_R), (f"strict_hits_top{k}", not_below_R)):
                setattr(self, name, getattr(self, name).index_add(0, index_R, (kept_R & (rank_R < k)).long()))

    def set_dtype(self, dst_type: str | torch.dtype) -> "TopKMetrics":
        """Does nothing: counts stay integers, and accuracies are float32."""
        return self

    def compute(self) -> dict[str, Tensor]:
        """``micro_top{k}``, ``macro_top{k}``, ``tied_top{k}`` and the groups for each K, and ``absent_classes``.

        Means over classes include those that occur in the counted labels; without any, the mean is NaN.
        """
        occurs = self.seen > 0
        groups = {"macro": occurs}
        if self.class_counts is not None:
            groups |= {name: occurs & members for name, members in size_groups(self.class_counts).items()}
        result = {}
        for k, accuracy in self.per_class().items():
            result[f"micro_top{k}"] = self._hits(k).sum() / self.seen.sum()
            for name, members in groups.items():
                result[f"{name}_top{k}"] = accuracy[members].mean()
            result[f"tied_top{k}"] = (
                self._count(f"hits_top{k}") - self._count(f"strict_hits_top{k}")
            ).sum() / self.seen.sum()
        result["absent_classes"] = (~occurs).sum()
        return result

    def per_class(self) -> dict[int, Tensor]:
        """``(L,)`` accuracies of the classes for each K; NaN for classes that did not occur."""
        return {k: self._hits(k) / self.seen for k in self.ks}

    def _hits(self, k: int) -> Tensor:
        """``(L,)`` number of correct images at K, with ties counted as asked for."""
        return self._count(f"hits_top{k}" if self.ties == "correct" else f"strict_hits_top{k}")

    def _count(self, state: str) -> Tensor:
        count: Tensor = getattr(self, state)
        return count


class SetMetrics(Metric):
    """How large sets of suggestions are, and how often they contain the label.

    Args:
        num_classes: Number L of classes.
        class_counts: ``(L,)`` number of training images of each class, zero allowed. Adds the coverage of classes with
            few (below 20), a medium number of, and many (above 100) images.
        **kwargs: Passed to ``torchmetrics.Metric``.

    Example:
        >>> metrics = SetMetrics(3)
        >>> sets = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
        >>> metrics.update(sets, torch.tensor([0, 0, 1]))
        >>> result = metrics.compute()
        >>> {name: round(result[name].item(), 3) for name in ("mean_size", "micro_coverage", "macro_coverage")}
        {'mean_size': 1.667, 'micro_coverage': 0.667, 'macro_coverage': 0.75}
        >>> round(result["empty"].item(), 3), result["classes_below_half"].item()
        (0.333, 0.0)
    """

    is_differentiable = False
    full_state_update = False

    seen: Tensor
    covered: Tensor
    size: Tensor
    empty: Tensor
    class_counts: Tensor | None

    def __init__(self, num_classes: int, class_counts: ClassCounts | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_at_least_one("num_classes", num_classes)
        self.num_classes = num_classes
        counts = None if class_counts is None else checked_class_counts(class_counts, num_classes, allow_zero=True)
        self.register_buffer("class_counts", counts, persistent=False)
        for name in ("seen", "covered"):
            self.add_state(name, torch.zeros(num_classes, dtype=torch.int64), dist_reduce_fx="sum")
        for name in ("size", "empty"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, sets: Tensor, target: Tensor) -> None:
        """Count a batch: ``(N, L)`` bool, as ``PredictionSets`` gives it, and ``(N,)`` labels."""
        if not isinstance(sets, Tensor) or sets.dtype != torch.bool or sets.shape[-1:] != (self.num_classes,):
            got = f"{sets.dtype} of shape {tuple(sets.shape)}" if isinstance(sets, Tensor) else type(sets).__name__
            raise ShortlistError(f"sets must be bool of shape (..., {self.num_classes}), got {got}")
        sets_NL, target_N = checked_rows(sets, target)
        sets_NL, target_N = sets_NL.to(sets.device), target_N.to(sets.device)
        size_N = sets_NL.sum(1)
        inside_N = sets_NL.gather(1, target_N.unsqueeze(1)).squeeze(1)
        # Not in place: a state created in inference mode cannot be changed outside it.
        self.seen = self.seen.index_add(0, target_N, torch.ones_like(target_N))
        self.covered = self.covered.index_add(0, target_N, inside_N.long())
        self.size = self.size + size_N.sum()
        self.empty = self.empty + (size_N == 0).sum()

    def set_dtype(self, dst_type: str | torch.dtype) -> "SetMetrics":
        """Does nothing: counts stay integers, and coverages are float32."""
        return self

    def compute(self) -> dict[str, Tensor]:
        """``mean_size``, ``empty``, ``micro_coverage``, ``macro_coverage``, ``classes_below_half`` and the groups.

        ``empty`` is the share of sets without a class. ``classes_below_half`` is the share of classes whose coverage is
        below one half. Means over classes include those that occur; without any, the mean is NaN.
        """
        occurs, images = self.seen > 0, self.seen.sum()
        coverage = self.per_class()
        groups = {"macro": occurs}
        if self.class_counts is not None:
            groups |= {name: occurs & members for name, members in size_groups(self.class_counts).items()}
        return {
            "mean_size": self.size / images,
            "empty": self.empty / images,
            "micro_coverage": self.covered.sum() / images,
            **{f"{name}_coverage": coverage[members].mean() for name, members in groups.items()},
            "classes_below_half": (coverage[occurs] < 0.5).float().mean(),
            "absent_classes": (~occurs).sum(),
        }

    def per_class(self) -> Tensor:
        """``(L,)`` coverages of the classes; NaN for classes that did not occur."""
        return self.covered / self.seen
