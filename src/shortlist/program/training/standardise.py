"""Steps of a linear layer as if its inputs had mean 0 and deviation 1, whatever they are.

Features of different networks have different means and sizes. A learning rate and a weight decay that suit some of them
are far too large or too small for others, and a mean that all features share slows every step. For standardised inputs
``(x - mean) / deviation``, the layer with ``v = deviation w`` and ``c = b + w mean`` in place of its weights ``w`` and
bias ``b`` gives the same scores. So weights and bias are changed to ``v`` and ``c`` before each step of the optimiser,
and back after it. What a run keeps is an ordinary layer for the features as they are.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shortlist.program.data.base import Split, evaluation_plan

_AT_ONCE = 4096  # images


class StandardisedInputs:
    """A linear layer and what its inputs are like.

    Args:
        layer: With a bias. Its initial weights are made those of a layer whose inputs are standardised.
        mean: ``(d,)`` of the inputs.
        deviation: From the mean, one number for all coordinates.
    """

    def __init__(self, layer: nn.Linear, mean: Tensor, deviation: float) -> None:
        self._layer, self._mean, self._deviation = layer, mean, deviation
        self._to_raw()

    def attach(self, optimizer: Optimizer) -> None:
        """Let every step of the optimiser be one of the layer with standardised inputs."""
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, *_: Any) -> None:
        weight, bias = self._layer.weight, self._layer.bias
        with torch.no_grad():
            bias.add_(weight @ self._mean)
            weight.mul_(self._deviation)
            if weight.grad is not None and bias.grad is not None:
                weight.grad.sub_(torch.outer(bias.grad, self._mean)).div_(self._deviation)

    def _after_step(self, *_: Any) -> None:
        self._to_raw()

    @torch.no_grad()
    def _to_raw(self) -> None:
        self._layer.weight.div_(self._deviation)
        self._layer.bias.sub_(self._layer.weight @ self._mean)


def mean_and_deviation(train: Split) -> tuple[Tensor, float]:
    """``(d,)`` mean of the training inputs, and the root mean square of what is left, over images and coordinates."""

    def rows() -> Iterator[Tensor]:
        plan = evaluation_plan(len(train), _AT_ONCE, 0, 1)
        return (inputs.double() for inputs, _, _ in train.batches(plan, torch.device("cpu")))

    mean = torch.stack([part.sum(0) for part in rows()]).sum(0) / sum(map(len, rows()))
    squares = [(part - mean).square().mean(1).sum() for part in rows()]
    deviation = (torch.stack(squares).sum() / sum(map(len, rows()))).sqrt().item()
    return mean.float(), deviation or 1.0  # all inputs are the same
