"""A noised head with its classes divided over processes, for last layers too large for one device.

Shape suffixes: R rows of this rank, N rows of all ranks, D features, L classes of all ranks, S classes of this rank
(at most), B draws, K scores kept in a draw, P = B + 1 selected classes, W ranks.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from shortlist.errors import ShortlistError
from shortlist.heads.collectives import Ranks, gather_rows, sum_own_rows
from shortlist.heads.cosine import unit_rows
from shortlist.heads.noised import NoisedHead, NoisedLoss, smoothed_and_label_scores
from shortlist.heads.running_topk import RunningTopK
from shortlist.heads.sparse_linear import selected_scores
from shortlist.ops.batch import reduce_rows
from shortlist.ops.checks import check_at_least_one, check_features


class ClassParallelNoisedTopKHead(NoisedHead):
    """A ``NoisedTopKHead`` whose classes are divided over the ranks of a process group.

    Each rank holds the weights of ``own_classes``, a contiguous part of the classes, and has its own batch. The ranks
    exchange their features, each finds the K + 1 largest perturbed scores of its own classes for all rows, and from
    these all ranks find the K + 1 largest of all classes. The result has the distribution, and for given ``noise`` the
    numbers, of a single process with all rows and classes.

    **Batches.** All ranks must have the same number of rows; fill up with rows whose label is ``ignore_index``.
    ``noise``, if given, has the rows of *all* ranks, in order, and the classes of *this* rank:
    ``(W * R, len(head.own_classes), B)``. Otherwise each call takes a seed from ``generator``, or from the default
    generator of the CPU, and adds the rank to it, so generators may be the same on all ranks.

    **Loss and gradients.** With ``"none"`` and ``"sum"`` a rank returns the loss of its own rows. With ``"mean"`` it
    returns W times the sum over its own rows, divided by the total weight of the rows of *all* ranks. The average over
    the ranks is then the mean over the global batch, even with class weights and ignored rows. All gradients are those
    of the *average over the ranks* of the returned values. The head averages the gradients of its own parameters;
    ``DistributedDataParallel`` averages those of the network in front of it. Together they take the same steps as one
    process with the global batch. Do not wrap the head in DDP: its ranks hold different parameters. To clip gradients
    by their norm, sum the squared norm of the head's gradients over the ranks first; otherwise ``clip_grad_norm_``
    scales the network differently on each rank. With ``sparse_grad`` a rank's first class always has an entry.

    **State.** The state dict holds ``weight`` and ``bias`` as ``DTensor`` s sharded over the group (plain tensors
    without a group). ``torch.distributed.checkpoint`` saves them from any number of ranks and loads them into any other
    number, or into a ``NoisedTopKHead``. ``load_state_dict`` also takes the whole tensors of a plain layer. Save the
    state of the optimiser on each rank separately, and resume with the same number of ranks:
    ``torch.distributed.checkpoint`` would keep one rank's averages for all.

    Args:
        in_features, num_classes, loss, cosine, bias, sparse_grad: As in ``NoisedTopKHead``.
        process_group: The ranks that share the classes; by default all, or this process alone if
            ``torch.distributed`` is not in use.

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
        self._ranks = Ranks(process_group)
        super().__init__(
            in_features,
            num_classes,
            loss,
            own_classes=self._ranks.own_classes(num_classes),
            cosine=cosine,
            bias=bias,
            sparse_grad=sparse_grad,
            device=device,
            dtype=dtype,
        )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw them as ``NoisedTopKHead`` does, differently on every rank."""
        if not self.weight.is_meta:
            super().reset_parameters(self._generator_for(self._ranks.rank, generator))

    @torch.no_grad()
    def scores(self, features: Tensor) -> Tensor:
        """``(..., L)`` scores of all classes for this rank's features, without gradient. All ranks must call it.

        So with ``eval_n_samples=math.inf`` the loss in evaluation mode has no gradient either.
        """
        check_features(features, self.in_features)
        features_RD = features.reshape(-1, self.in_features)
        features_ND = self._ranks.all_gather(unit_rows(features_RD) if self.cosine else features_RD)
        weight = unit_rows(self.weight) if self.cosine else self.weight
        scores_NS = F.linear(features_ND, weight, self.bias)
        scores_NS = F.pad(scores_NS, (0, self._ranks.largest_part(self.num_classes) - scores_NS.shape[1]))
        # Only the last ranks pad their scores, so all of the padding is at the end of the concatenated parts.
        scores_RL = self._ranks.all_to_all(scores_NS)[:, : self.num_classes]
        return scores_RL.reshape(*features.shape[:-1], self.num_classes)

    def _noised_scores(
        self, features_RD: Tensor, index_R: Tensor, noise_RLB: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        ranks = self._ranks
        features_ND = gather_rows(features_RD, ranks)
        index_N = ranks.all_gather(index_R)
        if noise_RLB is None and self.loss.epsilon > 0:
            # By the global rank: other groups have other rows, and must not draw the same noise.
            generator = self._generator_for(ranks.global_rank, generator)
        perturbed_NB, classes_NB, spoil_N = self._perturbed_at_rank(features_ND, noise_RLB, generator)
        classes_NP = torch.cat((classes_NB, index_N.unsqueeze(1)), 1)
        # Only the rank that holds a class adds its score, the others add 0. A bad score on any rank makes the sum NaN.
        scores_NP = self._selected_own_scores(features_ND, classes_NP) + spoil_N.unsqueeze(1)
        smoothed_R, label_R = smoothed_and_label_scores(ranks.own_rows(perturbed_NB), sum_own_rows(scores_NP, ranks))
        # On a GPU the labels were not checked. The score of a label that no rank holds would be 0: make it NaN.
        return smoothed_R, torch.where((index_R >= 0) & (index_R < self.num_classes), label_R, math.nan)

    def _overall(self, running: RunningTopK) -> RunningTopK:
        """The largest of all ranks' classes, from the largest of each rank."""
        overall = RunningTopK(
            *running.values_RBK.shape,
            epsilon=running.epsilon,
            dtype=running.values_RBK.dtype,
            device=running.values_RBK.device,
        )
        values_WNBK = self._ranks.all_gather(running.values_RBK.unsqueeze(0))
        classes_WNBK = self._ranks.all_gather(running.classes_RBK.unsqueeze(0))
        overall.enter(values_WNBK.movedim(0, -2).flatten(-2), classes_WNBK.movedim(0, -2).flatten(-2))
        return overall

    def _selected_own_scores(self, features_ND: Tensor, classes_NP: Tensor) -> Tensor:
        """``(N, P)`` scores of the selected classes, with 0 for those of other ranks."""
        own = self.own_classes
        is_own_NP = (classes_NP >= own.start) & (classes_NP < own.stop)
        classes_NP = torch.where(is_own_NP, classes_NP - own.start, 0)
        if not own:  # select nothing, but keep the graph: backward must communicate on all ranks
            classes_NP = classes_NP[:, :0]
        scores_NP = selected_scores(
            features_ND,
            self.weight,
            self.bias,
            classes_NP,
            cosine=self.cosine,
            sparse_grad=self.sparse_grad,
            parameter_grad_scale=1 / self._ranks.count,
        )
        scores_NP = F.pad(scores_NP, (0, is_own_NP.shape[1] - scores_NP.shape[1]))
        return torch.where(is_own_NP, scores_NP, 0)

    def _reduce(self, loss_R: Tensor, share_R: Tensor) -> Tensor:
        if self.loss.reduction == "mean":
            return self._ranks.count * loss_R.sum() / self._ranks.all_reduce(share_R.sum())
        return reduce_rows(loss_R, share_R, self.loss.reduction)

    def _scored_shape(self, target: Tensor) -> tuple[int, ...]:
        return self._ranks.count * target.numel(), len(self.own_classes)

    def _generator_for(self, rank: int, generator: torch.Generator | None) -> torch.Generator:
        """A new generator for each rank and call; all ranks advance ``generator`` equally."""
        if generator is not None and generator.device.type != "cpu":
            raise ShortlistError(
                f"generator must be on the CPU, where a seed is drawn from it, got one on {generator.device}"
            )
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        return torch.Generator(self.weight.device).manual_seed(seed + rank)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, parameter in self.named_parameters(recurse=False):
            part = destination[prefix + name]
            destination[prefix + name] = self._ranks.as_sharded(part, self._whole_shape(parameter))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        own = dict(state_dict)
        for name, parameter in self.named_parameters(recurse=False):
            saved = own.get(prefix + name)
            if saved is not None and hasattr(saved, "to_local"):  # a DTensor; importing the class would take a second
                saved = own[prefix + name] = saved.to_local()
            if saved is not None and saved.shape == self._whole_shape(parameter):
                own[prefix + name] = saved[self.own_classes.start : self.own_classes.stop]
        super()._load_from_state_dict(own, prefix, *arguments)

    def _whole_shape(self, parameter: nn.Parameter) -> torch.Size:
        return torch.Size((self.num_classes, *parameter.shape[1:]))
