"""The largest perturbed scores of every row and sample, kept while the classes arrive chunk by chunk.

Shape suffixes: R rows, C classes of a chunk, B samples, K = rank kept scores, P scores that compete with them.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shortlist.kernels.dispatch import Impl, supports
from shortlist.kernels.noised_hinge.plan import Plan, fits
from shortlist.ops.dtypes import widened
from shortlist.ops.smoothing import find_places

if TYPE_CHECKING:
    from shortlist.kernels.noised_hinge.autograd import Seed


class RunningTopK:
    """The ``rank`` largest of ``scores + epsilon Z`` in every row and sample, among the classes seen so far.

    Nothing here is differentiated, and nothing waits for the device.

    Args:
        epsilon: Scale of the noise, 0 or not tiny (``zero_if_tiny``); 0 takes the scores as they are.
        dtype: float32 or float64, in which scores are perturbed and compared.
        impl: Whether kernels merge the chunks; may be changed between them.
        plan: How the kernels work; by default chosen for each chunk.

    Attributes:
        values_RBK: The perturbed scores, in no particular order; -inf in places not yet taken.
        classes_RBK: Their classes, int64; always a class that exists, even in places not yet taken.
        spoil_R: 0, or NaN in a row where some score was NaN or infinite: its values mean nothing.

    Example:
        >>> best = RunningTopK(1, n_samples=1, rank=2, epsilon=0.0, dtype=torch.float32, device=torch.device("cpu"))
        >>> best.add(torch.tensor([[3.0, 1.0]]), first_class=0)
        >>> best.add(torch.tensor([[0.0, 2.0]]), first_class=2)
        >>> best.last_place()
        (tensor([[2.]]), tensor([[3]]))
    """

    def __init__(
        self,
        num_rows: int,
        n_samples: int,
        rank: int,
        *,
        epsilon: float,
        dtype: torch.dtype,
        device: torch.device,
        impl: Impl = "auto",
        plan: Plan | None = None,
    ) -> None:
        self.epsilon, self.impl = epsilon, impl
        self.values_RBK = torch.full((num_rows, n_samples, rank), -math.inf, dtype=dtype, device=device)
        self.classes_RBK = torch.zeros((num_rows, n_samples, rank), dtype=torch.int64, device=device)
        self.spoil_R = torch.zeros(num_rows, dtype=dtype, device=device)
        self._plan = plan
        self._num_seen = 0
        self._seed: Seed | None = None

    def add(
        self,
        scores_RC: Tensor,
        first_class: int,
        noise_RCB: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Merge the classes ``first_class, first_class + 1, ...`` with these scores, of any float dtype.

        The noise is the one given, or drawn from ``generator`` (by default the device's own, different on each rank).
        """
        if self._uses_kernel(scores_RC, noise_RCB):
            self._add_by_kernel(scores_RC, first_class, generator)
            return
        _, n_samples, rank = self.values_RBK.shape
        scores_RC = widened(scores_RC)
        num_kept = min(rank, scores_RC.shape[1])
        if self.epsilon == 0:
            values_RP, positions_RP = scores_RC.topk(num_kept)
            values_RBP = values_RP.unsqueeze(1).expand(-1, n_samples, -1)
            positions_RBP = positions_RP.unsqueeze(1).expand(-1, n_samples, -1)
        else:
            noise_BRC = None if noise_RCB is None else noise_RCB.movedim(-1, 0).to(scores_RC.dtype)
            positions_RBP, shift_RBP = find_places(
                scores_RC, num_kept, slice(num_kept), self.epsilon, n_samples, noise_BRC, generator
            )
            values_RBP = scores_RC.gather(1, positions_RBP.flatten(1)).view_as(shift_RBP) + shift_RBP
        self.enter(values_RBP, positions_RBP + first_class)
        lowest_R, highest_R = scores_RC.aminmax(dim=1)
        self.spoil_R += 0 * lowest_R + 0 * highest_R  # 0 times an infinity is NaN

    def _uses_kernel(self, scores_RC: Tensor, noise_RCB: Tensor | None) -> bool:
        _, n_samples, rank = self.values_RBK.shape
        needs = {
            "noise_RCB=None": noise_RCB is None,
            "epsilon > 0": self.epsilon > 0,
            # The kernel measures from the smallest kept value.
            "as many classes as are kept, or none, in earlier chunks": self._num_seen == 0 or self._num_seen >= rank,
        }
        if not supports(self.impl, scores_RC, needs=needs):
            return False
        is_planned = self._plan is not None or fits(scores_RC.shape[1], rank, n_samples, is_chunk=True)
        return supports(self.impl, needs={"a longer chunk, fewer samples or a smaller rank": is_planned})

    def _add_by_kernel(self, scores_RC: Tensor, first_class: int, generator: torch.Generator | None) -> None:
        from shortlist.kernels.noised_hinge.autograd import merge_chunk, new_seed

        if self._seed is None:  # the chunks of a batch share it
            self._seed = new_seed(scores_RC.device, generator)
        merge_chunk(
            self.values_RBK,
            self.classes_RBK,
            self.spoil_R,
            scores_RC,
            first_class,
            self.epsilon,
            self._seed,
            is_first=self._num_seen == 0,
            plan=self._plan,
        )
        self._num_seen += scores_RC.shape[1]

    def enter(self, values_RBP: Tensor, classes_RBP: Tensor) -> None:
        """Merge classes whose perturbed scores are known already."""
        values = torch.cat((self.values_RBK, values_RBP), -1)
        classes = torch.cat((self.classes_RBK, classes_RBP), -1)
        self.values_RBK, kept_RBK = values.topk(self.values_RBK.shape[-1])
        self.classes_RBK = classes.gather(-1, kept_RBK)
        self._num_seen += values_RBP.shape[-1]

    def last_place(self) -> tuple[Tensor, Tensor]:
        """``(R, B)`` smallest kept values, those of the given rank, and their classes."""
        values_RB, position_RB = self.values_RBK.min(-1)
        return values_RB, self.classes_RBK.gather(-1, position_RB.unsqueeze(-1)).squeeze(-1)
