"""Makes ``tests/conformal_reference.json``: what the authors' own programs say about random scores.

It needs their repositories, tiffanyding/long-tail-conformal (4fea246) and tiffanyding/macro-guarantees (5df6470), in an
environment with NumPy 1, SciPy, scikit-learn and matplotlib; nothing of shortlist:

    python tests/support/conformal_reference.py LONG_TAIL_CONFORMAL MACRO_GUARANTEES tests/conformal_reference.json
"""

import contextlib
import importlib
import io
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

WEIGHTS = (0.5, 0.999)
TESTED = 20


def problem(seed: int, images: int, classes: int) -> dict[str, np.ndarray]:
    """Random probabilities, long-tailed labels that follow them loosely, and class sizes."""
    rng = np.random.default_rng(seed)
    prior = 20.0 ** (-np.arange(classes) / (classes - 1))
    logits = 2 * rng.standard_normal((2 * images, classes)) + np.log(prior)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = np.array([rng.choice(classes, p=row) for row in probabilities])
    train_labels = np.concatenate([np.arange(classes), rng.choice(classes, p=prior / prior.sum(), size=500)])
    return {
        "cal": probabilities[:images],
        "labels": labels[:images],
        "test": probabilities[images:],
        "train_labels": train_labels,
    }


def main(long_tail: str, macro: str, out: str) -> None:
    sys.path[:0] = [long_tail, macro]
    conformal, conformal_utils = map(importlib.import_module, ("conformal", "utils.conformal_utils"))
    cases = []
    for seed, (images, classes) in enumerate([(40, 5), (120, 8), (250, 10)]):
        given = problem(seed, images, classes)
        counts = np.bincount(given["train_labels"], minlength=classes)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "train.npy")
            np.save(path, given["train_labels"])
            pas = {
                name: conformal_utils.get_conformal_scores(given[name], "PAS", train_labels_path=str(path))
                for name in ("cal", "test")
            }
        softmax = {name: conformal_utils.get_conformal_scores(given[name], "softmax") for name in ("cal", "test")}
        labels = given["labels"]
        seen = np.unique(labels)
        found = {}
        for alpha in (0.1, 0.2):
            with contextlib.redirect_stdout(io.StringIO()):
                standard = conformal_utils.compute_qhat(softmax["cal"], labels, alpha)
                by_class = conformal_utils.compute_class_specific_qhats(softmax["cal"], labels, classes, alpha)
                prevalence = conformal_utils.compute_qhat(pas["cal"], labels, alpha)
            own = pas["cal"][np.arange(len(labels)), labels]
            # Only classes with calibration images count, so they are numbered anew.
            weights = conformal.macro_weights(np.searchsorted(seen, labels), len(seen))
            guaranteed = conformal.compute_weighted_qhat(own, alpha, weights)
            finite = np.where(np.isinf(by_class), 1.0, by_class)  # as their own program does before it interpolates
            limits = {
                "marginal": (softmax["test"], np.full(classes, standard)),
                "classwise": (softmax["test"], by_class),
                "pas": (pas["test"], np.full(classes, prevalence)),
                "macro": (pas["test"], np.full(classes, guaranteed)),
                **{f"interp_q {w}": (softmax["test"], w * finite + (1 - w) * standard) for w in WEIGHTS},
            }
            found[f"{1 - alpha:g}"] = {
                name: {
                    "limits": [str(number) for number in limit],
                    "sets": ["".join("01"[int(inside)] for inside in row) for row in scores[:TESTED] <= limit],
                }
                for name, (scores, limit) in limits.items()
            }
        kept = {"cal": given["cal"], "labels": labels, "test": given["test"][:TESTED], "class_counts": counts}
        cases.append({name: array.tolist() for name, array in kept.items()} | {"found": found})
    Path(out).write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
