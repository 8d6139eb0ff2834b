"""The learning rate as a function of the epoch and step, so that resuming needs no scheduler state."""

import math

from shortlist.program.config import OptimConfig


def learning_rate(config: OptimConfig, epoch: int, step: int, steps: int, epochs: int) -> float:
    """Learning rate of step ``step`` (of ``steps``) of epoch ``epoch`` (of ``epochs``), both counted from 0.

    Example:
        >>> config = OptimConfig(lr=0.1, schedule="step", milestones=(0.5, 0.75))
        >>> [round(learning_rate(config, epoch, 0, 10, 300), 6) for epoch in (0, 149, 150, 225)]
        [0.1, 0.1, 0.01, 0.001]
    """
    now = epoch + step / steps
    if now < config.warmup_epochs:
        return config.lr * (now + 1 / steps) / (config.warmup_epochs + 1 / steps)
    if config.schedule == "step":
        return config.lr * config.decay ** sum(epoch >= drop for drop in config.drop_epochs(epochs))
    if config.schedule == "cosine":
        share = (now - config.warmup_epochs) / (epochs - config.warmup_epochs)
        return config.lr * (1 + math.cos(math.pi * share)) / 2
    return config.lr
