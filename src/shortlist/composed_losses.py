"""Losses made of other losses: any loss with the class frequencies added to its scores, and weighted sums of losses.

Both are called like the losses they hold, and can hold each other.
"""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.ops.batch import checked_class_dim
from shortlist.ops.checks import ClassCounts, check_floating, check_not_negative, check_per_class, check_positive
from shortlist.ops.class_counts import log_prior
from shortlist.ops.dtypes import result_dtype, widened

__all__ = ["MixedLoss", "PriorAdjusted"]


class _Composed(nn.Module):
    """A loss that calls other losses. It takes what they take, and has their ``reduction`` and ``ignore_index``."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        for part in parts:
            if not isinstance(part, nn.Module):
                raise ShortlistError(f"a loss must be a Module such as NoisedTopKHinge(5), got {part!r}")
        for setting in ("reduction", "ignore_index"):
            values = [getattr(part, setting, None) for part in parts]
            if any(value != values[0] for value in values):
                raise ShortlistError(f"the losses must agree in {setting}, got {', '.join(map(repr, values))}")
            setattr(self, setting, values[0])
        # Looked up once: torch.compile cannot trace it.
        self._noised = [_takes_noise(part) for part in parts]
        self.compares_rows = any(getattr(part, "compares_rows", False) for part in parts)

    def _call(self, number: int, part: nn.Module, scores: Tensor, target: Tensor, noise: dict[str, Any]) -> Tensor:
        value: Tensor = part(scores, target, **(noise if self._noised[number] else {}))
        return value

    def _noise_arguments(self, noise: Tensor | None, generator: torch.Generator | None) -> dict[str, Any]:
        """What is handed to the noised losses. An error if there are none, for it would have no effect."""
        given = {name: value for name, value in (("noise", noise), ("generator", generator)) if value is not None}
        if given and not any(self._noised):
            raise ShortlistError(f"{' and '.join(given)} must not be given: none of the losses draws noise")
        return given


class PriorAdjusted(_Composed):
    """Any loss, of ``s + tau log prior``: the prior of a class is its share of the training images.

    The prior is added in training alone. The network then learns scores that do not favour frequent classes, so
    accuracy averaged over classes improves. Around ``nn.CrossEntropyLoss`` it is the logit-adjusted loss, with
    ``tau = 1`` the balanced softmax.

    For losses that multiply cosines by a ``scale``, such as ``LDAMLoss``, use ``tau = 1 / scale``: the prior is added
    to the cosines.

    Args:
        loss: The loss, called as ``loss(scores, target)``. ``noise`` and ``generator`` are handed to it.
        class_counts: ``(L,)`` number of training images of each class. A buffer.
        tau: Strength of the adjustment; 0 leaves the loss as it is.
        leave_out: Labels of classes without a training image. Such a class is an error unless it is named here; it then
            never competes with others.

    Example:
        >>> loss = PriorAdjusted(nn.CrossEntropyLoss(), [1, 3])
        >>> loss(torch.zeros(1, 2), torch.tensor([0]))  # -log(1/4)
        tensor(1.3863)

    Reference:
        Menon et al., Long-tail Learning via Logit Adjustment, ICLR 2021.
    """

    class_counts: Tensor
    _log_prior: Tensor

    def __init__(
        self, loss: nn.Module, class_counts: ClassCounts, *, tau: float = 1.0, leave_out: Iterable[int] = ()
    ) -> None:
        super().__init__([loss])
        check_not_negative("tau", tau)
        self.loss, self.tau, self.leave_out = loss, tau, tuple(leave_out)
        counts, log_prior_L = log_prior(class_counts, self.leave_out)
        self.register_buffer("class_counts", counts)
        self.register_buffer("_log_prior", log_prior_L, persistent=False)

    def forward(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        class_dim = checked_class_dim(scores)
        check_per_class("class_counts", self.class_counts, scores.shape[class_dim])
        wide = widened(scores)
        prior_L = self._log_prior.to(wide.device, wide.dtype)
        # Relative to the largest score: large scores would lose the prior to rounding.
        largest = wide.detach().amax() if self.compares_rows else wide.detach().amax(class_dim, keepdim=True)
        above = wide - largest
        adjusted = above + self.tau * prior_L.view(-1, *[1] * (scores.dim() - 1 - class_dim))
        loss = self._call(0, self.loss, adjusted, target, self._noise_arguments(noise, generator))
        return loss.to(result_dtype(scores))

    def extra_repr(self) -> str:
        return f"tau={self.tau}" + (f", leave_out={self.leave_out}" if self.leave_out else "")

    def _apply(self, *arguments: Any, **options: Any) -> "PriorAdjusted":
        super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]
        self._log_prior = log_prior(self.class_counts, self.leave_out)[1]  # half() has rounded it
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        saved = state_dict.get(f"{prefix}class_counts")
        if saved is not None and saved.is_floating_point():
            # Loading copies into the buffer: an integer buffer would round the counts.
            self.class_counts = self.class_counts.to(saved.dtype)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._log_prior = log_prior(self.class_counts, self.leave_out)[1]


class MixedLoss(_Composed):
    """A weighted sum of losses: ``sum of w_i loss_i(scores, target)``.

    A share of cross-entropy keeps a network learning where a top-K loss is already satisfied. With class weights of one
    over the prior such a mixture is consistent for accuracy averaged over classes, at every K at once.

    Args:
        parts: Pairs of a weight > 0 and a loss. The losses must agree in ``reduction`` and ``ignore_index``. ``noise``
            and ``generator`` are handed to those that draw noise.

    Example:
        >>> half = MixedLoss([(0.5, nn.CrossEntropyLoss()), (0.5, nn.CrossEntropyLoss())])
        >>> half(torch.zeros(1, 2), torch.tensor([0]))
        tensor(0.6931)
    """

    def __init__(self, parts: Iterable[tuple[float, nn.Module]]) -> None:
        pairs = list(parts)
        if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise ShortlistError(f"parts must be pairs such as (0.5, nn.CrossEntropyLoss()), got {pairs!r}")
        super().__init__([loss for _, loss in pairs])
        for number, (share, _) in enumerate(pairs):
            check_positive(f"the weight of loss {number}", share)
        self.shares = tuple(share for share, _ in pairs)
        self.losses = nn.ModuleList(loss for _, loss in pairs)

    def forward(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        check_floating("scores", scores)
        given = self._noise_arguments(noise, generator)
        wide = widened(scores)  # so that half precision is rounded once, not in every part
        first, *others = (
            share * self._call(number, loss, wide, target, given)
            for number, (share, loss) in enumerate(zip(self.shares, self.losses, strict=True))
        )
        return sum(others, start=first).to(result_dtype(scores))

    def extra_repr(self) -> str:
        return f"shares={self.shares}"


def _takes_noise(loss: nn.Module) -> bool:
    if isinstance(loss, _Composed):
        return any(loss._noised)
    return "noise" in inspect.signature(loss.forward).parameters
