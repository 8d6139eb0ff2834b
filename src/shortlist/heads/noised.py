"""A last layer fused with a noised loss, for so many classes that their scores should not be stored.

Shape suffixes: R rows, D features, L classes, C classes of a chunk, B draws, P = B + 1 selected classes.
"""

import copy
import math
from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shortlist.errors import ShortlistError
from shortlist.heads.cosine import unit_rows
from shortlist.heads.running_topk import RunningTopK
from shortlist.heads.sparse_linear import selected_scores
from shortlist.losses import ImbalancedNoisedTopKHinge, NoisedTopKHinge
from shortlist.ops.batch import check_labels_in_range, reduce_rows, weigh_rows
from shortlist.ops.checks import check_at_least_one, check_features, check_k, check_noise, check_per_class
from shortlist.ops.dtypes import product_dtype, result_dtype, widened, working_dtype, zero_if_tiny
from shortlist.ops.exact import exact_topk
from shortlist.ops.smoothing import DRAWS_AT_ONCE

NoisedLoss = NoisedTopKHinge | ImbalancedNoisedTopKHinge

# Draws of all rows together: the class found in each takes about 50 bytes on the way.
_MAX_SELECTED = 2**28
# A number of classes that keeps matrix products on their fast paths, and the tiles of the kernels whole.
_CLASS_ALIGNMENT = 32


class NoisedHead(nn.Module, ABC):
    """What heads have in common, whether they hold all classes or only ``own_classes``: parameters, checks, loss."""

    bias: nn.Parameter | None
    scores_at_once: int = 2**24
    """Scores of a chunk: 32 MiB in half precision, which fits the cache of a large GPU, and 64 MiB in float32."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        loss: NoisedLoss,
        *,
        own_classes: range,
        cosine: bool,
        bias: bool,
        sparse_grad: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        check_at_least_one("in_features", in_features)
        self.loss = _copy_without_state(loss, num_classes)
        self._rank = _checked_rank(self.loss, num_classes)
        self.in_features = in_features
        self.num_classes = num_classes
        self.own_classes = own_classes
        self.cosine = cosine
        self.sparse_grad = sparse_grad
        self.weight = nn.Parameter(torch.empty(len(own_classes), in_features, device=device, dtype=dtype))
        bias_L = nn.Parameter(torch.empty(len(own_classes), device=device, dtype=dtype))
        self.register_parameter("bias", bias_L if bias and not cosine else None)
        self._move_loss()
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weights as ``CosineLinear`` and ``nn.Linear`` do."""
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            if self.cosine:
                self.weight.normal_(std=bound, generator=generator)
            else:
                self.weight.uniform_(-bound, bound, generator=generator)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound, generator=generator)

    def forward(
        self, features: Tensor, target: Tensor, *, noise: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        loss = self.loss
        index_R = self._checked_labels(features, target)
        loss.check_settings(working_dtype(product_dtype(features)))
        noise_RLB = self._checked_noise(target, noise, generator)
        kept_R = index_R != loss.ignore_index
        index_R = torch.where(kept_R, index_R, 0)
        if len(index_R):  # give ignored rows a label of the batch, so that they add no class to a sparse gradient
            index_R = torch.where(kept_R, index_R, index_R.max())
        # Backward multiplies the gradient of an ignored row, 0, by its features, which may be NaN.
        features_RD = features.reshape(-1, self.in_features).masked_fill(~kept_R.unsqueeze(1), 0)
        if noise_RLB is None and loss.active_n_samples() == math.inf:
            smoothed_R, label_R = self._expected_scores(features_RD, index_R)
        else:
            features_RD = unit_rows(features_RD) if self.cosine else features_RD
            factors_RD = features_RD.to(product_dtype(features))
            smoothed_R, label_R = self._noised_scores(factors_RD, index_R, noise_RLB, generator)
        gap_R = smoothed_R - label_R
        loss_R = (loss.margins_of(index_R, gap_R.dtype) + gap_R).relu()
        loss_R = loss_R if loss.scale == 1 else loss.scale * loss_R
        weight_R = None if loss.weight is None else loss.weight.to(loss_R.dtype)[index_R]
        value = self._reduce(*weigh_rows(loss_R, kept_R, weight_R))
        value = value.reshape(target.shape) if loss.reduction == "none" else value
        return value.to(result_dtype(features_RD))

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._move_loss()

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]
        self._move_loss()
        return self

    def _move_loss(self) -> None:
        """Move the loss's tensors to the device of the weight, unless that is still ``meta``."""
        if not self.weight.is_meta:
            for name, values in _tensors_of(self.loss).items():
                setattr(self.loss, name, values.to(self.weight.device))

    @abstractmethod
    def scores(self, features: Tensor) -> Tensor:
        """``(..., L)`` scores of all classes for ``(..., D)`` features, as the plain layer computes them."""

    @abstractmethod
    def _noised_scores(
        self, features_RD: Tensor, index_R: Tensor, noise_RLB: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Each row's smoothed (K+1)-th largest score and its label's score, with gradients.

        Their difference is NaN if any score of the row is NaN or infinite. The features are in the dtype of the matrix
        product and, for a cosine layer, of unit length.
        """

    def _reduce(self, loss_R: Tensor, share_R: Tensor) -> Tensor:
        return reduce_rows(loss_R, share_R, self.loss.reduction)

    def _expected_scores(self, features_RD: Tensor, index_R: Tensor) -> tuple[Tensor, Tensor]:
        """``_noised_scores`` for infinitely many draws; holds all scores of the batch."""
        scores_RL = widened(self.scores(features_RD))
        label_R = scores_RL.gather(1, index_R.unsqueeze(1)).squeeze(1)
        spoil_R = (scores_RL.detach() * 0).sum(1)  # NaN if any score is NaN or infinite
        return exact_topk(scores_RL, self._rank, epsilon=self.loss.epsilon), label_R + spoil_R

    def _perturbed_at_rank(
        self, features_RD: Tensor, noise_RLB: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(R, B)`` (K+1)-th largest perturbed scores of all classes, their classes, and ``RunningTopK.spoil_R``.

        The K + 1 largest of many draws would take much memory. So draws come in blocks, and each block scores all
        classes again.
        """
        rows, epsilon = len(features_RD), zero_if_tiny(self.loss.epsilon, working_dtype(features_RD.dtype))
        n_samples = int(self.loss.active_n_samples()) if noise_RLB is None else noise_RLB.shape[-1]
        n_samples = 1 if epsilon == 0 else n_samples
        if rows * n_samples > _MAX_SELECTED:
            largest = _MAX_SELECTED // rows
            raise ShortlistError(f"n_samples must be at most {largest} for {rows} rows in a head, got {n_samples}")
        values, classes, spoil_R = [], [], features_RD.new_zeros(rows, dtype=working_dtype(features_RD.dtype))
        for start in range(0, n_samples, DRAWS_AT_ONCE):
            block = range(start, min(start + DRAWS_AT_ONCE, n_samples))
            noise_RLb = None if noise_RLB is None else noise_RLB[..., block.start : block.stop]
            running = self._running_topk(features_RD, len(block), epsilon, noise_RLb, generator)
            spoil_R += running.spoil_R
            values_Rb, classes_Rb = self._overall(running).last_place()
            values.append(values_Rb)
            classes.append(classes_Rb)
        return torch.cat(values, 1), torch.cat(classes, 1), spoil_R

    def _overall(self, running: RunningTopK) -> RunningTopK:
        """The largest of all classes, from the largest of this head's own classes."""
        return running

    @torch.no_grad()
    def _running_topk(
        self,
        features_RD: Tensor,
        n_samples: int,
        epsilon: float,
        noise_RLB: Tensor | None,
        generator: torch.Generator | None,
    ) -> RunningTopK:
        """The K + 1 largest perturbed scores of this head's own classes in every row and draw."""
        rows, rank, dtype = len(features_RD), self._rank, working_dtype(features_RD.dtype)
        running = RunningTopK(rows, n_samples, rank, epsilon=epsilon, dtype=dtype, device=features_RD.device)
        step = self._classes_at_once(rows)
        buffer = features_RD.new_empty(rows * min(step, len(self.weight)))
        for start in range(0, len(self.weight), step):
            classes = min(step, len(self.weight) - start)
            chunk = slice(start, start + classes)
            scores_RC = buffer[: rows * classes].view(rows, classes)
            self._score_chunk(features_RD, chunk, out=scores_RC)
            noise_RCB = None if noise_RLB is None else noise_RLB[:, chunk]
            running.add(scores_RC, self.own_classes.start + start, noise_RCB, generator)
        return running

    def _classes_at_once(self, rows: int) -> int:
        """Chunks of nearly equal size: a small last chunk would take almost as long as the others."""
        num_classes = len(self.weight)
        largest = max(1, self.scores_at_once // max(1, rows))
        chunks = max(1, math.ceil(num_classes / largest))
        classes = max(1, math.ceil(num_classes / chunks))
        return math.ceil(classes / _CLASS_ALIGNMENT) * _CLASS_ALIGNMENT if largest > _CLASS_ALIGNMENT else classes

    def _score_chunk(self, features_RD: Tensor, chunk: slice, *, out: Tensor) -> None:
        weight_CD = self.weight[chunk]
        weight_CD = (unit_rows(weight_CD) if self.cosine else weight_CD).to(features_RD.dtype)
        if self.bias is None:
            torch.mm(features_RD, weight_CD.T, out=out)
        else:
            torch.addmm(self.bias[chunk].to(features_RD.dtype), features_RD, weight_CD.T, out=out)

    def _checked_labels(self, features: Tensor, target: Tensor) -> Tensor:
        check_features(features, self.in_features)
        if product_dtype(features) != product_dtype(self.weight):
            raise ShortlistError(f"features must be {self.weight.dtype} like the weight, got {features.dtype}")
        if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.uint8):
            got = target.dtype if isinstance(target, Tensor) else type(target).__name__
            raise ShortlistError(f"target must be a tensor of int64 labels (a head takes no probabilities), got {got}")
        if target.shape != features.shape[:-1]:
            raise ShortlistError(
                f"target must have shape {tuple(features.shape[:-1])} for features of shape {tuple(features.shape)}, "
                f"got {tuple(target.shape)}"
            )
        index_R = target.reshape(-1).long()
        check_labels_in_range(index_R, self.num_classes, self.loss.ignore_index)
        return index_R

    def _checked_noise(self, target: Tensor, noise: Tensor | None, generator: torch.Generator | None) -> Tensor | None:
        shape = self._scored_shape(target)
        # A tensor with the shape and device of the scores that takes no memory.
        check_noise(noise, self.weight.detach().new_empty(()).expand(shape), generator)
        return None if noise is None else noise.reshape(math.prod(shape[:-1]), *noise.shape[-2:])

    def _scored_shape(self, target: Tensor) -> tuple[int, ...]:
        """The shape of the scores that this head computes; noise has one more dimension."""
        return *target.shape, self.num_classes

    def extra_repr(self) -> str:
        names = ("in_features", "num_classes", "cosine", "sparse_grad")
        shown = {name: getattr(self, name) for name in names} | {"bias": self.bias is not None}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class NoisedTopKHead(NoisedHead):
    """A linear or cosine layer followed by a noised top-K loss, without storing the scores of all classes.

    Computes ``loss(layer(features), target)`` and its gradients. Classes are scored in chunks, and only the K + 1
    largest perturbed scores of every row and draw are kept. At most B + 1 scores of a row have a gradient, so backward
    reads only that many rows of the weight. One of the three matrix products of a usual last layer remains, and apart
    from the weight and its gradient, memory does not grow with the number of classes.

    Call it with ``(..., D)`` features and ``(...)`` labels; ``noise``, if given, has the shape ``(..., L, B)``. Under
    autocast the matrix product runs in its dtype, everything after it in float32. Half-precision gradients are summed
    in float32 and rounded once.

    The state dict is that of ``nn.Linear`` (``weight``, ``bias``) or ``CosineLinear`` (``weight``), so weights can be
    exchanged with either. ``head.loss`` is a copy of the loss; its settings are not part of the state.

    Args:
        in_features: Size D of the features.
        num_classes: Number L of classes.
        loss: A ``NoisedTopKHinge`` or ``ImbalancedNoisedTopKHinge`` with one K, finite ``n_samples`` and without
            ``relative``. With ``eval_n_samples=math.inf``, evaluation computes the expectation and needs memory for
            about a hundred numbers per score of the batch.
        cosine: Compute cosine scores without a bias, like ``CosineLinear``.
        bias: Whether the linear layer has a bias.
        sparse_grad: Produce sparse gradients, like ``nn.Embedding(sparse=True)``, for ``torch.optim.SparseAdam`` or
            plain ``SGD``. The time of backward and of the optimiser's step then does not depend on L, and no gradient
            is as large as the weight (``SparseAdam`` still keeps averages for all classes). Labels and the classes
            found in the draws have an entry, even if it is zero. ``DistributedDataParallel`` supports sparse gradients
            of ``nn.Embedding`` only: keep them dense there.

    On a GPU, kernels search chunks of thousands of classes without drawing most of the noise. Chunks are that long up
    to about 8,000 rows at K = 5, or 2,000 at K = 100. Split larger batches, which would be slower.

    Example:
        >>> head = NoisedTopKHead(16, 1000, NoisedTopKHinge(5, epsilon=0.1))
        >>> features, target = torch.randn(8, 16, requires_grad=True), torch.randint(1000, (8,))
        >>> head(features, target).backward()
        >>> (head.weight.grad != 0).any(1).sum() <= 8 * (5 + 1)
        tensor(True)
        >>> head.scores(features).shape
        torch.Size([8, 1000])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        loss: NoisedLoss,
        *,
        cosine: bool = False,
        bias: bool = True,
        sparse_grad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_at_least_one("num_classes", num_classes)
        super().__init__(
            in_features,
            num_classes,
            loss,
            own_classes=range(num_classes),
            cosine=cosine,
            bias=bias,
            sparse_grad=sparse_grad,
            device=device,
            dtype=dtype,
        )

    def scores(self, features: Tensor) -> Tensor:
        """``(..., L)`` scores of all classes for ``(..., D)`` features, to predict with."""
        check_features(features, self.in_features)
        if self.cosine:
            return F.linear(unit_rows(features), unit_rows(self.weight))
        return F.linear(features, self.weight, self.bias)

    def _noised_scores(
        self, features_RD: Tensor, index_R: Tensor, noise_RLB: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        perturbed_RB, classes_RB, spoil_R = self._perturbed_at_rank(features_RD, noise_RLB, generator)
        scores_RP = selected_scores(
            features_RD,
            self.weight,
            self.bias,
            torch.cat((classes_RB, index_R.unsqueeze(1)), 1),
            cosine=self.cosine,
            sparse_grad=self.sparse_grad,
        )
        smoothed_R, label_R = smoothed_and_label_scores(perturbed_RB, scores_RP)
        return smoothed_R, label_R + spoil_R


def smoothed_and_label_scores(perturbed_RB: Tensor, scores_RP: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the perturbed scores, with the gradient of the unperturbed ones; and the label's score, the last."""
    scores_RB, label_R = scores_RP[:, :-1], scores_RP[:, -1]
    noise_RB = perturbed_RB - scores_RB.detach()
    return (scores_RB + noise_RB).mean(1), label_R


def _copy_without_state(loss: NoisedLoss, num_classes: int) -> NoisedLoss:
    """A copy of the loss, checked against the number of classes, that adds nothing to a state dict.

    Its tensors become plain attributes. As buffers outside the state dict, their values would be lost if the head is
    built on the device ``meta`` or emptied by ``to_empty``.
    """
    if not isinstance(loss, NoisedLoss):
        raise ShortlistError(
            f"loss must be a NoisedTopKHinge or an ImbalancedNoisedTopKHinge, got {type(loss).__name__}"
        )
    if loss.n_samples == math.inf:
        raise ShortlistError(
            "n_samples must be finite in a head: the expectation needs all scores of a row, which a head does not "
            "store (eval_n_samples may be math.inf)"
        )
    loss = copy.deepcopy(loss)
    for name, per_class in {**loss._buffers, **_tensors_of(loss)}.items():
        if per_class is not None:
            check_per_class(name, per_class, num_classes)
            if per_class.is_meta:
                raise ShortlistError(f"{name} of the loss must have values, but is on the device meta")
        loss._buffers.pop(name, None)
        setattr(loss, name, per_class)
    return loss


def _checked_rank(loss: NoisedLoss, num_classes: int) -> int:
    """K + 1: the label's score is compared with the one of this rank."""
    if isinstance(loss.k, tuple):
        raise ShortlistError(
            f"k must be one number in a head, got {loss.k}: apply the loss to the scores of a plain layer instead"
        )
    if loss.relative:
        raise ShortlistError(
            "relative must be False in a head: the spread of a row needs its scores, which a head does not store; give "
            "epsilon in units of the scores, or apply the loss to the scores of a plain layer"
        )
    check_k(loss.k, num_classes - 1, num_classes)
    return loss.k + 1


def _tensors_of(loss: NoisedLoss) -> dict[str, Tensor]:
    """The class weights, counts and margins of a loss in a head."""
    return {name: value for name, value in loss.__dict__.items() if isinstance(value, Tensor)}
