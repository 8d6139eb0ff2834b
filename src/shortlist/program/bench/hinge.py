"""The suite ``hinge``: the hinge smoothed by a log-sum over subsets, beside cross-entropy."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from shortlist import functional
from shortlist.program.bench.contenders import Bench, Contender, dtype_name
from shortlist.program.bench.losses import OURS, Batch, cross_entropies, steps_of
from shortlist.program.bench.measurements import Case, Measurement
from shortlist.program.bench.twins import check_smooth_hinge

SUITE = "hinge"
_SPREAD = 1.0
_KS = (5, 20, 50)
_SIZES = ((64, 100), (64, 1_000), (256, 10_000), (256, 100_000))
_CPU_SIZES = _SIZES[:3]
_QUICK_KS, _QUICK_SIZES = (3,), ((4, 40),)


def measure(bench: Bench) -> Iterator[Measurement]:
    sizes = _QUICK_SIZES if bench.quick else _SIZES if bench.on_gpu else _CPU_SIZES
    for size in sizes:
        batches = Batch.drawn(bench, size, torch.float32, _SPREAD)
        case = Case(dtype=dtype_name(torch.float32), N=size[0], L=size[1], spread=_SPREAD)
        contenders = cross_entropies(case, batches, compiled=not bench.quick)
        contenders += [_ours(replace(case, K=k), batches, k) for k in (_QUICK_KS if bench.quick else _KS)]
        yield from bench.measure(SUITE, contenders)


def _ours(case: Case, batches: list[Batch], k: int) -> Contender:
    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return functional.smooth_topk_hinge(scores, target, k)

    def check() -> None:
        entry = f"smooth_topk_hinge ({case.N} x {case.L}, K={k})"
        check_smooth_hinge(entry, batches[0].scores, batches[0].target, k)

    return Contender(OURS, case, steps_of(loss, batches), check)
