"""Runs without training whose scores are known: the true log-probabilities of made-up images, times a scale."""

from pathlib import Path

import torch

from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.scores import Scores, write_scores
from tests.support.run_folders import untrained_run

CLASSES = 8
COUNTS = torch.tensor([200, 120, 80, 50, 30, 15, 8, 4])
LOG_SHARE = (COUNTS / COUNTS.sum()).double().log()


def drawn(images: int, seed: int, *, scale: float = 3.0, has_prior: bool = True, long_tailed: bool = True) -> Scores:
    """Scores that are the true log-probabilities times a scale, with or without the class sizes in them."""
    generator = torch.Generator().manual_seed(seed)
    evidence = 2 * torch.randn(images, CLASSES, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((evidence + long_tailed * LOG_SHARE).softmax(1), 1, generator=generator).squeeze(1)
    scores = scale * (evidence + has_prior * LOG_SHARE)
    return Scores(scores.float(), labels, torch.arange(images))


def made_run(folder: Path, val: Scores, test: Scores) -> RunFolder:
    run = untrained_run(folder, [f"bird {number}" for number in range(CLASSES)])
    run.write_json("classes.json", {"names": [f"bird {n}" for n in range(CLASSES)], "train_images": COUNTS.tolist()})
    write_scores(run, val=val, test=test)
    return run
