"""The suites ``loss`` and ``hinge``: the noised and the smoothed hinge beside cross-entropy, forward and backward."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from shortlist import functional
from shortlist.program.bench import peers
from shortlist.program.bench.agreement import check_noised_hinge, check_smooth_hinge
from shortlist.program.bench.contenders import Bench, Contender, dtype_name
from shortlist.program.bench.measurements import Case, Measurement
from shortlist.program.bench.timing import Step

CROSS_ENTROPY, COMPILED_CROSS_ENTROPY = "cross-entropy", "cross-entropy, compiled"
PYTOPK, OURS = "pytopk", "shortlist"
GOALS = {"cuda": 1.0, "cpu": 2.0}
"""The noised loss should take at most this multiple of cross-entropy's time."""

# The middle of the grid. Peers are measured only there, as their time hardly depends on the scores.
USUAL_SPREAD, USUAL_EPSILON = 1.0, 0.2

_HINGE_KS = (5, 20, 50)
_HINGE_SIZES = ((64, 100), (64, 1_000), (256, 10_000), (256, 100_000))
_QUICK_HINGE_KS, _QUICK_HINGE_SIZES = (3,), ((4, 40),)


@dataclass(frozen=True)
class Plan:
    """The grid of cases for the noised loss."""

    sizes: Sequence[tuple[int, int]]
    """(N, L)."""
    draws: Sequence[tuple[int, int]] = ((5, 3), (5, 10), (20, 5), (100, 10))
    """(K, B), where L allows."""
    spreads: Sequence[float] = (0.1, 1.0, 3.0)
    epsilons: Sequence[float] = (0.01, 0.2, 1.0)
    half_sizes: Sequence[tuple[int, int]] = ()
    """Also measured in bfloat16 and float16, at the usual spread and epsilon."""
    half_draws: Sequence[tuple[int, int]] = ((5, 10),)
    compiled: bool = True


ON_GPU = Plan(
    sizes=((64, 100), (128, 1_000), (32, 1_081), (256, 10_000), (256, 100_000), (64, 1_000_000)),
    half_sizes=((256, 10_000), (256, 100_000)),
)
ON_CPU = Plan(sizes=((64, 100), (64, 1_000), (64, 10_000), (64, 100_000)))
QUICK = Plan(sizes=((8, 40), (4, 300)), draws=((3, 2), (5, 3)), spreads=(1.0,), epsilons=(0.2,), compiled=False)


@dataclass(frozen=True)
class Batch:
    scores: Tensor
    target: Tensor

    @classmethod
    def drawn(cls, bench: Bench, size: tuple[int, int], dtype: torch.dtype, spread: float) -> "list[Batch]":
        """Random batches to rotate among."""
        n, num_classes = size
        generator = torch.Generator(bench.device).manual_seed(0)

        def draw() -> Batch:
            scores = torch.randn(n, num_classes, device=bench.device, generator=generator).mul_(spread).to(dtype)
            target = torch.randint(num_classes, (n,), device=bench.device, generator=generator)
            return cls(scores.requires_grad_(), target)

        return [draw() for _ in range(bench.input_sets(n * num_classes * dtype.itemsize))]


def measure_noised(bench: Bench) -> Iterator[Measurement]:
    plan = QUICK if bench.quick else ON_GPU if bench.on_gpu else ON_CPU
    for size in plan.sizes:
        yield from bench.measure("loss", _contenders(bench, plan, size, torch.float32))
    usual = replace(plan, spreads=(USUAL_SPREAD,), epsilons=(USUAL_EPSILON,), draws=plan.half_draws)
    for size in plan.half_sizes:
        for dtype in (torch.bfloat16, torch.float16):
            yield from bench.measure("loss", _contenders(bench, usual, size, dtype))


def measure_smoothed(bench: Bench) -> Iterator[Measurement]:
    sizes = _QUICK_HINGE_SIZES if bench.quick else _HINGE_SIZES if bench.on_gpu else _HINGE_SIZES[:3]
    for size in sizes:
        batches = Batch.drawn(bench, size, torch.float32, USUAL_SPREAD)
        case = Case(dtype=dtype_name(torch.float32), N=size[0], L=size[1], spread=USUAL_SPREAD)
        contenders = _cross_entropies(case, batches, compiled=not bench.quick)
        ks = _QUICK_HINGE_KS if bench.quick else _HINGE_KS
        contenders += [_our_smoothed(replace(case, K=k), batches, k) for k in ks]
        yield from bench.measure("hinge", contenders)


def _contenders(bench: Bench, plan: Plan, size: tuple[int, int], dtype: torch.dtype) -> list[Contender]:
    batches = {spread: Batch.drawn(bench, size, dtype, spread) for spread in plan.spreads}
    usual = batches[USUAL_SPREAD]
    case = Case(dtype=dtype_name(dtype), N=size[0], L=size[1], spread=USUAL_SPREAD)
    contenders = _cross_entropies(case, usual, compiled=plan.compiled)
    for k, n_samples in plan.draws:
        if k >= size[1]:
            continue
        case = replace(case, K=k, B=n_samples, epsilon=USUAL_EPSILON)
        theirs = peers.pytopk(k, USUAL_EPSILON, n_samples, bench.say) if dtype == torch.float32 else None
        if theirs is not None:
            contenders.append(Contender(PYTOPK, case, _steps_of(theirs, usual)))
        contenders += [
            _our_noised(replace(case, spread=spread, epsilon=epsilon), batches[spread], k, n_samples, epsilon, spread)
            for spread in plan.spreads
            for epsilon in plan.epsilons
        ]
    return contenders


def _cross_entropies(case: Case, batches: Sequence[Batch], *, compiled: bool) -> list[Contender]:
    """Torch's cross-entropy, plain and compiled."""
    contenders = [Contender(CROSS_ENTROPY, case, _steps_of(F.cross_entropy, batches))]
    if compiled:
        torch.compiler.reset()  # otherwise torch would give up compiling after eight sizes
        fused = torch.compile(F.cross_entropy, dynamic=False)
        contenders.append(Contender(COMPILED_CROSS_ENTROPY, case, _steps_of(fused, batches)))
    return contenders


def _our_noised(
    case: Case, batches: Sequence[Batch], k: int, n_samples: int, epsilon: float, spread: float
) -> Contender:
    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return functional.noised_topk_hinge(scores, target, k, epsilon=epsilon, n_samples=n_samples)

    def check() -> None:
        check_noised_hinge(
            f"noised_topk_hinge ({case.N} x {case.L} {case.dtype}, K={k}, B={n_samples}, epsilon={epsilon:g})",
            batches[0].scores,
            batches[0].target,
            k,
            epsilon=epsilon,
            n_samples=n_samples,
            spread=spread,
        )

    # The same kernels run at every spread and epsilon, so one check for each size, K and B is enough.
    is_usual = (spread, epsilon) == (USUAL_SPREAD, USUAL_EPSILON)
    return Contender(OURS, case, _steps_of(loss, batches), check if is_usual else None)


def _our_smoothed(case: Case, batches: Sequence[Batch], k: int) -> Contender:
    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return functional.smooth_topk_hinge(scores, target, k)

    def check() -> None:
        entry = f"smooth_topk_hinge ({case.N} x {case.L}, K={k})"
        check_smooth_hinge(entry, batches[0].scores, batches[0].target, k)

    return Contender(OURS, case, _steps_of(loss, batches), check)


def _steps_of(loss: peers.Loss, batches: Sequence[Batch]) -> tuple[Step, ...]:
    return tuple(Step(partial(loss, batch.scores, batch.target), (batch.scores,)) for batch in batches)
