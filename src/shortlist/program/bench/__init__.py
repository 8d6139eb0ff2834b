"""Every speed figure of the project: measured beside its peers, kept in a CSV, and told in docs/performance.md."""

from typing import Literal

Suite = Literal["loss", "head", "hinge", "metrics", "epoch", "loop"]
"""What can be measured."""
