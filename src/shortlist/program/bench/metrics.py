"""The suite ``metrics``: counting top-K hits, and sets, beside the ``topk`` and ``sort`` calls that they avoid."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from shortlist.program.bench.agreement import check_sets, check_topk_counts
from shortlist.program.bench.contenders import Bench, Contender, dtype_name
from shortlist.program.bench.losses import OURS, Batch
from shortlist.program.bench.measurements import Case, Measurement
from shortlist.program.bench.timing import Step
from shortlist.sets import PredictionSets

TOPK, SORT, SETS = "torch.topk alone", "torch.sort alone", "sets"
_K = 5
_SIZE, _QUICK_SIZE = (256, 100_000), (16, 60)


def measure(bench: Bench) -> Iterator[Measurement]:
    size = _QUICK_SIZE if bench.quick else _SIZE
    batches = Batch.drawn(bench, size, torch.float32, spread=1.0)
    case = Case(dtype=dtype_name(torch.float32), N=size[0], L=size[1])
    inputs = [batch.scores.detach() for batch in batches]
    yield from bench.measure(
        "metrics",
        [
            Contender(TOPK, replace(case, K=_K), tuple(Step(partial(torch.topk, scores, _K)) for scores in inputs)),
            Contender(SORT, case, tuple(Step(partial(torch.sort, scores, descending=True)) for scores in inputs)),
            _ours(bench, case, batches),
            _sets(case, batches),
        ],
    )


def _ours(bench: Bench, case: Case, batches: list[Batch]) -> Contender:
    from shortlist.metrics import TopKMetrics  # torchmetrics takes seconds to import

    metrics = TopKMetrics(case.L).to(bench.device)
    largest = max(metrics.ks)

    def check() -> None:
        counting = TopKMetrics(case.L).to(bench.device)
        scores, target = batches[0].scores.detach(), batches[0].target
        counting.update(scores, target)
        hits = {k: (share.nan_to_num() * counting.seen).round().long() for k, share in counting.per_class().items()}
        check_topk_counts(f"TopKMetrics.update ({case.N} x {case.L})", hits, scores, target)

    steps = tuple(Step(partial(metrics.update, batch.scores.detach(), batch.target)) for batch in batches)
    return Contender(OURS, replace(case, K=largest), steps, check)


def _sets(case: Case, batches: list[Batch]) -> Contender:
    scores, target = batches[0].scores.detach(), batches[0].target
    counts = 1 + torch.arange(case.L, device=scores.device) % 100
    sets = PredictionSets(0.9, "macro").calibrate(scores, target, counts)

    def check() -> None:
        check_sets(f"PredictionSets ({case.N} x {case.L})", sets(scores), scores, sets.thresholds, sets.log_prior)

    return Contender(SETS, case, tuple(Step(partial(sets, batch.scores.detach())) for batch in batches), check)
