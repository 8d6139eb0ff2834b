"""Classes divided over processes, for last layers too large for one device.

Shape suffixes: R rows of this rank, N rows of all ranks, D features, L classes of all ranks, S classes of this rank
(at most), B draws, K places, P = B + 1 chosen classes, W ranks.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shortlist.errors import ShortlistError
from shortlist.heads.cosine import unit_rows
from shortlist.heads.noised import NoisedHead, NoisedLoss, rival_and_own
from shortlist.heads.running_topk import Standings
from shortlist.heads.sparse_linear import chosen_scores
from shortlist.ops.batch import reduce_rows
from shortlist.ops.checks import check_at_least_one, check_features


class ClassParallelNoisedTopKHead(NoisedHead):
    """A ``NoisedTopKHead`` whose classes are divided over the ranks of a process group.

    Each rank holds the rows of the weight for ``own_classes``, a contiguous share of all, and brings a batch of its
    own. The ranks exchange their features, each finds the K + 1 best of its own classes for all rows, and from these
    all learn the best of all: the law, and on given noise the numbers, of one process that has everything.

    **What a rank returns, and what the gradients are.** ``"none"`` and ``"sum"`` speak of the rank's own rows.
    ``"mean"`` is W times the sum over its own rows, divided by the weights of the rows of *all* ranks: the average
    over the ranks is the mean over the global batch, also with class weights and ignored rows (without either, it is
    the mean over the rank's own rows). All gradients are those of the *average over the ranks* of what they return:
    the head's own are averaged inside, and the features' are left to ``DistributedDataParallel``, which averages
    those of the network in front. So a network under DDP and this head behind it take the steps of one process with
    the global batch. Do not wrap the head itself: its ranks hold different parameters. For the same reason, a norm to
    clip gradients by must be summed over the ranks for the head's part: ``clip_grad_norm_`` would scale those of the
    network differently on each.

    **State.** The state dict holds ``weight`` and ``bias`` as ``DTensor`` s sharded over the group (plain tensors where
    there is no group), so ``torch.distributed.checkpoint`` writes them from any number of ranks and reads them back
    into any other, or into a ``NoisedTopKHead``. ``load_state_dict`` also takes the whole tensors of a plain layer. An
    optimiser knows nothing of the other ranks' classes, and ``torch.distributed.checkpoint`` would keep one rank's
    averages for all: save its state on each rank apart, and go on with as many ranks.

    Args:
        in_features, num_classes, loss, cosine, bias, sparse_grad: As in ``NoisedTopKHead``.
        process_group: The ranks that share the classes; by default all, or this process alone where
            ``torch.distributed`` is not in use.

    Every rank must bring as many rows as the others; fill up with rows whose label is ``ignore_index``. ``noise``, if
    given, is that of *all* ranks' rows, in the order of the ranks, for *this* rank's classes:
    ``(W * R, len(head.own_classes), B)``. Fresh noise is drawn from a seed that each call takes from ``generator``, or
    from the CPU's default one, and that is then told apart by rank: generators may be the same on all ranks. With
    ``sparse_grad`` a rank's first class always counts as touched.

    Example:
        >>> from shortlist import NoisedTopKHinge
        >>> head = ClassParallelNoisedTopKHead(16, 1000, NoisedTopKHinge(5, epsilon=0.1))
        >>> head.own_classes  # in a group of 4: range(0, 250) on the first rank
        range(0, 1000)
        >>> head(torch.randn(8, 16), torch.randint(1000, (8,))).backward()
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        loss: NoisedLoss,
        *,
        process_group: dist.ProcessGroup | None = None,
        cosine: bool = False,
        bias: bool = True,
        sparse_grad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_at_least_one("num_classes", num_classes)
        self._ranks = _Ranks(process_group)
        super().__init__(
            in_features,
            num_classes,
            loss,
            own_classes=self._ranks.share(num_classes),
            cosine=cosine,
            bias=bias,
            sparse_grad=sparse_grad,
            device=device,
            dtype=dtype,
        )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw them as ``NoisedTopKHead`` does, every rank its own, from a seed as for noise."""
        if not self.weight.is_meta:
            super().reset_parameters(self._generator_for(self._ranks.rank, generator))

    @torch.no_grad()
    def scores(self, features: Tensor) -> Tensor:
        """``(..., L)`` scores of all classes for this rank's features; all ranks must call it.

        They have no gradient, nor has a loss made of them, with ``eval_n_samples=math.inf`` in evaluation mode.
        """
        check_features(features, self.in_features)
        features_RD = features.reshape(-1, self.in_features)
        features_ND = self._ranks.gather(unit_rows(features_RD) if self.cosine else features_RD)
        weight = unit_rows(self.weight) if self.cosine else self.weight
        scores_NS = F.linear(features_ND, weight, self.bias)
        scores_NS = F.pad(scores_NS, (0, self._ranks.largest_share(self.num_classes) - scores_NS.shape[1]))
        # Padding is on the ranks with the last classes only, so it is at the end again once the parts are side by side.
        return self._ranks.exchange(scores_NS)[:, : self.num_classes].reshape(*features.shape[:-1], self.num_classes)

    def _noised_rival(
        self, features_RD: Tensor, index_R: Tensor, noise_RLB: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        ranks = self._ranks
        features_ND: Tensor = _GatherRows.apply(features_RD, ranks)
        index_N = ranks.gather(index_R)
        draws = noise_RLB is None and self.loss.epsilon > 0
        perturbed_NB, classes_NB, spoil_N = self._last_places(
            features_ND, noise_RLB, self._generator_for(self._ranks.global_rank, generator) if draws else None
        )
        classes_NP = torch.cat((classes_NB, index_N.unsqueeze(1)), 1)
        # All ranks but a chosen class's own add 0 to its score. A bad score, on whichever rank, makes the sum NaN.
        chosen_NP = self._chosen_of_own_classes(features_ND, classes_NP) + spoil_N.unsqueeze(1)
        chosen_RP: Tensor = _SumOwnRows.apply(chosen_NP, ranks)
        rival_R, own_R = rival_and_own(ranks.own_rows(perturbed_NB), chosen_RP)
        # A label that no rank knows must not pass as one with a score of 0 (on a GPU it could not be checked before).
        return rival_R, torch.where((index_R >= 0) & (index_R < self.num_classes), own_R, math.nan)

    def _overall(self, standings: Standings) -> Standings:
        """The best of all ranks' classes, from the best of each."""
        overall = Standings(
            *standings.values_RBK.shape,
            epsilon=standings.epsilon,
            dtype=standings.values_RBK.dtype,
            device=standings.values_RBK.device,
        )
        values_WNBK = self._ranks.gather(standings.values_RBK.unsqueeze(0))
        classes_WNBK = self._ranks.gather(standings.classes_RBK.unsqueeze(0))
        overall.enter(values_WNBK.movedim(0, -2).flatten(-2), classes_WNBK.movedim(0, -2).flatten(-2))
        return overall

    def _chosen_of_own_classes(self, features_ND: Tensor, classes_NP: Tensor) -> Tensor:
        """``(N, P)`` scores of the chosen classes that are this rank's own, and 0 for the others."""
        own = self.own_classes
        here_NP = (classes_NP >= own.start) & (classes_NP < own.stop)
        classes_NP = torch.where(here_NP, classes_NP - own.start, 0)
        if not own:  # nothing to choose from, but backward must still come by here, as it does on the other ranks
            classes_NP = classes_NP[:, :0]
        scores_NP = chosen_scores(
            features_ND,
            self.weight,
            self.bias,
            classes_NP,
            cosine=self.cosine,
            sparse_grad=self.sparse_grad,
            parameter_grad_scale=1 / self._ranks.count,
        )
        scores_NP = F.pad(scores_NP, (0, here_NP.shape[1] - scores_NP.shape[1]))
        return torch.where(here_NP, scores_NP, 0)

    def _reduce(self, loss_R: Tensor, share_R: Tensor) -> Tensor:
        if self.loss.reduction == "mean":
            return self._ranks.count * loss_R.sum() / self._ranks.total(share_R.sum())
        return reduce_rows(loss_R, share_R, self.loss.reduction)

    def _scored_shape(self, target: Tensor) -> tuple[int, ...]:
        return self._ranks.count * target.numel(), len(self.own_classes)

    def _generator_for(self, rank: int, generator: torch.Generator | None) -> torch.Generator:
        """One that differs from rank to rank and from call to call, while all ranks consume ``generator`` alike."""
        if generator is not None and generator.device.type != "cpu":
            raise ShortlistError(
                f"generator must be on the CPU: a seed is taken from it, got one on {generator.device}"
            )
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        return torch.Generator(self.weight.device).manual_seed(seed + rank)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, parameter in self.named_parameters(recurse=False):
            part = destination[prefix + name]
            destination[prefix + name] = self._ranks.as_part_of_whole(part, self._whole_shape(parameter))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        own = dict(state_dict)
        for name, parameter in self.named_parameters(recurse=False):
            saved = own.get(prefix + name)
            if saved is not None and hasattr(saved, "to_local"):  # a DTensor, known without importing it
                saved = own[prefix + name] = saved.to_local()
            if saved is not None and saved.shape == self._whole_shape(parameter):
                own[prefix + name] = saved[self.own_classes.start : self.own_classes.stop]
        super()._load_from_state_dict(own, prefix, *arguments)

    def _whole_shape(self, parameter: nn.Parameter) -> torch.Size:
        return torch.Size((self.num_classes, *parameter.shape[1:]))


class _Ranks:
    """The processes that share the classes, or this one alone. What moves tensors must be called by all of them."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.group = dist.group.WORLD if together and group is None else group
        self.count = dist.get_world_size(group) if together else 1
        self.rank = dist.get_rank(group) if together else 0
        self.global_rank = dist.get_rank() if together else 0  # groups, of other rows, must not draw the same noise
        if self.rank < 0:
            raise ShortlistError("process_group must contain this process, and does not")

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Ranks":
        return self  # copies of a head talk through the same group

    def share(self, num_classes: int) -> range:
        """As ``torch.chunk`` and ``DTensor`` divide them: equal shares, less or nothing on the last ranks."""
        size = self.largest_share(num_classes)
        return range(min(self.rank * size, num_classes), min((self.rank + 1) * size, num_classes))

    def largest_share(self, num_classes: int) -> int:
        return math.ceil(num_classes / self.count)

    def own_rows(self, x_N: Tensor) -> Tensor:
        return x_N.chunk(self.count)[self.rank]

    def gather(self, x_R: Tensor) -> Tensor:
        """The rows of all ranks, one rank's after the other's."""
        if self.count == 1:
            return x_R
        x_N = x_R.new_empty(self.count * len(x_R), *x_R.shape[1:])
        dist.all_gather_into_tensor(x_N, x_R.contiguous(), group=self.group)
        return x_N

    def sum_own_rows(self, x_N: Tensor) -> Tensor:
        """Of the sum over the ranks, this rank's rows."""
        if self.count == 1:
            return x_N
        x_R = x_N.new_empty(len(x_N) // self.count, *x_N.shape[1:])
        dist.reduce_scatter_tensor(x_R, x_N.contiguous(), group=self.group)
        return x_R

    def total(self, x: Tensor) -> Tensor:
        if self.count > 1:
            x = x.clone()
            dist.all_reduce(x, group=self.group)
        return x

    def exchange(self, x_NS: Tensor) -> Tensor:
        """From all rows of some columns on each rank, to ``(R, W * S)``: this rank's rows of all columns."""
        if self.count == 1:
            return x_NS
        x_WRS = torch.empty_like(x_NS)
        dist.all_to_all_single(x_WRS, x_NS.contiguous(), group=self.group)
        return x_WRS.view(self.count, len(x_NS) // self.count, x_NS.shape[1]).movedim(0, 1).flatten(1)

    def as_part_of_whole(self, part: Tensor, whole_shape: torch.Size) -> Tensor:
        """A ``DTensor`` that shares the memory of the part."""
        if self.count == 1:
            return part
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        assert self.group is not None
        mesh = DeviceMesh.from_group(self.group, part.device.type)
        stride = torch.empty(whole_shape, device="meta").stride()
        return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=whole_shape, stride=stride)


class _GatherRows(torch.autograd.Function):
    """Forward, every rank gets the rows of all; backward, every row's rank gets the sum of its gradients."""

    @staticmethod
    def forward(ctx: Any, x_R: Tensor, ranks: _Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather(x_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum_own_rows(grad_N), None


class _SumOwnRows(torch.autograd.Function):
    """Forward, every rank gets the sum over the ranks of its own rows; backward, every rank gets all gradients."""

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, ranks: _Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum_own_rows(x_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.gather(grad_R), None
