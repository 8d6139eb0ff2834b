"""How much work a figure is worth: the same code draws all three."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """What makes a map of losses over the triangle fine and steady."""

    steps: int
    """Of the grid along a side of the triangle; a multiple of 6 puts the centre and all kinks of the losses on it."""
    repetitions: int
    """Over which a noised loss is averaged."""
