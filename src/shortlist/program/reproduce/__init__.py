"""The paper's tables and figures, reproduced: runs, results/*.csv, and docs/reproduction.md made from them."""

from typing import Literal

Scale = Literal["smoke", "short", "paper"]
"""``smoke``: tiny data, in seconds; ``short``: the real data for fewer epochs; ``paper``: for all epochs."""
