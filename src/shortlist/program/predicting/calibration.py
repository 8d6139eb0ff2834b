"""How sure a run is: probabilities from its scores, and the images that its sets rest on.

The validation images chose the epoch and the correction for class sizes, and here they choose how scores become
probabilities. Sets need images that no choice was made on: one half of the test images. The other half shows how well
the promises are kept.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shortlist.errors import ShortlistError
from shortlist.program.data.alter import shuffled_within_classes
from shortlist.program.predicting.reliability import calibration_error, reliability_by_size
from shortlist.program.runs.card import write_card
from shortlist.program.runs.checks import is_number, is_text, is_whole
from shortlist.program.runs.folder import BEST, RunFolder, file_digest
from shortlist.program.runs.records import read_added, read_classes
from shortlist.program.runs.scores import Scores, read_scores
from shortlist.program.seeds import mix_seed
from shortlist.sets import Method, PredictionSets

FILE = "calibration.json"
Of = Literal["classes", "photos"]
"""What a coverage is of: classes on average, each counting the same, or photos."""
METHODS: dict[Of, Method] = {"classes": "macro", "photos": "marginal"}
_NEWTON_STEPS = 100
_LARGEST_NUMBER = 2**62  # of an image, for a tensor of them
_LARGEST = 1e4  # of a parameter: without a maximum, if every label has the best score, the likelihood grows for ever


@dataclass(frozen=True)
class Calibration:
    """How the scores s of a run become probabilities: ``softmax(s / temperature + prior * log share)``.

    ``share`` is a class's share of the training images.
    """

    temperature: float
    prior: float
    """About 0 for cross-entropy, whose scores contain the class sizes, and 1 for losses that take them out."""
    imbalance: float
    """How long-tailed new images are: 1 as the training images, 0 not at all; judged by the validation labels."""
    val_images: int
    """Validation images that these three rest on."""
    set_images: tuple[int, ...]
    """Numbers of the test images that the thresholds of sets rest on."""
    set_class_images: tuple[int, ...]
    """How many of these are of each class. Of classes without any, a coverage promises nothing."""
    error_before: dict[str, float | None]
    """Expected calibration error of plain softmax on the other test images: of all, and of classes with few, a medium
    number of and many training images."""
    error: dict[str, float | None]
    """The same of the calibrated probabilities."""
    best_sha256: str
    """Checksum of the weights that it was made for."""

    @property
    def unseen(self) -> list[int]:
        """Labels of the classes that the sets do not rest on."""
        return [label for label, images in enumerate(self.set_class_images) if images == 0]


def calibrate(run: RunFolder, seed: int = 0) -> Calibration:
    """Choose how scores become probabilities, set images aside for sets, and record both in the run.

    Args:
        run: A finished run.
        seed: Which half of the test images the sets rest on.
    """
    val, test = read_scores(run, "val"), read_scores(run, "test")
    counts = torch.tensor(read_classes(run).train_images)
    if len(val.labels) == 0 or len(test.labels) < 2:
        raise ShortlistError(f"{run.path} cannot be calibrated: it needs a validation image and two test images")
    log_share = _log_share(counts)
    # No image is of a class that was added after training. Fitted with them, such classes would get no probability.
    added = read_added(run)
    trained = len(counts) - (len(added.classes) if added else 0)
    of_trained = log_share[:trained].expand(len(val.labels), -1)
    slope, prior = _likeliest(torch.stack((val.scores[:, :trained].double(), of_trained), 2), val.labels)
    (imbalance,) = _likeliest(of_trained.unsqueeze(2), val.labels)
    is_kept = half_of_each_class(test.labels, seed)
    found = Calibration(
        temperature=1 / slope,
        prior=prior,
        imbalance=imbalance,
        val_images=len(val.labels),
        set_images=tuple(test.images[is_kept].tolist()),
        set_class_images=tuple(test.labels[is_kept].bincount(minlength=len(counts)).tolist()),
        error_before=_errors(test.scores[~is_kept].softmax(1), test.labels[~is_kept], counts),
        error={},
        best_sha256=file_digest(run.path / BEST),
    )
    probabilities = log_probabilities(test.scores[~is_kept], found, counts).exp()
    found = dataclasses.replace(found, error=_errors(probabilities, test.labels[~is_kept], counts))
    run.write_json(FILE, dataclasses.asdict(found))
    if run.is_usable:
        write_card(run)
    return found


def read_calibration(run: RunFolder) -> Calibration | None:
    """What ``calibrate`` recorded for the best weights of a run; None if it has not been called for them."""
    if not run.has(FILE):
        return None
    checks: dict[str, Any] = {
        "temperature": lambda value: is_number(value) and value > 0,
        "prior": is_number,
        "imbalance": is_number,
        "val_images": is_whole,
        "set_images": _are_whole,
        "set_class_images": _are_whole,
        "error_before": lambda value: isinstance(value, dict),
        "error": lambda value: isinstance(value, dict),
        "best_sha256": is_text,
    }
    record = run.read_record(FILE)
    for name, is_valid in checks.items():
        if name not in record or not is_valid(record[name]):
            raise run.damaged(FILE, f"its entry {name} is missing or invalid; shortlist calibrate makes it anew")
    if len(record["set_class_images"]) != len(read_classes(run).names):
        raise run.damaged(FILE, "set_class_images does not fit the classes; shortlist calibrate makes it anew")
    if record["best_sha256"] != file_digest(run.path / BEST):
        return None  # of another training in this folder
    lists = {name: tuple(record[name]) for name, is_valid in checks.items() if is_valid is _are_whole}
    return Calibration(**{name: record[name] for name in checks} | lists)


def _are_whole(value: Any) -> bool:
    return isinstance(value, list) and all(is_whole(item) and item < _LARGEST_NUMBER for item in value)


def log_probabilities(scores: Tensor, calibration: Calibration, class_counts: Tensor) -> Tensor:
    """``(..., L)`` logarithms of calibrated probabilities, float32 at least."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    log_share = _log_share(class_counts).to(wide.device, wide.dtype)
    return (wide / calibration.temperature + calibration.prior * log_share).log_softmax(-1)


def fitted_sets(
    run: RunFolder,
    calibration: Calibration,
    *,
    coverage: float = 0.9,
    method: Method = "macro",
    average_k: float | None = None,
) -> PredictionSets:
    """Sets with thresholds from the test images that were set aside. They take log-probabilities."""
    counts = torch.tensor(read_classes(run).train_images)
    kept, _ = divided_test_scores(run, calibration)
    sets = PredictionSets(coverage, method, average_k=average_k)
    log_p = log_probabilities(kept.scores, calibration, counts)
    return sets.calibrate(log_p, kept.labels, new_image_prior(calibration, counts))


def divided_test_scores(run: RunFolder, calibration: Calibration) -> tuple[Scores, Scores]:
    """Of the test images that were set aside for sets, and of the others."""
    test = read_scores(run, "test")
    is_kept = torch.isin(test.images, torch.tensor(calibration.set_images, dtype=torch.int64))
    if is_kept.all() or not is_kept.any():
        raise run.damaged(FILE, "set_images must be some of the test images; shortlist calibrate makes it anew")
    return test.subset(is_kept), test.subset(~is_kept)


def new_image_prior(calibration: Calibration, class_counts: Tensor) -> Tensor:
    """``(L,)`` how frequent the classes are taken to be among new images."""
    return (calibration.imbalance * _log_share(class_counts)).softmax(0)


def _errors(probabilities: Tensor, labels: Tensor, counts: Tensor) -> dict[str, float | None]:
    bins = reliability_by_size(probabilities, labels, counts)
    return {name: calibration_error(of_group) for name, of_group in bins.items()}


def half_of_each_class(labels: Tensor, seed: int) -> Tensor:
    """``(N,)`` True for one half of the images of each class; of an odd number, one more or one less by chance."""
    generator = torch.Generator().manual_seed(mix_seed(seed, *b"calibration"))
    grouped, place = shuffled_within_classes(labels, generator)
    offset = torch.randint(2, (int(labels.max()) + 1,), generator=generator)
    is_kept = torch.zeros(len(labels), dtype=torch.bool)
    is_kept[grouped] = (place + offset[labels[grouped]]) % 2 == 0
    if is_kept.all() or not is_kept.any():  # every class has one image, and chance has put all on one side
        is_kept = torch.arange(len(labels)) % 2 == 0
    return is_kept


def _log_share(counts: Tensor) -> Tensor:
    """Classes without a training image count as if they had half of one."""
    known = counts.double().clamp(min=0.5)
    return (known / known.sum()).log()


def _likeliest(features: Tensor, labels: Tensor) -> list[float]:
    """The factors of ``(N, L, F)`` features whose sum, after a softmax, gives the labels the highest likelihood.

    The likelihood is concave in the factors, so Newton's method finds its maximum; steps that lower it are halved. The
    first factor stays positive: it is that of the scores, and there may be no maximum otherwise.
    """
    own = features.gather(1, labels.view(-1, 1, 1).expand(-1, 1, features.shape[2])).squeeze(1)
    factors = torch.ones(features.shape[2], dtype=torch.float64)
    factors[1:] = 0.0

    def likelihood(tried: Tensor) -> float:
        return float(((own @ tried) - (features @ tried).logsumexp(1)).mean())

    value = likelihood(factors)
    for _ in range(_NEWTON_STEPS):
        p = (features @ factors).softmax(1)
        expected = (p.unsqueeze(2) * features).sum(1)
        gradient = (own - expected).mean(0)
        second = torch.einsum("nl,nlf,nlg->fg", p, features, features) / len(labels)
        curvature = second - torch.einsum("nf,ng->fg", expected, expected) / len(labels)
        step = torch.linalg.solve(curvature + 1e-9 * torch.eye(len(factors), dtype=torch.float64), gradient)
        while True:
            tried = (factors + step).clamp(-_LARGEST, _LARGEST)
            tried[0] = tried[0].clamp(min=1 / _LARGEST if features.shape[2] > 1 else -_LARGEST)
            risen = likelihood(tried)
            if risen >= value or step.abs().max() < 1e-12:
                break
            step = step / 2
        if risen - value < 1e-12:
            break
        factors, value = tried, risen
    return factors.tolist()
