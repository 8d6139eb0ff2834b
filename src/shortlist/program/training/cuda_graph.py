"""A training step as one CUDA graph.

A step on small images is hundreds of kernels of a few microseconds each, and the GPU waits for the CPU to launch them.
Recorded in a graph, they are launched together: forward, loss, backward, clipping and optimiser.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from shortlist.errors import ShortlistError

# The first steps compile kernels, choose convolution algorithms and create the optimiser's state.
_WARM_UPS = 3


class CapturedStep:
    """Records ``update(inputs, target)`` at the first call, and replays it from then on.

    Every batch must have the shape of the first. Learning rates may change between calls. Noise comes from the
    device's generator: with the same seed, a replay draws what ``update`` itself would draw.

    Args:
        update: One step on the GPU. It must never wait for the GPU, and must leave no gradient behind.
        optimizer: The optimiser that it steps: AdamW or SGD, fused.
        state: All other tensors that it changes: parameters, batch statistics, sums.
    """

    def __init__(self, update: Callable[[Tensor, Tensor], None], optimizer: Optimizer, state: Iterable[Tensor]) -> None:
        self._update = update
        self._optimizer = optimizer
        self._state = list(state)
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, inputs: Tensor, target: Tensor) -> None:
        if self._graph is None:
            self._graph = self._recorded(inputs, target)
        self._inputs.copy_(inputs)
        self._target.copy_(target)
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self._graph.replay()

    def _recorded(self, inputs: Tensor, target: Tensor) -> torch.cuda.CUDAGraph:
        # A graph uses the same memory at each replay: inputs, labels and learning rates are copied there.
        self._inputs, self._target = inputs.clone(), target.clone()
        self._rates = [torch.zeros((), device=inputs.device) for _ in self._optimizer.param_groups]
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(inputs.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(inputs.device))
        with _learning_rates(self._optimizer, self._rates), _fastest_convolutions():
            with torch.cuda.stream(stream), torch.random.fork_rng([inputs.device]):
                self._warm_up()
            try:
                with _capturable(self._optimizer), torch.cuda.graph(graph, stream=stream):
                    self._update(self._inputs, self._target)
            except RuntimeError as error:  # e.g. a network that reads its own results
                raise ShortlistError(f"this step cannot be a CUDA graph, use --train.no-cuda-graph: {error}") from error
        return graph

    def _warm_up(self) -> None:
        with undone(self._optimizer, self._state):
            for _ in range(_WARM_UPS):
                self._update(self._inputs, self._target)


@contextmanager
def undone(optimizer: Optimizer, state: Iterable[Tensor]) -> Iterator[None]:
    """Restore these tensors and those of the optimiser after the block, in the same memory."""
    before = {tensor: tensor.detach().clone() for tensor in (*state, *_tensors_of(optimizer))}
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before.items():
                tensor.copy_(value)
            for tensor in _tensors_of(optimizer):
                if tensor not in before:  # created by the first step; every optimiser here starts at zero
                    tensor.zero_()


def _tensors_of(optimizer: Optimizer) -> list[Tensor]:
    return [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]


@contextmanager
def _learning_rates(optimizer: Optimizer, rates: list[Tensor]) -> Iterator[None]:
    """Have the optimiser read its learning rates from tensors; numbers would become constants of the graph."""
    before = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    try:
        yield
    finally:
        for group, number in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = number


@contextmanager
def _capturable(optimizer: Optimizer) -> Iterator[None]:
    """Mark AdamW as capturable during the capture only: elsewhere it would warn at every step."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False


@contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """Let cuDNN try its algorithms and keep the fastest, which pays for a shape that comes at every step."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
