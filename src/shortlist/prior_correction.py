"""The correction of a finished network's scores for the class sizes that it was trained on.

Shape suffixes: N images, R rows (some of the images), L classes, M breakpoints.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Literal, Self, get_args

import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.ops.batch import checked_rows, row_chunks
from shortlist.ops.checks import ClassCounts, Ks, check_floating, check_not_negative, sorted_ks
from shortlist.ops.class_counts import log_prior
from shortlist.ops.dtypes import widened

__all__ = ["PriorCorrection"]

Average = Literal["macro", "micro"]
_AVERAGES = get_args(Average)

# How tau is chosen; docs/math.md has the measurements. The first two are in temperatures.
_LARGEST_TAU = 4.0
_HALF_WINDOWS = (0.25, 0.5, 1.0)
_SIMILAR_SIZE = 0.25  # difference of log counts
_TIE = 1e-12  # accuracies that differ by rounding alone are equal
_AT_ONCE = 2**21  # scores in working memory
_FOR_TEMPERATURE = 2**24  # scores that it rests on
_COLDEST, _HOTTEST, _BISECTIONS = 1e-3, 1e3, 14  # searched temperatures, in standard deviations of a row of scores


class PriorCorrection(nn.Module):
    """Corrects the scores of a finished network for the class sizes that it was trained on: ``s - tau log prior``.

    A network trained with cross-entropy estimates log p(y | x) + constant, and the K suggestions with the highest macro
    accuracy are those with the largest p(y | x) / prior of y: ``tau = 1``. Networks are no exact estimators, and other
    losses have scores on other scales, so ``fit`` chooses tau on validation scores. Until then ``tau = 0``, which
    changes nothing.

    The offsets are computed in float32 at least, and the result has the dtype of the scores. Half precision keeps three
    digits, so corrected scores may tie there: correct float32 scores if you can.

    Args:
        class_counts: ``(L,)`` number of training images of each class.
        leave_out: Classes without a training image. They have no prior, so they must be named here. They are never
            suggested: their corrected score is the lowest finite number.

    Attributes:
        tau: What ``fit`` chose. Like all results of ``fit`` it is in the ``state_dict``.
        images: How many validation images tau rests on; 0 before ``fit``.
        classes: How many classes have one of these images.
        num_classes: How many classes there are, L.

    Example:
        >>> correction = PriorCorrection([90, 10])
        >>> scores = torch.tensor([[1.0, 0.0]] * 4 + [[4.0, 0.0]] * 4)
        >>> correction.fit(scores, torch.tensor([0, 1, 1, 1, 0, 0, 0, 0]), k=1)
        PriorCorrection(num_classes=2, tau=0.9321, images=8, classes=2)
        >>> correction(scores).argmax(-1)
        tensor([1, 1, 1, 1, 0, 0, 0, 0])

    Reference:
        Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021.
    """

    class_counts: Tensor
    left_out: Tensor
    tau: Tensor
    images: Tensor
    classes: Tensor

    def __init__(self, class_counts: ClassCounts, *, leave_out: Sequence[int] = ()) -> None:
        super().__init__()
        counts, _ = log_prior(class_counts, leave_out)
        if len(set(leave_out)) == len(counts):
            raise ShortlistError("leave_out must leave at least one class, got all of them")
        self.num_classes = len(counts)
        self.register_buffer("class_counts", counts)
        self.register_buffer("left_out", counts == 0)
        self.register_buffer("tau", torch.zeros((), dtype=torch.float32))
        self.register_buffer("images", torch.zeros((), dtype=torch.int64))
        self.register_buffer("classes", torch.zeros((), dtype=torch.int64))

    def forward(self, scores: Tensor) -> Tensor:
        """Corrected scores, of the same shape and dtype. The classes are in the last dimension."""
        self._check_scores(scores)
        wide = widened(scores)
        corrected = (wide - self.tau * self._log_prior(wide.dtype, wide.device)).to(scores.dtype)
        return corrected.masked_fill(self.left_out, torch.finfo(scores.dtype).min)

    def fit(self, scores: Tensor, target: Tensor, k: Ks = 5, average: Average = "macro") -> Self:
        """Choose tau by the top-K accuracy of the corrected validation scores, or by the mean of several.

        One tau is right for every K if the scores are log-probabilities. Several K together choose it with less noise
        than one, above all where nearly every label is among the K best already: that says little about tau.

        The accuracy is a step function of tau, and ``curve`` gives it exactly. Its highest step is often narrow, and
        high by chance. So tau maximises, exactly as well, the mean accuracy around it: the mean over windows of a
        quarter, a half and a whole temperature to both sides, for tau from 0 to 4 temperatures. The temperature is the
        number to divide the scores by so that they are log-probabilities (with the highest likelihood, for labels as
        frequent as in training); it makes the choice independent of the scale of the scores. Among equally good values
        the smallest is taken: it changes the network's own order least. A tau that does not raise the accuracy is not
        taken, nor any for scores that are no better than chance: it stays 0.

        Validation images of a long tail are mostly of frequent classes, and a mean over the classes that have any would
        choose for these. So for the macro average the accuracy of a class is estimated by the images of all classes of
        about its size, the nearer the more, and classes without validation images count too.

        Args:
            scores: ``(N, L)`` scores of images that the network was not trained on.
            target: ``(N,)`` their labels. Images of classes that are left out are not counted.
            k: Number of suggestions, or several such as ``(1, 3, 5)``: the mean of their accuracies counts.
            average: ``"macro"``, every class counts the same, or ``"micro"``, every image counts the same.

        Returns:
            Itself.

        Raises:
            ShortlistError: There is no image to choose by, or an argument is invalid.
        """
        ks, scores_NL, target_N = self._checked(scores, target, k, average)
        temperature = _temperature(scores_NL, target_N, self.class_counts.to(target_N.device))
        largest, half_windows = _LARGEST_TAU * temperature, [width * temperature for width in _HALF_WINDOWS]
        margin = max(half_windows)
        weight_N = _even_weights(target_N) if average == "micro" else self._weights_by_size(target_N)
        taus, accuracy = self._steps(scores_NL, target_N, ks, weight_N, -margin, largest + margin)
        tau = _smoothed_argmax(taus, accuracy, largest, half_windows)
        before, after = accuracy[torch.searchsorted(taus, taus.new_tensor([0.0, tau]), right=True) - 1].tolist()
        self.tau.fill_(tau if after > before else 0.0)
        self.images.fill_(len(target_N))
        self.classes.fill_(len(torch.unique(target_N)))
        return self

    def curve(
        self, scores: Tensor, target: Tensor, k: Ks = 5, average: Average = "macro", *, up_to: float = math.inf
    ) -> tuple[Tensor, Tensor]:
        """Top-K accuracy, or the mean of several, of ``scores - tau log prior`` as a function of tau, exactly.

        Args:
            scores, target, k, average: As in ``fit``.
            up_to: Steps at larger tau are left out.

        Returns:
            ``(M,)`` the values of tau at which the accuracy changes, in ascending order from 0, and ``(M,)`` the
            accuracy between each of them and the next, both in float64. *At* such a value a label ties with the K-th
            score, which counts as correct.

        Example:
            >>> scores = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
            >>> taus, accuracy = PriorCorrection([3, 1]).curve(scores, torch.tensor([1, 1]), k=1)
            >>> taus  # 1 / log 3 and 2 / log 3
            tensor([0.0000, 0.9102, 1.8205], dtype=torch.float64)
            >>> accuracy
            tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)
        """
        check_not_negative("up_to", min(up_to, sys.float_info.max))
        ks, scores_NL, target_N = self._checked(scores, target, k, average)
        weight_N = _even_weights(target_N) if average == "micro" else _class_weights(target_N)
        return self._steps(scores_NL, target_N, ks, weight_N, 0.0, up_to)

    def _steps(
        self, scores_NL: Tensor, target_N: Tensor, ks: tuple[int, ...], weight_N: Tensor, begin: float, end: float
    ) -> tuple[Tensor, Tensor]:
        """Where the weighted accuracy changes in [begin, end], first of all at ``begin``, and its value from there."""
        log_prior_L = self._log_prior(torch.float64, target_N.device)
        left_out_L = self.left_out.to(target_N.device)
        first = torch.zeros(1, dtype=torch.float64, device=target_N.device)
        taus, changes = [torch.zeros_like(first)], [torch.zeros_like(first)]
        for rows in row_chunks(scores_NL, _AT_ONCE):
            scores_RL = scores_NL[rows].double().masked_fill(left_out_L, -math.inf) - begin * log_prior_L
            steps = _RowSteps(scores_RL, target_N[rows], log_prior_L, ks, end - begin)
            first += (steps.first_R * weight_N[rows]).sum()
            taus.append(steps.tau_E)
            changes.append(steps.change_E * weight_N[rows][steps.row_E])
        taus_M, index_E = torch.unique(torch.cat(taus), return_inverse=True)
        change_M = torch.zeros_like(taus_M).index_add_(0, index_E, torch.cat(changes))
        return begin + taus_M, first + change_M.cumsum(0)

    def _weights_by_size(self, target_N: Tensor) -> Tensor:
        """``(N,)`` share of each image in the macro accuracy, estimated by images of classes of a similar size.

        It is computed for each size and not for each class, since there may be millions of classes.
        """
        kept_L = ~self.left_out.to(target_N.device)
        counts_L = self.class_counts.to(target_N.device, torch.float64)
        sizes_D, classes_D = torch.unique(counts_L[kept_L], return_counts=True)
        size_N = torch.searchsorted(sizes_D, counts_L[target_N])
        images_D = size_N.bincount(minlength=len(sizes_D))
        log_D, seen_D = sizes_D.log(), images_D > 0
        share_D = torch.zeros_like(sizes_D)
        for rows in row_chunks(log_D.unsqueeze(1).expand(-1, len(sizes_D)), _AT_ONCE):
            distance_RD = (log_D[rows].unsqueeze(1) - log_D[seen_D]) / _SIMILAR_SIZE
            near_RD = (images_D[seen_D].log() - distance_RD.square() / 2).softmax(1)
            share_D[seen_D] += classes_D[rows].double() @ near_RD
        return (share_D / (images_D * kept_L.sum()))[size_N]

    def _log_prior(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``(L,)``, 0 for classes that are left out."""
        counts = self.class_counts.to(device, dtype)
        return (counts / counts.sum()).log().masked_fill(self.left_out.to(device), 0)

    def _check_scores(self, scores: Tensor) -> None:
        check_floating("scores", scores)
        if scores.dim() == 0 or scores.shape[-1] != self.num_classes:
            want = f"(..., {self.num_classes}), with the classes last"
            raise ShortlistError(f"scores must have shape {want}, got {tuple(scores.shape)}")

    def _checked(
        self, scores: Tensor, target: Tensor, k: Ks, average: Average
    ) -> tuple[tuple[int, ...], Tensor, Tensor]:
        """Every K; ``(N, L)`` scores and ``(N,)`` labels, without images of classes that are left out."""
        self._check_scores(scores)
        ks = sorted_ks(k, self.num_classes, self.num_classes)
        if not isinstance(average, str) or average not in _AVERAGES:
            raise ShortlistError(f"average must be one of {_AVERAGES}, got {average!r}")
        scores_NL, target_N = checked_rows(scores, target)
        device = target_N.device
        kept_N = ~self.left_out.to(device)[target_N]
        if not kept_N.all():
            scores_NL, target_N = scores_NL[kept_N], target_N[kept_N]
        if len(target_N) == 0:
            raise ShortlistError(
                "scores must be those of at least one validation image, got none: tau cannot be chosen without images"
            )
        return ks, scores_NL, target_N

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves to another device but keeps the dtypes: ``half()`` of a network must not round tau."""
        super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        rests_on = f", images={self.images}, classes={self.classes}" if self.images else ""
        return f"num_classes={self.num_classes}, tau={self.tau:.4g}{rests_on}"


class _RowSteps:
    """Where rows become correct and wrong again as tau grows from 0. With several K, a row is correct for a share.

    Class j is above the label y if s_j - s_y > tau (log prior_j - log prior_y). So a more frequent class that is above
    the label at 0 stops being so at the quotient of the two differences, a rarer class that is not above it at 0
    begins to be so there, and all others stay where they are.

    Shape suffix: E steps, of all rows.

    Attributes:
        first_R: Share of the K for which a row is correct before its first step, which may be at 0.
        tau_E: Where the steps are.
        change_E: The change of this share, negative where the row becomes wrong.
        row_E: Which row.
    """

    def __init__(
        self, scores_RL: Tensor, target_R: Tensor, log_prior_L: Tensor, ks: tuple[int, ...], end: float
    ) -> None:
        own_R1 = scores_RL.gather(1, target_R.unsqueeze(1))
        tied_RL = (scores_RL == own_R1) & own_R1.isinf()  # at every tau
        ahead_RL = (scores_RL - own_R1).masked_fill(tied_RL, 0)
        frequent_RL = (log_prior_L - log_prior_L[target_R].unsqueeze(1)).masked_fill(tied_RL, 0)
        leaves_RL = (ahead_RL > 0) & (frequent_RL > 0)
        joins_RL = (ahead_RL <= 0) & (frequent_RL < 0)
        # A NaN on either side counts as above, as in TopKMetrics: ``ahead`` is NaN.
        above_R1 = (~(ahead_RL <= 0)).sum(1, keepdim=True)
        crossing_RL = (ahead_RL / frequent_RL).masked_fill(~(leaves_RL | joins_RL), math.inf)
        tau_RL, order_RL = crossing_RL.sort(1)
        step_RL = (joins_RL.int() - leaves_RL.int()).gather(1, order_RL)
        above_RM = torch.cat([above_R1, above_R1 + step_RL.cumsum(1)], 1)
        # Wrong for every K that is not above the number of classes above the label.
        wrong_RM = torch.bucketize(above_RM, above_RM.new_tensor(ks), right=True, out_int32=True)
        change_RL = -wrong_RM.diff(dim=1)
        self.first_R = 1 - wrong_RM[:, 0].double() / len(ks)
        self.row_E, place_E = ((change_RL != 0) & (tau_RL <= min(end, sys.float_info.max))).nonzero(as_tuple=True)
        self.tau_E = tau_RL[self.row_E, place_E]
        self.change_E = change_RL[self.row_E, place_E].double() / len(ks)


def _even_weights(target_N: Tensor) -> Tensor:
    """``(N,)`` share of each image in the micro accuracy."""
    return torch.ones_like(target_N, dtype=torch.float64) / len(target_N)


def _class_weights(target_N: Tensor) -> Tensor:
    """``(N,)`` share of each image in the macro accuracy of the classes that occur."""
    images_L = target_N.bincount()
    return 1 / (images_L[target_N].double() * (images_L > 0).sum())


def _smoothed_argmax(taus_M: Tensor, accuracy_M: Tensor, largest: float, half_windows: Sequence[float]) -> float:
    """The tau in [0, largest] whose windows have the highest mean accuracy, exactly; the smallest of several.

    The mean is linear between the values at which an end of a window passes a step, so only these can be the best.
    """
    if min(half_windows) == 0:
        return 0.0
    area_M = torch.cat([taus_M.new_zeros(1), (accuracy_M[:-1] * taus_M.diff()).cumsum(0)])

    def area(tau: Tensor) -> Tensor:
        """The integral of the accuracy up to tau."""
        index = (torch.searchsorted(taus_M, tau, right=True) - 1).clamp(min=0)
        return area_M[index] + accuracy_M[index] * (tau - taus_M[index])

    passes = [taus_M + sign * half for half in half_windows for sign in (-1, 1)]
    candidates = torch.cat([taus_M.new_tensor([0.0, largest]), *passes]).clamp(0, largest)
    mean = torch.zeros_like(candidates)
    for half in half_windows:
        mean += (area(candidates + half) - area(candidates - half)) / (2 * half * len(half_windows))
    return candidates[mean >= mean.max() - _TIE].min().item()


def _temperature(scores_NL: Tensor, target_N: Tensor, class_counts_L: Tensor) -> float:
    """The T for which softmax(scores / T) gives the labels the highest likelihood.

    0 if the scores say nothing: all are the same, or the labels have no higher ones than other classes.

    Images are weighted so that classes are as frequent as in training: only then are the scores log-probabilities.
    The likelihood is concave in 1 / T, so it is highest where the label's score is on average the expected one.
    Without a maximum, if every label has the best score, the coldest T is taken. It is only a unit, so a part of many
    images and a few digits suffice.
    """
    every = max(1, scores_NL.numel() // _FOR_TEMPERATURE)
    scores_NL, target_N = scores_NL[::every], target_N[::every]
    finite_N = torch.cat([scores_NL[rows].isfinite().all(1) for rows in row_chunks(scores_NL, _AT_ONCE)])
    if not finite_N.all():
        scores_NL, target_N = scores_NL[finite_N], target_N[finite_N]
    spread = sum(scores_NL[rows].double().std(1, correction=0).sum().item() for rows in row_chunks(scores_NL, _AT_ONCE))
    if spread == 0:
        return 0.0
    unit = spread / len(target_N)
    weight_N = (class_counts_L / target_N.bincount(minlength=len(class_counts_L)))[target_N].double()
    low, high = math.log(_COLDEST), math.log(_HOTTEST)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        excess = 0.0
        for rows in row_chunks(scores_NL, _AT_ONCE):
            scores_RL = widened(scores_NL[rows])
            expected_R = (scores_RL * (scores_RL / (unit * math.exp(middle))).softmax(1)).sum(1)
            own_R = scores_RL.gather(1, target_N[rows].unsqueeze(1)).squeeze(1)
            excess += (weight_N[rows] * (expected_R - own_R)).sum().item()
        # The expected score falls as T grows.
        low, high = (middle, high) if excess > 0 else (low, middle)
    return unit * math.exp(high) if high < math.log(_HOTTEST) else 0.0
