"""The tables and figures of the paper, redone: runs, results/*.csv, and docs/reproduction.md made from them."""

from typing import Literal

Scale = Literal["smoke", "short", "paper"]
"""``smoke`` runs the same code on tiny data in seconds, ``short`` the real data for fewer epochs, ``paper`` for all."""
