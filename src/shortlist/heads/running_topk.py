"""The best perturbed scores of every row and draw, kept while the classes arrive chunk by chunk.

Shape suffixes: R rows, C classes of a chunk, B draws, K places, P contenders.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shortlist import kernels
from shortlist.ops.dtypes import widened
from shortlist.ops.smoothing import find_places

if TYPE_CHECKING:
    from shortlist.kernels.noised_hinge.autograd import Seed


class Standings:
    """The K largest of ``scores + epsilon Z`` in every row and draw, among the classes seen so far.

    Nothing here is differentiated, and nothing waits for the device.

    Args:
        rows, draws, places: R, B and K.
        epsilon: Scale of the noise, 0 or not tiny (``zero_if_tiny``); 0 takes the scores as they are.
        dtype: float32 or float64, in which scores are perturbed and compared.

    Attributes:
        values_RBK: The perturbed scores, in no particular order; -inf in places not yet taken.
        classes_RBK: Their classes, int64; always a class that exists, even in places not yet taken.
        spoil_R: 0, or NaN in a row where some score was NaN or infinite: its places mean nothing.

    Example:
        >>> standings = Standings(1, draws=1, places=2, epsilon=0.0, dtype=torch.float32, device=torch.device("cpu"))
        >>> standings.add(torch.tensor([[3.0, 1.0]]), first_class=0)
        >>> standings.add(torch.tensor([[0.0, 2.0]]), first_class=2)
        >>> standings.last_place()
        (tensor([[2.]]), tensor([[3]]))
    """

    def __init__(
        self, rows: int, draws: int, places: int, *, epsilon: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.epsilon = epsilon
        self.values_RBK = torch.full((rows, draws, places), -math.inf, dtype=dtype, device=device)
        self.classes_RBK = torch.zeros((rows, draws, places), dtype=torch.int64, device=device)
        self.spoil_R = torch.zeros(rows, dtype=dtype, device=device)
        self._entrants = 0
        self._seed: Seed | None = None

    def add(
        self,
        scores_RC: Tensor,
        first_class: int,
        noise_RCB: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Let the classes ``first_class, first_class + 1, ...`` compete with these scores, of any float dtype.

        Draws are those given, or fresh ones from ``generator`` (by default that of the device, told apart by rank).
        """
        _, draws, places = self.values_RBK.shape
        if noise_RCB is None and self.epsilon > 0 and kernels.usable(scores_RC):
            from shortlist.kernels.noised_hinge import autograd as noised

            # The kernel measures from the least that holds a place, so all of them must be held, or none.
            held = self._entrants == 0 or self._entrants >= places
            if held and noised.can_challenge(scores_RC, places, draws):
                self._challenge(scores_RC, first_class, generator)
                return
        scores_RC = widened(scores_RC)
        entrants = min(places, scores_RC.shape[1])
        if self.epsilon == 0:
            values_RP, positions_RP = scores_RC.topk(entrants)
            values_RBP, positions_RBP = (each.unsqueeze(1).expand(-1, draws, -1) for each in (values_RP, positions_RP))
        else:
            noise_BRC = None if noise_RCB is None else noise_RCB.movedim(-1, 0).to(scores_RC.dtype)
            positions_RBP, shift_RBP = find_places(
                scores_RC, entrants, slice(entrants), self.epsilon, draws, noise_BRC, generator
            )
            values_RBP = scores_RC.gather(1, positions_RBP.flatten(1)).view_as(shift_RBP) + shift_RBP
        self.enter(values_RBP, positions_RBP + first_class)
        lowest_R, highest_R = scores_RC.aminmax(dim=1)
        self.spoil_R += 0 * lowest_R + 0 * highest_R  # 0 times an infinity is NaN

    def _challenge(self, scores_RC: Tensor, first_class: int, generator: torch.Generator | None) -> None:
        """As below, in a kernel. The chunks of one batch share a seed."""
        from shortlist.kernels.noised_hinge import autograd as noised

        if self._seed is None:
            self._seed = noised.new_seed(scores_RC.device, generator)
        places = self.values_RBK, self.classes_RBK
        noised.challenge(
            *places, self.spoil_R, scores_RC, first_class, self.epsilon, self._seed, first=self._entrants == 0
        )
        self._entrants += scores_RC.shape[1]

    def enter(self, values_RBP: Tensor, classes_RBP: Tensor) -> None:
        """Let classes compete with perturbed scores that are known already."""
        values = torch.cat((self.values_RBK, values_RBP), -1)
        classes = torch.cat((self.classes_RBK, classes_RBP), -1)
        self.values_RBK, winners_RBK = values.topk(self.values_RBK.shape[-1])
        self.classes_RBK = classes.gather(-1, winners_RBK)
        self._entrants += values_RBP.shape[-1]

    def last_place(self) -> tuple[Tensor, Tensor]:
        """``(R, B)`` K-th largest perturbed scores, and their classes."""
        values_RB, place_RB = self.values_RBK.min(-1)
        return values_RB, self.classes_RBK.gather(-1, place_RB.unsqueeze(-1)).squeeze(-1)
