"""What only a GPU can show: the same numbers as on the CPU, kernels by default, no hidden waits, no bad label accepted.

Run with ``make test-gpu`` on a machine that has one. Needs torch, pytest and, for the metrics, torchmetrics.
"""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import shortlist as sl
from shortlist.program.bench.timing import waits_are_errors
from tests.support.loss_cases import LossCase, every_differentiable_loss, every_loss, noise_for

pytestmark = pytest.mark.gpu


def draw(n: int = 16, num_classes: int = 50) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(n, num_classes, generator=generator), torch.randint(num_classes, (n,), generator=generator)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_value_and_gradient_are_those_of_the_cpu(loss: LossCase, dtype: torch.dtype) -> None:
    scores, target = draw()
    results = []
    for device in ("cpu", "cuda"):
        here = scores.to(device, dtype).requires_grad_()
        noise = loss.given(noise_for(scores).to(device))
        value = loss(here, target.to(device), **noise)
        gradient = torch.autograd.grad(value, here)[0] if loss.has_gradient else torch.zeros(())
        results.append((value.cpu(), gradient.cpu()))
    torch.testing.assert_close(results[1], results[0])


def test_losses_take_their_kernels_by_default() -> None:
    scores, target = (t.cuda() for t in draw())
    scores.requires_grad_()
    counts = torch.arange(1, 51, device="cuda")
    assert "NoisedHinge" in graph_of(sl.functional.noised_topk_hinge(scores, target, 5))
    assert "NoisedHinge" in graph_of(sl.functional.imbalanced_noised_topk_hinge(scores, target, counts, 5))
    assert "NoisedHinge" in graph_of(sl.functional.noised_topk_hinge(scores, target, (1, 5), relative=True))
    assert "LogOddsAgainst" in graph_of(sl.functional.smooth_topk_hinge(scores, target, 5))
    assert "FusedTopKCrossEntropy" in graph_of(sl.functional.topk_cross_entropy(scores, target, 5))


def graph_of(value: Tensor) -> str:
    names, nodes = [], [value.grad_fn]
    while nodes:
        if (node := nodes.pop()) is not None:
            names.append(node.name())
            nodes += [parent for parent, _ in node.next_functions]
    return " ".join(names)


@every_differentiable_loss
def test_no_loss_waits_for_the_gpu(loss: LossCase) -> None:
    scores, target = (t.cuda() for t in draw())
    module = loss.module(50).cuda()
    for labels in (target, scores.softmax(1)):
        leaf = scores.detach().requires_grad_()
        with waits_are_errors():
            module(leaf, labels).backward()
        assert leaf.grad is not None


def test_no_operator_waits_for_the_gpu() -> None:
    x = draw()[0].cuda().requires_grad_()
    with waits_are_errors():
        for value in (
            sl.topk_value(x, 3),
            sl.smooth_topk(x, 3, epsilon=0.1),
            sl.smooth_topk_sum(x, 3, epsilon=0.1),
            sl.exact_topk(x, 3, epsilon=0.1),
        ):
            value.sum().backward()


def test_metrics_count_on_the_gpu_without_waiting() -> None:
    scores, target = draw(200)
    on_gpu, on_cpu = sl.TopKMetrics(50).cuda(), sl.TopKMetrics(50)
    scores_there, target_there = scores.cuda(), target.cuda()
    with waits_are_errors():
        on_gpu.update(scores_there, target_there)
    on_cpu.update(scores, target)
    for k in (1, 3, 5):
        torch.testing.assert_close(on_gpu.per_class()[k].cpu(), on_cpu.per_class()[k], equal_nan=True)


def test_the_devices_own_generator_is_used() -> None:
    scores, target = (t.cuda() for t in draw())
    loss = sl.NoisedTopKHinge(5, epsilon=0.5)
    torch.cuda.manual_seed(7)
    first, second = loss(scores, target), loss(scores, target)
    torch.cuda.manual_seed(7)
    assert loss(scores, target) == first != second


def test_memory_grows_with_the_scores_not_with_the_draws() -> None:
    scores = torch.randn(256, 10_000, device="cuda", requires_grad=True)
    target = torch.randint(10_000, (256,), device="cuda")
    held = []
    for n_samples in (1, 50):
        before = torch.cuda.memory_allocated()
        value = sl.functional.noised_topk_hinge(scores, target, 5, n_samples=n_samples)
        held.append(torch.cuda.memory_allocated() - before)
        del value
    assert held[1] - held[0] < 2**20, "only positions may wait for backward"


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_loss_holds_no_draws_either() -> None:
    """In generated code, with a layer in the graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    features, target = torch.randn(64, 8, device="cuda"), torch.randint(20_000, (64,), device="cuda")
    layer, criterion = torch.nn.Linear(8, 20_000).cuda(), sl.NoisedTopKHinge(5, epsilon=0.1, n_samples=50)

    def loss() -> Tensor:
        value: Tensor = criterion(layer(features), target)
        return value

    means, peaks = [], []
    for step in (loss, torch.compile(loss, fullgraph=True)):
        step().backward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        values = []
        for _ in range(20):
            value = step()
            value.backward()
            values.append(value.detach())
        means.append(torch.stack(values).mean().item())
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert means[1] == pytest.approx(means[0], rel=1e-3)
    assert peaks[1] < 2 * peaks[0]


def test_class_counts_that_nobody_could_check_give_nan() -> None:
    counts = torch.tensor([0, 5, 7], device="cuda")
    assert sl.class_margins(counts, 0.5).isnan().all()


@pytest.mark.parametrize("num_classes", [50, 1000, 10_000])
@pytest.mark.parametrize("relative", [False, True])
def test_several_k_by_the_kernel_have_the_expectation_of_their_exact_losses(num_classes: int, relative: bool) -> None:
    """The mean over equal rows, whose draws differ."""
    row, rows = torch.randn(1, num_classes, device="cuda"), 4000
    scores, target = row.expand(rows, -1).contiguous().requires_grad_(), torch.zeros(rows, dtype=torch.int64).cuda()
    settings: dict[str, Any] = {"epsilon": 0.5, "margin": 6.0, "relative": relative}
    loss = sl.functional.noised_topk_hinge(scores, target, (1, 3, 5), n_samples=5, **settings)
    (gradient,) = torch.autograd.grad(loss, scores)
    exact = row.double().requires_grad_()
    expected = sl.functional.noised_topk_hinge(exact, target[:1], (1, 3, 5), n_samples=math.inf, **settings)
    (expected_gradient,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=0.01)
    torch.testing.assert_close(gradient.sum(0).double(), expected_gradient[0], rtol=0, atol=0.02)
    assert ((gradient != 0).sum(1) <= 5 * 3 + 1).all()


@pytest.mark.parametrize("num_classes", [50, 20_000])
@pytest.mark.parametrize("settings", [{"k": 5}, {"k": (1, 3, 5)}, {"k": (1, 3, 5), "relative": True}], ids=str)
def test_cuda_graphs_replay_fresh_noise(num_classes: int, settings: dict[str, Any]) -> None:
    """For short rows, and for long ones, where several programs share a row and count each other."""
    scores, target = torch.randn(4, num_classes, device="cuda"), torch.arange(4, device="cuda")
    loss = sl.NoisedTopKHinge(**settings, epsilon=0.5)
    loss(scores, target)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(scores, target)
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append(value.item())
    assert len(set(replays)) == 3
    assert all(math.isfinite(replay) for replay in replays)


# A failed assertion on the device ends all CUDA work of its process, so each try has a process of its own.
_BAD_LABEL = """
import torch, shortlist as sl
scores = torch.randn(4, 7, device="cuda")
target = torch.tensor([0, 1, {label}, 3], device="cuda")
print(getattr(sl.functional, "{name}")(scores, target{arguments}).item())
"""


@pytest.mark.parametrize("label", [7, -1])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("noised_topk_hinge", ", 3"), ("smooth_topk_hinge", ", 3"), ("topk_cross_entropy", ", 3"), ("focal", "")],
)
def test_a_label_out_of_range_cannot_pass(name: str, arguments: str, label: int) -> None:
    code = _BAD_LABEL.format(label=label, name=name, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 or not math.isfinite(float(done.stdout))
