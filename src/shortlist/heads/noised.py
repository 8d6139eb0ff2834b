"""The last layer and its loss in one, for so many classes that their scores had better not be stored.

Shape suffixes: R rows, D features, L classes, C classes of a chunk, B draws, P = B + 1 chosen classes.
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
from shortlist.heads.running_topk import Standings
from shortlist.heads.sparse_linear import chosen_scores
from shortlist.losses import ImbalancedNoisedTopKHinge, NoisedTopKHinge
from shortlist.ops.batch import check_labels_in_range, reduce_rows, weigh_rows
from shortlist.ops.checks import check_at_least_one, check_features, check_k, check_noise, check_per_class
from shortlist.ops.dtypes import product_dtype, result_dtype, widened, working_dtype, zero_if_tiny
from shortlist.ops.exact import exact_topk
from shortlist.ops.smoothing import DRAWS_AT_ONCE

NoisedLoss = NoisedTopKHinge | ImbalancedNoisedTopKHinge

# Scores of a chunk: 32 MiB in half types, which a large GPU's cache holds on to, and 64 MiB in float32.
_SCORES_AT_ONCE = 2**24
# Draws of all rows together: what they chose takes about 50 bytes each on the way.
_MOST_CHOSEN = 2**28
# Chunks of a multiple of this many classes keep matrix products on their fast paths, and tiles of the kernels whole.
_CLASSES_ALIGNED = 32


class NoisedHead(nn.Module, ABC):
    """What heads share, whether all classes are at hand or only ``own_classes``: parameters, checks and the loss."""

    bias: nn.Parameter | None

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
        self.loss = _settings_alone(loss, num_classes)
        self.in_features = in_features
        self.num_classes = num_classes
        self.own_classes = own_classes
        self.cosine = cosine
        self.sparse_grad = sparse_grad
        self.weight = nn.Parameter(torch.empty(len(own_classes), in_features, device=device, dtype=dtype))
        bias_L = nn.Parameter(torch.empty(len(own_classes), device=device, dtype=dtype))
        self.register_parameter("bias", bias_L if bias and not cosine else None)
        self._bring_loss()
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw them as ``CosineLinear`` and ``nn.Linear`` do."""
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
        if len(index_R):  # an ignored row borrows a label of the batch, so as to touch no class but for its draws
            index_R = torch.where(kept_R, index_R, index_R.max())
        # The loss of an ignored row has a gradient of 0, and 0 times a NaN among its features would be NaN.
        features_RD = features.reshape(-1, self.in_features).masked_fill(~kept_R.unsqueeze(1), 0)
        if noise_RLB is None and loss.draws() == math.inf:
            rival_R, own_R = self._expected_rival(features_RD, index_R)
        else:
            features_RD = unit_rows(features_RD) if self.cosine else features_RD
            factors_RD = features_RD.to(product_dtype(features))
            rival_R, own_R = self._noised_rival(factors_RD, index_R, noise_RLB, generator)
        loss_R = loss.of_lead(rival_R - own_R, index_R)
        weight_R = None if loss.weight is None else loss.weight.to(loss_R.dtype)[index_R]
        value = self._reduce(*weigh_rows(loss_R, kept_R, weight_R))
        value = value.reshape(target.shape) if loss.reduction == "none" else value
        return value.to(result_dtype(features_RD))

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._bring_loss()

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]
        self._bring_loss()
        return self

    def _bring_loss(self) -> None:
        """Have its values for each class where the weight is, if that is anywhere yet."""
        if not self.weight.is_meta:
            for name, values in _tensors_of(self.loss).items():
                setattr(self.loss, name, values.to(self.weight.device))

    @abstractmethod
    def scores(self, features: Tensor) -> Tensor:
        """``(..., L)`` scores of all classes for ``(..., D)`` features: the plain layer, for evaluation."""

    @abstractmethod
    def _noised_rival(
        self, features_RD: Tensor, index_R: Tensor, noise_RLB: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Each row's smoothed (K+1)-th largest score and its label's, with gradients; NaN where a score is bad.

        The features are in the dtype of the product and, for a cosine layer, of unit length.
        """

    def _reduce(self, loss_R: Tensor, share_R: Tensor) -> Tensor:
        return reduce_rows(loss_R, share_R, self.loss.reduction)

    def _expected_rival(self, features_RD: Tensor, index_R: Tensor) -> tuple[Tensor, Tensor]:
        """As ``_noised_rival`` in the limit of many draws, which needs all scores of a row side by side."""
        scores_RL = widened(self.scores(features_RD))
        own_R = scores_RL.gather(1, index_R.unsqueeze(1)).squeeze(1)
        spoil_R = (scores_RL.detach() * 0).sum(1)
        return exact_topk(scores_RL, self.loss.k + 1, epsilon=self.loss.epsilon), own_R + spoil_R

    def _last_places(
        self, features_RD: Tensor, noise_RLB: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(R, B)`` (K + 1)-th largest perturbed scores of all classes, their classes, and what spoils a row.

        The K + 1 best of many draws would take much memory, so draws are taken in blocks. Each scores all classes anew.
        """
        rows, epsilon = len(features_RD), zero_if_tiny(self.loss.epsilon, working_dtype(features_RD.dtype))
        draws = 1 if epsilon == 0 else int(self.loss.draws()) if noise_RLB is None else noise_RLB.shape[-1]
        if rows * draws > _MOST_CHOSEN:
            most = _MOST_CHOSEN // rows
            raise ShortlistError(f"n_samples must be at most {most} for {rows} rows in a head, got {draws}")
        values, classes, spoil_R = [], [], features_RD.new_zeros(rows, dtype=working_dtype(features_RD.dtype))
        for start in range(0, draws, DRAWS_AT_ONCE):
            block = range(start, min(start + DRAWS_AT_ONCE, draws))
            noise_RLb = None if noise_RLB is None else noise_RLB[..., block.start : block.stop]
            standings = self._standings(features_RD, len(block), epsilon, noise_RLb, generator)
            spoil_R += standings.spoil_R
            values_Rb, classes_Rb = self._overall(standings).last_place()
            values.append(values_Rb)
            classes.append(classes_Rb)
        return torch.cat(values, 1), torch.cat(classes, 1), spoil_R

    def _overall(self, standings: Standings) -> Standings:
        """The best of all classes, from the best of this head's own."""
        return standings

    @torch.no_grad()
    def _standings(
        self,
        features_RD: Tensor,
        draws: int,
        epsilon: float,
        noise_RLB: Tensor | None,
        generator: torch.Generator | None,
    ) -> Standings:
        """The K + 1 best of this head's own classes in every row and draw; the noise is that of these classes."""
        rows, dtype = len(features_RD), working_dtype(features_RD.dtype)
        standings = Standings(rows, draws, self.loss.k + 1, epsilon=epsilon, dtype=dtype, device=features_RD.device)
        step = _classes_at_once(rows, len(self.weight))
        buffer = features_RD.new_empty(rows * min(step, len(self.weight)))
        for start in range(0, len(self.weight), step):
            classes = min(step, len(self.weight) - start)
            chunk = slice(start, start + classes)
            scores_RC = buffer[: rows * classes].view(rows, classes)
            self._score_chunk(features_RD, chunk, out=scores_RC)
            noise_RCB = None if noise_RLB is None else noise_RLB[:, chunk]
            standings.add(scores_RC, self.own_classes.start + start, noise_RCB, generator)
        return standings

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
            raise ShortlistError(f"features must be {self.weight.dtype} as the weight is, got {features.dtype}")
        if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.uint8):
            got = target.dtype if isinstance(target, Tensor) else type(target).__name__
            raise ShortlistError(f"target must be a tensor of int64 labels (no probabilities here), got {got}")
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
        # Stands for the scores in shape and device, and takes no memory.
        check_noise(noise, self.weight.detach().new_empty(()).expand(shape), generator)
        return None if noise is None else noise.reshape(math.prod(shape[:-1]), *noise.shape[-2:])

    def _scored_shape(self, target: Tensor) -> tuple[int, ...]:
        """That of the scores this head computes, and so of the noise, less its draws."""
        return *target.shape, self.num_classes

    def extra_repr(self) -> str:
        names = ("in_features", "num_classes", "cosine", "sparse_grad")
        shown = {name: getattr(self, name) for name in names} | {"bias": self.bias is not None}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class NoisedTopKHead(NoisedHead):
    """A linear or cosine layer followed by a noised top-K loss, without keeping the scores of all classes.

    The loss and gradients of ``loss(layer(features), target)``. Classes are scored in chunks, and only the K + 1
    best perturbed scores of every row and draw are kept. The gradient in the scores has at most B + 1 non-zeros a
    row, so backward gathers that many rows of the weight and touches no others: of the three matrix products of a
    usual last layer one is left, and beyond the weight and its gradient memory does not grow with the classes.

    The state dict is that of ``nn.Linear`` (``weight``, ``bias``) or ``CosineLinear`` (``weight``): weights can be
    exchanged. The head keeps a copy of the loss, at ``head.loss``, whose settings are no part of the state.

    Args:
        in_features: Size D of the features.
        num_classes: Number L of classes.
        loss: A ``NoisedTopKHinge`` or ``ImbalancedNoisedTopKHinge``; all its settings are honoured. ``n_samples``
            must be finite. With ``eval_n_samples=math.inf`` evaluation takes the expectation, and to do so holds
            some hundred numbers for each score of its batch.
        cosine: Score by cosines, as ``CosineLinear`` does, without a bias.
        bias: Whether the linear layer has one.
        sparse_grad: Leave sparse gradients, as ``nn.Embedding(sparse=True)`` does, for ``torch.optim.SparseAdam`` or
            plain ``SGD``: the time of backward and of the step then does not depend on L, and no gradient is as large
            as the weight (``SparseAdam`` keeps its averages for all classes). A class counts as touched where it is a
            label or was found by a draw, even if its gradient is zero. ``DistributedDataParallel`` takes sparse
            gradients from ``nn.Embedding`` alone: keep them dense there.

    On a GPU, chunks of thousands of classes are searched by kernels that draw hardly any of the noise. Chunks are that
    long up to about 8,000 rows at K = 5, 2,000 at K = 100; larger batches are slower, and better split.

    Call it with ``(..., D)`` features and ``(...)`` labels; ``noise``, if given, is shaped ``(..., L, B)``. Under
    autocast the product runs in its dtype, everything after it in float32. Gradients of half types are summed in
    float32 and rounded once.

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
        check_features(features, self.in_features)
        if self.cosine:
            return F.linear(unit_rows(features), unit_rows(self.weight))
        return F.linear(features, self.weight, self.bias)

    def _noised_rival(
        self, features_RD: Tensor, index_R: Tensor, noise_RLB: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        perturbed_RB, classes_RB, spoil_R = self._last_places(features_RD, noise_RLB, generator)
        chosen_RP = chosen_scores(
            features_RD,
            self.weight,
            self.bias,
            torch.cat((classes_RB, index_R.unsqueeze(1)), 1),
            cosine=self.cosine,
            sparse_grad=self.sparse_grad,
        )
        rival_R, own_R = rival_and_own(perturbed_RB, chosen_RP)
        return rival_R, own_R + spoil_R


def rival_and_own(perturbed_RB: Tensor, chosen_RP: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the perturbed scores, differentiated through the unperturbed ones; and the label's, chosen last."""
    scores_RB, own_R = chosen_RP[:, :-1], chosen_RP[:, -1]
    noise_RB = perturbed_RB - scores_RB.detach()
    return (scores_RB + noise_RB).mean(1), own_R


def _settings_alone(loss: NoisedLoss, num_classes: int) -> NoisedLoss:
    """A copy of the loss, checked against the number of classes, that adds nothing to a state dict.

    Its values for each class are no buffers any more: as they are in no state dict, nobody could give them back to a
    head that is made without memory, or emptied, and filled later.
    """
    if not isinstance(loss, NoisedLoss):
        raise ShortlistError(
            f"loss must be a NoisedTopKHinge or an ImbalancedNoisedTopKHinge, got {type(loss).__name__}"
        )
    if loss.n_samples == math.inf:
        raise ShortlistError(
            "n_samples must be finite here: the expectation needs all scores of a row at once, and this head never "
            "stores them (eval_n_samples may be math.inf)"
        )
    check_k(loss.k, num_classes - 1, num_classes)
    loss = copy.deepcopy(loss)
    for name, per_class in {**loss._buffers, **_tensors_of(loss)}.items():
        if per_class is not None:
            check_per_class(name, per_class, num_classes)
            if per_class.is_meta:
                raise ShortlistError(f"{name} of the loss must have values, and is on the device meta")
        loss._buffers.pop(name, None)
        setattr(loss, name, per_class)
    return loss


def _tensors_of(loss: NoisedLoss) -> dict[str, Tensor]:
    """Its values for each class, in a head."""
    return {name: value for name, value in loss.__dict__.items() if isinstance(value, Tensor)}


def _classes_at_once(rows: int, num_classes: int) -> int:
    """Chunks of about equal size: a small one at the end would cost nearly as much as the others."""
    most = max(1, _SCORES_AT_ONCE // max(1, rows))
    chunks = max(1, math.ceil(num_classes / most))
    classes = max(1, math.ceil(num_classes / chunks))
    return math.ceil(classes / _CLASSES_ALIGNED) * _CLASSES_ALIGNED if most > _CLASSES_ALIGNED else classes
