"""The losses that are compared: what each changes in a recipe, and what is searched for it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shortlist.errors import ShortlistError
from shortlist.program import recipes
from shortlist.program.config import RunConfig, changed
from shortlist.program.losses import LOSSES, Range
from shortlist.program.text import did_you_mean
from shortlist.program.tuning.space import Axis, parsed_search, spanned

_RATES = 5.0  # the search tries learning rates up to this factor away from the recipe's


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of the losses that are compared."""

    name: str
    """As it is typed after ``--losses``."""
    loss: str
    label: str
    what: str
    """What it is, in a line."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings beside the loss and the last layer that it needs."""
    ks: Callable[[int], int | tuple[int, ...]] = lambda k: k
    """Every K of the loss, if people are shown ``k`` suggestions."""
    ranges: Mapping[str, Range] = field(default_factory=dict)
    """What is searched beside the ranges of the loss and the learning rate, or instead of the same setting."""

    def config(self, base: RunConfig) -> RunConfig:
        """The recipe with this loss. The metric that picks the best epoch stays the same."""
        config = recipes.with_loss(base, self.loss)
        return changed(config, {"loss.k": self.ks(base.loss.largest_k), **self.changes})

    def axes(self, base: RunConfig, search: Sequence[str] = (), fixed: Collection[str] = ()) -> dict[str, Axis]:
        """What is tried for each setting.

        Args:
            base: The recipe, with the user's settings.
            search: More settings or ranges, as texts such as ``optim.weight_decay=1e-5,1e-3``. Those of other losses
                are left to them.
            fixed: Settings that keep the value they have.
        """
        config = self.config(base)
        rate = {"optim.lr": Range(base.optim.lr / _RATES, base.optim.lr * _RATES, log=True)} if base.optim.lr else {}
        ranges = rate | {f"loss.{name}": values for name, values in config.loss.ranges.items()} | dict(self.ranges)
        usual = {name: values for name, values in ranges.items() if name not in fixed}
        asked = parsed_search(config, [text for text in search if self._has(text)])
        return usual | {name: spanned(values) for name, values in asked.items()}

    def _has(self, search: str) -> bool:
        """False for a setting that some other loss has, and not this one."""
        section, _, name = search.partition("=")[0].replace("-", "_").partition(".")
        others = {name for loss in LOSSES.values() for name in loss.__dataclass_fields__}
        return section != "loss" or name not in others or name in LOSSES[self.loss].__dataclass_fields__


def few_to(k: int) -> tuple[int, ...]:
    """One suggestion, half of them, and all: 1, 3 and 5 for five suggestions."""
    return tuple(sorted({1, (k + 1) // 2, k}))


def all_to(k: int) -> tuple[int, ...]:
    return tuple(range(1, k + 1))


_LISTED = (
    Candidate(
        name="cross_entropy",
        loss="cross_entropy",
        label="Cross-entropy",
        what="what most people use",
    ),
    Candidate(
        name="balanced_softmax",
        loss="balanced_softmax",
        label="Balanced softmax",
        what="cross-entropy with the class sizes in it",
    ),
    Candidate(
        name="balanced_softmax_cosine",
        loss="balanced_softmax",
        label="Balanced softmax on cosines",
        what="the same on scaled cosines: no class gets larger weights than others",
        changes={"model.head": "scaled_cosine"},
        ranges={"model.scale": Range(10.0, 100.0, log=True)},
    ),
    Candidate(
        name="ldam",
        loss="ldam",
        label="LDAM",
        what="cross-entropy on cosines, with larger margins for rare classes",
        changes={"loss.max_margin": 0.2},
    ),
    Candidate(
        name="ldam_prior",
        loss="ldam",
        label="LDAM with prior",
        what="the same with the class sizes in it",
        changes={"loss.prior": 1.0, "loss.max_margin": 0.2},
    ),
    Candidate(
        name="imbalanced_several_k",
        loss="imbalanced_noised_topk_hinge",
        label="Imbalanced noised top-K hinge, several K",
        what="the paper's loss for classes of different sizes, for K = 1, 3 and 5 at once (up to your K)",
        changes={"loss.epsilon": 0.02, "loss.scale": 20.0},
        ks=few_to,
    ),
    Candidate(
        name="noised_several_k",
        loss="noised_topk_hinge",
        label="Noised top-K hinge, several K, with prior",
        what="the paper's loss for K = 1, 3 and 5 at once (up to your K), with the class sizes in it",
        changes={"loss.epsilon": 1.0, "loss.prior": 1.0},
        ks=few_to,
    ),
    Candidate(
        name="mixture",
        loss="noised_topk_hinge",
        label="Half cross-entropy, half noised top-K hinge, with prior",
        what="cross-entropy keeps the network learning where the top-K loss is satisfied",
        changes={"loss.epsilon": 3.0, "loss.margin": 3.0, "loss.prior": 1.0, "loss.cross_entropy_share": 0.5},
    ),
    Candidate(
        name="topk_cross_entropy_several_k",
        loss="topk_cross_entropy",
        label="Top-K cross-entropy, several K, with prior",
        what="the probability to be among the first 1, 2, ... K, with the class sizes in it",
        changes={"loss.prior": 1.0},
        ks=all_to,
    ),
)


CANDIDATES = {candidate.name: candidate for candidate in _LISTED}
"""The losses that are compared unless the user names others."""


def find_candidates(names: Sequence[str]) -> list[Candidate]:
    """The candidates of these names; any loss is one, with its own settings and the last layer that it needs.

    Example:
        >>> [candidate.label for candidate in find_candidates(["cross_entropy", "focal"])]
        ['Cross-entropy', 'Focal']
    """
    found = []
    for name in dict.fromkeys(names):
        if name in CANDIDATES:
            found.append(CANDIDATES[name])
        elif name in LOSSES:
            found.append(Candidate(name=name, loss=name, label=LOSSES[name].label, what=""))
        else:
            known = [*CANDIDATES, *(loss for loss in LOSSES if loss not in CANDIDATES)]
            hint = did_you_mean(name, known) or f": known are {', '.join(known)}"
            raise ShortlistError(f"there is no loss {name!r} to compare{hint}")
    return found
