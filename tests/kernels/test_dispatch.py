"""Which implementation runs: as asked for, or as the inputs allow."""

import pytest
import torch
from torch import Tensor

from shortlist import ShortlistError
from shortlist import functional as F
from shortlist.kernels.dispatch import supports

SCORES, TARGET = torch.zeros(3, 7), torch.zeros(3, dtype=torch.int64)


@pytest.fixture
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_the_reference_needs_nothing_and_auto_needs_a_gpu() -> None:
    assert not supports("reference", SCORES)
    assert not supports("auto", SCORES)


def test_a_forced_kernel_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ShortlistError, match=r"GPU.*cpu"):
        supports("triton", SCORES)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(
    ("fact", "scores", "target", "weight"),
    [
        ("float64", SCORES.double(), TARGET, None),
        (r"\(N, L\)", SCORES[0], TARGET, None),
        ("L >= 2", SCORES[:, :1], TARGET, None),
        (r"int64 .*\(N,\)", SCORES, TARGET.int(), None),
        (r"int64 .*\(N,\)", SCORES, TARGET[:2], None),
        (r"int64 .*\(N,\)", SCORES, [0, 1, 2], None),
        ("one row", SCORES[:0], TARGET[:0], None),
        ("target on cpu, got meta", SCORES, TARGET.to("meta"), None),
        ("weight on cpu", SCORES, TARGET, torch.ones(7, device="meta")),
    ],
)
def test_a_forced_kernel_names_what_it_needs(fact: str, scores: Tensor, target: Tensor, weight: Tensor | None) -> None:
    with pytest.raises(ShortlistError, match=fact):
        supports("triton", scores, labels=(target, weight))


@pytest.mark.usefixtures("_interpreted")
def test_a_forced_kernel_runs_if_all_its_needs_are_met() -> None:
    assert supports("triton", SCORES, labels=(TARGET, None), needs={"epsilon > 0": True})
    with pytest.raises(ShortlistError, match="epsilon > 0"):
        supports("triton", SCORES, labels=(TARGET, None), needs={"epsilon > 0": False})


@pytest.mark.usefixtures("_interpreted")
def test_the_environment_switches_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTLIST_KERNELS", "0")
    with pytest.raises(ShortlistError, match="SHORTLIST_KERNELS=0"):
        supports("triton", SCORES)


@pytest.mark.usefixtures("_interpreted")
def test_no_kernel_runs_inside_function_transforms() -> None:
    with pytest.raises(ShortlistError, match=r"torch\.func"):
        torch.func.grad(lambda x: x.sum() * supports("triton", x))(SCORES)


@pytest.mark.usefixtures("_interpreted")
def test_a_forced_smoothed_hinge_needs_a_temperature() -> None:
    with pytest.raises(ShortlistError, match="tau > 0"):
        F._smooth_topk_hinge(SCORES, TARGET, 2, 0.0, None, -100, "mean", impl="triton")
