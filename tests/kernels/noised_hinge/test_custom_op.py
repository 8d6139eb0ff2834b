"""The kernels as operators: what ``torch.compile`` and ``torch.export`` make of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

import shortlist as sl
from shortlist.ops import random
from shortlist.ops.noised_hinge import noised_hinge

pytest.importorskip("triton")
from shortlist.kernels.noised_hinge import custom_op
from tests.support.noised_hinge_kernels import DEVICE, SEED, draw

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaNs in the interpreter


class KernelLoss(nn.Module):
    """The noised hinge by kernels, in the interpreter too, with hardly any noise."""

    def __init__(
        self,
        *,
        imbalanced: bool = False,
        reduction: Any = "mean",
        weight: Tensor | None = None,
        k: int | tuple[int, ...] = 3,
        relative: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("margins", torch.linspace(0.1, 1, 20) if imbalanced else None)
        self.register_buffer("weight", weight)
        self.reduction = reduction
        self.k = k
        self.relative = relative

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return noised_hinge(
            scores,
            target,
            self.k,
            margin=1.5,
            margins_L=self.margins,  # type: ignore[arg-type]
            scale=1.0,
            epsilon=1e-6,
            relative=self.relative,
            n_samples=2,
            noise=None,
            generator=None,
            weight=self.weight,  # type: ignore[arg-type]
            ignore_index=-100,
            reduction=self.reduction,
            impl="triton",
        )


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(("imbalanced", "k", "relative"), [(False, 3, False), (True, 3, False), (True, (1, 3), True)])
def test_a_compiled_graph_holds_the_kernels_as_one_node(
    reduction: str, imbalanced: bool, k: int | tuple[int, ...], relative: bool
) -> None:
    scores, target = draw(5, 20, 3.0)
    target[2] = -100
    weight = torch.linspace(0.5, 2, 20)
    module = KernelLoss(imbalanced=imbalanced, reduction=reduction, weight=weight, k=k, relative=relative).to(DEVICE)
    graphs: list[torch.fx.GraphModule] = []

    def remember(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    results = []
    for loss in (module, torch.compile(module, fullgraph=True, backend=remember)):
        here = scores.to(DEVICE).requires_grad_()
        value = loss(here, target.to(DEVICE))
        results.append((value, *torch.autograd.grad(value.sum(), here)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum("shortlist" in name for name in called) == 1
    assert not any("randn" in name for name in called)
    assert sum("topk" in name for name in called) == relative, "for the spread of the rows alone"


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_graph_of_the_kernels_serves_every_batch_size() -> None:
    module = KernelLoss()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (5, 8, 3):
        scores, target = draw(size, 20, 3.0)
        with torch.compiler.set_stance("default" if size == 5 else "fail_on_recompile"):
            loss = compiled(scores.to(DEVICE), target.to(DEVICE))
        torch.testing.assert_close(loss, module(scores.to(DEVICE), target.to(DEVICE)), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_compiler")
def test_an_exported_loss_takes_every_batch_size() -> None:
    module = KernelLoss()
    (scores, target), (others, labels) = draw(5, 20, 3.0), draw(3, 20, 3.0)
    any_size = torch.export.Dim.DYNAMIC
    exported = torch.export.export(
        module, (scores.to(DEVICE), target.to(DEVICE)), dynamic_shapes=({0: any_size}, {0: any_size})
    )
    loss = exported.module()(others.to(DEVICE), labels.to(DEVICE))
    torch.testing.assert_close(loss, module(others.to(DEVICE), labels.to(DEVICE)), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_function_transforms_do_without_kernels() -> None:
    def loss(scores: Tensor) -> Tensor:
        return sl.functional.noised_topk_hinge(scores, target.to(DEVICE), 3, epsilon=1e-6)

    scores, target = draw(5, 20, 3.0)
    gradient = torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")(scores.to(DEVICE))
    here = scores.to(DEVICE).requires_grad_()
    torch.testing.assert_close(gradient, *torch.autograd.grad(loss(here), here), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's own checks
@pytest.mark.parametrize(("reduction", "ks"), [("none", (3,)), ("mean", (1, 3)), ("sum", (1, 3))])
def test_the_operators_keep_torchs_rules(reduction: str, ks: tuple[int, ...]) -> None:
    scores, target = draw(3, 20, 1.0)
    seed = torch.tensor([SEED], device=DEVICE)
    here = scores.to(DEVICE).requires_grad_()
    epsilon_R = None if len(ks) == 1 else torch.linspace(0.1, 0.5, 3, device=DEVICE)
    arguments = (here, target.to(DEVICE), None, None, epsilon_R, seed, False, ks, 1.0, 1.0, 0.3, 2, -100, reduction)
    torch.library.opcheck(custom_op.forward, arguments)
    loss, *kept = (tensor.detach() for tensor in custom_op.forward(*arguments))
    backward = (torch.ones_like(loss), target.to(DEVICE), *kept, 20, scores.dtype, reduction)
    torch.library.opcheck(custom_op.backward, backward)


def test_ranks_draw_their_own_in_a_compiled_graph_unless_their_generators_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores, target = draw(3, 20, 1.0)
    seed = torch.tensor([SEED], device=DEVICE)
    losses = {}
    for rank in (0, 1):
        monkeypatch.setattr(random, "_rank", lambda rank=rank: rank)
        for same in (True, False):
            tensors = (scores.to(DEVICE), target.to(DEVICE), None, None, None, seed)
            losses[rank, same] = custom_op.forward(*tensors, same, (3,), 1.0, 1.0, 0.3, 2, -100, "none")[0]
    assert torch.equal(losses[0, True], losses[1, True])
    assert torch.equal(losses[0, True], losses[0, False])
    assert (losses[0, False] != losses[1, False]).all()
