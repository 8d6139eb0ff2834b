"""The comparisons on rare classes: which losses, on which data, with which search. ``compare`` does the work.

Listing them must not wait for torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shortlist.program import recipes
from shortlist.program.compare.candidates import CANDIDATES, Candidate, all_to, few_to
from shortlist.program.config import Changes, RunConfig, changed
from shortlist.program.losses import Range
from shortlist.program.reproduce import Scale
from shortlist.program.reproduce.experiment import FAST, TINY

if TYPE_CHECKING:
    from shortlist.program.compare.search import Budget

SEEDS = (0, 1, 2, 3, 4)
BASELINES = ("cross_entropy", "balanced_softmax", "ldam")
"""What a new default must beat: trained with every seed."""
_KS = (1, 2, 3, 4, 5, 7, 10)
_MARGINS = {"loss.max_margin": Range(0.05, 0.5), "loss.scale": Range(15.0, 60.0, log=True)}
_IMBALANCED = {**_MARGINS, "loss.epsilon": Range(0.01, 0.3, log=True)}
_NOISED = {"loss.epsilon": Range(0.3, 5.0, log=True), "loss.margin": Range(0.5, 5.0, log=True)}
_SHARE = {"loss.cross_entropy_share": Range(0.2, 0.8)}
_SCALE = {"model.scale": Range(10.0, 60.0, log=True)}
_ONE_AND_SEVERAL: dict[str, tuple[str, Callable[[int], int | tuple[int, ...]]]] = {
    "k1": ("K = 1", lambda k: 1),
    "k3": ("K = 3", lambda k: 3),
    "k5": ("K = 5", lambda k: 5),
    "k135": ("K = 1, 3, 5", few_to),
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Losses that are compared on one data set."""

    name: str
    title: str
    recipe: str
    candidates: tuple[str, ...]
    """Names of ``CONTENDERS``."""
    changes: Changes = field(default_factory=dict)
    """Settings that differ from the recipe."""
    trials: int = 8
    search_epochs: int | None = None
    """None is the length of the recipe."""
    search: tuple[str, ...] = ()
    """Settings that are searched for every loss, beside the learning rate and its own."""
    fixed: tuple[str, ...] = ()
    """Settings that are not searched."""
    remarks: str = ""

    def base(self, scale: Scale) -> RunConfig:
        """The recipe that every candidate changes."""
        recipe = recipes.build(self.recipe)
        measured: Changes = {"train.ks": _KS, "train.select": "macro_top5"}
        if scale == "smoke":
            from shortlist.program.reproduce import tiny_data

            whole = {
                "model.frozen": False,
                "model.weights": "",
                "optim.head_lr_factor": 1,
                "optim.standardise": False,
            }
            no_files = {"data.fit": "crop", "data.image_size": 0, "data.canvas": 0}
            tiny = {**TINY, **whole, **no_files, "data.root": str(tiny_data.path(Path("runs"))), "train.epochs": 1}
            return changed(recipe, {**measured, **self.changes, **tiny})
        # A last layer alone is trained in no time, and its features are best in full precision.
        fast = {} if recipe.model.frozen else FAST
        return changed(recipe, {**measured, **fast, **self.changes})

    def budget(self, scale: Scale) -> "Budget":
        from shortlist.program.compare.search import Budget

        trials, epochs = self.trials, self.search_epochs or self.base(scale).train.epochs
        if scale == "smoke":
            trials, epochs = 1, 1
        return Budget(trials=trials, epochs=epochs, search=self.search, fixed=self.fixed)

    def contenders(self) -> list[Candidate]:
        return [CONTENDERS[name] for name in self.candidates]


def _renamed(name: str, listed: str, ranges: Mapping[str, Range] | None = None) -> Candidate:
    """A candidate that users are offered, with the ranges of this study."""
    return replace(CANDIDATES[listed], name=name, ranges=ranges or {})


def _variant(
    name: str,
    loss: str,
    label: str,
    changes: Mapping[str, Any],
    ranges: Mapping[str, Range],
    ks: Callable[[int], int | tuple[int, ...]] = lambda k: k,
) -> Candidate:
    return Candidate(name=name, loss=loss, label=label, what="", changes=changes, ranges=ranges, ks=ks)


def _with_and_without_prior() -> list[Candidate]:
    found = []
    for suffix, words, prior in (("", "", {}), ("_prior", ", with prior", {"loss.prior": 1.0})):
        for name, (label, ks) in _ONE_AND_SEVERAL.items():
            noised = {"loss.epsilon": 1.0, **prior}
            found.append(
                _variant(f"noised_{name}{suffix}", "noised_topk_hinge", f"Noised, {label}{words}", noised, _NOISED, ks)
            )
            cosines = {"loss.epsilon": 0.05, "loss.scale": 30.0, **prior}
            found.append(
                _variant(
                    f"imbalanced_{name}{suffix}",
                    "imbalanced_noised_topk_hinge",
                    f"Noised imbalanced, {label}{words}",
                    cosines,
                    _IMBALANCED,
                    ks,
                )
            )
    return found


_MIXED = {"loss.epsilon": 3.0, "loss.margin": 3.0, "loss.prior": 1.0, "loss.cross_entropy_share": 0.5}
_DEFERRED = {"loss.class_weights": "effective", "loss.weight_from": 0.8}
_COSINE = {"model.head": "scaled_cosine"}

_LISTED = (
    _renamed("cross_entropy", "cross_entropy"),
    _variant("cross_entropy_cosine", "cross_entropy", "Cross-entropy on cosines", _COSINE, _SCALE),
    _renamed("balanced_softmax", "balanced_softmax"),
    _renamed("balanced_softmax_cosine", "balanced_softmax_cosine", _SCALE),
    _variant("logit_adjusted", "logit_adjusted", "Logit adjustment", {}, {"loss.tau": Range(0.5, 2.0)}),
    _variant(
        "logit_adjusted_cosine",
        "logit_adjusted",
        "Logit adjustment on cosines",
        _COSINE,
        {"loss.tau": Range(0.5, 2.0), **_SCALE},
    ),
    _variant("focal", "focal", "Focal", {"loss.gamma": 1.0}, {"loss.gamma": Range(0.25, 3.0)}),
    _variant("ldam", "ldam", "LDAM", {"loss.max_margin": 0.2}, _MARGINS),
    _variant("ldam_drw", "ldam", "LDAM, weights deferred", {"loss.max_margin": 0.2, **_DEFERRED}, _MARGINS),
    _variant("ldam_prior", "ldam", "LDAM, with prior", {"loss.max_margin": 0.2, "loss.prior": 1.0}, _MARGINS),
    *_with_and_without_prior(),
    _variant("topk_ce_k5", "topk_cross_entropy", "Top-K cross-entropy, K = 5", {}, {}),
    _variant(
        "topk_ce_k5_prior", "topk_cross_entropy", "Top-K cross-entropy, K = 5, with prior", {"loss.prior": 1.0}, {}
    ),
    _variant(
        "topk_ce_all_prior",
        "topk_cross_entropy",
        "Top-K cross-entropy, K = 1 to 5, with prior",
        {"loss.prior": 1.0},
        {},
        all_to,
    ),
    _variant(
        "mixture_k5",
        "noised_topk_hinge",
        "Mixture, K = 5",
        _MIXED,
        {**_NOISED, **_SHARE},
    ),
    _variant(
        "mixture_k135",
        "noised_topk_hinge",
        "Mixture, K = 1, 3, 5",
        _MIXED,
        {**_NOISED, **_SHARE},
        few_to,
    ),
    _variant(
        "mixture_k5_cosine",
        "noised_topk_hinge",
        "Mixture on cosines, K = 5",
        {**_MIXED, **_COSINE},
        {**_NOISED, **_SHARE, **_SCALE},
    ),
    _variant(
        "mixture_imbalanced_k5",
        "imbalanced_noised_topk_hinge",
        "Mixture with margins, K = 5",
        {"loss.epsilon": 0.05, "loss.scale": 30.0, "loss.prior": 1.0, "loss.cross_entropy_share": 0.5},
        {**_IMBALANCED, **_SHARE},
    ),
)

CONTENDERS = {candidate.name: candidate for candidate in _LISTED}
"""Every loss of the study."""

# Chosen on the validation images: between 2e-4 and 2e-3, cross-entropy, balanced softmax and mixtures did best
# here. The usual 2e-4 costs each of them two to three points.
# All validation images are one batch, for the speed of a GPU: they are seen after each of 200 short epochs.
_LONG_TAIL: Changes = {"optim.weight_decay": 8e-4, "train.eval_batch_size": 5000, "train.select_corrected": True}

# Enlarged, because the network has seen larger images.
_LONG_TAIL_LARGE: Changes = {"data.name": "cifar100", "data.imbalance": 100, "data.fit": "crop", "data.image_size": 128}
# Published before the recipe kept the latest of equally good epochs.
_BEST_EPOCH: Changes = {"train.select_latest": False}
# Around the settings of the recipe, lr = 0.01 and weight_decay = 1.
_LAST_LAYER_SEARCH = ("optim.lr=0.0005,0.05", "optim.weight_decay=0.03,3")
_FINE_TUNED = (
    "cross_entropy",
    "cross_entropy_cosine",
    "balanced_softmax",
    "balanced_softmax_cosine",
    "ldam",
    "ldam_prior",
    "imbalanced_k1",
    "imbalanced_k5",
    "imbalanced_k135",
    "topk_ce_all_prior",
    "mixture_k5",
    "mixture_imbalanced_k5",
)

_ALL = (
    Comparison(
        name="rare-feathers-frozen",
        title="Feathers, the last layer alone on frozen features",
        recipe="feathers_frozen",
        changes=_BEST_EPOCH,
        candidates=tuple(CONTENDERS),
        search=_LAST_LAYER_SEARCH,
    ),
    Comparison(
        name="rare-cifar100-lt-frozen",
        title="CIFAR-100-LT, the last layer alone on frozen features",
        recipe="feathers_frozen",
        changes={**_LONG_TAIL_LARGE, **_BEST_EPOCH},
        candidates=tuple(CONTENDERS),
        search=_LAST_LAYER_SEARCH,
        remarks="Features of EfficientNet-Lite0, of images enlarged to 128 pixels.",
    ),
    Comparison(
        name="rare-feathers",
        title="Feathers, fine-tuned from EfficientNet-Lite0",
        recipe="feathers_lite",
        # Twice the recipe's batches, for the speed of a GPU, and a learning rate to match.
        changes={"data.canvas": 144, "train.batch_size": 128, "optim.lr": 0.03},
        candidates=_FINE_TUNED,
        search=("optim.lr=0.01,0.1",),
        trials=8,
        search_epochs=4,
        remarks="Training images are read once and cropped on the GPU (`data.canvas`).",
    ),
    Comparison(
        name="rare-cifar100-lt-lite",
        title="CIFAR-100-LT, fine-tuned from EfficientNet-Lite0",
        recipe="feathers_lite",
        changes={**_LONG_TAIL_LARGE, "train.batch_size": 128, "optim.lr": 0.03},
        candidates=_FINE_TUNED,
        search=("optim.lr=0.01,0.1",),
        trials=5,
        search_epochs=4,
        remarks="Images are enlarged to 128 pixels.",
    ),
    Comparison(
        name="rare-cifar100-lt",
        title="CIFAR-100-LT, imbalance 100, 50 validation images of each class",
        recipe="cifar100_lt_cross_entropy_k5",
        changes=_LONG_TAIL,
        candidates=tuple(CONTENDERS),
        search=("optim.weight_decay=5e-4,1.5e-3",),
        fixed=("optim.lr",),
        trials=4,
        search_epochs=60,
    ),
    Comparison(
        name="rare-cifar100-lt-thinned",
        title="CIFAR-100-LT, imbalance 100, validation images thinned like the training images",
        recipe="cifar100_lt_cross_entropy_k5",
        changes={**_LONG_TAIL, "data.thin_validation": True},
        candidates=tuple(CONTENDERS),
        search=("optim.weight_decay=5e-4,1.5e-3",),
        fixed=("optim.lr",),
        trials=4,
        search_epochs=60,
    ),
)

COMPARISONS: dict[str, Comparison] = {comparison.name: comparison for comparison in _ALL}
