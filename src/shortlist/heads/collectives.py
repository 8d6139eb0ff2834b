"""Communication between the ranks that share the classes of a head.

Shape suffixes: R rows of this rank, N = W * R rows of all ranks, S columns of this rank, W ranks.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from shortlist.errors import ShortlistError


class Ranks:
    """The processes of a group, or this process alone. All of them must call the collective operations.

    Args:
        group: By default all processes, or this one alone if ``torch.distributed`` is not in use.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        self.group = dist.group.WORLD if is_distributed and group is None else group
        self.count = dist.get_world_size(group) if is_distributed else 1
        self.rank = dist.get_rank(group) if is_distributed else 0
        self.global_rank = dist.get_rank() if is_distributed else 0
        if self.rank < 0:
            raise ShortlistError("process_group must contain this process, and does not")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self  # copies of a head communicate through the same group

    def own_classes(self, num_classes: int) -> range:
        """Equal parts, smaller or empty on the last ranks: the division of ``torch.chunk`` and ``DTensor``."""
        size = self.largest_part(num_classes)
        return range(min(self.rank * size, num_classes), min((self.rank + 1) * size, num_classes))

    def largest_part(self, num_classes: int) -> int:
        return math.ceil(num_classes / self.count)

    def own_rows(self, x_N: Tensor) -> Tensor:
        return x_N.chunk(self.count)[self.rank]

    def all_gather(self, x_R: Tensor) -> Tensor:
        """The rows of all ranks, in the order of the ranks."""
        if self.count == 1:
            return x_R
        x_N = x_R.new_empty(self.count * len(x_R), *x_R.shape[1:])
        dist.all_gather_into_tensor(x_N, x_R.contiguous(), group=self.group)
        return x_N

    def reduce_scatter(self, x_N: Tensor) -> Tensor:
        """This rank's rows of the sum over all ranks."""
        if self.count == 1:
            return x_N
        x_R = x_N.new_empty(len(x_N) // self.count, *x_N.shape[1:])
        dist.reduce_scatter_tensor(x_R, x_N.contiguous(), group=self.group)
        return x_R

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.count > 1:
            x = x.clone()
            dist.all_reduce(x, group=self.group)
        return x

    def all_to_all(self, x_NS: Tensor) -> Tensor:
        """``(R, W * S)`` this rank's rows of all columns, from all rows of this rank's columns."""
        if self.count == 1:
            return x_NS
        x_WRS = torch.empty_like(x_NS)
        dist.all_to_all_single(x_WRS, x_NS.contiguous(), group=self.group)
        return x_WRS.view(self.count, len(x_NS) // self.count, x_NS.shape[1]).movedim(0, 1).flatten(1)

    def as_sharded(self, part: Tensor, whole_shape: torch.Size) -> Tensor:
        """A ``DTensor`` of the whole that shares the memory of this rank's part; the part itself for one rank."""
        if self.count == 1:
            return part
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        assert self.group is not None
        mesh = DeviceMesh.from_group(self.group, part.device.type)
        stride = torch.empty(whole_shape, device="meta").stride()
        return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=whole_shape, stride=stride)


def gather_rows(x_R: Tensor, ranks: Ranks) -> Tensor:
    """``all_gather`` with a gradient: each rank gets the sum of the gradients of its rows."""
    x_N: Tensor = _GatherRows.apply(x_R, ranks)
    return x_N


def sum_own_rows(x_N: Tensor, ranks: Ranks) -> Tensor:
    """``reduce_scatter`` with a gradient: each rank gets the gradients of all rows."""
    x_R: Tensor = _SumOwnRows.apply(x_N, ranks)
    return x_R


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_R: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_gather(x_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.reduce_scatter(grad_N), None


class _SumOwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.reduce_scatter(x_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.all_gather(grad_R), None
