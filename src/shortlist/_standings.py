"""The best perturbed scores of every row and draw, kept while the classes arrive chunk by chunk.

Shape suffixes: R rows, C classes of a chunk, B draws, K places, P contenders.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shortlist import _lazy, kernels
from shortlist._noise import cpu_generator_from, standard_normal
from shortlist._precision import working

if TYPE_CHECKING:
    from shortlist.kernels.noised import Seed


class Standings:
    """The K largest of ``scores + epsilon Z`` in every row and draw, among the classes seen so far.

    Nothing here is differentiated, and nothing waits for the device.

    Args:
        rows, draws, places: R, B and K.
        epsilon: Scale of the noise; 0 takes the scores as they are.
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
            from shortlist.kernels import noised

            # The kernel measures from the least that holds a place, so all of them must be held, or none.
            held = self._entrants == 0 or self._entrants >= places
            if held and noised.can_challenge(scores_RC, places, self.epsilon, draws):
                self._challenge(scores_RC, first_class, generator)
                return
        scores_RC = working(scores_RC)
        contenders = None
        if noise_RCB is None and self.epsilon > 0 and _lazy.can_do(scores_RC, places, draws):
            generator = cpu_generator_from(generator)
            contenders = self._found_lazily(scores_RC, generator)
        if contenders is None:
            contenders = self._found_densely(scores_RC, noise_RCB, generator)
        values_RBP, positions_RBP = contenders
        self.enter(values_RBP, positions_RBP + first_class)
        lowest_R, highest_R = scores_RC.aminmax(dim=1)
        self.spoil_R += 0 * lowest_R + 0 * highest_R  # 0 times an infinity is NaN

    def _challenge(self, scores_RC: Tensor, first_class: int, generator: torch.Generator | None) -> None:
        """As below, in a kernel. The chunks of one batch share a seed."""
        from shortlist.kernels import noised

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

    def _found_lazily(self, scores_RC: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor] | None:
        """As ``_found_densely`` in law, where it can be had without drawing all of the noise."""
        _, draws, places = self.values_RBK.shape
        found = _lazy.largest_perturbed(scores_RC, places, slice(places), self.epsilon, draws, generator)
        if found is None:
            return None
        positions_RBP, shift_RBP = found
        return scores_RC.gather(1, positions_RBP.flatten(1)).view_as(shift_RBP) + shift_RBP, positions_RBP

    def _found_densely(
        self, scores_RC: Tensor, noise_RCB: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """The largest perturbed scores of the chunk, as many as there are places or classes, and their positions."""
        _, draws, places = self.values_RBK.shape
        values, positions = [], []
        # One draw after the other: what is in memory at once does not grow with their number.
        for draw in range(draws):
            noise_RC = None if noise_RCB is None else noise_RCB[..., draw]
            values_RP, positions_RP = self._perturbed(scores_RC, noise_RC, generator).topk(
                min(places, scores_RC.shape[1])
            )
            values.append(values_RP)
            positions.append(positions_RP)
        return torch.stack(values, 1), torch.stack(positions, 1)

    def _perturbed(self, scores_RC: Tensor, noise_RC: Tensor | None, generator: torch.Generator | None) -> Tensor:
        if self.epsilon == 0:
            return scores_RC
        if noise_RC is None:
            noise_RC = standard_normal(
                scores_RC.shape, dtype=scores_RC.dtype, device=scores_RC.device, generator=generator
            )
        return torch.add(scores_RC, noise_RC.to(scores_RC.dtype), alpha=self.epsilon)
