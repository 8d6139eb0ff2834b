"""The kernel that merges chunks of classes against the best of all classes, on the noise that it sees."""

import math

import pytest
import torch
from torch import Tensor

from shortlist import ShortlistError
from shortlist.heads.running_topk import RunningTopK

pytest.importorskip("triton")
from shortlist.kernels.noised_hinge.autograd import Seed, merge_chunk, new_seed
from tests.support.noised_hinge_kernels import DEVICE, SEED, cutoffs_of, draw, lazy_plan, noise_seen

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaNs in the interpreter


def running(num_rows: int, n_samples: int, rank: int, epsilon: float, **options: object) -> RunningTopK:
    device = torch.device(DEVICE)
    return RunningTopK(num_rows, n_samples, rank, epsilon=epsilon, dtype=torch.float32, device=device, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chunks", "shift"),
    [([400], 0.0), *((chunks, shift) for chunks in ([300, 200], [200, 300, 130]) for shift in (0.0, 0.8, 20.0, -20.0))],
)
def test_chunks_that_challenge_give_the_best_of_all(chunks: list[int], shift: float) -> None:
    """Also where a chunk is better than all before it, or worse."""
    scores, _ = draw(2, sum(chunks), 1.0)
    scores[:, chunks[0] :] += shift
    plan, seed = lazy_plan(scores, 4, 2), Seed(torch.tensor([SEED], device=DEVICE), 0)
    best = running(2, 2, 4, 0.4)
    reference = RunningTopK(2, 2, 4, epsilon=0.4, dtype=torch.float64, device=torch.device("cpu"))
    start = 0
    for chunk in scores.split(chunks, 1):
        state = (best.values_RBK, best.classes_RBK, best.spoil_R)
        here = chunk.contiguous().to(DEVICE)
        search = merge_chunk(*state, here, start, 0.4, seed, is_first=start == 0, plan=plan)
        noise = noise_seen(chunk, cutoffs_of(search, plan), 2, key=start << 32)
        reference.enter(*best_of(chunk.double(), noise, 0.4, 4, start))
        start += chunk.shape[1]
    values, order = best.values_RBK.sort(-1, descending=True)
    torch.testing.assert_close(values.cpu().double(), reference.values_RBK, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(best.classes_RBK.gather(-1, order).cpu(), reference.classes_RBK)
    assert (best.spoil_R == 0).all()


def best_of(scores: Tensor, noise: Tensor, epsilon: float, rank: int, first_class: int) -> tuple[Tensor, Tensor]:
    values, classes = (scores.unsqueeze(-1) + epsilon * noise).transpose(1, 2).topk(rank)
    return values, classes + first_class


def test_a_head_merges_its_chunks_by_the_kernel_with_one_seed() -> None:
    scores = draw(1, 200, 1.0)[0].to(DEVICE)
    plan = lazy_plan(scores, 3, 1)
    by_head, by_hand = running(1, 1, 3, 0.4, impl="triton", plan=plan), running(1, 1, 3, 0.4)
    seed = new_seed(scores.device, torch.Generator(DEVICE).manual_seed(7))
    generator = torch.Generator(DEVICE).manual_seed(7)
    state = (by_hand.values_RBK, by_hand.classes_RBK, by_hand.spoil_R)
    for start in (0, 100):
        chunk = scores[:, start : start + 100].contiguous()
        by_head.add(chunk, start, generator=generator)
        merge_chunk(*state, chunk, start, 0.4, seed, is_first=start == 0, plan=plan)
    assert torch.equal(by_head.values_RBK.sort().values, by_hand.values_RBK.sort().values)
    assert torch.equal(by_head.classes_RBK.sort().values, by_hand.classes_RBK.sort().values)


def test_places_that_nobody_holds_are_open_to_all() -> None:
    """The kernel measures from the smallest kept value. While there are too few, it must not be asked."""
    scores = draw(2, 203, 1.0)[0].to(DEVICE)
    best = running(2, 2, 4, 0.4, impl="reference", plan=lazy_plan(scores, 4, 2))
    best.add(scores[:, :3].contiguous(), 0)
    best.impl = "triton"
    with pytest.raises(ShortlistError, match="as many classes as are kept"):
        best.add(scores[:, 3:].contiguous(), 3)
    best.impl = "auto"
    best.add(scores[:, 3:].contiguous(), 3)
    assert best.values_RBK.isfinite().all()
    assert (best.classes_RBK >= 3).any()


def test_bad_scores_spoil_their_row_in_any_chunk() -> None:
    scores, _ = draw(3, 300, 1.0)
    scores[0, 3], scores[2, 299] = math.nan, math.inf
    best = running(3, 1, 2, 0.4, impl="triton", plan=lazy_plan(scores, 2, 1, max_tries=5))
    for start in (0, 150):
        best.add(scores[:, start : start + 150].contiguous().to(DEVICE), start)
    assert best.spoil_R.isnan().tolist() == [True, False, True]


def test_a_chunk_of_classes_that_are_ruled_out_is_never_wrong_in_silence() -> None:
    """The next chunk is measured from there, and may be too far away for its noise to be told."""
    scores, _ = draw(1, 300, 2.0)
    scores[:, :150] = -1e9
    best = running(1, 1, 4, 0.2, impl="triton", plan=lazy_plan(scores, 4, 1))
    for start in (0, 150):
        best.add(scores[:, start : start + 150].contiguous().to(DEVICE), start)
    value, want = best.last_place()[0].cpu(), scores.topk(4).values[:, -1:]
    assert (value.isnan() | ((value - want).abs() < 6 * 0.2)).all()
