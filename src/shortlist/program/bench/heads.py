"""The suite ``head``: a linear layer with its loss. With many classes it costs more than the network before it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shortlist as sl
from shortlist.program.bench import peers
from shortlist.program.bench.agreement import check_noised_head
from shortlist.program.bench.contenders import Bench, Contender, dtype_name
from shortlist.program.bench.measurements import Case, Measurement
from shortlist.program.bench.timing import Step

PRODUCT = "forward product alone"
LINEAR, COMPILED_LINEAR = "linear + cross-entropy", "linear + cross-entropy, compiled"
CUT, LIGER, LINEAR_PYTOPK = "cut-cross-entropy", "Liger", "linear + pytopk"
OURS, OURS_SPARSE = "shortlist", "shortlist, sparse gradient"
PEERS = (LINEAR, COMPILED_LINEAR, CUT, LIGER, LINEAR_PYTOPK)
ENTRIES = (PRODUCT, *PEERS, OURS, OURS_SPARSE)
GOAL = 0.5
"""Our head should take at most this share of the fastest peer's time."""

_K, _DRAWS, _EPSILON = 5, 5, 0.2
_FEATURES = 512
_SIZES = ((1_024, 100_000), (4_096, 100_000), (1_024, 1_000_000))
_QUICK_FEATURES, _QUICK_SIZES = 8, ((16, 60),)
# For every draw pytopk keeps the perturbed scores, their negatives and the one-hot gradient in float32.
_PYTOPK_BYTES_A_DRAW = 16


def measure(bench: Bench) -> Iterator[Measurement]:
    if not bench.quick and not bench.on_gpu:
        bench.say("head is left out: it needs a GPU")
        return
    for size in _QUICK_SIZES if bench.quick else _SIZES:
        inputs = _Inputs.drawn(bench, size, _QUICK_FEATURES if bench.quick else _FEATURES)
        yield from bench.measure("head", [*_peers(bench, inputs), *_ours(inputs)])


@dataclass(frozen=True)
class _Inputs:
    features: Tensor
    weight: Tensor
    target: Tensor

    @classmethod
    def drawn(cls, bench: Bench, size: tuple[int, int], d: int) -> "_Inputs":
        """One set of inputs is enough: the weights alone exceed the GPU's cache."""
        n, num_classes = size
        dtype = torch.bfloat16 if bench.on_gpu else torch.float32
        generator = torch.Generator(bench.device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=bench.device, generator=generator).to(dtype)

        weight = draw(num_classes, d) / d**0.5  # the scores of a row then have a standard deviation of 1
        target = torch.randint(num_classes, (n,), device=bench.device, generator=generator)
        return cls(draw(n, d).requires_grad_(), weight.requires_grad_(), target)

    @property
    def case(self) -> Case:
        (n, d), num_classes = self.features.shape, len(self.weight)
        return Case(dtype=dtype_name(self.weight.dtype), N=n, L=num_classes, d=d, spread=1.0)

    @property
    def noised_case(self) -> Case:
        return replace(self.case, K=_K, B=_DRAWS, epsilon=_EPSILON)

    def steps_of(self, loss: peers.HeadLoss) -> tuple[Step, ...]:
        forward = partial(loss, self.features, self.weight, self.target)
        return (Step(forward, (self.features, self.weight)),)


def _peers(bench: Bench, inputs: _Inputs) -> Iterator[Contender]:
    product = Step(partial(F.linear, inputs.features.detach(), inputs.weight.detach()))
    yield Contender(PRODUCT, inputs.case, (product,))
    yield Contender(LINEAR, inputs.case, inputs.steps_of(_linear_cross_entropy))
    if not bench.quick:
        torch.compiler.reset()
        compiled = torch.compile(_linear_cross_entropy, dynamic=False)
        yield Contender(COMPILED_LINEAR, inputs.case, inputs.steps_of(compiled))
    if bench.on_gpu:  # their kernels run on nothing else
        for entry, theirs in ((CUT, peers.cut_cross_entropy(bench.say)), (LIGER, peers.liger(bench.say))):
            if theirs is not None:
                yield Contender(entry, inputs.case, inputs.steps_of(theirs))
    noised = peers.pytopk(_K, _EPSILON, _DRAWS, bench.say)
    if noised is not None and _fits(bench, inputs):
        yield Contender(LINEAR_PYTOPK, inputs.noised_case, inputs.steps_of(partial(_linear_then, noised)))


def _ours(inputs: _Inputs) -> Iterator[Contender]:
    for entry, sparse in ((OURS, False), (OURS_SPARSE, True)):
        head = _head(inputs.weight, sparse=sparse)
        step = Step(partial(head, inputs.features, inputs.target), (inputs.features, *head.parameters()))
        check = partial(
            check_noised_head,
            f"NoisedTopKHead ({inputs.case.N} x {inputs.case.L}, {'sparse' if sparse else 'dense'} gradient)",
            partial(_head, sparse=sparse),
            inputs.features,
            inputs.weight,
            inputs.target,
            k=_K,
            epsilon=_EPSILON,
            n_samples=_DRAWS,
        )
        yield Contender(entry, inputs.noised_case, (step,), check)


def _head(weight: Tensor, *, sparse: bool) -> nn.Module:
    """Our head, with these weights."""
    num_classes, d = weight.shape
    loss = sl.NoisedTopKHinge(_K, epsilon=_EPSILON, n_samples=_DRAWS)
    head = sl.NoisedTopKHead(d, num_classes, loss, bias=False, sparse_grad=sparse, device="meta")
    head.weight = nn.Parameter(weight.detach())  # the same as the peers have
    return head


def _linear_then(loss: peers.Loss, features: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return loss(F.linear(features, weight), target)


def _linear_cross_entropy(features: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(features, weight), target)


def _fits(bench: Bench, inputs: _Inputs) -> bool:
    """True if there is memory for pytopk, and as much again for its CUDA graph."""
    needed = 2 * _PYTOPK_BYTES_A_DRAW * _DRAWS * inputs.case.N * inputs.case.L
    if not bench.on_gpu or needed < torch.cuda.mem_get_info(bench.device)[0]:
        return True
    bench.say(f"{LINEAR_PYTOPK} is left out at {inputs.case.N} x {inputs.case.L}: it needs {needed / 2**30:.0f} GiB")
    return False
