"""Speed measurements: each beside its peers, kept in a CSV, and shown in docs/performance.md."""

from typing import Literal

Suite = Literal["loss", "head", "hinge", "metrics", "epoch", "loop"]
"""What can be measured."""
